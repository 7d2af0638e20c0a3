"""The reference itself, and the library, against stored cases and against what is known in closed form."""

import math
from pathlib import Path

import models_tiny as tiny
import numpy as np
import pytest
import reference
from head_influence import concentration

CASES = Path(__file__).parent / "cases"
TRANSITIONS = [(path.parent.name, int(path.stem.removeprefix("layer"))) for path in sorted(CASES.glob("*/layer*.npz"))]
RELATIVE, ROOT_JS = (3e-5, 5e-4), (1e-5, 1e-3)


def close(found, expected, tolerance):
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    assert (np.isnan(found) == np.isnan(expected)).all()
    return np.nanmax(np.abs(found - expected) / (tolerance[0] + tolerance[1] * np.abs(expected)), initial=0) < 1


def expected_of(case, source):
    return dict(np.load(CASES / case / f"layer{source:02d}.npz"))


def measured_by(route, folder, want):
    """Singles, masks and joints by one of the two routes."""
    ids, source, index = want["input_ids"].tolist(), int(want["source_layer"]), int(want["sample_index"])
    if route == "library":
        return tiny.measure(folder, ids, source, index)
    single = reference.singles(folder, ids, source)
    sets = reference.masks(single["relative"][3], 31000, index, source)
    return single, sets, reference.joints(folder, ids, source, sets, single)


@pytest.mark.parametrize("route", ["reference", "library"])
@pytest.mark.parametrize(("case", "source"), TRANSITIONS)
def test_agrees_with_case(route, case, source):
    want = expected_of(case, source)
    single, sets, joint = measured_by(route, CASES / case / "model", want)
    assert close(single["baseline_norm"], want["baseline_norm"], (1e-7, 3e-5))
    assert close(single["relative"], want["single_relative"], RELATIVE)
    assert close(np.sqrt(single["js"]), np.sqrt(want["single_js"]), ROOT_JS)
    firm = (want["rank_margin"] > 1e-3) | (want["rank_margin"] == 0)
    differ = (sets != want["joint_mask"]).any(axis=1)
    assert not (differ[:2] & firm).any()
    assert not differ[2:].any()
    same = np.cumsum(differ, axis=1) == 0  # a set that flipped by rounding changes all that follows
    assert same.mean() > 0.9
    for name, theirs in (
        ("relative", "joint_relative"),
        ("sum_of_singles", "sum_of_singles"),
        ("additive", "joint_additive"),
    ):
        assert close(joint[name] * same, want[theirs] * same, RELATIVE), name
    scale = 6e-5 + 1e-3 * np.maximum(want["joint_relative"][:3], want["joint_additive"])
    assert (np.abs(joint["interaction"] - want["joint_interaction"]) * same / scale).max() < 1
    for name, theirs in (("js", "joint_js"), ("sum_of_singles_js", "sum_of_singles_js")):
        assert close(np.sqrt(joint[name]) * same, np.sqrt(want[theirs]) * same, ROOT_JS), name


@pytest.mark.parametrize(("case", "source"), TRANSITIONS)
def test_concentration_agrees_with_case(case, source):
    want = expected_of(case, source)
    found = concentration.of_transition(
        want["single_relative"].astype(float), want["single_js"].astype(float), {"vectors": 1e-4, "js": 1e-8}
    )
    count = len(want["conc_total"])
    assert (found["undefined"][:count] == want["conc_undefined"]).all()
    names = {"n_eff": "n_eff", "n_eff_fraction": "fraction", "concentration": "c", "total": "total"}
    for name in (*names, "top1", "top25", "top50", "bottom25"):
        assert close(found[name][:count], want[f"conc_{names.get(name, name)}"], (1e-6, 1e-5)), name
        if name != "total":
            assert np.isnan(found[name][count:]).all()
    sure = want["conc_n90_margin"] > 1e-5
    assert (found["n90"][:count][sure] == want["conc_n90"][sure]).all()


def test_removing_by_hook_is_subtracting_contributions():
    folder, ids = tiny.checkpoint("llama_bias"), tiny.token_ids(9)
    base = reference.run(folder, ids, 0)
    removed = np.random.default_rng(0).random((9, 4)) > 0.5
    changed = reference.run(folder, ids, 0, removed)
    subtracted = base["after_branch"].copy()
    for t in range(9):
        for h in range(4):
            if removed[t, h]:
                subtracted[t] -= base["contribution"][h, t]
    np.testing.assert_allclose(changed["after_branch"], subtracted, atol=2e-6)


def test_all_heads_removed_leaves_the_residual_stream_and_the_bias():
    folder, ids = tiny.checkpoint("llama_bias"), tiny.token_ids(9)
    changed = reference.run(folder, ids, 0, np.ones((9, 4), bool))
    bias = reference.load(folder).model.layers[0].self_attn.o_proj.bias.detach().numpy()
    assert np.abs(bias).max() > 0.1
    np.testing.assert_allclose(changed["after_branch"], changed["residual_in"] + bias, atol=1e-6)


def test_removing_nothing_changes_nothing():
    folder, ids = tiny.checkpoint("hybrid"), tiny.token_ids(9)
    base, same = reference.run(folder, ids, 1), reference.run(folder, ids, 1, np.zeros((9, 4), bool))
    for name in ("q", "k", "v", "rows", "logits"):
        assert (base[name] == same[name]).all(), name


def test_weights_are_measured_in_float32():
    model = reference.load(tiny.checkpoint("hybrid_wrapped"))
    assert {p.dtype for p in model.parameters()} == {reference.torch.float32}


@pytest.mark.parametrize(
    ("p", "q", "nats"),
    [
        ([1, 0], [0, 1], math.log(2)),
        ([0.5, 0.5], [0.5, 0.5], 0.0),
        ([1, 0], [0.5, 0.5], 0.75 * math.log(4 / 3)),
        ([0.25, 0.75], [0.75, 0.25], math.log(2) + 0.25 * math.log(0.25) + 0.75 * math.log(0.75)),
    ],
)
def test_jensen_shannon_by_hand(p, q, nats):
    assert reference.jensen_shannon(p, q) == pytest.approx(nats, abs=1e-15)
