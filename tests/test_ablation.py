"""Single and joint removals of every family and edge against the whole real model."""

import models_tiny as tiny
import numpy as np
import pytest
import reference
from head_influence import ablation

LAYERS = {name: configuration["num_hidden_layers"] for name, (configuration, _) in tiny.CHECKPOINTS.items()}
TRANSITIONS = [(name, source) for name, count in LAYERS.items() for source in range(count - 1)]
TOLERANCE = 1e-5, 1e-4  # absolute, relative: ten times the float32 noise between the two routes


def check_close(found, expected, what, scale=None):
    """Compare with TOLERANCE; absent values (NaN) and exact zeros must agree as they are."""
    assert found.shape == expected.shape, what
    assert (np.isnan(found) == np.isnan(expected)).all(), what
    assert ((found == 0) == (expected == 0)).all(), f"{what}: exact zeros differ"
    scale = np.abs(expected) if scale is None else scale
    excess = np.abs(found - expected) / (TOLERANCE[0] + TOLERANCE[1] * scale)
    assert np.nanmax(excess, initial=0) < 1, f"{what}: {np.nanmax(excess):.3g} of the tolerance"


def assert_agrees(name, source, tokens, sample_index=1):
    """Everything that the library measures at one transition, against the reference."""
    folder, ids = tiny.checkpoint(name), tiny.token_ids(tokens, seed=source)
    single, sets, joint = tiny.measure(folder, ids, source, sample_index)
    expected = reference.singles(folder, ids, source)
    check_close(single["relative"], expected["relative"], "relative")
    norms = np.maximum(expected["baseline_norm"], 1e-12)
    check_close(single["absolute"] / norms[:, None], expected["absolute"] / norms[:, None], "absolute")
    check_close(single["baseline_norm"] / norms, expected["baseline_norm"] / norms, "baseline norm")
    check_close(np.sqrt(single["js"]), np.sqrt(expected["js"]), "root of js")
    for i, c in enumerate("qkv"):
        distinct = single[f"change_{c}"].shape[2]
        change = np.linalg.norm(single[f"change_{c}"].astype(float), axis=-1)
        each = np.repeat(change, expected["absolute"].shape[-1] // distinct, axis=2)
        check_close(each / norms[i], expected["absolute"][i] / norms[i], f"change vectors of {c}")
    own = reference.masks(expected["relative"][3], 31000, sample_index, source)
    assert (sets[2:] == own[2:]).all()
    firm = reference.firm(expected["relative"][3])
    assert ((sets[:2] == own[:2]).all(axis=1) | ~firm).all()
    assert firm.mean() > 0.95
    wanted = reference.joints(folder, ids, source, sets, expected)
    for what in ("relative", "sum_of_singles", "additive"):
        check_close(joint[what], wanted[what], f"joint {what}")
    check_close(joint["absolute"] / norms[:, None], wanted["absolute"] / norms[:, None], "joint absolute")
    for what in ("js", "sum_of_singles_js"):
        check_close(np.sqrt(joint[what]), np.sqrt(wanted[what]), f"root of joint {what}")
    scale = np.maximum(wanted["relative"][:3], wanted["additive"])  # interaction is a difference of near equals
    excess = np.abs(joint["interaction"] - wanted["interaction"]) / (2e-5 + 2e-4 * scale)
    assert excess.max() < 1, "interaction"
    return single, sets, joint


@pytest.mark.parametrize(("name", "source"), TRANSITIONS)
def test_agrees_with_the_whole_model(name, source):
    single, _, _ = assert_agrees(name, source, tokens=9)
    if not tiny.CHECKPOINTS[name][1]:
        assert np.median(single["relative"]) > 0.02, "the effects are too small to test anything"


@pytest.mark.parametrize("source", [0, 1, 3])
def test_text_longer_than_a_chunk_of_the_delta_rule(source):
    assert_agrees("hybrid", source, tokens=67)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_text_shorter_than_the_convolution(tokens):
    assert_agrees("hybrid", 0, tokens)


def test_zeroed_heads_show_exactly_no_influence():
    single, _, _ = tiny.measure(tiny.checkpoint("llama_zero"), tiny.token_ids(9), 2)
    assert (single["relative"][:, [0, 2]] == 0).all()
    assert (single["js"][[0, 2]] == 0).all()
    assert (single["relative"][:, 1] > 0).all()


@pytest.mark.parametrize(("name", "source"), [("llama_zero", 1), ("hybrid_odd", 2)])
def test_branch_of_zeros_shows_exactly_no_influence(name, source):
    single, sets, joint = tiny.measure(tiny.checkpoint(name), tiny.token_ids(9), source)
    assert not single["relative"].any()
    for what in ("relative", "additive", "interaction", "sum_of_singles"):
        assert not joint[what].any(), what
    assert (sets[0] == np.array([1, 0, 0])[:, None, None]).all(), "ties are ranked by head index"
    assert (sets[1] == np.array([0, 0, 1])[:, None, None]).all()


def test_change_before_the_first_removal_is_exactly_zero():
    folder, ids = tiny.checkpoint("llama"), tiny.token_ids(9)
    change = tiny.transition(folder, ids, 0)
    single = ablation.single_removals(change)
    masks = np.zeros((4, 4, 9, 4), bool)
    masks[:, :, 5] = True  # only token 5 loses its heads
    joint = ablation.joint_removals(change, masks, single)
    elsewhere = [0, 1, 2, 3, 4, 6, 7, 8]
    assert not joint["relative"][:, :3, elsewhere].any()
    assert (joint["relative"][:, :3, 5] > 0).all()
    assert not joint["js"][:3, :5].any()
    assert (joint["js"][:3, 5:] > 0).all()


def test_change_reaches_as_far_as_the_convolution():
    folder, ids = tiny.checkpoint("hybrid"), tiny.token_ids(12)
    change = tiny.transition(folder, ids, 0)
    single = ablation.single_removals(change)
    masks = np.zeros((4, 4, 12, 4), bool)
    masks[:, :, 5] = True
    changed = ablation.joint_removals(change, masks, single)["relative"][:, :3] > 0
    assert (changed.all(axis=(0, 1, 3)) == changed.any(axis=(0, 1, 3))).all()
    assert changed.all(axis=(0, 1, 3)).tolist() == [5 <= t <= 8 for t in range(12)]


def test_all_removed_is_the_same_sequence_for_every_recipient_head():
    folder, ids = tiny.checkpoint("llama"), tiny.token_ids(9)
    _, sets, joint = tiny.measure(folder, ids, 0)
    assert sets[3].all()
    single_sequence = reference.run(folder, ids, 0, np.ones((9, 4), bool))
    base = reference.run(folder, ids, 0)
    for i, c in enumerate("qkv"):
        size = np.linalg.norm(single_sequence[c].astype(float) - base[c], axis=-1)
        np.testing.assert_allclose(joint["absolute"][i, 3], size, rtol=1e-4, atol=1e-5)


def test_additive_heads_on_orthogonal_axes_have_no_interaction():
    """Eight additive, orthogonal changes: the sum of norms is too large by root 8, `additive` is exact."""
    vectors = np.eye(8)[:, None, None].astype(np.float32)  # head, token, recipient head, axis

    class Linear:
        kind, heads, reach, window = "linear", 1, 0, None

        def finish(self, r):
            return r

        normed = finish

        def project(self, x, head=None):
            return {c: x[:, None] for c in "qkv"}

        def effective(self, parts, cos, sin, head=None):
            return parts

        def slots(self, x, axis=-1):
            return x

    change = ablation.Transition(Linear(), Linear(), np.full((1, 8), 3, np.float32), vectors[:, :, 0])
    single = ablation.single_removals(change)
    masks = np.ones((4, 8, 1, 1), bool)
    joint = ablation.joint_removals(change, masks, single)
    size = np.sqrt(8 * 9)
    np.testing.assert_allclose(joint["relative"][0, 0], np.sqrt(8) / size, rtol=1e-6)
    np.testing.assert_allclose(joint["additive"][0, 0], np.sqrt(8) / size, rtol=1e-6)
    np.testing.assert_allclose(joint["sum_of_singles"][0, 0], 8 / size, rtol=1e-6)
    assert joint["interaction"].max() < 1e-6
    np.testing.assert_allclose(joint["relative"][0, 0] / joint["sum_of_singles"][0, 0], 0.35, atol=0.004)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8])
def test_masks_by_hand(heads):
    rng = np.random.default_rng(heads)
    qkv = rng.integers(0, 3, (heads, 4, 2)).astype(float)  # many ties
    sets = ablation.joint_masks(qkv, 7, 2, 1)
    assert (sets == reference.masks(qkv, 7, 2, 1)).all()
    assert ablation.check_masks(sets) == 0
    assert (sets[:3].sum(axis=1) == heads // 2).all()


@pytest.mark.parametrize(
    ("scenario", "head"), [(0, 0), (1, 0), (2, 3), (3, 1)], ids=["weak", "strong", "random", "all"]
)
def test_a_flipped_mask_is_noticed(scenario, head):
    sets = ablation.joint_masks(np.random.default_rng(0).random((4, 3, 2)), 7, 0, 0)
    sets[scenario, head, 1, 1] ^= True
    assert ablation.check_masks(sets) > 0


def test_overlapping_halves_are_noticed():
    sets = ablation.joint_masks(np.random.default_rng(0).random((4, 3, 2)), 7, 0, 0)
    sets[1] = sets[0]
    assert ablation.check_masks(sets) > 0


def test_numbered_rows():
    rows = np.array([[[1.0, 2], [1, 2], [3, 2]], [[1, 2], [3, 2], [3, 2]]], np.float32)
    number, unique, token = ablation.number_rows(rows)
    assert number.tolist() == [[0, 0, 1], [2, 3, 3]]
    assert token.tolist() == [0, 0, 1, 1]
    assert unique.tolist() == [[1, 2], [3, 2], [1, 2], [3, 2]]


def test_a_removed_zero_leaves_the_same_bytes():
    change = ablation.Transition(None, None, np.array([[-0.0, 1]], np.float32), np.zeros((2, 1, 2), np.float32))
    rows = change.intervened_at(0, np.array([[False, False], [True, False], [True, True]]))
    assert len({row.tobytes() for row in rows}) == 1


@pytest.mark.parametrize("width", [1, 2, 4])
def test_trailing_positions(width):
    same = np.random.default_rng(width).random((3, 10)) > 0.3
    expected = [[all(row[max(0, t - width + 1) : t + 1]) for t in range(10)] for row in same]
    assert ablation.trailing(same, width).tolist() == expected


def test_small_blocks_change_nothing(monkeypatch):
    folder, ids = tiny.checkpoint("hybrid"), tiny.token_ids(9)
    whole = tiny.measure(folder, ids, 0)
    monkeypatch.setattr(ablation, "BLOCK_ROWS", 1)
    blocks = tiny.measure(folder, ids, 0)
    np.testing.assert_allclose(blocks[0]["relative"], whole[0]["relative"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(blocks[2]["relative"], whole[2]["relative"], rtol=1e-4, atol=1e-5)
    assert blocks[0]["controls"]["zeroed head"][0] == 0
