"""How the figures look: page size, palette, axes of transitions, intervals, and labels that always render."""

import warnings
from pathlib import Path

import numpy as np

from head_influence.distributions import ENOUGH_TEXTS, spread

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import font_manager
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

WIDTH = 9.0  # inches: a page's width at 150 dots per inch
TALLEST = 990  # pixels: Snakemake's report cuts figures off above about 1,000
# Okabe and Ito's colours, told apart with all common kinds of colour vision; markers repeat what colour says.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
)  # fmt: skip
RUNS = {"": (BLUE, "o"), "random": (ORANGE, "s"), "permuted": (PURPLE, "^"), "mean": (GREEN, "D")}
SCENARIO_STYLE = {"weak": (SKY, "v"), "random": (ORANGE, "s"), "strong": (RED, "^"), "all": (BLACK, "o")}
GREY, PALE, NONE = "#5f5f5f", "#ededed", "#d9d9d9"
SHARES = "Blues"  # from nothing (white) to much (dark), in one hue
KEY = "L: linear, S: softmax attention, shaded: softmax recipient"
SHORT = {"linear": "L", "softmax": "S"}
NAMES = {"q": "Q", "k": "K", "v": "V", "qkv": "Q, K, V together", "js": "retrieval (JS)"}
STYLE = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.formatter.useoffset": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "path",
    "svg.hashsalt": "head-influence",
    "text.parse_math": False,
}


def start():
    """Set the style; labels in Chinese use the font that the environment brings, if it is there."""
    matplotlib.rcParams.update(matplotlib.rcParamsDefault)
    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)


def chinese_font():
    """Path of the installed Noto Sans CJK, or None."""
    try:
        from noto_cjk_sans_otc import FONT_PATH
    except ImportError:
        return None
    return str(FONT_PATH) if Path(str(FONT_PATH)).is_file() else None


class Labels:
    """Token labels that render: unprintable characters are made visible, those without a glyph become a box.

    Parameters
    ----------
    strings : iterable of str
        All strings that will be drawn.
    """

    VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\r": "↵", "\t": "⇥", "\u3000": "␣"})

    def __init__(self, strings):
        self.known = set(font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap())
        self.family = ["DejaVu Sans"]
        missing = {ord(c) for c in "".join(strings)} - self.known
        path = chinese_font() if missing else None
        if path is not None:
            before = len(font_manager.fontManager.ttflist)
            font_manager.fontManager.addfont(path)
            added = font_manager.fontManager.ttflist[before:]
            names = [font.name for font in added]
            self.family.append("Noto Sans CJK SC" if "Noto Sans CJK SC" in names else names[0])
            self.known |= set(font_manager.get_font(path).get_charmap())

    def __call__(self, string, longest=10):
        """Label of one token."""
        visible = string.translate(self.VISIBLE) if string else "∅"
        visible = visible if len(visible) <= longest else visible[: longest - 1] + "…"
        return "".join(c if ord(c) in self.known and c.isprintable() else "□" for c in visible)


def page(title, rows, columns, height, *, footer, note="", **grid):
    """Start a figure.

    Parameters
    ----------
    title : str
        The question it answers.
    rows, columns : int
    height : float
        Inches.
    footer : str
        What it is made from, and how far it may be read.
    note : str
        Second line: how to read it.
    **grid
        For `Figure.subplots`; left, right, hspace, wspace and top_inches for the margins.

    Returns
    -------
    figure, axes : Figure, array of Axes (rows, columns)
    """
    figure = Figure(figsize=(WIDTH, height))
    margins = {"left": 0.08, "right": 0.985, "hspace": 0.34, "wspace": 0.16}
    margins |= {key: grid.pop(key) for key in list(grid) if key in margins}
    top, bottom = grid.pop("top_inches", 0.86), grid.pop("bottom_inches", 0.84)
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw=grid.pop("gridspec", None), **grid)
    figure.subplots_adjust(top=1 - top / height, bottom=bottom / height, **margins)
    figure.text(0.012, 1 - 0.2 / height, title, fontsize=11.5, fontweight="bold", va="center")
    figure.text(0.012, 1 - 0.42 / height, note, fontsize=8.5, color=GREY, va="center")
    figure.text(0.012, 0.12 / height, footer, fontsize=7.5, color=GREY, va="center")
    return figure, axes


def legend(figure, handles, labels, height, columns=6, x=0.006):
    """A legend under the figure's title."""
    made = figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(x, 1 - 0.5 / height), ncols=columns, handletextpad=0.4,
        columnspacing=1.4, borderpad=0.1,
    )  # fmt: skip
    for handle in made.legend_handles:  # readable even where the figure's own marks are tiny
        if getattr(handle, "get_marker", lambda: None)() not in (None, "", "None"):
            handle.set_markersize(5)


def transition_axis(ax, kinds, last=True, columns=1):
    """Make the x axis the transitions, in one of `columns` panels; those to softmax attention get a shaded band."""
    for j, kind in enumerate(kinds):
        if kind.endswith("softmax"):
            ax.axvspan(j - 0.5, j + 0.5, color=PALE, lw=0, zorder=0)
    ax.set_xlim(-0.5, len(kinds) - 0.5)
    step = max(1, -(-len(kinds) * columns // 32))
    ax.set_xticks(range(0, len(kinds), step))
    if not last:
        ax.set_xticklabels([])
        return
    if len(kinds) * columns <= 24:
        ax.set_xticklabels([f"{j}\n{'→'.join(SHORT[k] for k in kind.split(' to '))}" for j, kind in enumerate(kinds)])
    else:
        ax.set_xticklabels(range(0, len(kinds), step))
    ax.set_xlabel("transition, by source layer")


def intervals(ax, x, quantiles, colour, marker, *, wide=2.6, size=4.2, hollow=None, label=None, line=1.0):
    """Draw 5 to 95 % (thin), 25 to 75 % (thick) and the median (marker) of quantiles (n, 5); return the marker."""
    thinner = min(1.0, 30 / max(len(quantiles), 1))
    wide, size, line = wide * thinner, size * max(thinner, 0.5), line * max(thinner, 0.5)
    known = np.isfinite(quantiles[:, 2])
    x, q = np.asarray(x, float)[known], quantiles[known]
    ax.vlines(x, q[:, 0], q[:, 4], color=colour, lw=line)
    ax.vlines(x, q[:, 1], q[:, 3], color=colour, lw=wide)
    face = np.full(len(x), False) if hollow is None else np.asarray(hollow)[known]
    mark = None  # the first that is drawn stands in the legend
    for empty in (False, True):
        if (face == empty).any() or not empty:
            (found,) = ax.plot(
                x[face == empty], q[face == empty, 2], ls="", marker=marker, ms=size, mec=colour if empty else "white",
                mew=0.7 * thinner, mfc="white" if empty else colour, label=label, zorder=3,
            )  # fmt: skip
            mark = mark or found
    return mark


def text_marks(ax, x, per_text, colour=GREY):
    """Beside an interval: each text's value, or from eight texts on the bootstrap interval of their mean."""
    for place, values in zip(x, np.asarray(per_text).T, strict=True):
        known = values[np.isfinite(values)]
        if known.size == 0:
            continue
        if known.size < ENOUGH_TEXTS:
            ax.plot(np.full(known.size, place), known, ls="", marker="_", ms=3.5, mew=0.8, color=colour, zorder=4)
        else:
            centre, low, high = spread(known)
            ax.plot([place, place], [low, high], color=colour, lw=1, marker="_", ms=3.5, zorder=4)
            ax.plot([place], [centre], ls="", marker=".", ms=2.5, color=colour, zorder=4)


def offsets(count, width=0.8):
    """Places of `count` marks around an integer."""
    return (np.arange(count) - (count - 1) / 2) * width / max(count, 1)


def nothing(ax, text):
    """Say in an empty panel why it is empty."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=GREY, fontsize=8.5)


def log_scale(ax, values, least=0.0):
    """Use a logarithmic y axis if there is a value above `least`; what is not is out of view, which captions say."""
    values = np.asarray(values, float)
    values = values[np.isfinite(values) & (values > least)]
    if values.size and values.max() > values.min():
        ax.set_yscale("log")
        narrow = values.max() / values.min() < 60
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}" if y >= 1e-3 else f"{y:.0e}".replace("e-0", "e-"))
        ax.yaxis.set_minor_formatter(lambda y, _: "")
        ax.set_ylim(values.min() * 0.8, values.max() * 1.25)


def save(figure, stem, dpi):
    """Write `stem`.png and `stem`.svg; the PNG is at most `TALLEST` pixels high."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    dpi = min(dpi, TALLEST / figure.get_figheight())
    figure.savefig(f"{stem}.png", dpi=dpi, metadata={"Software": None})
    figure.savefig(f"{stem}.svg", metadata={"Date": None, "Creator": None})


def footer(runs, extra=None, key=True):
    """How far a pooled figure may be read, what it is made from, and how its transitions are named."""
    texts = len(runs[0].texts)
    limit = f"{texts} text{'s' if texts != 1 else ''}: no generalisation to other texts"
    if extra is None:
        extra = "ticks: medians of single texts"
        extra = extra if texts < ENOUGH_TEXTS else "grey bars: 95 % of resamplings of the texts"
    return " · ".join([limit, f"queries from {runs[0].attributes['first_query']}", extra, *([KEY] if key else [])])


def styles(runs):
    """Colour and marker of each run; further seeds of a control share both."""
    return [RUNS[run.control] for run in runs]


def labels(runs):
    """What each run is."""
    return [run.label for run in runs]


def run_intervals(ax, runs, count, distribution, texts=None, size=4.2):
    """Draw every run's intervals side by side; return one marker per run.

    Parameters
    ----------
    ax : Axes
    runs : list of Run
    count : int
        Places on the x axis.
    distribution : callable
        Run to quantiles (count, 5).
    texts : callable, optional
        Run to each text's value (X, count), drawn beside the interval.
    """
    x, marks = np.arange(count), []
    for run, (colour, marker), shift in zip(runs, styles(runs), offsets(len(runs), 0.66), strict=True):
        marks.append(intervals(ax, x + shift, distribution(run), colour, marker, size=size))
        if texts is not None:
            text_marks(ax, x + shift + 0.28 / len(runs), texts(run))
    return marks
