"""Concentration against closed forms, values worked by hand, and properties that hold for any influences."""

import numpy as np
import pytest
import reference
from head_influence import StudyError
from head_influence.concentration import MEASURES, concentration, of_transition, shares
from hypothesis import given
from hypothesis import strategies as st

INFLUENCES = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e9)), min_size=1, max_size=17)


def of(*d, small_total=0.0):
    """Concentration of one observation, as plain numbers."""
    return {name: float(x) for name, x in concentration(np.array(d, float), small_total).items()}


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7, 8, 16])
def test_equal_heads(heads):
    found = of(*[0.3] * heads)
    quarter, half = -(-heads // 4), -(-heads // 2)
    expected = {
        "total": 0.3 * heads,
        "n_eff": heads,
        "n_eff_fraction": 1,
        "concentration": 0 if heads > 1 else np.nan,
        "top1": 1 / heads,
        "top25": quarter / heads,
        "top50": half / heads,
        "bottom25": quarter / heads,
        "n90": next(n for n in range(1, heads + 1) if 10 * n >= 9 * heads),
        "undefined": 0,
        "small_total": 0,
    }
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("heads", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("place", [0, -1])
def test_one_head_alone(heads, place):
    d = [0.0] * heads
    d[place] = 2.5
    expected = {"n_eff": 1, "n_eff_fraction": 1 / heads, "concentration": 1, "top1": 1, "top25": 1, "top50": 1}
    found = of(*d)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert (found["bottom25"], found["n90"]) == (0, 1)


def test_values_worked_by_hand():
    """H = 5, p = .5 .25 .15 .1 0: sum of squares .345, ceil(5/4) = 2 and ceil(5/2) = 3 heads."""
    found = of(0.15, 0, 0.5, 0.1, 0.25)
    expected = {
        "total": 1,
        "n_eff": 1 / 0.345,
        "n_eff_fraction": 1 / 0.345 / 5,
        "concentration": (0.345 - 0.2) / 0.8,
        "top1": 0.5,
        "top25": 0.75,
        "top50": 0.9,
        "bottom25": 0.1,
        "n90": 3,
        "undefined": 0,
        "small_total": 0,
    }
    assert found == pytest.approx(expected)


def test_share_of_exactly_nine_tenths_is_reached():
    assert of(9, 1)["n90"] == 1
    assert of(*[0.1] * 10)["n90"] == 9
    assert of(8.9, 1.1)["n90"] == 2


def test_zero_total_is_undefined_and_never_uniform():
    found = of(0, 0, 0, small_total=1)
    assert found["total"] == 0
    assert (found["undefined"], found["small_total"]) == (1, 0)
    assert all(np.isnan(found[name]) for name in MEASURES)


def test_one_head():
    found = of(0.7)
    assert np.isnan(found["concentration"])
    assert found["undefined"] == 0
    assert {found[n] for n in MEASURES if n != "concentration"} == {1}


def test_one_head_without_influence_is_undefined():
    found = of(0.0)
    assert found["undefined"] == 1
    assert all(np.isnan(found[name]) for name in MEASURES)


@pytest.mark.parametrize(("total", "flag"), [(1e-9, 1), (0.99e-4, 1), (1e-4, 0), (1, 0), (0, 0)])
def test_small_total_is_flagged_and_kept(total, flag):
    found = of(total * 0.75, total * 0.25, small_total=1e-4)
    assert found["small_total"] == flag
    if total:
        assert found["n_eff"] == pytest.approx(1.6)


def test_absent_js_sets_no_flag():
    found = of_transition(np.ones((4, 3, 2, 1)), np.full((3, 2, 1), np.nan), {"vectors": 1e-4, "js": 1e-8})
    assert np.isnan(found["total"][4]).all()
    for name in MEASURES:
        assert np.isnan(found[name][4]).all()
        assert np.isfinite(found[name][:4]).all()
    assert not found["undefined"].any()
    assert not found["small_total"].any()


def test_each_component_has_its_own_limit():
    d = np.full((3, 1, 1), 1e-6)
    found = of_transition(np.stack([d] * 4), d, {"vectors": 1e-4, "js": 1e-8})
    assert found["small_total"].ravel().tolist() == [1, 1, 1, 1, 0]


def test_totals_of_many_sizes_are_told_apart():
    d = np.array([[1e-300, 1.0, 0.0], [1e-300, 3.0, 0.0]])
    found = concentration(d, 0)
    np.testing.assert_allclose(found["top1"], [0.5, 0.75, np.nan])


def test_a_negative_influence_is_a_fault():
    with pytest.raises(StudyError, match="outside"):
        concentration(np.array([3.0, -1.0]), 0)


@given(INFLUENCES)
def test_agrees_with_the_plain_loop(d):
    found, expected = of(*d), reference.concentration(d)
    n90 = expected.pop("n90"), found["n90"]
    assert found == pytest.approx(found | expected, rel=1e-9, abs=1e-9, nan_ok=True)
    p = sorted(d, reverse=True)
    if sum(d) and min(abs(np.cumsum(p) / sum(d) - 0.9)) > 1e-9:
        assert n90[0] == n90[1]


@given(INFLUENCES)
def test_bounds(d):
    found, heads = of(*d), len(d)
    if sum(d) == 0:
        return
    assert 1 <= found["n_eff"] <= heads
    assert 1 <= found["n90"] <= heads
    assert 1 / heads - 1e-12 <= found["top1"] <= found["top25"] + 1e-12 <= found["top50"] + 2e-12 <= 1 + 3e-12
    assert -1e-12 <= found["bottom25"] <= -(-heads // 4) / heads + 1e-12
    if heads > 1:
        assert 0 <= found["concentration"] <= 1


@given(INFLUENCES, st.randoms(use_true_random=False))
def test_order_of_heads_does_not_matter(d, random):
    shuffled = list(d)
    random.shuffle(shuffled)
    assert of(*shuffled) == pytest.approx(of(*d), rel=1e-9, nan_ok=True)


@given(INFLUENCES, st.sampled_from([0.125, 4.0, 1024.0]))
def test_scale_does_not_matter(d, factor):
    scaled, found = of(*(x * factor for x in d)), of(*d)
    assert scaled.pop("total") == found.pop("total") * factor
    assert scaled == pytest.approx(found, nan_ok=True)


@given(INFLUENCES)
def test_shares_sum_to_one(d):
    p = shares(np.array(d, float))
    if sum(d) > 0:
        assert p.sum() == pytest.approx(1)
    else:
        assert np.isnan(p).all()


@given(INFLUENCES, st.floats(1e-3, 1))
def test_moving_influence_to_the_largest_head_concentrates(d, part):
    d = sorted(d)
    if len(d) < 2 or d[0] == 0:
        return
    moved = [d[0] * (1 - part), *d[1:-1], d[-1] + d[0] * part]
    assert of(*moved)["n_eff"] <= of(*d)["n_eff"] * (1 + 1e-12)
