"""Sharing keys among heads: against brute force, by hand, and what must be conserved."""

import itertools

import numpy as np
import pytest
from head_influence import budgets
from head_influence.budgets import exchange, predicted, pyramid, schemes, whole_keys
from head_influence.curve_budgets import budget_keys
from hypothesis import given, settings
from hypothesis import strategies as st

RATIOS = np.array([0, 0.05, 0.1, 0.2, 0.5])


def brute_force(curves, target, unit):
    """Smallest sum over every way to share whole units."""
    heads, total = len(curves), round(len(curves) * target / unit)
    most = round(RATIOS[-1] / unit)
    best = np.inf
    for held in itertools.product(range(min(total, most) + 1), repeat=heads - 1):
        last = total - sum(held)
        if 0 <= last <= most:
            ratios = [*(h * unit for h in held), last * unit]
            best = min(best, sum(np.interp(r, RATIOS, c) for r, c in zip(ratios, curves, strict=True)))
    return best


def convex(rng, heads):
    slopes = np.sort(-rng.exponential(size=(heads, len(RATIOS) - 1)), axis=1)
    curves = np.concatenate((np.zeros((heads, 1)), np.cumsum(slopes * np.diff(RATIOS), axis=1)), axis=1)
    return curves - curves[:, 1:2]


@pytest.mark.parametrize("seed", range(4))
def test_convex_curves_reach_the_minimum(seed, monkeypatch):
    curves = convex(np.random.default_rng(seed), 3)
    monkeypatch.setattr(budgets, "UNITS", 10)
    found = exchange(curves, RATIOS, 0.1)
    assert predicted(curves, RATIOS, found) == pytest.approx(brute_force(curves, 0.1, 0.01), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.sampled_from([0.01, 0.02, 0.05, 0.1, 0.5]))
def test_exchange_conserves_and_never_loses(seed, heads, target):
    curves = 0.02 * np.random.default_rng(seed).standard_normal((heads, len(RATIOS)))
    found = exchange(curves, RATIOS, target)
    assert found.mean() == pytest.approx(target)
    assert (found >= 0).all() and (found <= RATIOS[-1] + 1e-12).all()
    uniform = predicted(curves, RATIOS, np.full(heads, target))
    assert predicted(curves, RATIOS, found) <= uniform + 1e-15
    unit = target / budgets.UNITS
    for a, b in itertools.permutations(range(heads), 2):  # no single exchange of one unit helps
        moved = found.copy()
        moved[[a, b]] += unit, -unit
        if moved[b] >= -1e-12 and moved[a] <= RATIOS[-1] + 1e-12:
            assert predicted(curves, RATIOS, moved) >= predicted(curves, RATIOS, found) - 1e-10


def test_keys_go_where_they_help():
    curves = np.array([[0.3, 0.0, -0.3, -0.6, -0.9], [0.0] * 5])
    assert exchange(curves, RATIOS, 0.1).tolist() == pytest.approx([0.2, 0])


def test_a_curve_is_flat_beyond_its_last_ratio():
    curves = np.array([[1.0, 0, 0, 0, -2]])
    assert predicted(curves, RATIOS, [0.35]) == pytest.approx(-1)
    assert predicted(curves, RATIOS, [0.9]) == -2
    assert predicted(curves, RATIOS, [0.025]) == pytest.approx(0.5)


def test_largest_remainder_by_hand():
    assert whole_keys([0.5, 0.3, 0.2], 11, 100).tolist() == [6, 3, 2]  # 5.5, 3.3, 2.2
    assert whole_keys([0.5, 0.3, 0.2], 0, 100).tolist() == [0, 0, 0]
    assert whole_keys([0.9, 0.1, 0.0], 12, 5).tolist() == [5, 5, 2]  # full heads pass on what they cannot hold


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 50), st.data())
def test_whole_keys_add_up(weights, most, data):
    total = data.draw(st.integers(0, most * len(weights)))
    shares = np.array(weights) + 1e-9
    keys = whole_keys(shares / shares.sum(), total, most)
    assert keys.sum() == total
    assert (keys >= 0).all() and (keys <= most).all()


def test_too_many_keys_are_refused():
    with pytest.raises(ValueError, match="11 keys are more than 2 heads of 5"):
        whole_keys([0.5, 0.5], 11, 5)


def test_a_pyramid_falls_by_layer_and_keeps_the_mean():
    shares = pyramid(np.array([0, 0, 3, 3, 7, 7]))
    assert shares.tolist() == [1.5, 1.5, 1, 1, 0.5, 0.5]
    assert pyramid(np.array([4, 4])).tolist() == [1, 1]


def test_every_scheme_has_the_same_number_of_keys():
    rng = np.random.default_rng(0)
    curves = {name: rng.standard_normal((6, 5)) for name in ("half0", "half1", "all")}
    for target in (0.01, 0.05, 0.1):
        found = schemes(curves, RATIOS, target, np.array([0, 0, 1, 1, 2, 2]))
        assert set(found) == {"uniform", "pyramid", "half0", "half1", "all"}
        totals = {int(budget_keys(x, target, 937).sum()) for x in found.values()}
        assert totals == {6 * int(target * 937 + 1e-9)}
        assert budget_keys(found["uniform"], target, 937).tolist() == [int(target * 937 + 1e-9)] * 6
