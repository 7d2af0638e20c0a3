"""Stages of the head influence curves: prefill, baseline, and one layer's heads; each writes what it made."""

import json

import numpy as np
import torch

from head_influence import StudyError, files
from head_influence.budgets import keys_at
from head_influence.checkpoint import Checkpoint
from head_influence.compaction import Fit, compact, reference_queries
from head_influence.curve_study import cache_kinds, parse_head
from head_influence.prefill import prefill
from head_influence.scoring import HeadCache, LinearCache, Scorer, SlidingCache, SoftmaxCache, score

RESTART = 1e-5  # limit of float noise in a score: nats, or a share of scores above 1 nat
MODES = ("full", "baseline", "none")
ONE = "1"
TITLES = {
    "keys": "keys as attention sees them", "values": "values", "queries": "reference queries: the article read again",
    "conv_state": "state of the convolution after the context",
    "recurrent_state": "state of the delta rule after the context",
    "bias": "added to the scaled logits", "residual": "residual stream that enters the layer at the baseline",
    "positions": "kept positions of the article",
}  # fmt: skip
DIMS = {
    "keys": ("kv_head", "entry", "key_dim"), "values": ("kv_head", "entry", "value_dim"),
    "queries": ("head", "article_position", "key_dim"), "conv_state": ("channel", "kernel"),
    "recurrent_state": ("linear_head", "linear_key_dim", "linear_value_dim"), "bias": ("kv_head", "entry"),
    "residual": ("live_token", "hidden"), "positions": ("kv_head", "kept"),
}  # fmt: skip


def write_prefill(checkpoint_folder, context, paths, attributes):
    """Stage prefill: one file per layer with what the layer keeps of the context and its reference queries."""
    checkpoint = Checkpoint(checkpoint_folder)
    for layer, (path, record) in enumerate(zip(paths, prefill(checkpoint, context), strict=True)):
        arrays = {k: x for k, x in record.items() if isinstance(x, np.ndarray)}
        scalars = {k: x for k, x in record.items() if not isinstance(x, np.ndarray)}
        own = {"stage": "curve prefill", "layer": layer, "context_tokens": len(context.ids)}
        variables, shapes = _pack(arrays)
        files.write(path, variables, own | scalars | shapes | attributes)


def _pack(arrays, prefix=""):
    """Arrays as variables; netCDF has no fixed dimension of size 0, so empty arrays are kept as shapes."""
    variables, shapes = {}, {}
    for name, x in arrays.items():
        if x.size:
            dims = tuple(f"{prefix}{d}" for d in DIMS[name])
            variables[prefix + name] = (dims, x, {"long_name": TITLES[name], "units": ONE})
        else:
            shapes[f"{prefix}{name}_shape"] = list(x.shape)
    return variables, shapes


def _unpack(variables, attributes, prefix=""):
    arrays = {n.removeprefix(prefix): np.ascontiguousarray(x) for n, x in variables.items() if n.startswith(prefix)}
    for name, shape in attributes.items():
        if name.startswith(prefix) and name.endswith("_shape"):
            inner = name.removeprefix(prefix).removesuffix("_shape")
            if inner in DIMS:
                arrays[inner] = np.zeros(json.loads(shape), np.float32)
    return arrays


def read_prefill(path):
    """Read one layer's prefill: its arrays, and attributes."""
    variables, attributes = files.read(path)
    return _unpack(variables, attributes), attributes


class Article:
    """A softmax layer's cache of the context, whose article part can be compacted head by head.

    Parameters
    ----------
    record : dict
        Arrays keys, values (kv_head, position, d) and queries (head, article position, d).
    scaling : float
    context : TokenContext
    settings : dict
        fit, minimum_keys, max_queries, seed.
    layer : int
        Only for the seed of the queries' subset.
    """

    def __init__(self, record, scaling, context, settings, layer):
        self.keys, self.values, self.queries = record["keys"], record["values"], record["queries"]
        self.scaling, self.settings, self.layer = scaling, settings, layer
        self.heads, self.tokens = len(self.keys), len(context.article)
        self.start = len(context.prefix)
        self.article = slice(self.start, self.start + self.tokens)

    def count(self, ratio):
        """Keys kept at a ratio."""
        return keys_at(ratio, self.tokens, self.settings["minimum_keys"])

    def compact(self, head, counts, fit=None):
        """Compact one KV head to several counts: count to `CompactHead`."""
        group = len(self.queries) // self.heads
        own = self.queries[head * group : (head + 1) * group]
        pooled = reference_queries(own, self.settings["max_queries"], [self.settings["seed"], self.layer, head])
        fit = fit or Fit(**self.settings["fit"])
        return compact(
            pooled, self.keys[head, self.article], self.values[head, self.article], self.scaling, counts, fit
        )

    def entries(self, head, compacted):
        """Prefix, kept article and suffix entries of one head: keys, values, bias as float32 arrays."""
        before, after = slice(0, self.start), slice(self.article.stop, None)
        keys, values = self.keys[head], self.values[head]
        bias = np.zeros(len(keys) - self.tokens + len(compacted.kept), np.float32)
        bias[self.start : self.start + len(compacted.kept)] = compacted.bias
        return (
            np.concatenate((keys[before], keys[self.article][compacted.kept], keys[after])),
            np.concatenate((values[before], compacted.values.astype(np.float32), values[after])),
            bias,
        )

    def cache(self, head, compacted):
        """`HeadCache` of one compacted head."""
        return HeadCache(*map(torch.from_numpy, self.entries(head, compacted)))

    def full(self, head):
        """`HeadCache` of one head with all its keys."""
        keys, values = torch.from_numpy(self.keys[head]), torch.from_numpy(self.values[head])
        return HeadCache(keys, values, torch.zeros(len(keys)))


def unchanged_cache(record):
    """Cache of a layer that is never compacted."""
    arrays = {name: torch.from_numpy(x) for name, x in record.items()}
    if "conv_state" in arrays:
        return LinearCache(arrays["conv_state"], arrays["recurrent_state"])
    return SlidingCache(arrays["keys"], arrays["values"])


def measure_baseline(checkpoint_folder, context, paths, output, settings, attributes):
    """Stage baseline: every head compacted to the baseline ratio; scores of the full, baseline and empty cache.

    Parameters
    ----------
    context : TokenContext
    paths : list of path
        Prefill, by layer.
    output : path
    settings : dict
        fit, baseline, minimum_keys, max_queries, seed.
    """
    checkpoint = Checkpoint(checkpoint_folder)
    kinds, scorer = cache_kinds(checkpoint), Scorer(checkpoint, len(context.ids))
    embedded = [scorer.embed(item)[None] for item in context.items]
    hidden = {mode: embedded for mode in MODES}
    variables, shapes = {}, {}
    for index, (kind, path) in enumerate(zip(kinds, paths, strict=True)):
        record, attrs = read_prefill(path)
        kept = {}
        if kind == "softmax":
            article = Article(record, float(attrs["scaling"]), context, settings, index)
            count = article.count(settings["baseline"])
            fits = [article.compact(head, {0, count}) for head in range(article.heads)]
            caches = {
                "full": SoftmaxCache([article.full(h) for h in range(article.heads)]),
                "baseline": SoftmaxCache([article.cache(h, fit[count]) for h, fit in enumerate(fits)]),
                "none": SoftmaxCache([article.cache(h, fit[0]) for h, fit in enumerate(fits)]),
            }
            entries = [article.entries(h, fit[count]) for h, fit in enumerate(fits)]
            kept = dict(zip(("keys", "values", "bias"), map(np.stack, zip(*entries, strict=True)), strict=True))
            kept["positions"] = np.stack([fit[count].kept for fit in fits]).astype(np.int32)
            kept["residual"] = torch.cat([h[0] for h in hidden["baseline"]]).numpy()
        else:
            caches = dict.fromkeys(MODES, unchanged_cache(record))
            kept = record
        more, empty = _pack(kept, f"L{index:02d}_")
        variables, shapes = variables | more, shapes | empty
        scorer.load(index)
        hidden = {mode: [scorer.step(index, h, caches[mode]) for h in hidden[mode]] for mode in MODES}
        scorer.release(index)
    for mode in MODES:
        nll = [scorer.nll(item, h)[0] for item, h in zip(context.items, hidden[mode], strict=True)]
        variables[f"nll_{mode}"] = (("item",), np.array(nll), _nll_title(mode))
    variables |= _item_coordinates(context)
    files.write(output, variables, {"stage": "curve baseline", "cache_kinds": kinds} | shapes | attributes)


def _nll_title(mode):
    cache = {"full": "the full cache", "baseline": "every head at the baseline ratio", "none": "no article key"}[mode]
    return {"long_name": f"mean negative log probability of the answer with {cache}", "units": "nat"}


def _item_coordinates(context):
    return {
        "item": (("item",), [item.id for item in context.items], {"long_name": "item"}),
        "answer_tokens": (
            ("item",), np.array([len(item.targets) for item in context.items]),
            {"long_name": "scored tokens", "units": ONE},
        ),
    }  # fmt: skip


class BaselineCaches:
    """What every layer keeps at the baseline, from the file of stage baseline."""

    def __init__(self, path, items):
        self.data, self.attributes = files.read(path)
        self.nll = {mode: self.data[f"nll_{mode}"] for mode in MODES}
        self._ends = np.cumsum([len(item.live) for item in items])

    def cache(self, index, differs=None):
        """Cache of a layer; `differs` as in `SoftmaxCache`."""
        arrays = _unpack(self.data, self.attributes, f"L{index:02d}_")
        if "residual" not in arrays:
            return unchanged_cache(arrays)
        tensors = [torch.from_numpy(arrays[name]) for name in ("keys", "values", "bias")]
        return SoftmaxCache([HeadCache(*parts) for parts in zip(*tensors, strict=True)], differs or {})

    def residual(self, index):
        """Per item the residual stream (tokens, hidden) that enters a softmax layer."""
        whole = torch.from_numpy(np.ascontiguousarray(self.data[f"L{index:02d}_residual"]))
        return list(torch.tensor_split(whole, self._ends[:-1].tolist()))


def noise_limit(nll):
    """Largest difference between two scores that float32 noise explains."""
    return RESTART * max(1.0, float(np.max(nll)))


def measure_layer(
    checkpoint_folder, context, layer, heads, prefill_path, baseline_path, output, ratios, settings, attributes
):
    """Stage layer: every chosen head of one layer at every ratio, the others at the baseline.

    Parameters
    ----------
    context : TokenContext
    layer : int
    heads : list of int
        KV heads.
    prefill_path, baseline_path, output : path
    ratios : list of float
    settings : dict
        fit, baseline, minimum_keys, max_queries, seed.
    """
    checkpoint = Checkpoint(checkpoint_folder)
    scorer = Scorer(checkpoint, len(context.ids))
    base = BaselineCaches(baseline_path, context.items)
    record, attrs = read_prefill(prefill_path)
    article = Article(record, float(attrs["scaling"]), context, settings, layer)
    counts = [article.count(ratio) for ratio in ratios]
    at_baseline = article.count(settings["baseline"])
    fits = [article.compact(head, counts) for head in heads]
    evaluated = sorted({(i, count) for i in range(len(heads)) for count in counts if count != at_baseline})
    differs = {row: (heads[i], article.cache(heads[i], fits[i][t])) for row, (i, t) in enumerate(evaluated, 1)}
    difference, zero = score(
        scorer, layer, base.residual(layer), lambda i: base.cache(i, differs if i == layer else None), len(differs) + 1,
        context.items,
    )  # fmt: skip
    error = float(np.abs(zero - base.nll["baseline"]).max())
    limit = noise_limit(base.nll["baseline"])
    if not error <= limit:
        raise StudyError(
            f"context {context.id}, layer {layer}: control failed: restarting at the layer changes the baseline's "
            "score by "
            f"{error:.3g} nats, limit {limit:.3g}"
        )
    rows = {place: row for row, place in enumerate(evaluated, 1)}
    place = [[rows.get((i, count), 0) for count in counts] for i in range(len(heads))]
    delta = difference[:, place]
    fit_errors = {
        name: np.array([[getattr(fit[count], name) for count in counts] for fit in fits])
        for name in ("mass_error", "output_error")
    }
    dims = ("kv_head", "ratio")
    variables = {
        "ratio": (("ratio",), np.array(ratios, float), {"long_name": "share of the article's keys", "units": ONE}),
        "kv_head": (("kv_head",), np.array(heads, np.int32), {"long_name": "KV head", "units": ONE}),
        "nll": (
            ("item", *dims), base.nll["baseline"][:, None, None] + delta,
            {"long_name": "mean negative log probability of the answer, this head at this ratio", "units": "nat"},
        ),
        "delta": (("item", *dims), delta, {"long_name": "nll minus nll_baseline: negative is better", "units": "nat"}),
        "keys_used": (
            dims, np.tile(np.array(counts, np.int32), (len(heads), 1)), {"long_name": "keys kept", "units": ONE}
        ),
        "mass_error": (
            dims, fit_errors["mass_error"], {"long_name": "relative error of the attention mass", "units": ONE}
        ),
        "output_error": (dims, fit_errors["output_error"], {"long_name": "relative error of the output", "units": ONE}),
    }  # fmt: skip
    variables |= {f"nll_{mode}": (("item",), base.nll[mode], _nll_title(mode)) for mode in MODES}
    own = {
        "stage": "curve", "layer": layer, "article_tokens": article.tokens, "baseline_keys": at_baseline,
        "control_restart": [error, limit], "cache_kinds": base.attributes["cache_kinds"],
    }  # fmt: skip
    files.write(output, variables | _item_coordinates(context), own | attributes)


def heads_of_layer(names, layer):
    """KV heads of one layer in a list of names like L15H2."""
    return sorted(h for i, h in map(parse_head, names) if i == layer)
