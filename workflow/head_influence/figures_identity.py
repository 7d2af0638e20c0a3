"""Figures of which heads dominate, how stable they are, and what their shares depend on."""

import numpy as np
from matplotlib.patches import Patch

from head_influence.catalogue import title
from head_influence.distributions import present
from head_influence.drawing import (
    BLACK,
    BLUE,
    GREEN,
    NAMES,
    NONE,
    ORANGE,
    PURPLE,
    RED,
    SHARES,
    SKY,
    Labels,
    footer,
    labels,
    legend,
    nothing,
    offsets,
    page,
    styles,
    text_marks,
    transition_axis,
)  # fmt: skip
from head_influence.identity import OVERLAPS, SOURCES
from head_influence.summary import controls_of

POOLED = ("qkv", "js")


def heatmap(material):
    """Shares of the source heads at every token, for the most and the least concentrated transition."""
    run = material.runs[0]
    medians = run.distribution("transition", "qkv", "n_eff_fraction")[:, 2]
    if not np.isfinite(medians).any():
        figure, axes = page(title("heatmap"), 1, 1, 2.4, footer="")
        nothing(axes[0, 0], "no transition has a defined share")
        return figure
    transitions = list(dict.fromkeys([int(np.nanargmin(medians)), int(np.nanargmax(medians))]))
    languages = [str(x) for x in run.identity["language"]]
    texts = [languages.index(name) for name in dict.fromkeys(languages)][:2]
    texts += [i for i in range(len(languages)) if i not in texts][: 2 - len(texts)]
    panels = [(j, x, *material.shares_at(j, x)) for j in transitions for x in texts]
    shown = Labels(token for *_, tokens in panels for token in tokens)
    height = 3.2 + 2.9 * (len(transitions) - 1)
    figure, axes = page(
        title("heatmap"), len(transitions), len(texts), height, hspace=0.6, wspace=0.12, right=0.89,
        bottom_inches=0.85, top_inches=0.78,
        footer=f"Q, K, V together; recipient head nearest to the transition's median; left of the line: queries before "
        f"{run.attributes['first_query']}; dot: largest share",
        note="share of each source head in the influence on one recipient head",
    )  # fmt: skip
    top = max(np.nanmax(p, initial=0) for _, _, _, p, _ in panels)
    for ax, (j, x, head, p, tokens) in zip(axes.ravel(), panels, strict=True):
        image = ax.imshow(p, aspect="auto", cmap=SHARES, vmin=0, vmax=top or 1, interpolation="nearest")
        found = np.isfinite(p[0])
        ax.plot(np.flatnonzero(found), p[:, found].argmax(axis=0), ls="", marker=".", ms=3, color=RED)
        ax.axvline(int(run.attributes["first_query"]) - 0.5, color=BLACK, lw=0.8)
        step = max(1, -(-len(tokens) // 34))
        ax.set_xticks(range(0, len(tokens), step))
        ax.set_xticklabels([shown(t, 8) for t in tokens[::step]], rotation=90, fontsize=7, family=shown.family)
        for label in ax.get_xticklabels():
            if len(label.get_text()) == 1 and label.get_text() > "\u2e80":  # Chinese characters stand upright
                label.set_rotation(0)
        ax.set_yticks(range(0, len(p), max(1, len(p) // 8)))
        ax.set_title(f"{run.texts[x]}, transition {j} ({run.kinds[j]}), recipient head {head}", fontsize=8)
        ax.spines[:].set_visible(False)
        ax.set_facecolor(NONE)
    for ax in axes[:, 0]:
        ax.set_ylabel("source head")
    box = axes[0, -1].get_position()
    low = axes[-1, -1].get_position().y0
    figure.colorbar(image, cax=figure.add_axes([0.905, low, 0.013, box.y1 - low]), label="share")
    return figure


def dominance(material):
    """How often each head is dominant, per transition."""
    runs = [material.runs[0], *controls_of(material.runs)][:3]
    height = 5.4
    figure, axes = page(
        title("dominance"), 2, len(runs), height, sharex=True, sharey=True, right=0.89, wspace=0.08,
        footer=footer(runs, "grey: no such head, or no defined share", key=False), top_inches=0.78,
        note="colour: how often a source head has the largest share, over tokens, recipient heads and texts",
    )  # fmt: skip
    for row, component in zip(axes, POOLED, strict=True):
        for ax, run in zip(row, runs, strict=True):
            values = run.identity["dominance"][:, run.index("component", component)]
            image = ax.imshow(values.T, aspect="auto", cmap=SHARES, vmin=0, vmax=1, interpolation="nearest")
            ax.set_facecolor(NONE)
            ax.set_title(f"{run.label}: {NAMES[component]}")
            if not np.isfinite(values).any():
                nothing(ax, "not defined")
            ax.set_xticks(range(0, len(values), max(1, len(values) // 12)))
            ax.set_yticks(range(0, values.shape[1], max(1, values.shape[1] // 8)))
        row[0].set_ylabel("source head")
    for ax in axes[-1]:
        ax.set_xlabel("transition, by source layer")
    box, low = axes[0, -1].get_position(), axes[-1, -1].get_position()
    figure.colorbar(image, cax=figure.add_axes([0.905, low.y0, 0.013, box.y1 - low.y0]), label="frequency")
    return figure


def stability(material):
    """Overlap of strong halves between tokens, recipient heads and texts beside that of random halves."""
    runs = material.runs
    height = 6.4
    figure, axes = page(
        title("stability"), 3, 1, height, sharey=True, top_inches=1.0,
        footer=footer(runs, "marker: mean over texts"),
        note="Jaccard overlap of the halves with the larger influence (Q, K, V together); dotted: random halves",
    )  # fmt: skip
    x = np.arange(len(runs[0].kinds))
    for i, (ax, between) in enumerate(zip(axes[:, 0], OVERLAPS, strict=True)):
        marks = []
        for run, (colour, marker), shift in zip(runs, styles(runs), offsets(len(runs), 0.66), strict=True):
            c = run.index("component", "qkv")
            (mark,) = ax.plot(
                x + shift, run.identity["overlap"][:, c, i], ls="", marker=marker, ms=5, color=colour, mec="white"
            )
            marks.append(mark)
            text_marks(ax, x + shift + 0.1, run.identity["overlap_by_text"][:, :, c, i].T)
        ax.hlines(runs[0].identity["overlap_of_random"], x - 0.5, x + 0.5, color=BLACK, lw=0.9, ls=":")
        transition_axis(ax, runs[0].kinds, last=i == 2)
        ax.set_ylim(0, 1.03)
        ax.set_title(f"between {between}")
        ax.set_ylabel("overlap")
        if between == "texts" and len(runs[0].texts) < 2:
            nothing(ax, "one text: nothing to compare")
        elif not np.isfinite(runs[0].identity["overlap"][:, runs[0].index("component", "qkv"), i]).any():
            nothing(ax, "no two halves to compare")
    legend(figure, marks, labels(runs), height)
    return figure


def variance(material):
    """Where the shares vary: head, text, token, recipient head."""
    runs = [material.runs[0], *controls_of(material.runs)]
    height = 5.4
    figure, axes = page(
        title("variance"), 2, 1, height, sharey=True, top_inches=1.0,
        footer=footer(runs, "bars, left to right: " + ", ".join(labels(runs)), key=False),
        note="parts of the mean square of (share − 1/H); they add up to 1; head: the same at every text, token and "
        "recipient head",
    )  # fmt: skip
    colours = (BLUE, SKY, ORANGE, PURPLE, "#c8c8c8")
    for i, (ax, component) in enumerate(zip(axes[:, 0], POOLED, strict=True)):
        for run, shift in zip(runs, offsets(len(runs), 0.8), strict=True):
            c = run.index("component", component)
            total = run.identity["variance_total"][:, c]
            parts = run.identity["variance"][:, c] / np.where(total > 0, total, np.nan)[:, None]
            x = np.flatnonzero(np.isfinite(parts[:, 0]))
            bottom = np.zeros(len(x))
            for s, colour in enumerate(colours):
                part = np.maximum(parts[x, s], 0)
                ax.bar(x + shift, part, 0.72 / len(runs), bottom, color=colour, lw=0)
                bottom += part
        transition_axis(ax, runs[0].kinds, last=i == 1)
        ax.set_ylim(0, 1.02)
        ax.set_title(NAMES[component])
        ax.set_ylabel("part of the variation")
        if not np.isfinite(runs[0].identity["variance_total"][:, runs[0].index("component", component)]).any():
            nothing(ax, "not defined")
    legend(figure, [Patch(color=colour) for colour in colours], SOURCES, height)
    return figure


def constant(material):
    """Whether heads that dominate write a constant."""
    runs = [material.runs[0], *controls_of(material.runs)][:3]
    height = 3.9
    figure, axes = page(
        title("constant"), 1, len(runs), height, sharex=True, sharey=True, top_inches=1.0,
        footer=footer(runs, "one mark per source head and transition; constant part: mean over texts", key=False),
        note="right: a head that writes the same vector at every token; top: a head that is most often dominant",
    )  # fmt: skip
    names = present(runs[0].kinds)
    for ax, run in zip(axes[0], runs, strict=True):
        c, marks = run.index("component", "qkv"), []
        for kind, colour, marker in zip(names, (BLUE, ORANGE, GREEN, PURPLE), "osD^", strict=False):
            chosen = [j for j, k in enumerate(run.kinds) if k == kind]
            part = run.identity["constant_part"][chosen]
            known = np.isfinite(part)
            x = np.where(known, part, 0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
            x = np.where(known.any(axis=1), x, np.nan)
            y = run.identity["dominance"][chosen, c]
            marks += ax.plot(x.ravel(), y.ravel(), ls="", marker=marker, ms=4, color=colour, mec="white", mew=0.4)
        ax.set_xlim(-0.03, 1.03)
        ax.set_ylim(-0.03, 1.03)
        ax.set_title(run.label)
        ax.set_xlabel("constant part of the head's contribution")
    axes[0, 0].set_ylabel("frequency as dominant head")
    legend(figure, marks, names, height)
    return figure
