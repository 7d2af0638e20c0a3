"""What must hold in every file of a finished study, checked by code of its own: nothing that made a file is used here.

Each function takes `items`, whose `add(name, value, limit, where)` keeps the worst value of every check.
Dimensions: H source heads, R recipient heads, T tokens.
"""

import numpy as np

VECTORS, COMPONENTS = ["q", "k", "v"], ["q", "k", "v", "qkv"]
SCENARIOS = ["weak", "strong", "random", "all"]
FLOOR = 1e-12  # of a baseline norm in a denominator
EXACT = 1e-11  # relative, of float64 arithmetic in another order
STORED = 1e-6  # relative, of what is stored in float32


def place(values):
    """Rank of each value along the first axis, from 0; equal values in the order of their indices."""
    heads = range(len(values))
    return np.array([(values < values[h]).sum(0) + (values[:h] == values[h]).sum(0) for h in heads])


def difference(found, expected, least=1e-12):
    """Largest difference over the expected value, or over `least` if that is larger; infinite where NaNs differ."""
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    if found.shape != expected.shape or (np.isnan(found) != np.isnan(expected)).any():
        return np.inf
    size = np.maximum(np.abs(expected), least)
    return float(np.nanmax(np.abs(found - expected) / size, initial=0))


def _ranges(items, kind, where, data, names, js, softmax):
    for name in names:
        items.add(f"{kind} {name}: not finite or negative", np.sum(~(data[name] >= 0) | np.isinf(data[name])), 0, where)
    for name in js:
        absent = np.isnan(data[name])
        items.add(f"{kind} {name}: absent or present where it should not be", np.sum(absent == softmax), 0, where)
        outside = (data[name] < 0) | (data[name] > (np.log(2) + 1e-9 if name == "js" else np.inf))
        items.add(f"{kind} {name}: outside its range", np.sum(outside), 0, where)
        items.add(f"{kind} {name}: at query 0, where there is one key", np.nansum(data[name][..., 0, :]), 0, where)


def _relative(items, kind, where, data, norm):
    expected = data["absolute"] / np.maximum(norm, FLOOR)[:, None]
    expected = np.concatenate([expected, np.sqrt((expected**2).mean(0))[None]])
    items.add(f"{kind} relative: as absolute over norm", difference(data["relative"], expected), EXACT, where)


def check_single(items, where, data, softmax):
    """Single removals: ranges, and relative effects as they follow from absolute ones."""
    same = data["component"].tolist() == COMPONENTS and data["vector"].tolist() == VECTORS
    items.add("single: labels", not same, 0, where)
    _ranges(items, "single", where, data, ["relative", "absolute", "baseline_norm"], ["js"], softmax)
    _relative(items, "single", where, data, data["baseline_norm"])


def check_joint(items, where, data, single, softmax, seed):
    """Joint removals: the sets as they follow from the singles and the seed, the sums over them, the triangle."""
    labels = [data[n].tolist() for n in ("component", "vector", "scenario")]
    items.add("joint: labels", labels != [COMPONENTS, VECTORS, SCENARIOS], 0, where)
    names = ["relative", "absolute", "additive", "interaction", "sum_of_singles"]
    _ranges(items, "joint", where, data, names, ["js", "sum_of_singles_js"], softmax)
    _relative(items, "joint", where, data, single["baseline_norm"])

    removed = data["removed"].astype(bool)
    heads, tokens, recipients = removed.shape[1:]
    half = heads // 2
    sizes = np.sum(removed.sum(1) != np.array([half, half, half, heads])[:, None, None])
    items.add("joint removed: sets of another size", sizes, 0, where)
    items.add("joint removed: heads both weak and strong", np.sum(removed[0] & removed[1]), 0, where)
    missing = 0 if heads % 2 else np.sum(~(removed[0] | removed[1]))
    items.add("joint removed: heads neither weak nor strong (even number of heads)", missing, 0, where)
    rank = place(single["relative"][3])
    wrong = np.sum(removed[0] != (rank < half)) + np.sum(removed[1] != (rank >= heads - half))
    items.add("joint removed: weak and strong not as the singles rank", wrong, 0, where)
    drawn = place(np.moveaxis(np.random.default_rng(seed).random((tokens, recipients, heads)), 2, 0)) < half
    items.add("joint removed: random not as its seed gives", np.sum(removed[2] != drawn), 0, where)

    for name, of in (("sum_of_singles", single["relative"][:, None]), ("sum_of_singles_js", single["js"][None])):
        axis = 2 if name == "sum_of_singles" else 1
        expected = np.where(removed if axis == 1 else removed[None], of, 0 * of).sum(axis)
        items.add(f"joint {name}: as the singles add up", difference(data[name], expected), EXACT, where)
    joint, additive, interaction = data["relative"][:3], data["additive"], data["interaction"]
    most = {
        "additive: above the sum of singles": additive - data["sum_of_singles"][:3],
        "interaction: above joint plus additive": interaction - joint - additive,
        "interaction: below their difference": np.abs(joint - additive) - interaction,
    }
    for name, excess in most.items():
        worst = np.max(excess / np.maximum(1, joint + additive))
        items.add(f"joint {name}", max(worst, 0), STORED, where)


def measures(d, limits):
    """Concentration of influences d (component, H, ...), by ranks instead of sorting; `limits` flag small totals.

    Of n90 the smallest and largest values that rounding allows.
    """
    heads = d.shape[1]
    total = d.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(total[:, None] > 0, d / total[:, None], np.nan)
    rank = np.array([heads - 1 - place(x) for x in d])  # 0 is the largest
    share = np.array([(p * (rank < n)).sum(1) for n in range(1, heads + 1)])  # of the n largest
    square = (p**2).sum(1)
    quarter, half = -(-heads // 4), -(-heads // 2)
    n90 = [np.where(np.isnan(square), np.nan, 1 + (share[:-1] < 0.9 + e).sum(0)) for e in (-1e-9, 1e-9)]
    return {
        "total": total,
        "n_eff": 1 / square,
        "n_eff_fraction": 1 / square / heads,
        "concentration": (heads * square - 1) / (heads - 1) if heads > 1 else np.full_like(square, np.nan),
        "top1": share[0],
        "top25": share[quarter - 1],
        "top50": share[half - 1],
        "bottom25": (p * (rank >= heads - quarter)).sum(1),
        "n90": n90,
        "undefined": total == 0,
        "small_total": (total > 0) & (total < np.reshape(limits, (-1, *[1] * (total.ndim - 1)))),
    }


def check_concentration(items, where, data, single, small_total):
    """One text and transition of the table, each variable (component, T, R, padded), from the single removals."""
    d = np.concatenate([single["relative"], single["js"][None]])
    tokens, recipients = single["js"].shape[1:]
    for name, values in measures(d, [small_total["vectors"]] * 4 + [small_total["js"]]).items():
        found = data[name][:, :tokens, :recipients]
        if name == "n90":
            values = np.clip(found, *values)
        limit = EXACT if name == "total" else STORED
        error = difference(found, values, 1e-12 if name == "total" else 1e-3)
        items.add(f"concentration {name}: as the singles give", error, limit, where)
        outside, empty = np.array(data[name]), -1 if name in ("undefined", "small_total") else np.nan
        outside[:, :tokens, :recipients] = empty
        right = np.full(outside.shape, empty)
        items.add("concentration: values where there is no observation", difference(outside, right), 0, where)
