"""Head budgets of a study: planned from its curves, tried by joint runs through the model, and compared."""

import csv
from pathlib import Path

import numpy as np

from head_influence import StudyError, budgets, files
from head_influence.budgets import keys_at

ONE = "1"


def plan(table, targets):
    """Share every target budget in every way.

    Parameters
    ----------
    table : CurveTable
    targets : list of float
        Mean ratios.

    Returns
    -------
    dict
        heads (names) and targets: a list of {target, ratios: {scheme: list}, predicted: {scheme: float}}; predicted is
        the gain on the uniform budget that the curves of that scheme's items promise, in nats.
    """
    curves = {f"half{h}": table.mean(table.half == h) for h in (0, 1) if len(set(table.half)) == 2}
    curves["all"] = table.mean()
    out = []
    for target in targets:
        shared = budgets.schemes(curves, table.ratios, target, table.layers)
        promised = {
            name: budgets.predicted(curves[name], table.ratios, shared["uniform"])
            - budgets.predicted(curves[name], table.ratios, shared[name])
            for name in curves
        }
        out.append({"target": target, "ratios": {n: x.tolist() for n, x in shared.items()}, "predicted": promised})
    return {"heads": table.names, "targets": out}


def budget_keys(ratios, target, tokens):
    """Whole keys (head,) of a budget: as many in all as `target` gives every head."""
    ratios = np.asarray(ratios, float)
    return budgets.whole_keys(ratios / ratios.sum(), len(ratios) * keys_at(target, tokens), tokens)


def try_budgets(checkpoint_folder, context, paths, planned, output, settings, attributes):
    """Score one context with all heads compacted to each planned budget.

    Parameters
    ----------
    context : TokenContext
    paths : list of path
        Prefill, by layer.
    planned : dict
        From `plan`.
    output : path
    settings : dict
        fit, minimum_keys, max_queries, seed.
    """
    from head_influence.checkpoint import Checkpoint
    from head_influence.curve_study import cache_kinds, head_name
    from head_influence.curves import Article, read_prefill, unchanged_cache
    from head_influence.scoring import Scorer, SoftmaxCache

    checkpoint = Checkpoint(checkpoint_folder)
    kinds, scorer = cache_kinds(checkpoint), Scorer(checkpoint, len(context.ids))
    names = {name: i for i, name in enumerate(planned["heads"])}
    schemes = list(planned["targets"][0]["ratios"])
    tokens = len(context.article)
    keys = np.array(
        [[budget_keys(t["ratios"][s], t["target"], tokens) for s in schemes] for t in planned["targets"]], np.int32
    )
    runs = [(i, j) for i in range(len(planned["targets"])) for j in range(len(schemes))]
    embedded = [scorer.embed(item)[None] for item in context.items]
    hidden = {run: embedded for run in runs}
    for index, (kind, path) in enumerate(zip(kinds, paths, strict=True)):
        record, attrs = read_prefill(path)
        caches = dict.fromkeys(runs) if kind == "softmax" else dict.fromkeys(runs, unchanged_cache(record))
        if kind == "softmax":
            article = Article(record, float(attrs["scaling"]), context, settings, index)
            places = [names[head_name(index, h)] for h in range(article.heads)]
            fits = [article.compact(h, keys[:, :, p].ravel()) for h, p in enumerate(places)]
            for i, j in runs:
                counts = keys[i, j, places]
                caches[i, j] = SoftmaxCache(
                    [article.cache(h, fit[t]) for h, (fit, t) in enumerate(zip(fits, counts, strict=True))]
                )
        scorer.load(index)
        hidden = {run: [scorer.step(index, h, caches[run]) for h in hidden[run]] for run in runs}
        scorer.release(index)
    nll = np.array([[scorer.nll(i, h)[0] for i, h in zip(context.items, hidden[run], strict=True)] for run in runs])
    shape = (len(planned["targets"]), len(schemes))
    variables = {
        "target": (("target",), [t["target"] for t in planned["targets"]], {"long_name": "mean ratio", "units": ONE}),
        "scheme": (("scheme",), schemes, {"long_name": "how the keys are shared"}),
        "head": (("head",), planned["heads"], {"long_name": "KV head"}),
        "item": (("item",), [item.id for item in context.items], {"long_name": "item"}),
        "nll": (("target", "scheme", "item"), nll.reshape(*shape, -1),
                {"long_name": "mean negative log probability of the answer", "units": "nat"}),
        "keys": (("target", "scheme", "head"), keys, {"long_name": "keys kept", "units": ONE}),
    }  # fmt: skip
    files.write(output, variables, {"stage": "curve budgets", "article_tokens": tokens} | attributes)


def compare(table, planned, paths):
    """Compare the joint runs with the uniform budget and with what the curves promised.

    Parameters
    ----------
    table : CurveTable
    planned : dict
        From `plan`.
    paths : list of path
        From `try_budgets`, by context.

    Returns
    -------
    list of dict
        Per target: target, keys (total, all contexts), uniform and full (nll), promised (of the half-fitted budgets on
        their own half, mean of the two), promised_held_out (on the other half); the measured gains on the uniform
        budget in_sample, held_out, pyramid, and all_in_sample for the budget that is written, each with its standard
        error over items.
    """
    runs = [files.read(path)[0] for path in paths]
    schemes = list(runs[0]["scheme"])
    nll = np.concatenate([r["nll"] for r in runs], axis=2)
    rows = []
    for i, entry in enumerate(planned["targets"]):
        totals = {int(r["keys"][i, j].sum()) for r in runs[:1] for j in range(len(schemes))}
        if len(totals) != 1:
            raise StudyError(f"{paths[0]}: budgets of different size at target {entry['target']}: {sorted(totals)}")
        of = {s: nll[i, schemes.index(s)] for s in schemes}
        row = {
            "target": entry["target"],
            "keys": int(sum(r["keys"][i, 0].sum() for r in runs)),
            "uniform": float(of["uniform"].mean()),
            "full": float(table.nll["full"].mean()),
        }
        if "half0" in of:
            own = np.where(table.half == 0, of["half0"], of["half1"])
            other = np.where(table.half == 0, of["half1"], of["half0"])
            row["promised"] = float(np.mean([entry["predicted"][f"half{h}"] for h in (0, 1)]))
            row["promised_held_out"] = float(
                np.mean([_promised(table, entry, fitted, 1 - fitted) for fitted in (0, 1)])
            )
            row |= _gain("in_sample", of["uniform"] - own) | _gain("held_out", of["uniform"] - other)
        row |= _gain("pyramid", of["uniform"] - of["pyramid"]) | _gain("all_in_sample", of["uniform"] - of["all"])
        rows.append(row)
    return rows


def _promised(table, entry, fitted, judged):
    curves = table.mean(table.half == judged)
    ratios = entry["ratios"]
    uniform, own = (budgets.predicted(curves, table.ratios, ratios[s]) for s in ("uniform", f"half{fitted}"))
    return uniform - own


def _gain(name, difference):
    n = len(difference)
    error = float(difference.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
    return {name: float(difference.mean()), f"{name}_error": error}


def shares(planned, target_index, scheme="all"):
    """Shares of a budget, {"L0H0": share}, sum 1."""
    ratios = np.asarray(planned["targets"][target_index]["ratios"][scheme])
    return dict(zip(planned["heads"], (ratios / ratios.sum()).tolist(), strict=True))


def read_comparison(path):
    """Read the table that `compare` made: rows of numbers, NaN where a cell is empty."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return [{key: float(x) if x else float("nan") for key, x in row.items()} for row in csv.DictReader(file)]
