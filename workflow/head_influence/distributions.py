"""Distributions over observations, and spreads over texts that respect that observations are not independent."""

import numpy as np

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
KINDS = tuple(f"{source} to {recipient}" for source in ("linear", "softmax") for recipient in ("linear", "softmax"))
ENOUGH_TEXTS = 8  # from here on a bootstrap over texts; below it the texts themselves
RESAMPLES = 2000


def kind_name(source, recipient):
    """Name of a kind of transition."""
    return f"{source} to {recipient}"


def quantiles(values, axis=-1, levels=QUANTILES):
    """Linearly interpolated quantiles over one axis, NaN left out; NaN of nothing. The new axis comes first."""
    ordered = np.sort(np.moveaxis(np.asarray(values), axis, -1), axis=-1)
    if ordered.shape[-1] == 0:
        return np.full((len(levels), *ordered.shape[:-1]), np.nan)
    count = np.isfinite(ordered).sum(axis=-1)
    place = np.multiply.outer(np.array(levels), np.maximum(count - 1, 0))
    below = place.astype(int)
    above = np.minimum(below + 1, np.maximum(count - 1, 0))
    low, high = (np.moveaxis(np.take_along_axis(ordered, np.moveaxis(i, 0, -1), -1), -1, 0) for i in (below, above))
    return low + (place - below) * (high - low)


def means(values):
    """Mean over the last axis, NaN left out; NaN of nothing."""
    finite = np.isfinite(values)
    count = finite.sum(axis=-1)
    total = np.where(finite, values, 0).sum(axis=-1, dtype=np.float64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def spread(per_text):
    """Say how far texts differ.

    Parameters
    ----------
    per_text : array (X,)
        One value per text; NaN for a text without one.

    Returns
    -------
    centre, low, high : float
        Mean of the texts' values; below eight texts their smallest and largest value, from eight on the 2.5 and 97.5 %
        points of that mean over resamplings of the texts. No generalisation: these texts only.
    """
    known = np.asarray(per_text, float)
    known = known[np.isfinite(known)]
    if known.size == 0:
        return np.nan, np.nan, np.nan
    if known.size < ENOUGH_TEXTS:
        return known.mean(), known.min(), known.max()
    drawn = np.random.default_rng(0).integers(known.size, size=(RESAMPLES, known.size))
    low, high = np.quantile(known[drawn].mean(axis=1), [0.025, 0.975])
    return known.mean(), low, high


def separated(per_text, per_text_control):
    """Whether two spreads over texts do not touch: -1 (below the control), 1 (above), 0; 0 for fewer than two texts."""
    if min(np.isfinite(per_text).sum(), np.isfinite(per_text_control).sum()) < 2:
        return 0
    _, low, high = spread(per_text)
    _, control_low, control_high = spread(per_text_control)
    return -1 if high < control_low else 1 if low > control_high else 0


def grouped(values, kinds, reduce):
    """Reduce observations by transition, by kind of transition, and both again text by text.

    Parameters
    ----------
    values : array (X, L, C, T, R)
        Texts, transitions, any inner axis, queries, recipient heads; NaN where there is no observation.
    kinds : sequence of str (L,)
    reduce : callable
        Takes (..., N) to (..., K).

    Returns
    -------
    dict of arrays
        transition (L, C, K), text_transition (X, L, C, K), kind (number of kinds, C, K), text_kind (X, kinds, C, K).
    """
    x, layers, c = values.shape[:3]
    of_kind = [values[:, [k == kind for k in kinds]] for kind in present(kinds)]
    return {
        "transition": reduce(values.transpose(1, 2, 0, 3, 4).reshape(layers, c, -1)),
        "text_transition": reduce(values.reshape(x, layers, c, -1)),
        "kind": np.stack([reduce(v.transpose(2, 0, 1, 3, 4).reshape(c, -1)) for v in of_kind]),
        "text_kind": np.stack([reduce(v.transpose(0, 2, 1, 3, 4).reshape(x, c, -1)) for v in of_kind], axis=1),
    }


def by_position(values, kinds, reduce):
    """Reduce observations by kind of transition and query: (X, L, C, T, R) to (kinds, T, C, K)."""
    c, t = values.shape[2:4]
    of_kind = [values[:, [k == kind for k in kinds]] for kind in present(kinds)]
    return np.stack([reduce(v.transpose(3, 2, 0, 1, 4).reshape(t, c, -1)) for v in of_kind])


def present(kinds):
    """The kinds that occur, in the order of `KINDS`."""
    return [kind for kind in KINDS if kind in kinds]


def five_numbers(values):
    """Quantiles over the last axis, as the last axis."""
    return np.moveaxis(quantiles(values), 0, -1)
