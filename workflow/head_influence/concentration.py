"""How concentrated influence is over source heads. Everything float64; no threshold defines activity."""

import numpy as np

from head_influence import StudyError

COMPONENTS = ("q", "k", "v", "qkv", "js")
MEASURES = ("n_eff", "n_eff_fraction", "concentration", "top1", "top25", "top50", "bottom25", "n90")
ROUNDING = 1e-9


def shares(influence):
    """Return p = d / sum d over the first axis; NaN where the total is exactly zero or absent."""
    total = influence.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(total > 0, influence / total, np.nan)


def _bounded(name, values, low, high):
    outside = (values < low - ROUNDING) | (values > high + ROUNDING)
    if outside.any():
        raise StudyError(f"{name} {values[outside][0]!r} outside [{low}, {high}]")
    return np.clip(values, low, high)


def concentration(influence, small_total):
    """Describe the distribution of influence over source heads.

    Parameters
    ----------
    influence : array (H, ...)
        Nonnegative influences of the source heads; NaN where the component does not exist.
    small_total : float
        Positive totals below it are flagged: float32 noise may dominate them.

    Returns
    -------
    dict of arrays (...)
        `total`; the measures n_eff (heads, 1 to H), n_eff_fraction, concentration (0 to 1, NaN for H = 1), top1, top25,
        top50, bottom25 (shares), n90 (heads), all NaN where the total is zero or absent; the flags `undefined` (total
        exactly zero) and `small_total` as int8.
    """
    heads = len(influence)
    total = influence.sum(axis=0)
    p = np.sort(shares(influence), axis=0)[::-1]
    squares = np.square(p).sum(axis=0)
    n_eff = _bounded("n_eff", 1 / squares, 1, heads)
    with np.errstate(invalid="ignore", divide="ignore"):
        c = (squares - 1 / heads) / (1 - 1 / heads) if heads > 1 else np.full_like(squares, np.nan)
    largest = np.cumsum(p, axis=0)
    count = {f: int(np.ceil(f * heads)) for f in (0.25, 0.5)}
    reached = largest >= 0.9 - 1e-12  # a share of exactly 0.9 counts as reached in spite of rounding
    return {
        "total": total,
        "n_eff": n_eff,
        "n_eff_fraction": n_eff / heads,
        "concentration": _bounded("concentration", c, 0, 1),
        "top1": p[0],
        "top25": largest[count[0.25] - 1],
        "top50": largest[count[0.5] - 1],
        "bottom25": p[heads - count[0.25] :].sum(axis=0),
        "n90": np.where(np.isnan(p[0]), np.nan, reached.argmax(axis=0) + 1.0),
        "undefined": (total == 0).astype(np.int8),
        "small_total": ((total > 0) & (total < small_total)).astype(np.int8),
    }


def of_transition(relative, js, small_total):
    """Concentration of every component of one (text, transition).

    Parameters
    ----------
    relative : array (4, H, T, R)
        Relative changes of q, k, v, qkv.
    js : array (H, T, R)
    small_total : dict
        Limits "vectors" and "js".

    Returns
    -------
    dict of arrays (5, T, R) in the order of `COMPONENTS`
    """
    influences = [*relative, js]
    limits = [small_total["vectors"]] * 4 + [small_total["js"]]
    each = [concentration(d, limit) for d, limit in zip(influences, limits, strict=True)]
    return {name: np.stack([e[name] for e in each]) for name in each[0]}
