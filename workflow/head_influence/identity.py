"""Which source heads dominate, how stable they are, and what a head's contribution carries of the input.

Dimensions: C components, H source heads, T query tokens, R recipient heads, X texts. Only primary observations with
defined shares count; every text has the same weight, and so has every (token, recipient head) within a text.
"""

import json
from math import comb

import numpy as np

from head_influence import files
from head_influence.concentration import COMPONENTS, shares
from head_influence.controls import ONE, controls_of
from head_influence.distributions import QUANTILES, kind_name, quantiles
from head_influence.influence import FLOOR

OVERLAPS = ("neighbouring tokens", "recipient heads", "texts")
SOURCES = ("head", "head x text", "head x token", "head x recipient", "rest")


def jaccard_of_random(heads, size):
    """Expected Jaccard overlap of two independent random sets of `size` out of `heads`; NaN for empty sets."""
    if size == 0:
        return np.nan
    ways = [comb(size, i) * comb(heads - size, size - i) for i in range(size + 1)]
    return sum(n * i / (2 * size - i) for i, n in enumerate(ways)) / comb(heads, size)


def strong_halves(influence):
    """The last H//2 heads of the ascending stable order over the first axis: (H, ...) to bool (H, ...)."""
    heads = len(influence)
    order = influence.argsort(axis=0, kind="stable")
    chosen = np.zeros(influence.shape, bool)
    np.put_along_axis(chosen, order[heads - heads // 2 :], True, axis=0)
    return chosen


def jaccard(a, b):
    """Jaccard overlap of sets over the first axis, (H, ...) and (H, ...) to (...); NaN where both are empty."""
    a, b = np.broadcast_arrays(a, b)
    either = (a | b).sum(axis=0)
    return np.where(either > 0, (a & b).sum(axis=0) / np.maximum(either, 1), np.nan)


def overlap_within(strong, defined):
    """Mean overlap of strong halves between neighbouring tokens and between recipient heads of one text.

    Parameters
    ----------
    strong : array of bool (H, T, R)
    defined : array of bool (T, R)

    Returns
    -------
    tokens, recipients : float
        NaN where there is no pair.
    """
    tokens = jaccard(strong[:, 1:], strong[:, :-1])[defined[1:] & defined[:-1]]
    first, second = np.triu_indices(strong.shape[2], 1)
    recipients = jaccard(strong[:, :, first], strong[:, :, second])[defined[:, first] & defined[:, second]]
    return mean(tokens), mean(recipients)


def overlap_between(strong, defined):
    """Mean overlap of strong halves between texts at the same token and recipient head.

    Parameters
    ----------
    strong, defined : list of arrays of bool (H, T, R), (T, R)
        One per text; T may differ.

    Returns
    -------
    array (X, X)
        NaN on the diagonal and where two texts share no defined observation.
    """
    table = np.full((len(strong), len(strong)), np.nan)
    for x in range(len(strong)):
        for y in range(x):
            t = min(len(defined[x]), len(defined[y]))
            both = defined[x][:t] & defined[y][:t]
            table[x, y] = table[y, x] = mean(jaccard(strong[x][:, :t], strong[y][:, :t])[both])
    return table


def mean(values):
    """Mean of the finite values; NaN of none."""
    values = np.asarray(values)
    values = values[np.isfinite(values)]
    return values.mean() if values.size else np.nan


class VarianceShares:
    """Sums of squares of y = p - 1/H, gathered text by text.

    `head`, `head x text`, `head x token` (within text), `head x recipient` and `rest` add up to `total`. The terms are
    orthogonal where every text has the same recipient heads defined at every token; `balanced` says whether it is so.
    """

    def __init__(self):
        self.texts = []
        self.balanced = True

    def add(self, p):
        """Add a text's shares (H, T, R), NaN where undefined; return its constant share of the text's own total."""
        heads = len(p)
        defined = np.isfinite(p[0])
        n = defined.sum()
        if n == 0:
            return np.nan
        y = np.where(defined, p - 1 / heads, 0)
        per_token, per_recipient = defined.sum(axis=1), defined.sum(axis=0)
        text = y.sum(axis=(1, 2)) / n
        token = y.sum(axis=2) / np.maximum(per_token, 1)
        self.texts.append(
            {
                "total": np.square(y).sum() / n,
                "text": text,
                "token": (per_token * np.square(token - text[:, None]).sum(axis=0)).sum() / n,
                "recipient_sum": y.sum(axis=1) / n,
                "recipient_weight": per_recipient / n,
            }
        )
        rectangular = set(per_token.tolist()) <= {0, int(per_token.max())}
        self.balanced &= rectangular and set(per_recipient.tolist()) <= {0, int(per_recipient.max())}
        total = self.texts[-1]["total"]
        return np.square(text).sum() / total if total > 0 else np.nan

    def result(self):
        """Sums of squares in the order of `SOURCES`, and their total."""
        if not self.texts:
            return np.full(len(SOURCES), np.nan), np.nan

        def averaged(name):
            return np.mean([text[name] for text in self.texts], axis=0)

        total, head = averaged("total"), averaged("text")
        weight = averaged("recipient_weight")
        recipient = averaged("recipient_sum") / np.where(weight > 0, weight, 1)
        spread = np.square(recipient - head[:, None]).sum(axis=0)
        parts = [
            np.square(head).sum(),
            np.mean([np.square(text["text"] - head).sum() for text in self.texts]),
            averaged("token"),
            (weight * spread).sum(),
        ]
        self.balanced &= all((text["recipient_weight"] == weight).all() for text in self.texts)
        return np.array([*parts, total - sum(parts)]), total


def constant_parts(contributions):
    """How much of each head's contribution is the same at every token.

    Parameters
    ----------
    contributions : list of arrays (H, T, hidden)
        One per text.

    Returns
    -------
    within : array (X, H)
        ||mean over t||^2 / mean over t of ||.||^2 in each text; NaN for a head that contributes nothing.
    across : array (H,)
        The same with means over all texts' tokens, every text of the same weight.
    """
    means = np.stack([c.mean(axis=1, dtype=np.float64) for c in contributions])
    sizes = np.stack([np.square(c.astype(np.float64)).sum(axis=-1).mean(axis=1) for c in contributions])

    def ratio(numerator, denominator):
        return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), np.nan)

    within = ratio(np.square(means).sum(axis=-1), sizes)
    return within, ratio(np.square(means.mean(axis=0)).sum(axis=-1), sizes.mean(axis=0))


def of_transition(influences, contributions):
    """All identity measures of one transition.

    Parameters
    ----------
    influences : list of arrays (C, H, T, R)
        One per text, primary observations only; NaN where a component does not exist.
    contributions : list of arrays (H, T, hidden)

    Returns
    -------
    dict of arrays, see `LAYOUT` for their dims without the transition.
    """
    components, heads = influences[0].shape[:2]
    texts = len(influences)
    out = {
        "defined": np.zeros((texts, components), int),
        "dominance_by_text": np.full((texts, components, heads), np.nan),
        "dominance": np.full((components, heads), np.nan),
        "overlap_by_text": np.full((texts, components, len(OVERLAPS)), np.nan),
        "overlap": np.full((components, len(OVERLAPS)), np.nan),
        "overlap_of_random": jaccard_of_random(heads, heads // 2),
        "variance": np.full((components, len(SOURCES)), np.nan),
        "variance_total": np.full(components, np.nan),
        "variance_balanced": np.ones(components, bool),
        "constant_share": np.full((texts, components), np.nan),
        "modal_head": np.full(components, -1),
        "modal_share": np.full(components, np.nan),
        "head_change": np.full((components, heads, len(QUANTILES)), np.nan),
        "any_head_change": np.full((components, len(QUANTILES)), np.nan),
    }
    out["constant_part"], out["constant_part_across_texts"] = constant_parts(contributions)
    out["mean_influence"] = np.stack([d.mean(axis=(2, 3)) for d in influences])
    for c in range(components):
        variance, strong, defined = VarianceShares(), [], []
        for x, influence in enumerate(influences):
            d = influence[c]
            p = shares(d)
            found = np.isfinite(p[0])
            out["defined"][x, c] = found.sum()
            out["constant_share"][x, c] = variance.add(p)
            strong.append(strong_halves(d))
            defined.append(found)
            if found.any():
                out["dominance_by_text"][x, c] = np.bincount(p[:, found].argmax(axis=0), minlength=heads) / found.sum()
            out["overlap_by_text"][x, c, :2] = overlap_within(strong[-1], found)
        between = overlap_between(strong, defined)
        out["overlap_by_text"][:, c, 2] = [mean(row) for row in between]
        out["overlap"][c] = [mean(column) for column in out["overlap_by_text"][:, c, :2].T] + [mean(between)]
        out["variance"][c], out["variance_total"][c] = variance.result()
        out["variance_balanced"][c] = variance.balanced
        pooled = np.concatenate([d[c].reshape(heads, -1) for d in influences], axis=1)
        out["head_change"][c] = quantiles(pooled, axis=1).T
        out["any_head_change"][c] = quantiles(pooled.reshape(-1), axis=0)
        rows = out["dominance_by_text"][:, c]
        if (known := np.isfinite(rows[:, 0])).any():
            out["dominance"][c] = rows[known].mean(axis=0)
            out["modal_head"][c] = out["dominance"][c].argmax()
            out["modal_share"][c] = out["dominance"][c].max()
    return out


# name -> (dims without the transition, long name)
LAYOUT = {
    "defined": (("text", "component"), "primary observations with defined shares"),
    "dominance": (("component", "source_head"), "how often a head has the largest share, mean over texts"),
    "dominance_by_text": (("text", "component", "source_head"), "how often a head has the largest share"),
    "modal_head": (("component",), "head that most often has the largest share; -1 for none"),
    "modal_share": (("component",), "how often that head has the largest share"),
    "overlap": (("component", "between"), "mean Jaccard overlap of strong halves"),
    "overlap_by_text": (("text", "component", "between"), "mean Jaccard overlap of strong halves, one text"),
    "overlap_of_random": ((), "expected Jaccard overlap of two random halves"),
    "variance": (("component", "source"), "sum of squares of share minus 1/H, mean over observations"),
    "variance_total": (("component",), "total of these sums of squares"),
    "variance_balanced": (("component",), "1 where the sources are orthogonal: no observation is missing"),
    "constant_share": (("text", "component"), "part of a text's sum of squares that is constant per head"),
    "constant_part": (("text", "source_head"), "part of a head's squared contribution that is constant in the text"),
    "constant_part_across_texts": (("source_head",), "part of it that is constant over all texts' tokens"),
    "mean_influence": (("text", "component", "source_head"), "mean influence over the text's primary observations"),
    "head_change": (("component", "source_head", "quantile"), "quantiles of a head's influence over observations"),
    "any_head_change": (("component", "quantile"), "quantiles of single influences over heads and observations"),
    "under_floor": (("text", "component"), "primary observations with a baseline norm under 1e-12"),
}


def read_influence(path, first_query, extra=()):
    """Influences of one single file's primary observations, (C, H, T, R); the other variables; attributes."""
    data, attributes = files.read(path, ["relative", "js", *extra])
    influence = np.concatenate([data.pop("relative"), data.pop("js")[None]])
    return influence[:, :, first_query:], data, attributes


def measure_identity(singles, output, texts, first_query, attributes):
    """Stage identity: one transition at a time, read from the single files and the baseline caches they name.

    Parameters
    ----------
    singles : list of list of path
        By text, then transition.
    output : path
    texts : list of str
        Their ids.
    first_query : int
        First query of the primary observations.
    attributes : dict
    """
    results, kinds, heads, checks = [], [], [], []
    for column in zip(*singles, strict=True):
        influences, contributions, floored, described = [], [], [], []
        for path in column:
            influence, data, found = read_influence(path, first_query, ["baseline_norm"])
            influences.append(influence)
            under = data["baseline_norm"][:, first_query:] < FLOOR
            floored.append([*under.sum(axis=(1, 2)), under.any(axis=0).sum(), 0])
            baseline, basis = files.read(found["baseline"], ["contribution"])
            contributions.append(baseline["contribution"][:, first_query:])
            checks += [*controls_of(found).items(), *controls_of(basis).items()]
            described.append(found)
        results.append(of_transition(influences, contributions) | {"under_floor": np.array(floored)})
        kinds.append((found["source_kind"], found["recipient_kind"]))
        heads.append(influences[0].shape[1])
    variables = coordinates(texts, heads, kinds) | {
        "language": (("text",), [str(a["language"]) for a in described], {"long_name": "the text's language"}),
        "tokens": (("text",), [int(a["tokens"]) for a in described], {"long_name": "tokens of the text", "units": ONE}),
        "between": (("between",), list(OVERLAPS), {"long_name": "what two strong halves are compared between"}),
        "source": (("source",), list(SOURCES), {"long_name": "source of variation of the shares"}),
        "quantile": (("quantile",), np.array(QUANTILES), {"long_name": "quantile", "units": ONE}),
        "source_head": (("source_head",), np.arange(max(heads)), {"long_name": "source head", "units": ONE}),
    }
    for name, (dims, title) in LAYOUT.items():
        padded = [_pad_heads(result[name], dims, max(heads)) for result in results]
        variables[name] = (("transition", *dims), np.stack(padded), {"long_name": title, "units": ONE})
    kept = {key: found[key] for key in ("model", "revision", "fingerprint", "replacement") if key in found}
    own = {"stage": "identity", "first_query": first_query, "controls": worst_controls(checks)}
    files.write(output, variables, kept | own | attributes)


def worst_controls(found):
    """Merge controls: iterable of (name, [value, limit]) to name to [largest value, limit, how many]."""
    merged = {}
    for name, pair in found:
        value, limit = json.loads(pair) if isinstance(pair, str) else map(float, pair)
        worst, _, count = merged.get(name, (value, limit, 0))
        merged[name] = [max(worst, value), limit, count + 1]
    return merged


def coordinates(texts, heads, kinds):
    """Variables that name the texts, transitions and components of an aggregate."""
    return {
        "text": (("text",), texts, {"long_name": "text id"}),
        "transition": (("transition",), np.arange(len(heads)), {"long_name": "source layer", "units": ONE}),
        "component": (("component",), list(COMPONENTS), {"long_name": "component of the influence"}),
        "source_heads": (("transition",), heads, {"long_name": "number of source heads", "units": ONE}),
        "transition_kind": (("transition",), [kind_name(*k) for k in kinds], {"long_name": "kind of transition"}),
    }


def _pad_heads(values, dims, heads):
    values = np.asarray(values)
    if "source_head" not in dims:
        return values
    widths = [(0, heads - n if dim == "source_head" else 0) for dim, n in zip(dims, values.shape, strict=True)]
    return np.pad(values, widths, constant_values=np.nan)
