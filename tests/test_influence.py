"""Changes and divergences against closed forms."""

import math

import numpy as np
import pytest
import reference
from head_influence.ablation import clipped_js
from head_influence.influence import balanced, change_norms, js_divergence, relative
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

ROWS = arrays(np.float32, st.tuples(st.just(2), st.integers(1, 6)), elements=st.floats(0, 1, width=32))


def test_change_is_float64():
    change, size = change_norms(np.float32([[3, 4]]), np.float32([[0, 1e-8]]))
    assert change.dtype == size.dtype == np.float64
    assert change[0, 1] == 4 - float(np.float32(1e-8))
    assert size == pytest.approx(5)


def test_relative_change_has_a_floor():
    assert relative(np.array([0.0, 1e-12, 1]), np.array([0.0, 0.0, 4])).tolist() == [0, 1, 0.25]


def test_balanced_score_by_hand():
    assert balanced(np.array([[3.0], [4], [0]])) == pytest.approx(math.sqrt(25 / 3))


@pytest.mark.parametrize(
    ("p", "q", "nats"),
    [([1, 0], [0, 1], math.log(2)), ([1, 0], [0.5, 0.5], 0.75 * math.log(4 / 3)), ([0, 1], [0, 1], 0.0), ([1], [1], 0)],
)
def test_divergence_by_hand(p, q, nats):
    assert js_divergence(np.float32(p), np.float32(q)) == pytest.approx(nats, abs=1e-15)


@given(ROWS)
def test_divergence_of_any_rows(rows):
    p, q = rows + np.float32(1e-6)
    p, q = p / p.sum(), q / q.sum()
    found = js_divergence(p, q)
    assert found == js_divergence(q, p)
    assert -1e-12 <= found <= math.log(2) + 1e-12
    # The library makes the float32 rows' sums exactly 1, the reference does not: a gap of up to their rounding.
    assert math.sqrt(max(found, 0)) == pytest.approx(math.sqrt(reference.jensen_shannon(p, q)), abs=1e-7, rel=1e-6)


@pytest.mark.parametrize("step", [1e-3, 1e-5, 1e-7])
def test_tiny_divergence_is_accurate_and_not_negative(step):
    """JS = sum of d^2 / (8 m) to leading order, far below what a float32 sum resolves."""
    p, q = np.array([0.5 + step, 0.5 - step]), np.array([0.5, 0.5])
    assert js_divergence(p, q) == pytest.approx(step**2 / 2, rel=3 * step + 1e-6)


def test_divergence_outside_its_range_is_a_fault():
    assert clipped_js(np.array([-1e-12, math.log(2) + 1e-12])).tolist() == [0, math.log(2)]
    for bad in (-1e-6, 0.7):
        with pytest.raises(Exception, match=r"outside \[0, ln 2\]"):
            clipped_js(np.array([bad]))
