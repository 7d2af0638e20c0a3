"""Compaction of one head against slow formulas, scipy's solver and values worked by hand."""

from decimal import Decimal

import numpy as np
import pytest
from head_influence import compaction
from head_influence.budgets import keys_at
from head_influence.compaction import HIGH, LOW, Fit, bounded_least_squares, compact, reference_queries
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

FITS = [Fit(k, b, v) for k in compaction.KEYS for b in compaction.BIAS for v in compaction.VALUES]


def head(seed=0, queries=90, tokens=23, size=6, scale=1.5):
    rng = np.random.default_rng(seed)
    return [scale * rng.standard_normal((n, size)).astype(np.float32) for n in (queries, tokens, tokens)]


def slow(queries, keys, values, scaling, count, fit):
    """The definition, query by query, in float64."""
    q, k, v = (x.astype(np.float64) for x in (queries, keys, values))
    logits = np.array([[scaling * float(a @ b) for b in k] for a in q])
    weights = np.array([np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in logits])
    score = {"rms": np.sqrt((weights**2).mean(0)), "mean": weights.mean(0), "max": weights.max(0)}[fit.keys]
    kept = sorted(sorted(range(len(k)), key=lambda j: (-score[j], j))[:count])
    masses = np.array([np.exp(row - row.max()) for row in logits])
    w = np.ones(count)
    if fit.bias == "nnls":
        w = lsq_linear(masses[:, kept], masses.sum(1), (LOW, HIGH), method="bvls", tol=1e-14, max_iter=5000).x
    x = np.exp(logits[:, kept]) * w
    x /= x.sum(1, keepdims=True)
    y = weights @ v
    if fit.values == "original":
        new = v[kept]
    elif fit.values == "lstsq":
        new = np.linalg.lstsq(x, y, rcond=None)[0]
    else:
        ridge = 1e-6 * np.diag(x.T @ x).mean()
        new = np.linalg.solve(x.T @ x + ridge * np.eye(count), x.T @ y)
    mass_error = np.linalg.norm(masses[:, kept] @ w - masses.sum(1)) / np.linalg.norm(masses.sum(1))
    return kept, np.log(w), new, mass_error, np.linalg.norm(x @ new - y) / np.linalg.norm(y)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_the_slow_definition(fit, seed):
    given = head(seed)
    found = compact(*given, 0.4, [3, 1, 9, 23], fit)
    for count in (1, 3, 9, 23):
        kept, bias, values, mass, output = slow(*given, 0.4, count, fit)
        assert found[count].kept.tolist() == kept
        assert found[count].bias == pytest.approx(bias, abs=1e-8)
        assert found[count].values == pytest.approx(values, abs=1e-6)
        assert (found[count].mass_error, found[count].output_error) == pytest.approx((mass, output), abs=1e-8)


@pytest.mark.parametrize("fit", FITS[::2])
def test_blocks_of_queries_change_nothing(fit, monkeypatch):
    given = head(5, queries=101)
    whole = compact(*given, 0.3, [2, 7], fit)
    monkeypatch.setattr(compaction, "BLOCK", 100)
    for count, a in compact(*given, 0.3, [2, 7], fit).items():
        b = whole[count]
        assert a.kept.tolist() == b.kept.tolist()
        assert a.bias == pytest.approx(b.bias, abs=1e-9)
        assert a.values == pytest.approx(b.values, abs=1e-7)
        assert a.output_error == pytest.approx(b.output_error, abs=1e-9)


def test_ties_go_to_the_lower_position():
    queries, keys, values = head(1)
    keys[:] = keys[0]
    assert compact(queries, keys, values, 1.0, [4], Fit())[4].kept.tolist() == [0, 1, 2, 3]


def test_counts_are_nested():
    found = compact(*head(2), 1.0, range(24), Fit("max", "none", "original"))
    for count in range(23):
        assert set(found[count].kept) < set(found[count + 1].kept)


def test_no_key_and_every_key():
    queries, keys, values = head(3)
    found = compact(queries, keys, values, 0.5, [0, 23], Fit("rms", "none", "original"))
    assert found[0].kept.size == found[0].bias.size == 0
    assert found[0].values.shape == (0, 6)
    assert (found[0].mass_error, found[0].output_error) == (1, 1)
    assert found[23].kept.tolist() == list(range(23))
    assert np.array_equal(found[23].values, values)
    assert found[23].mass_error == pytest.approx(0, abs=1e-14)
    assert found[23].output_error == pytest.approx(0, abs=1e-14)


def test_two_equal_keys_by_hand():
    # Both keys get half of every query's weight, so the kept one stands for twice its own mass.
    queries, keys = np.array([[1.0], [2.0]]), np.array([[1.0], [1.0]])
    found = compact(queries, keys, np.array([[3.0], [5.0]]), 1.0, [1], Fit("rms", "nnls", "ridge"))[1]
    assert found.kept.tolist() == [0]
    assert np.exp(found.bias) == pytest.approx([2])
    assert found.values[0] == pytest.approx([4], rel=2e-6)  # the ridge pulls it down by a millionth


def test_the_bias_stays_within_its_bounds():
    queries, keys, values = head(4, scale=4)
    for count, found in compact(queries, keys, values, 1.0, [1, 5, 15], Fit()).items():
        assert (np.abs(found.bias) <= 3 + 1e-12).all(), count
    one = compact(np.zeros((3, 2)), np.zeros((100, 2)), np.ones((100, 1)), 1.0, [1], Fit())[1]
    assert one.bias == pytest.approx([3])  # 100 keys' mass on one key: cut off at e^3
    assert one.mass_error == pytest.approx(1 - np.exp(3) / 100)


def test_far_apart_logits_stay_finite():
    queries, keys, values = head(6)
    keys[0] = 400 * queries[0]
    for found in compact(queries, keys, values, 1.0, [1, 2, 23], Fit()).values():
        assert np.isfinite(found.values).all() and np.isfinite(found.bias).all()
        assert np.isfinite(found.output_error)


def test_a_count_beyond_the_keys_is_refused():
    with pytest.raises(ValueError, match="cannot keep 3 to 24 of 23 keys"):
        compact(*head(), 1.0, [3, 24], Fit())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 25), st.integers(1, 60), st.sampled_from([0.3, 1.0, 3.0]), st.booleans())
def test_bounded_least_squares_is_the_minimum(seed, n, m, spread, repeated):
    rng = np.random.default_rng(seed)
    a = np.exp(spread * rng.standard_normal((m, n)))
    if repeated and n > 1:
        a[:, 1] = a[:, 0]
    b = a @ np.exp(2 * rng.standard_normal(n)) * rng.choice([0.01, 1, 30]) + rng.standard_normal(m)
    x = bounded_least_squares(a, b, LOW, HIGH)
    assert (x >= LOW - 1e-12).all() and (x <= HIGH + 1e-12).all()
    expected = lsq_linear(a, b, (LOW, HIGH), method="bvls", tol=1e-14, max_iter=5000).cost
    assert 0.5 * np.square(a @ x - b).sum() <= expected * (1 + 1e-8) + 1e-18 * (b @ b)


def test_clipping_would_not_be_the_minimum():
    a, b = np.array([[1.0, 0.9], [0.0, 0.1]]), np.array([30.0, 0.0])
    clipped = np.clip(np.linalg.lstsq(a, b, rcond=None)[0], LOW, HIGH)
    x = bounded_least_squares(a, b, LOW, HIGH)
    assert np.linalg.norm(a @ x - b) < np.linalg.norm(a @ clipped - b) - 0.1


@given(st.integers(0, 1000), st.integers(1, 500), st.integers(0, 20))
def test_keys_are_counted_in_decimals(thousandths, tokens, minimum):
    ratio = thousandths / 1000
    exact = int(Decimal(thousandths) * tokens / 1000)
    assert keys_at(ratio, tokens, minimum) == min(tokens, max(minimum, exact))


def test_29_percent_of_100_is_29():
    assert int(0.29 * 100) == 28
    assert keys_at(0.29, 100) == 29
    assert (keys_at(0, 100), keys_at(0, 100, 1), keys_at(1, 7, 9)) == (0, 1, 7)


def test_queries_are_pooled_by_position_then_head():
    queries = np.arange(2 * 3 * 1).reshape(2, 3, 1)
    assert reference_queries(queries)[:, 0].tolist() == [0, 3, 1, 4, 2, 5]
    some = reference_queries(queries, 4, seed=1)[:, 0].tolist()
    assert len(set(some)) == 4
    assert some == [x for x in [0, 3, 1, 4, 2, 5] if x in some]
    assert some == reference_queries(queries, 4, seed=1)[:, 0].tolist()
    assert any(some != reference_queries(queries, 4, seed=s)[:, 0].tolist() for s in range(2, 9))
    assert len(reference_queries(queries, 100)) == 6
