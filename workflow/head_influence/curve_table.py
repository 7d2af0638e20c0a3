"""All curves of a study in one table, their spread, and how stable a ranking of the heads is."""

import json
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from head_influence import StudyError, files
from head_influence.curve_study import head_name

ENOUGH = 8  # units below which no interval is drawn, scored items below which no ranking is spoken of
RESAMPLES = 1000
ONE = "1"


@dataclass
class CurveTable:
    """Every curve of a study.

    Attributes
    ----------
    names : list of str
        Heads, like L15H2.
    layers, kv_heads : array (head,)
    ratios : array (ratio,)
    baseline : float
    samples : list of str
        "context/item".
    context : array (sample,)
        Index of the sample's context.
    contexts : list of str
    delta : array (sample, head, ratio)
        nats; negative is better.
    nll : dict
        "full", "baseline", "none" to array (sample,).
    keys_used, mass_error, output_error : array (context, head, ratio)
    attributes : dict
    """

    names: list
    layers: np.ndarray
    kv_heads: np.ndarray
    ratios: np.ndarray
    baseline: float
    samples: list
    context: np.ndarray
    contexts: list
    delta: np.ndarray
    nll: dict
    keys_used: np.ndarray
    mass_error: np.ndarray
    output_error: np.ndarray
    attributes: dict

    @property
    def half(self):
        """Which half (0 or 1) of the items each sample belongs to: every second one."""
        return np.arange(len(self.samples)) % 2

    @property
    def zero(self):
        """Index of the baseline ratio."""
        return int(np.flatnonzero(self.ratios == self.baseline)[0])

    def units(self, chosen=None):
        """Curves (unit, head, ratio) of the independent units: contexts, or the items if there is one context."""
        chosen = np.ones(len(self.samples), bool) if chosen is None else chosen
        if len(self.contexts) == 1:
            return self.delta[chosen]
        present = [c for c in range(len(self.contexts)) if (chosen & (self.context == c)).any()]
        return np.stack([self.delta[chosen & (self.context == c)].mean(0) for c in present])

    @property
    def unit(self):
        """What a unit is."""
        return "item" if len(self.contexts) == 1 else "context"

    def mean(self, chosen=None):
        """Mean curve (head, ratio): over items, then over contexts."""
        return self.units(chosen).mean(0)

    def standard_error(self, chosen=None):
        """Standard error (head, ratio) over units; NaN for a single one."""
        units = self.units(chosen)
        if len(units) < 2:
            return np.full(units.shape[1:], np.nan)
        return units.std(0, ddof=1) / np.sqrt(len(units))

    def uses_context(self):
        """Mean of nll_none - nll_full, its standard error over items, and whether full < baseline < none holds."""
        n = self.nll
        gain = n["none"] - n["full"]
        error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.nan
        ordered = n["full"].mean() < n["baseline"].mean() < n["none"].mean()
        return float(gain.mean()), float(error), bool(ordered and gain.mean() > 2 * error)


def collect(paths, contexts):
    """Read all layer files of a study.

    Parameters
    ----------
    paths : list of list of path
        By context, then layer.
    contexts : list of str

    Returns
    -------
    CurveTable
    """
    pieces, attributes = [], None
    for row in paths:
        found = [files.read(path) for path in row]
        attributes = attributes or found[0][1]
        pieces.append([data for data, _ in found])
        for data, attrs in found:
            if not np.array_equal(data["ratio"], found[0][0]["ratio"]):
                raise StudyError(f"{row[0].parent}: layer files with different ratios; delete the folder and run again")
            if attrs["fingerprint"] != attributes["fingerprint"]:
                raise StudyError(f"{row[0].parent}: files of different models; delete the folder and run again")
    layer_numbers = [int(files.read(path, ["ratio"])[1]["layer"]) for path in paths[0]]
    first = pieces[0]
    layers = np.concatenate([np.full(len(d["kv_head"]), i) for i, d in zip(layer_numbers, first, strict=True)])
    kv_heads = np.concatenate([d["kv_head"] for d in first])
    settings = json.loads(attributes["settings"])

    def joined(name):
        return np.stack([np.concatenate([d[name] for d in row]) for row in pieces])

    return CurveTable(
        names=[head_name(i, h) for i, h in zip(layers, kv_heads, strict=True)],
        layers=layers,
        kv_heads=kv_heads,
        ratios=first[0]["ratio"],
        baseline=settings["scoring"]["baseline"],
        samples=[f"{c}/{item}" for c, row in zip(contexts, pieces, strict=True) for item in row[0]["item"]],
        context=np.concatenate([np.full(len(row[0]["item"]), i) for i, row in enumerate(pieces)]),
        contexts=list(contexts),
        delta=np.concatenate([np.concatenate([d["delta"] for d in row], axis=1) for row in pieces]),
        nll={m: np.concatenate([row[0][f"nll_{m}"] for row in pieces]) for m in ("full", "baseline", "none")},
        keys_used=joined("keys_used"),
        mass_error=joined("mass_error"),
        output_error=joined("output_error"),
        attributes={k: attributes[k] for k in ("study", "model", "revision", "fingerprint", "cache_kinds", "settings")},
    )


def write_table(table, path, attributes):
    """Write a `CurveTable` with its means and standard errors."""
    t, head = table, ("head", "ratio")

    def title(text, units=ONE):
        return {"long_name": text, "units": units}

    variables = {
        "head": (("head",), t.names, {"long_name": "KV head"}),
        "layer": (("head",), t.layers.astype(np.int32), title("layer")),
        "kv_head": (("head",), t.kv_heads.astype(np.int32), title("KV head within the layer")),
        "ratio": (("ratio",), t.ratios, title("share of the article's keys")),
        "sample": (("sample",), t.samples, {"long_name": "context/item"}),
        "context": (("context",), t.contexts, {"long_name": "context"}),
        "context_index": (("sample",), t.context.astype(np.int32), title("context of the sample")),
        "half": (("sample",), t.half.astype(np.int32), title("half of the items")),
        "delta": (("sample", *head), t.delta, title("nll minus nll_baseline: negative is better", "nat")),
        "mean": (head, t.mean(), title("mean over items, then contexts", "nat")),
        "standard_error": (head, t.standard_error(), title(f"standard error of the mean over {t.unit}s", "nat")),
        "keys_used": (("context", *head), t.keys_used, title("keys kept")),
        "mass_error": (("context", *head), t.mass_error, title("relative error of the attention mass")),
        "output_error": (("context", *head), t.output_error, title("relative error of the attention output")),
    }
    variables |= {
        f"nll_{m}": (("sample",), x, title(f"mean negative log probability, {m} cache", "nat"))
        for m, x in t.nll.items()
    }
    own = {"stage": "curve table", "baseline": t.baseline, "contexts": len(t.contexts), "items": len(t.samples)}
    files.write(path, variables, t.attributes | own | attributes)


def read_table(path):
    """Read what `write_table` wrote."""
    d, attributes = files.read(path)
    return CurveTable(
        names=list(d["head"]), layers=d["layer"], kv_heads=d["kv_head"], ratios=d["ratio"],
        baseline=float(attributes["baseline"]), samples=list(d["sample"]), context=d["context_index"],
        contexts=list(d["context"]), delta=d["delta"], nll={m: d[f"nll_{m}"] for m in ("full", "baseline", "none")},
        keys_used=d["keys_used"], mass_error=d["mass_error"], output_error=d["output_error"], attributes=attributes,
    )  # fmt: skip


def spearman(x, y):
    """Rank correlation with average ranks of ties; NaN where one side is constant."""
    a, b = rankdata(x), rankdata(y)
    a, b = a - a.mean(), b - b.mean()
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size else np.nan


def stability(table, seed=0):
    """How well a ranking of the heads can be trusted.

    Returns
    -------
    dict
        "delta(0)" and "gain" (at the largest ratio) to {"halves": rank correlation between the halves of the items,
        "bootstrap": [5, 50, 95 percentiles of the rank correlation of a resample of the units with the whole],
        "top": share of resamples in which the leading head stays the leading one}.
    """
    quantities = {"delta(0)": (0, 1.0), "gain": (-1, -1.0)}
    out, units = {}, table.units()
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(units), (RESAMPLES, len(units)))
    for name, (place, sign) in quantities.items():
        whole = sign * table.mean()[:, place]
        halves = [sign * table.mean(table.half == h)[:, place] for h in (0, 1) if (table.half == h).any()]
        entry = {"halves": spearman(*halves) if len(halves) == 2 and len(whole) > 1 else np.nan}
        if len(units) > 1 and len(whole) > 1:
            resampled = sign * units[draws, :, place].mean(1)
            found = np.array([spearman(r, whole) for r in resampled])
            entry["bootstrap"] = [float(x) for x in np.percentile(found, [5, 50, 95])]
            entry["top"] = float((resampled.argmax(1) == whole.argmax()).mean())
        out[name] = entry
    return out


def default_heads(table):
    """Choose heads on half 0 of the items: largest delta(0), largest gain at the last ratio, and the flattest."""
    chosen = table.half == 0
    mean = table.mean(chosen)
    size = np.abs(mean).max(axis=1)
    ranked = [
        np.argsort(-mean[:, 0], kind="stable"),
        np.argsort(mean[:, -1], kind="stable"),
        np.argsort(size, kind="stable"),
    ]
    found = []
    for order in ranked:
        found += [next(int(i) for i in order if int(i) not in found)] if len(found) < len(mean) else []
    return found


def pick_heads(table, number):
    """Names of the `number` heads with the largest effect on half 0 of the items, in the model's order."""
    size = np.abs(table.mean(table.half == 0)).max(axis=1)
    best = np.sort(np.argsort(-size, kind="stable")[:number])
    return [table.names[i] for i in best]
