"""Figures of the joint removals: their size, beside the single removals, and their departure from additivity."""

import numpy as np

from head_influence.catalogue import title
from head_influence.drawing import (
    BLACK,
    GREY,
    NAMES,
    RUNS,
    SCENARIO_STYLE,
    footer,
    intervals,
    legend,
    log_scale,
    nothing,
    offsets,
    page,
    transition_axis,
)  # fmt: skip

POOLED = ("qkv", "js")
ORDER = ("weak", "random", "strong", "all")
WORDS = {"weak": "weak half", "random": "random half", "strong": "strong half", "all": "all heads"}


def _scenarios(ax, run, component, quantity, chosen=ORDER, hollow=None):
    """Draw one quantity of every scenario per transition."""
    x, marks = np.arange(len(run.kinds)), []
    for scenario, shift in zip(chosen, offsets(len(chosen), 0.72), strict=True):
        colour, marker = SCENARIO_STYLE[scenario]
        values = run.joint("transition", component, scenario, quantity)
        empty = None if hollow is None else hollow(scenario)
        marks.append(intervals(ax, x + shift, values, colour, marker, size=4, wide=2.2, hollow=empty))
    return marks


def _runs(ax, runs, component, scenario, quantity, hollow=None):
    """Draw one quantity of one scenario for every run."""
    x, marks = np.arange(len(runs[0].kinds)), []
    for run, shift in zip(runs, offsets(len(runs), 0.66), strict=True):
        colour, marker = RUNS[run.control]
        values = run.joint("transition", component, scenario, quantity)
        marks.append(intervals(ax, x + shift, values, colour, marker, size=4, wide=2.2, hollow=hollow))
    return marks


def _finish(ax, run, title, label, last, values):
    transition_axis(ax, run.kinds, last=last, columns=2)
    ax.set_title(title)
    ax.set_ylabel(label)
    if not np.isfinite(values).any():
        nothing(ax, "not defined")


def _two_legends(figure, left, right, runs, height):
    legend(figure, left, [WORDS[s] for s in ORDER], height)
    legend(figure, right, [run.label for run in runs], height, x=0.535)


def _top(ax, values, least):
    """Scale of ratios: from 0 to a little above the 95 % quantiles."""
    finite = values[np.isfinite(values)]
    ax.set_ylim(0, max(least, finite.max() * 1.06) if finite.size else least)


def joint(material):
    """Joint effects over the sum of the single effects."""
    run, height = material.runs[0], 5.6
    figure, axes = page(
        title("joint"), 2, 2, height, sharex=True, sharey="row", top_inches=1.0,
        footer=footer(material.runs, "left: studied model; right: all runs"),
        note="joint effect over the sum of the single effects: norms are compared, so below 1 is not cancellation",
    )  # fmt: skip
    for row, component in enumerate(POOLED):
        left, right = axes[row]
        values = run.found["joint_transition"][:, run.index("component", component), :]
        values = values[:, :, run.index("quantity", "effect_over_sum")]
        marks = _scenarios(left, run, component, "effect_over_sum")
        others = _runs(right, material.runs, component, "strong", "effect_over_sum")
        for ax, what in ((left, "studied model"), (right, "strong half")):
            ax.axhline(1, color=GREY, lw=0.8, ls=":")
            _finish(
                ax, run, f"{NAMES[component]}, {what}", "joint / sum of singles" if ax is left else "", row == 1, values
            )
        every = [r.joint("transition", component, "strong", "effect_over_sum") for r in material.runs]
        _top(left, np.concatenate([values.ravel(), np.ravel(every)]), 1.2)
    _two_legends(figure, marks, others, material.runs, height)
    return figure


def additivity(material):
    """Departure from additivity over the additive change."""
    run, height = material.runs[0], 6.5
    figure, axes = page(
        title("additivity"), 3, 2, height, sharex=True, sharey="row", top_inches=1.0,
        footer=footer(material.runs, "hollow: sets at other positions take part"),
        note="|joint change − sum of single changes| over |sum of single changes|; only filled marks "
        "may be called synergy or cancellation",
    )  # fmt: skip
    speaks = run.found["speaks"].astype(bool)
    for row, component in enumerate("qkv"):
        c = run.index("component", component)
        left, right = axes[row]
        marks = _scenarios(
            left, run, component, "interaction_over_additive",
            hollow=lambda s, c=c: ~speaks[:, c, run.index("scenario", s)],
        )  # fmt: skip
        others = _runs(
            right, material.runs, component, "strong", "interaction_over_additive",
            ~speaks[:, c, run.index("scenario", "strong")],
        )  # fmt: skip
        values = run.found["joint_transition"][:, c, :, run.index("quantity", "interaction_over_additive")]
        every = [r.joint("transition", component, "strong", "interaction_over_additive") for r in material.runs]
        for ax, what in ((left, "studied model"), (right, "strong half")):
            label = "departure / additive" if ax is left else ""
            _finish(ax, run, f"{NAMES[component]}, {what}", label, row == 2, values)
        log_scale(left, np.concatenate([values.ravel(), np.ravel(every)]), 1e-4)
    _two_legends(figure, marks, others, material.runs, height)
    return figure


def scenarios(material):
    """Effects of weak, random, strong halves and of all heads, and as fractions of the latter."""
    run, height = material.runs[0], 5.6
    figure, axes = page(
        title("scenarios"), 2, 2, height, sharex=True, top_inches=1.0, wspace=0.2,
        footer=footer([run], "studied model"),
        note="left: size of the effect; right: over the effect of removing all heads; the random half is the yardstick",
    )  # fmt: skip
    for row, component in enumerate(POOLED):
        left, right = axes[row]
        unit = "nats" if component == "js" else "relative change"
        marks = _scenarios(left, run, component, "effect")
        _scenarios(right, run, component, "effect_over_all", ORDER[:3])
        sizes = np.array([run.joint("transition", component, s, "effect") for s in ORDER])
        parts = np.array([run.joint("transition", component, s, "effect_over_all") for s in ORDER[:3]])
        log_scale(left, sizes)
        _top(right, parts, 1.1)
        right.axhline(1, color=BLACK, lw=0.8, ls=":")
        _finish(left, run, f"{NAMES[component]}: effect", unit, row == 1, sizes)
        _finish(right, run, f"{NAMES[component]}: over removing all", "effect / effect of all", row == 1, parts)
    legend(figure, marks, [WORDS[s] for s in ORDER], height)
    return figure
