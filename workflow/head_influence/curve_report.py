"""The report's section on head influence curves, as HTML that needs nothing else."""

import base64
import html
import json
from pathlib import Path

import numpy as np

from head_influence.curve_budgets import read_comparison
from head_influence.curve_figures import counted
from head_influence.curve_table import ENOUGH, read_table, stability
from head_influence.json_files import read_json

STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff; }
table { border-collapse: collapse; font-size: 13px; margin: .6rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .7rem; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; height: auto; border: 1px solid #eee; }
figure { margin: 1.2rem 0; } figcaption { font-size: 13px; color: #555; }
.warn { border-left: 4px solid #D55E00; padding: .2rem .8rem; background: #fdf3ec; }
"""
CAPTIONS = {
    "curves": "Change of the log perplexity of the answers (nats per token) when one KV head keeps another share of "
    "its keys than the baseline's and every other head stays at the baseline. Below 0 is better than the baseline, "
    "above 0 is worse. Every curve passes through 0 at the baseline.",
    "curve_map": "Every head at the smallest and the largest ratio. A head that is red above loses most without its "
    "keys, one that is blue below gains most from more of them.",
    "curve_ranking": "Each head's effect on the two halves of the items. Where the points do not lie along a rising "
    "line, the order of the heads on one half says little about the other, and no head should be named for its rank.",
    "curve_budgets": "Gain over the uniform budget when all heads share the same number of keys by their curves. The "
    "promise is the sum of the single curves; measured is one run with all heads changed together. Only the gain on "
    "held-out items says what a budget is worth on other questions about these contexts.",
    "curve_upstream": "Each point a KV head: what its share of the cache does for the answers, and what removing its "
    "query heads does to the next layer. Two different questions; see the caveats in the text.",
}


def cell(value):
    """A table cell; numbers to the right."""
    if isinstance(value, (float, np.floating)):
        text = "" if np.isnan(value) else f"{value:.4g}"
        return f'<td class="n">{text}</td>'
    if isinstance(value, (int, np.integer)):
        return f'<td class="n">{value}</td>'
    return f"<td>{html.escape(str(value))}</td>"


def rows_table(header, rows):
    """An HTML table."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def figure(folder, name):
    """A figure with its caption, the picture inside the page."""
    data = base64.b64encode((Path(folder) / f"{name}.png").read_bytes()).decode()
    caption = html.escape(CAPTIONS[name])
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


def scores(table):
    """Paragraphs on the three caches and on whether the model uses its context."""
    gain, error, holds = table.uses_context()
    n = table.nll
    rows = [
        (words, float(n[m].mean()))
        for m, words in (
            ("full", "full cache"),
            ("baseline", f"every head at ratio {table.baseline:g}"),
            ("none", "no article key in any head"),
        )
    ]
    out = [rows_table(("cache", "mean negative log probability, nats per token"), rows)]
    words = (
        f"Without any article key the score is {abs(gain):.3g} nats {'worse' if gain > 0 else 'better'} than with the "
        f"full cache (standard error over {counted(len(table.samples), 'item')}: {error:.2g})."
    )
    if holds:
        out.append(f"<p>{words} The order full &lt; baseline &lt; none holds: the model uses its context here.</p>")
    else:
        out.append(
            f'<p class="warn">{words} The order full &lt; baseline &lt; none, with a difference above two standard '
            "errors, does <b>not</b> hold: on these contexts the model does not use its softmax cache reliably, and "
            "the curves mean little. The check of it reads “not applicable”.</p>"
        )
    return out


def ranking_words(table, seed=0):
    """Paragraph on whether heads may be ranked."""
    if len(table.samples) < ENOUGH:
        return (
            f'<p class="warn">Only {counted(len(table.samples), "scored item")}: fewer than {ENOUGH}, so a ranking of '
            "heads is "
            "not supported.</p>"
        )
    parts = []
    for name, entry in stability(table, seed).items():
        label = f"Δ at ratio {table.ratios[0]:g}" if name == "delta(0)" else f"the gain at ratio {table.ratios[-1]:g}"
        words = f"{label}: rank correlation between the halves of the items {entry['halves']:.2f}"
        if "bootstrap" in entry:
            low, middle, high = entry["bootstrap"]
            few = (
                ""
                if len(table.units()) >= ENOUGH
                else f" ({counted(len(table.units()), table.unit)}: too few to mean much)"
            )
            words += (
                f"; over resampled {table.unit}s, against the whole, {middle:.2f} ({low:.2f} to {high:.2f}); the "
                f"leading head leads in {100 * entry['top']:.0f} % of the resamples{few}"
            )
        parts.append(f"<li>{html.escape(words)}</li>")
    return f"<p>How far the heads can be ranked:</p><ul>{''.join(parts)}</ul>"


def heads_table(table, number=10):
    """The heads with the largest effect at either end, with standard errors."""
    mean, error = table.mean(), table.standard_error()
    size = np.maximum(np.abs(mean[:, 0]), np.abs(mean[:, -1]))
    rows = [
        (
            table.names[i],
            mean[i, 0],
            error[i, 0],
            -mean[i, -1],
            error[i, -1],
            float(table.output_error[:, i, -1].mean()),
        )
        for i in np.argsort(-size, kind="stable")[:number]
    ]
    header = (
        "head", f"Δ at {table.ratios[0]:g}", "s.e.", f"gain at {table.ratios[-1]:g}", "s.e.",
        f"output error at {table.ratios[-1]:g}",
    )  # fmt: skip
    return (
        f"<p>The {len(rows)} heads with the largest effect (nats; s.e.: standard error over "
        f"{counted(len(table.units()), table.unit)}). "
        "They are picked by the very numbers shown, so these are too large on average.</p>" + rows_table(header, rows)
    )


def budget_words(rows, items):
    """Paragraph and table on the budgets."""
    header = (
        "target ratio", "keys", "uniform, nats", "promised", "measured, items of the fit", "s.e.", "measured, held out",
        "s.e.", "pyramid", "s.e.",
    )  # fmt: skip
    keys = (
        "target", "keys", "uniform", "promised", "in_sample", "in_sample_error", "held_out", "held_out_error",
        "pyramid", "pyramid_error",
    )  # fmt: skip
    body = [tuple(row.get(key, float("nan")) for key in keys) for row in rows]
    return (
        "<p>A budget gives each head a share of a fixed number of keys; shares minimise the sum of the curves, by "
        "exchange between heads from the uniform budget (a local optimum). Gains on the uniform budget, nats, "
        f"{counted(items, 'item')}. “Promised” adds up single curves as if heads did not interact. “Held out” is the "
        "number to quote: the budget is fitted on every second item and measured on the others, and the other way "
        "round; all items share the contexts, so it says nothing about other contexts. The written shares "
        "(budgets/R*.json) are fitted on all items; they have no "
        "held-out gain of their own.</p>" + rows_table(header, body)
    )


def check_rows(checks):
    """The check table."""
    rows = [
        (c["number"], c["what"], "" if c["value"] is None else f"{c['value']:.3g}", c["limit"], c["outcome"])
        for c in checks
    ]
    return rows_table(("check", "what", "found", "expected", "outcome"), rows)


def kinds_words(table):
    """Sentence on the layers that are not compacted."""
    kinds = json.loads(table.attributes["cache_kinds"])
    listed = {k: [i for i, kind in enumerate(kinds) if kind == k] for k in ("softmax", "sliding", "linear")}
    words = [
        f"Compacted: the {counted(len(listed['softmax']), 'softmax layer')} ({', '.join(map(str, listed['softmax']))})."
    ]
    if listed["sliding"]:
        words.append(f"Left alone: sliding-window layers {', '.join(map(str, listed['sliding']))}.")
    if listed["linear"]:
        words.append(
            "Carried unchanged, with the state after the whole context: linear layers "
            f"{', '.join(map(str, listed['linear']))}; they keep part of the article in every cache, also in “none”."
        )
    return html.escape(" ".join(words))


def section(table, model, figures, checks, budgets=None, seed=0):
    """Return the section as an HTML fragment.

    Parameters
    ----------
    table : CurveTable
    model : str
    figures : path
        Folder of the PNG files.
    checks : list of dict
        From `curve_checks`.
    budgets : list of dict, optional
        From `curve_budgets.compare`.
    seed : int
    """
    settings = json.loads(table.attributes["settings"])
    fit = settings["scoring"]["fit"]
    reading = settings["reading"]
    parts = [
        "<h2>Head influence curves</h2>",
        "<p>A context is read once and its KV cache is compacted head by head; then questions about it are asked and "
        f"the log perplexity of the answers is measured. At the baseline every KV head keeps {100 * table.baseline:g} "
        "% of the article's keys. A curve shows what changes when <b>one</b> head keeps more or fewer and all others "
        "stay. <b>Negative means better than the baseline</b>: a head far below 0 gains most from more keys, one "
        "well above 0 at ratio 0 is hurt most when its keys are taken away, and a flat line at 0 is a head without "
        "influence. What is measured here is the loss of the answers, unlike in the concentration study.</p>",
        f"<p>Model: {html.escape(model)}. {counted(len(table.contexts), 'context')}, "
        f"{counted(len(table.samples), 'scored item')}; answers: "
        f"{'the model’s own greedy ones' if reading['answers'] == 'greedy' else 'the reference texts'}. Keys chosen "
        f"by {fit['keys']}, bias {fit['bias']}, values {fit['values']}. {kinds_words(table)}</p>",
        *scores(table),
        figure(figures, "curves"),
        figure(figures, "curve_map"),
        heads_table(table),
        ranking_words(table, seed),
        figure(figures, "curve_ranking"),
    ]
    if budgets:
        parts += ["<h3>Head budgets</h3>", budget_words(budgets, len(table.samples)), figure(figures, "curve_budgets")]
    parts += [
        "<h3>Checks</h3>",
        "<p>On the first context and one layer; check 9 on a model made by hand whose retrieval head is known.</p>",
        check_rows(checks),
        "<p>Effects of single heads are small, often not monotone, and differ between texts. Nothing here says that "
        "a head can be removed, nor does a rank carry over to other contexts without the stability shown above.</p>",
    ]
    return "\n".join(parts)


def read_section(folder, model, budgets=False, seed=0):
    """Return the section from a study's results.

    Parameters
    ----------
    folder : path
        results/<study>.
    model : str
    budgets : bool
        Whether the study has budgets.
    seed : int

    Returns
    -------
    str
        An HTML fragment that needs no other file; `STYLE` has rules for its classes.
    """
    folder = Path(folder)
    return section(
        read_table(folder / "curves.nc"),
        model,
        folder / "figures",
        read_json(folder / "curve_checks.json"),
        read_comparison(folder / "budgets.csv") if budgets else None,
        seed,
    )


def page(fragment, title):
    """A whole HTML page around a section."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n{fragment}\n</body></html>\n"
    )
