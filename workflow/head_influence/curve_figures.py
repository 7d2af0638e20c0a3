"""The figures of the head influence curves."""

from pathlib import Path

import numpy as np

from head_influence.curve_study import parse_head
from head_influence.curve_table import ENOUGH, default_heads, stability
from head_influence.curve_titles import TITLES
from head_influence.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NONE,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    legend,
    nothing,
    page,
    save,
    start,
)

COLOURS = (GREEN, SKY, RED, PURPLE, BLUE, ORANGE, BLACK, "#8c6d31")
MARKS = "osD^vPX*"
X = "head ratio (fraction of original keys)"
Y = "Δ log(perplexity) from baseline, nats\n(negative = better)"


def head_title(name):
    """Name of a head as the figure writes it: Layer 15 Head 2."""
    return "Layer {} Head {}".format(*parse_head(name))


def counted(number, thing):
    """A number and its noun."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def sample_size(table, chosen):
    """How many contexts and items a drawn mean is made from."""
    return f"n = {counted(len(set(table.context[chosen])), 'context')}, {counted(int(chosen.sum()), 'item')}"


def shown_heads(table, wanted):
    """Which heads a chart shows and which samples it draws: (indices, samples, sentence)."""
    everything = np.ones(len(table.samples), bool)
    if wanted:
        places = [table.names.index(name) for name in wanted if name in table.names]
        return places, everything, "heads as given in the settings"
    if len(table.names) <= 4:
        return list(range(len(table.names))), everything, "all heads"
    places = default_heads(table)
    rule = "largest Δ at 0, largest gain at the last ratio, flattest"
    if len(set(table.half)) < 2:
        return places, everything, f"{rule}: chosen on the very item that is drawn"
    return places, table.half == 1, f"{rule}: chosen on the other half of the items"


def line_chart(table, model, wanted=None, published=None):
    """Draw curves of a few heads with their spread."""
    places, chosen, rule = shown_heads(table, wanted)
    units, mean, error = table.units(chosen), table.mean(chosen), table.standard_error(chosen)
    several = len(units)
    if several >= ENOUGH:
        spread = f"band: ± 1 standard error over {several} {table.unit}s"
    elif several > 1:
        spread = f"thin lines: the {several} single {table.unit}s, too few for an interval"
    else:
        spread = f"one {table.unit}: no spread can be given"
    height = 5.2
    figure, axes = page(
        f"{TITLES['curves']} ({model}; {counted(len(table.contexts), 'context')})", 1, 1, height, left=0.115,
        top_inches=0.62, bottom_inches=0.92,
        note=f"one KV head's share of the cache is changed, all others stay at {table.baseline:g} · "
        f"{sample_size(table, chosen)}",
        footer=f"{spread} · {rule}",
    )  # fmt: skip
    ax = axes[0, 0]
    ax.axhline(0, color=GREY, lw=0.8, zorder=1)
    ax.axvline(table.baseline, color=GREY, lw=0.8, ls=(0, (4, 3)), zorder=1)
    for i, place in enumerate(places):
        colour, marker = COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]
        if several >= ENOUGH:
            low, high = mean[place] - error[place], mean[place] + error[place]
            ax.fill_between(table.ratios, low, high, color=colour, alpha=0.18, lw=0)
        elif several > 1:
            ax.plot(table.ratios, units[:, place].T, color=colour, lw=0.5, alpha=0.55, zorder=2)
        ax.plot(
            table.ratios, mean[place], color=colour, lw=1.8, marker=marker if len(table.ratios) < 25 else "", ms=4.5,
            mec="white", mew=0.6, label=head_title(table.names[place]), zorder=3,
        )  # fmt: skip
        if published and table.names[place] in published:
            x, y = zip(*published[table.names[place]], strict=True)
            ax.plot(x, y, color=colour, lw=1, ls=":", marker="x", ms=5, zorder=2)
    if published:
        ax.plot([], [], color=GREY, lw=1, ls=":", marker="x", ms=5, label="published figure, read off approximately")
    ax.annotate(
        f"baseline {table.baseline:g}", (table.baseline, 1), xycoords=("data", "axes fraction"), xytext=(3, -3),
        textcoords="offset points", va="top", fontsize=8, color=GREY,
    )  # fmt: skip
    width = table.ratios[-1] - table.ratios[0]
    ax.set_xlim(table.ratios[0] - 0.012 * width, table.ratios[-1] + 0.012 * width)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.12 * (high - low))
    if width <= 0.6:
        ax.set_xticks(np.arange(np.ceil(table.ratios[0] / 0.05), np.floor(table.ratios[-1] / 0.05 + 1e-9) + 1) * 0.05)
    ax.set_xlabel(X)
    ax.set_ylabel(Y)
    ax.legend(loc="upper right", ncols=1 if len(places) < 5 else 2, frameon=True, framealpha=0.85, edgecolor="none")
    return figure


def head_map(table, model):
    """Draw every head's delta(0) and gain at the largest ratio, layer by KV head."""
    layers, heads = np.unique(table.layers), int(table.kv_heads.max()) + 1
    mean = table.mean()
    panels = (
        (mean[:, 0], f"Δ at ratio {table.ratios[0]:g}: above 0, the answers get worse without this head's keys"),
        (
            -mean[:, -1],
            f"gain at ratio {table.ratios[-1]:g} (−Δ): above 0, the answers get better with more of its keys",
        ),
    )
    row = min(1.6, max(0.75, 0.22 * heads + 0.2))
    height = 2 * row + 2.35
    figure, axes = page(
        TITLES["curve_map"], 2, 1, height, left=0.075, right=0.89, hspace=0.75 / row + 0.1,
        top_inches=0.85, bottom_inches=0.85,
        note=f"{model} · {sample_size(table, np.ones(len(table.samples), bool))} · nats; blue is better, red is worse",
        footer="single cells are noisy: see the ranking's stability before naming a head",
    )  # fmt: skip
    for ax, (values, title) in zip(axes[:, 0], panels, strict=True):
        grid = np.full((heads, len(layers)), np.nan)
        grid[table.kv_heads, np.searchsorted(layers, table.layers)] = values
        top = np.nanmax(np.abs(grid)) or 1.0
        worse_is_positive = ax is axes[0, 0]
        image = ax.imshow(
            grid,
            cmap="RdBu_r" if worse_is_positive else "RdBu",
            vmin=-top,
            vmax=top,
            aspect="auto",
            interpolation="nearest",
        )
        ax.set_facecolor(NONE)
        ax.set_title(title)
        ax.set_yticks(range(heads))
        ax.set_ylabel("KV head")
        step = max(1, -(-len(layers) // 36))
        ax.set_xticks(range(0, len(layers), step))
        ax.set_xticklabels(layers[::step])
        box = ax.get_position()
        figure.colorbar(image, cax=figure.add_axes([0.905, box.y0, 0.014, box.height]), format="%.2g")
    axes[1, 0].set_xlabel("layer")
    return figure


def ranking(table, model, seed=0):
    """Draw both halves of the items against each other, head by head."""
    found = stability(table, seed)
    height = 4.4
    figure, axes = page(
        TITLES["curve_ranking"], 1, 2, height, left=0.1, wspace=0.3, top_inches=1.0,
        bottom_inches=0.95,
        note=f"{model} · each point a KV head · n = {counted(len(table.contexts), 'context')}, "
        f"{counted(len(table.samples), 'item')} in two halves",
        footer="fewer than 8 scored items: a ranking is not supported" if len(table.samples) < ENOUGH
        else f"rank correlation between the halves; resampled {table.unit}s against all: 5 to 95 % of 1,000"
        if len(table.units()) >= ENOUGH
        else f"rank correlation between the halves; {counted(len(table.units()), table.unit)}: too few to resample",
    )  # fmt: skip
    panels = (("delta(0)", 0, 1, f"Δ at {table.ratios[0]:g}"), ("gain", -1, -1, f"gain at {table.ratios[-1]:g} (−Δ)"))
    for ax, (name, place, sign, label) in zip(axes[0], panels, strict=True):
        if len(set(table.half)) < 2:
            nothing(ax, "one item: no halves")
            continue
        x, y = (sign * table.mean(table.half == h)[:, place] for h in (0, 1))
        ax.axhline(0, color=PALE, lw=0.8, zorder=0)
        ax.axvline(0, color=PALE, lw=0.8, zorder=0)
        ax.plot(x, y, ls="", marker="o", ms=4, mfc=BLUE, mec="white", mew=0.5)
        far = np.argsort(-(np.abs(x) + np.abs(y)), kind="stable")[:3]
        for rank, i in enumerate(far):
            ax.annotate(
                table.names[i],
                (x[i], y[i]),
                xytext=(4, 4 - 12 * (rank % 2)),
                textcoords="offset points",
                fontsize=7.5,
                color=GREY,
                annotation_clip=True,
            )
        words = f"{label}: rank correlation {found[name]['halves']:.2f}"
        if "bootstrap" in found[name] and len(table.units()) >= ENOUGH:
            low, _, high = found[name]["bootstrap"]
            words += f"\nresampled against all {low:.2f} to {high:.2f}"
        ax.set_title(words)
        ax.margins(0.12)
        ax.locator_params(axis="x", nbins=5)
        ax.set_xlabel("first half of the items, nats")
        ax.set_ylabel("second half of the items, nats")
    return figure


def budget_chart(rows, model, items):
    """Draw promised, in-sample and held-out gains of budgets on the uniform one.

    Parameters
    ----------
    rows : list of dict
        From `curve_budgets.compare`, numbers as floats.
    """
    height, enough = 4.3, items >= ENOUGH
    bars = "bars: ± 1 standard error over items" if enough else "too few items for an interval"
    figure, axes = page(
        TITLES["curve_budgets"], 1, 1, height, left=0.1, top_inches=0.9, bottom_inches=0.95,
        note=f"{model} · gain on the uniform budget of the same number of keys, by one joint run each · "
        f"n = {counted(items, 'item')}",
        footer=f"{bars}; held out: budgets fitted on one half of the items, measured on the other",
    )  # fmt: skip
    ax = axes[0, 0]
    ax.axhline(0, color=GREY, lw=0.8, zorder=0)
    series = (
        ("promised", "promised by the curves", GREY, "x"), ("in_sample", "measured, items of the fit", SKY, "o"),
        ("held_out", "measured, held-out items", RED, "D"), ("pyramid", "pyramid by layer, measured", ORANGE, "^"),
    )  # fmt: skip
    handles, names = [], []
    for shift, (key, name, colour, marker) in zip((-0.24, -0.08, 0.08, 0.24), series, strict=True):
        if key not in rows[0]:
            continue
        y = [row[key] for row in rows]
        error = [row.get(f"{key}_error", np.nan) for row in rows]
        handles.append(
            ax.errorbar(
                np.arange(len(rows)) + shift,
                y,
                yerr=error if enough and key != "promised" else None,
                ls="",
                marker=marker,
                color=colour,
                ms=6,
                lw=1.2,
            )
        )
        names.append(name)
    legend(figure, handles, names, height)
    ax.set_xticks(range(len(rows)))
    ax.set_xticklabels([f"{row['target']:g}\n{row['keys']:g} keys" for row in rows])
    ax.set_xlim(-0.5, len(rows) - 0.5)
    ax.set_xlabel("target ratio")
    ax.set_ylabel("gain on uniform, nats\n(positive = better)")
    return figure


def draw_curves(table, model, folder, dpi, wanted=None, published=None, budgets=None, seed=0):
    """Write all figures as `folder`/<name>.png and .svg; without budgets there is no chart of them."""
    start()
    folder = Path(folder)
    save(line_chart(table, model, wanted, published), folder / "curves", dpi)
    save(head_map(table, model), folder / "curve_map", dpi)
    save(ranking(table, model, seed), folder / "curve_ranking", dpi)
    if budgets:
        save(budget_chart(budgets, model, len(table.samples)), folder / "curve_budgets", dpi)


def upstream_chart(found, model):
    """Draw cache influence against upstream influence, one point per KV head.

    Parameters
    ----------
    found : dict
        From `upstream.beside_upstream`.
    """
    height = 6.4
    layers = np.array(found["layers"])
    figure, axes = page(
        TITLES["curve_upstream"], 2, 2, height, left=0.1, right=0.9, hspace=0.5,
        wspace=0.26, bottom_inches=0.95,
        note=f"{model} · each point a KV head, coloured by layer · Q, K, V together",
        footer="a KV head's value is the mean over its query heads · title: rank correlation within a layer, mean over "
        "layers, no p-value · other texts in each study",
    )  # fmt: skip
    measures = (
        ("share", "mean share of the influence on the next layer × H"),
        ("dominance", "how often its group has the largest share"),
    )
    for row, y in zip(axes, ("delta(0)", "gain"), strict=True):
        for ax, (x, label) in zip(row, measures, strict=True):
            points = ax.scatter(
                found[x], found[y], c=layers, cmap="viridis", vmin=layers.min(), vmax=layers.max(), s=22,
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            if len(layers) < ENOUGH:
                ax.set_title(f"{counted(len(layers), 'head')}: too few for a correlation")
                for name, *place in zip(found["names"], found[x], found[y], strict=True):
                    ax.annotate(name, place, xytext=(5, 4), textcoords="offset points", fontsize=7.5, color=GREY)
            else:
                r, n = found["within"][f"{y} and {x}"]
                ax.set_title(f"rank correlation within a layer {r:.2f} ({counted(n, 'layer')})")
            ax.margins(0.12)
            ax.axhline(0, color=GREY, lw=0.6, zorder=0)
            ax.set_xlabel(label)
            ax.set_ylabel("Δ at the smallest ratio, nats" if y == "delta(0)" else "gain at the largest ratio, nats")
    box = axes[0, -1].get_position()
    low = axes[-1, -1].get_position().y0
    if len(set(found["layers"])) > 1:
        figure.colorbar(points, cax=figure.add_axes([0.925, low, 0.013, box.y1 - low]), label="layer")
    return figure
