"""Numbers of keys: how many a ratio keeps, and how a fixed number is shared among KV heads, from their curves."""

from fractions import Fraction

import numpy as np

UNITS = 20  # of a head's uniform ratio: the smallest amount that changes hands
STEPS = (1, 2, 5, 10, 20, 40, 100, 200, 400)
PYRAMID = 1.5, 0.5  # share of the lowest and of the highest layer, relative to uniform


def keys_at(ratio, tokens, minimum=0):
    """Number of keys kept at `ratio` of `tokens` keys: rounded down in exact decimals, at least `minimum`.

    0.29 of 100 is 29, although the binary product 0.29 * 100 is less.
    """
    return min(tokens, max(minimum, int(Fraction(str(ratio)) * tokens)))


def predicted(curves, ratios, shares):
    """Sum over heads of their piecewise-linear curves.

    Parameters
    ----------
    curves : array (head, ratio)
        Change of the score, flat beyond the last ratio.
    ratios : array (ratio,)
        Rising.
    shares : array (head,)
        Ratio of each head.

    Returns
    -------
    float
    """
    return float(_at(curves, ratios, np.asarray(shares, float)).sum())


def _at(curves, ratios, x):
    place = np.clip(np.searchsorted(ratios, x, side="right") - 1, 0, len(ratios) - 2)
    left, right = ratios[place], ratios[place + 1]
    weight = np.clip((x - left) / (right - left), 0, 1)
    rows = np.arange(len(curves))
    return (1 - weight) * curves[rows, place] + weight * curves[rows, place + 1]


def exchange(curves, ratios, target):
    """Minimise the sum of curves at a mean ratio by exchanges between two heads, the best one first.

    Curves need not be convex, so this ends at a local optimum: no exchange of any of a few sizes between any two heads
    helps.

    Parameters
    ----------
    curves : array (head, ratio)
    ratios : array (ratio,)
    target : float
        Mean ratio; the start is every head at it.

    Returns
    -------
    array (head,)
        Ratios with mean `target`.
    """
    curves, ratios = np.asarray(curves, float), np.asarray(ratios, float)
    heads, unit = len(curves), target / UNITS
    most = int(np.floor(ratios[-1] / unit + 1e-9))
    held = np.full(heads, UNITS)
    while True:
        now, best = _at(curves, ratios, held * unit), (1e-12, None)
        for step in STEPS:
            gain = np.where(held + step <= most, now - _at(curves, ratios, (held + step) * unit), -np.inf)
            cost = np.where(held >= step, _at(curves, ratios, (held - step) * unit) - now, np.inf)
            takers, givers = np.argsort(-gain, kind="stable")[:2], np.argsort(cost, kind="stable")[:2]
            for taker in takers:
                for giver in givers:
                    if taker != giver and gain[taker] - cost[giver] > best[0]:
                        best = gain[taker] - cost[giver], (taker, giver, step)
        if best[1] is None:
            return held * unit
        taker, giver, step = best[1]
        held[taker] += step
        held[giver] -= step


def pyramid(layers):
    """Share of each head relative to uniform, falling linearly from the lowest layer to the highest.

    Parameters
    ----------
    layers : array (head,) of int

    Returns
    -------
    array (head,) with mean 1
    """
    distinct, place = np.unique(layers, return_inverse=True)
    weight = np.linspace(*PYRAMID, len(distinct))[place] if len(distinct) > 1 else np.ones(len(layers))
    return weight / weight.mean()


def whole_keys(shares, total, most):
    """Whole keys per head by largest remainder, their sum exactly `total`.

    Parameters
    ----------
    shares : array (head,)
        Sum 1.
    total : int
        At most `most` times the number of heads.
    most : int
        Keys that a head has.

    Returns
    -------
    array (head,) of int
    """
    shares = np.asarray(shares, float)
    if total > most * len(shares):
        raise ValueError(f"{total} keys are more than {len(shares)} heads of {most}")
    keys, free = np.zeros(len(shares), int), np.ones(len(shares), bool)
    while (left := total - keys.sum()) > 0:  # again only if a head is full
        weight = np.where(free, shares, 0)
        weight = weight / weight.sum() if weight.sum() > 0 else free / free.sum()
        exact = left * weight
        more = np.floor(exact).astype(int)
        rest = left - more.sum()
        more[np.argsort(-(exact - more), kind="stable")[:rest]] += 1
        keys = np.minimum(keys + more, most)
        free = keys < most
    return keys


def schemes(curves, ratios, target, layers):
    """Ratios (head,) of every way to share a budget: fitted to half or all of the items, and two rules of thumb.

    Parameters
    ----------
    curves : dict
        "half0", "half1", "all" to array (head, ratio); halves may be missing.
    ratios, target, layers
        As in `exchange` and `pyramid`.
    """
    found = {"uniform": np.full(len(layers), float(target)), "pyramid": target * pyramid(layers)}
    return found | {name: exchange(c, ratios, target) for name, c in curves.items()}
