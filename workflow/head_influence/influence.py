"""How much an intervention changes vectors and retrieval distributions. Differences and divergences are float64."""

import numpy as np

FLOOR = 1e-12  # of a baseline norm in a denominator


def change_norms(changed, baseline):
    """Return the change (float64) and its Euclidean norm over the last axis."""
    change = changed.astype(np.float64) - baseline
    return change, np.linalg.norm(change, axis=-1)


def relative(absolute, baseline_norm):
    """Changes as fractions of the baseline's norm."""
    return absolute / np.maximum(baseline_norm, FLOOR)


def balanced(relative_qkv):
    """Root mean square of the relative changes of q, k and v (first axis): never a sum of different scales."""
    return np.sqrt(np.mean(np.square(relative_qkv), axis=0))


def js_divergence(p, q):
    """Jensen-Shannon divergence in nats of distributions over the last axis, from float32 rows, in float64.

    Written with the half difference d and the mean m, p = m + d, q = m - d: each pair of terms is then accurate (and
    not negative) however close the two are. The rows' sums, 1 up to float32 rounding, are made 1 in float64, without
    which disjoint rows could exceed ln 2.
    """
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    p, q = p / p.sum(axis=-1, keepdims=True), q / q.sum(axis=-1, keepdims=True)
    m = (p + q) / 2
    ratio = (p - q) / 2 / np.where(m > 0, m, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0, p * np.log1p(ratio), 0) + np.where(q > 0, q * np.log1p(-ratio), 0)
    return terms.sum(axis=-1) / 2
