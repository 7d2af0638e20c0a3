"""Figures of how concentrated influence is: by transition, kind, position and text, and how large it is."""

import numpy as np

from head_influence.catalogue import title
from head_influence.distributions import ENOUGH_TEXTS, present
from head_influence.drawing import (
    BLACK,
    BLUE,
    GREY,
    NAMES,
    RED,
    Labels,
    footer,
    intervals,
    labels,
    legend,
    log_scale,
    nothing,
    page,
    run_intervals,
    styles,
    transition_axis,
)  # fmt: skip

POOLED = ("qkv", "js")
HEADS = "N_eff / H"


def why_empty(component, kind):
    """Why a panel of a kind of transition has nothing in it."""
    if component == "js" and not kind.endswith("softmax"):
        return "linear recipient: no retrieval\ndistribution, so no JS"
    return "no observation with\na defined share"


def name_rows(axes, what):
    """Say at the left what the rows of panels are of; all their y axes are fractions."""
    for ax, component in zip(axes[:, 0], POOLED, strict=True):
        ax.set_yticks(np.linspace(0, 1, 6))
        ax.set_ylabel(f"{NAMES[component]}\n{what}")


def _floor(ax, heads):
    """The least possible N_eff/H of every transition."""
    x = np.arange(len(heads))
    ax.hlines(1 / np.asarray(heads), x - 0.5, x + 0.5, color=GREY, lw=0.8, ls=":")


def _fraction_figure(runs, components, name, height):
    figure, axes = page(
        title(name), len(components), 1, height, sharey=True, footer=footer(runs),
        note="low: few heads carry the influence; thin 5–95 %, thick 25–75 % of observations, marker median; "
        "dotted: 1/H", top_inches=1.0,
    )  # fmt: skip
    kinds = runs[0].kinds
    for i, (ax, component) in enumerate(zip(axes[:, 0], components, strict=True)):
        marks = run_intervals(
            ax, runs, len(kinds),
            lambda run, c=component: run.distribution("transition", c, "n_eff_fraction"),
            lambda run, c=component: run.distribution("text_transition", c, "n_eff_fraction")[..., 2],
        )  # fmt: skip
        _floor(ax, runs[0].found["source_heads"])
        transition_axis(ax, kinds, last=i == len(components) - 1)
        ax.set_ylim(0, 1.03)
        ax.set_title(NAMES[component])
        ax.set_ylabel(HEADS)
        if component == "js" and not any(kind.endswith("softmax") for kind in kinds):
            nothing(ax, "no softmax recipient: retrieval is not defined")
    legend(figure, marks, labels(runs), height)
    return figure


def distributions(material):
    """N_eff/H of qkv and js per transition, with the controls."""
    return _fraction_figure(material.runs, POOLED, "distributions", 5.6)


def components(material):
    """N_eff/H of q, k and v per transition, with the controls."""
    return _fraction_figure(material.runs, ("q", "k", "v"), "components", 6.5)


def kinds(material):
    """Cumulative distribution of N_eff/H, kind by kind."""
    runs, names = material.runs, present(material.runs[0].kinds)
    height = 5.2
    figure, axes = page(
        title("kinds"), 2, len(names), height, sharex=True, sharey=True, top_inches=1.0,
        footer=footer(runs, "thin lines: texts" if len(runs[0].texts) < ENOUGH_TEXTS else "all texts", key=False),
        note="further left: more concentrated; compare curves within a panel only, since the floor 1/H and the mixing "
        "of tokens differ between kinds",
    )  # fmt: skip
    first = int(runs[0].attributes["first_query"])
    levels = np.linspace(0, 1, 201)
    for k, (column, kind) in enumerate(zip(axes.T, names, strict=True)):
        chosen = [j for j, k in enumerate(runs[0].kinds) if k == kind]
        for ax, component in zip(column, POOLED, strict=True):
            marks = []
            for run, (colour, _) in zip(runs, styles(runs), strict=True):
                values = material.fractions(run)[:, chosen, run.index("component", component), first:]
                if not run.control and len(values) < ENOUGH_TEXTS:
                    for text in values:
                        _ecdf(ax, text, levels, colour, 0.5)
                marks.append(_ecdf(ax, values, levels, colour, 1.6))
            ax.set_xlim(0, 1.02)
            ax.set_ylim(0, 1.02)
            if not np.isfinite(runs[0].distribution("kind", component, "n_eff_fraction")[k, 2]):
                nothing(ax, why_empty(component, kind))
        column[0].set_title(kind)
        column[-1].set_xlabel(HEADS)
    name_rows(axes, "share of observations")
    legend(figure, marks, labels(runs), height)
    return figure


def _ecdf(ax, values, levels, colour, width):
    values = values[np.isfinite(values)]
    x = np.quantile(values, levels) if values.size else []
    return ax.plot(x, levels if values.size else [], color=colour, lw=width)[0]


def positions(material):
    """N_eff/H along the text, kind by kind."""
    runs, names = material.runs, present(material.runs[0].kinds)
    height = 5.2
    figure, axes = page(
        title("positions"), 2, len(names), height, sharex=True, sharey=True, top_inches=1.0,
        footer=footer(runs, "band: 25–75 % of the studied model; left of the line: not in the results", key=False),
        note="median over texts, recipient heads and transitions of a kind",
    )  # fmt: skip
    first = int(runs[0].attributes["first_query"])
    for k, column in enumerate(axes.T):
        for ax, component in zip(column, POOLED, strict=True):
            marks = []
            for run, (colour, _) in zip(runs, styles(runs), strict=True):
                values = run.distribution("position", component, "n_eff_fraction")[k]
                x = run.found["query"]
                if not run.control:
                    ax.fill_between(x, values[:, 1], values[:, 3], color=colour, alpha=0.18, lw=0)
                marks += ax.plot(x, values[:, 2], color=colour, lw=1.3)
            ax.axvline(first - 0.5, color=BLACK, lw=0.7)
            ax.set_ylim(0, 1.03)
            if not np.isfinite(runs[0].distribution("kind", component, "n_eff_fraction")[k, 2]):
                nothing(ax, why_empty(component, names[k]))
        column[0].set_title(names[k])
        column[-1].set_xlabel("token position")
    name_rows(axes, HEADS)
    legend(figure, marks, labels(runs), height)
    return figure


def texts(material):
    """N_eff/H text by text."""
    runs, names = material.runs, present(material.runs[0].kinds)
    count = len(runs[0].texts)
    height = 5.4
    figure, axes = page(
        title("texts"), 2, len(names), height, sharex=True, sharey=True, top_inches=1.0, bottom_inches=0.95,
        footer=footer(runs, "every text by itself", key=False),
        note="thin 5–95 %, thick 25–75 % of observations, marker median",
    )  # fmt: skip
    for k, column in enumerate(axes.T):
        for ax, component in zip(column, POOLED, strict=True):
            marks = run_intervals(
                ax, runs, count,
                lambda run, c=component, k=k: run.distribution("text_kind", c, "n_eff_fraction")[:, k], size=3.6,
            )  # fmt: skip
            ax.set_xlim(-0.5, count - 0.5)
            ax.set_ylim(0, 1.03)
            if not np.isfinite(runs[0].distribution("kind", component, "n_eff_fraction")[k, 2]):
                nothing(ax, why_empty(component, names[k]))
        column[0].set_title(names[k])
        shown = Labels(runs[0].texts)
        step = max(1, -(-count * len(names) // 36))
        column[-1].set_xticks(range(0, count, step))
        column[-1].set_xticklabels(
            [shown(x, 18) for x in runs[0].texts[::step]], rotation=40 if count > 3 else 0,
            ha="right" if count > 3 else "center", fontsize=7.5, family=shown.family,
        )  # fmt: skip
    name_rows(axes, HEADS)
    legend(figure, marks, labels(runs), height)
    return figure


def averages(material):
    """Concentration of averaged influences beside the median over observations."""
    run = material.runs[0]
    height = 4.9
    figure, axes = page(
        title("averages"), 2, 1, height, sharey=True, top_inches=1.0, footer=footer([run]),
        note="diamonds: N_eff/H of influences averaged over texts, tokens, recipient heads: a contrast, no result",
    )  # fmt: skip
    x = np.arange(len(run.kinds))
    for i, (ax, component) in enumerate(zip(axes[:, 0], POOLED, strict=True)):
        values = run.distribution("transition", component, "n_eff_fraction")
        marks = [intervals(ax, x - 0.1, values, BLUE, "o")]
        averaged = run.found["averaged"][:, run.index("component", component), run.index("measure", "n_eff_fraction")]
        marks += ax.plot(x + 0.12, averaged, ls="", marker="D", ms=5, color=RED, mec="white")
        transition_axis(ax, run.kinds, last=i == 1)
        ax.set_ylim(0, 1.03)
        ax.set_title(NAMES[component])
        ax.set_ylabel(HEADS)
        if not np.isfinite(values).any():
            nothing(ax, "not defined")
    legend(figure, marks, ["single observations", "averaged influences"], height)
    return figure


def totals(material):
    """Size of the influence itself: totals, and single heads' changes."""
    runs = material.runs
    height = 5.9
    figure, axes = page(
        title("totals"), 2, 2, height, sharex=True, top_inches=1.0, wspace=0.2,
        footer=footer(runs, "dotted: limit of the flag “small total”; zeros are not drawn", key=False),
        note="left: sum over source heads; right: one head's removal; a relative change of 1 is as large as the vector",
    )  # fmt: skip
    limits = material.small_total
    for row, component in enumerate(POOLED):
        unit = "nats" if component == "js" else "relative change"
        total, single = axes[row]
        marks = run_intervals(
            total, runs, len(runs[0].kinds), lambda run, c=component: run.distribution("transition", c, "total")
        )
        run_intervals(
            single, runs, len(runs[0].kinds),
            lambda run, c=component: run.identity["any_head_change"][:, run.index("component", c)],
        )  # fmt: skip
        for ax, what, values in (
            (total, "total", [r.distribution("transition", component, "total") for r in runs]),
            (single, "single head", [r.identity["any_head_change"][:, r.index("component", component)] for r in runs]),
        ):
            log_scale(ax, values)
            transition_axis(ax, runs[0].kinds, last=row == 1, columns=2)
            ax.set_title(f"{what}: {NAMES[component]}")
            ax.set_ylabel(unit)
            if not np.isfinite(np.concatenate(values)).any():
                nothing(ax, "not defined")
        low, high = total.get_ylim()
        limit = limits["js" if component == "js" else "vectors"]
        if low < limit < high:
            total.axhline(limit, color=GREY, lw=0.8, ls=":")
    legend(figure, marks, labels(runs), height)
    return figure
