"""Compaction of one KV head's cache to fewer keys by attention matching, in closed form and in float64.

N counts reference queries, T the article's keys, t the keys that are kept, d the head's dimension.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import lsq_linear

from head_influence import StudyError

LOW, HIGH = np.exp(-3.0), np.exp(3.0)  # bounds of the weights whose logarithm is the bias
RIDGE = 1e-6  # of the mean diagonal
BLOCK = 1 << 23  # numbers in one block of the query x key matrix
KEYS, BIAS, VALUES = ("rms", "mean", "max"), ("none", "nnls"), ("original", "ridge", "lstsq")


@dataclass(frozen=True)
class Fit:
    """How a head is compacted: `keys` rms, mean or max; `bias` nnls or none; `values` ridge, lstsq or original."""

    keys: str = "rms"
    bias: str = "nnls"
    values: str = "ridge"


@dataclass(frozen=True)
class CompactHead:
    """A compacted KV head: `kept` (t,), `bias` (t,) and `values` (t, d) in position order; the errors of both fits."""

    kept: np.ndarray
    bias: np.ndarray
    values: np.ndarray
    mass_error: float
    output_error: float


def reference_queries(queries, maximum=None, seed=0):
    """Pool the queries of a KV head's group.

    Parameters
    ----------
    queries : array (heads of the group, positions, d)
    maximum : int, optional
        Take a random subset of this many, in order; all otherwise.
    seed : int or sequence of int

    Returns
    -------
    array (N, d), by position, then query head
    """
    pooled = queries.swapaxes(0, 1).reshape(-1, queries.shape[-1])
    if maximum is None or maximum >= len(pooled):
        return pooled
    chosen = np.random.default_rng(seed).choice(len(pooled), maximum, replace=False)
    return pooled[np.sort(chosen)]


def softmax(logits):
    """Softmax over the last axis."""
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def compact(queries, keys, values, scaling, counts, fit):
    """Compact one KV head to several numbers of keys.

    Parameters
    ----------
    queries : array (N, d)
        Reference queries, as attention sees them.
    keys, values : array (T, d)
        The head's keys, as attention sees them, and values.
    scaling : float
        Factor of the logits.
    counts : iterable of int
        Numbers of keys to keep, 0 to T.
    fit : Fit

    Returns
    -------
    dict
        Count to `CompactHead`.
    """
    counts = sorted(set(map(int, counts)))
    if counts and not 0 <= counts[0] <= counts[-1] <= len(keys):
        raise ValueError(f"cannot keep {counts[0]} to {counts[-1]} of {len(keys)} keys")
    attention = ReferenceAttention(queries, keys, values, scaling)
    order = attention.order(fit.keys)
    heads, positive = {}, [t for t in counts if t > 0]
    if 0 in counts:
        none = np.empty(0)
        heads[0] = CompactHead(none.astype(int), none, np.empty((0, values.shape[1])), 1.0, 1.0)
    if not positive:
        return heads
    columns = order[: positive[-1]]
    weights = attention.weights(columns, positive, fit.bias)
    fitted = attention.values(columns, weights, fit.values)
    mass, output = attention.errors(columns, weights, fitted)
    for t in positive:
        place = np.argsort(columns[:t])
        bias = np.zeros(t) if fit.bias == "none" else np.log(weights[t][place])
        heads[t] = CompactHead(columns[:t][place], bias, fitted[t][place], mass[t], output[t])
    return heads


class ReferenceAttention:
    """Attention of the reference queries to the whole article, streamed in blocks of queries.

    Attributes
    ----------
    top, mass : array (N,)
        Largest logit per query and the sum of exp(logit - largest) over all keys.
    output : array (N, d)
        The full attention's output.
    """

    def __init__(self, queries, keys, values, scaling):
        self.q, self.k, self.v = (np.asarray(x, np.float64) for x in (queries, keys, values))
        self.q = self.q * float(scaling)
        self.top, self.mass = np.empty(len(self.q)), np.empty(len(self.q))
        self.output = np.empty((len(self.q), self.v.shape[1]))
        tokens = len(self.k)
        self._sums = {"rms": np.zeros(tokens), "mean": np.zeros(tokens), "max": np.zeros(tokens)}
        for rows, logits in self.blocks(np.arange(tokens)):
            self.top[rows] = logits.max(axis=1)
            logits -= self.top[rows, None]
            np.exp(logits, out=logits)
            self.mass[rows] = logits.sum(axis=1)
            logits /= self.mass[rows, None]
            self.output[rows] = logits @ self.v
            self._sums["mean"] += logits.sum(axis=0)
            self._sums["max"] = np.maximum(self._sums["max"], logits.max(axis=0))
            self._sums["rms"] += np.einsum("nt,nt->t", logits, logits)

    def blocks(self, columns):
        """Iterate over blocks of queries: (slice of rows, their scaled logits on the keys `columns`)."""
        step = max(1, BLOCK // max(1, len(columns)))
        keys = self.k[columns].T
        for start in range(0, len(self.q), step):
            rows = slice(start, start + step)
            yield rows, self.q[rows] @ keys

    def order(self, rule):
        """Keys by falling score, ties to the lower position; the square root of rms changes no order."""
        return np.argsort(-self._sums[rule], kind="stable")

    def _masses(self, rows, logits):
        return np.exp(logits - self.top[rows, None])

    def weights(self, columns, counts, rule):
        """Per count the weights (t,) of the first t of `columns` that match the attention mass best."""
        if rule == "none":
            return {t: np.ones(t) for t in counts}
        triangle = np.empty((0, len(columns) + 1))
        for rows, logits in self.blocks(columns):
            block = np.column_stack((self._masses(rows, logits), self.mass[rows]))
            triangle = np.linalg.qr(np.vstack((triangle, block)), mode="r")
        return {t: bounded_least_squares(triangle[:t, :t], triangle[:t, -1], LOW, HIGH) for t in counts}

    def values(self, columns, weights, rule):
        """Per count the values (t, d) that bring the compacted output nearest to the full one."""
        if rule == "original":
            return {t: self.v[columns[:t]] for t in weights}
        if rule == "lstsq":
            return {t: self._minimum_norm(columns[:t], np.log(w)) for t, w in weights.items()}
        grams = {t: (np.zeros((t, t)), np.zeros((t, self.v.shape[1]))) for t in weights}
        for rows, logits in self.blocks(columns):
            for t, w in weights.items():
                x = softmax(logits[:, :t] + np.log(w))
                gram, target = grams[t]
                gram += x.T @ x
                target += x.T @ self.output[rows]
        fitted = {}
        for t, (gram, target) in grams.items():
            gram[np.diag_indices(t)] += RIDGE * np.trace(gram) / t
            fitted[t] = cho_solve(cho_factor(gram, overwrite_a=True), target)
        return fitted

    def _minimum_norm(self, columns, bias):
        t = len(columns)
        triangle = np.empty((0, t + self.v.shape[1]))
        for rows, logits in self.blocks(columns):
            block = np.column_stack((softmax(logits + bias), self.output[rows]))
            triangle = np.linalg.qr(np.vstack((triangle, block)), mode="r")
        smallest = np.finfo(np.float64).eps * max(len(self.q), t)
        return np.linalg.lstsq(triangle[:t, :t], triangle[:t, t:], rcond=smallest)[0]

    def errors(self, columns, weights, fitted):
        """Relative errors of the mass and of the output, per count."""
        mass, output = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
        for rows, logits in self.blocks(columns):
            masses = self._masses(rows, logits)
            for t, w in weights.items():
                mass[t] += np.square(masses[:, :t] @ w - self.mass[rows]).sum()
                x = softmax(logits[:, :t] + np.log(w))
                output[t] += np.square(x @ fitted[t] - self.output[rows]).sum()
        norms = np.linalg.norm(self.mass), np.linalg.norm(self.output)
        return [
            {t: float(np.sqrt(e) / norm) if e else 0.0 for t, e in errors.items()}
            for errors, norm in zip((mass, output), norms, strict=True)
        ]


def bounded_least_squares(a, b, low, high):
    """Exact minimum of ||a x - b|| over low <= x <= high.

    Block principal pivoting: guess which unknowns lie at a bound, solve for the others, and exchange all that violate
    the optimality conditions; when that stops helping, exchange one at a time.

    Parameters
    ----------
    a : array (m, n)
    b : array (m,)
    low, high : float

    Returns
    -------
    array (n,)
    """
    n = a.shape[1]
    where = np.zeros(n, int)  # -1: at the lower bound, 1: at the upper, 0: free
    slack = 1e-11 * np.linalg.norm(a, axis=0) * max(np.linalg.norm(b), np.finfo(float).tiny)
    best, patience = n + 1, 3
    for _ in range(200 + 2 * n):
        x = np.where(where < 0, low, high)
        free = where == 0
        x[free] = _least_squares(a[:, free], b - a[:, ~free] @ x[~free])
        gradient = a.T @ (a @ x - b)
        below, above = free & (x < low), free & (x > high)
        inward = ((where < 0) & (gradient < -slack)) | ((where > 0) & (gradient > slack))
        wrong = np.flatnonzero(below | above | inward)
        if not len(wrong):
            return x
        if len(wrong) < best:
            best, patience = len(wrong), 3
        elif patience:
            patience -= 1
        else:
            wrong = wrong[-1:]
        where[wrong] = np.where(below[wrong], -1, np.where(above[wrong], 1, 0))
    result = lsq_linear(a, b, (low, high), method="bvls", tol=1e-14)
    if not result.success:
        raise StudyError(f"curves.fit.bias nnls: bounded least squares of {n} weights failed ({result.message})")
    return result.x


def _least_squares(a, b):
    """Least squares by QR; the minimum-norm solution where the columns are not independent."""
    if not a.shape[1]:
        return np.empty(0)
    if a.shape[0] >= a.shape[1]:
        q, r = np.linalg.qr(a)
        diagonal = np.abs(np.diag(r))
        if diagonal.min() > 1e-13 * diagonal.max():
            return solve_triangular(r, q.T @ b)
    return np.linalg.lstsq(a, b, rcond=None)[0]
