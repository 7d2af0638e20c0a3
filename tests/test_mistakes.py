"""Each mistake that hides is made here on purpose, and shows in the number where the methods say it shows.

A mistake is the library's own code with one expression changed. `damage` measures with it and returns, for each number
of the raw files, how far it is from the reference in units of the tolerance: below 1 it looks right.
"""

import inspect
import textwrap
from functools import cached_property

import models_tiny as tiny
import numpy as np
import pytest
import reference
from head_influence import StudyError, ablation, baseline, concentration
from head_influence.checkpoint import Checkpoint
from head_influence.families import base, linear, qwen3_5, softmax
from head_influence.trace import trace, write_trace

WRONG = 100  # of the tolerance, at least, is unmistakable


def mistaken(monkeypatch, owner, name, right, wrong):
    """Replace `right`, which must occur once, by `wrong` in the source of function `owner.name`."""
    function = getattr(vars(owner)[name], "func", vars(owner)[name])  # within a cached property
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1, f"{name} no longer has one {right!r}: adapt the mistake to the new code"
    scope = dict(function.__globals__)
    exec(source.replace(right, wrong), scope)
    if isinstance(scope[name], cached_property):
        scope[name].__set_name__(owner, name)
    monkeypatch.setattr(owner, name, scope[name])


def of_tolerance(found, expected, scale=1):
    difference = np.abs(found - expected) / (scale * (1e-5 + 1e-4 * np.abs(expected)))
    assert (np.isnan(found) == np.isnan(expected)).all()
    return float(np.nanmax(difference, initial=0))


def damage(name, source, tokens=9, sample_index=1):
    """How far each number is from the reference, by name."""
    folder, ids = tiny.checkpoint(name), tiny.token_ids(tokens)
    single, sets, joint = tiny.measure(folder, ids, source, sample_index)
    right = reference.singles(folder, ids, source)
    own = reference.masks(right["relative"][3], 31000, sample_index, source)
    norms = np.maximum(right["baseline_norm"], 1e-12)
    wanted = reference.joints(folder, ids, source, own, right)
    found = {f"relative {c}": of_tolerance(single["relative"][i], right["relative"][i]) for i, c in enumerate("qkv")}
    for i, c in enumerate("qkv"):
        found[f"absolute {c}"] = of_tolerance(single["absolute"][i] / norms[i], right["absolute"][i] / norms[i])
        found[f"norm {c}"] = of_tolerance(single["baseline_norm"][i] / norms[i], right["baseline_norm"][i] / norms[i])
    found["js"] = of_tolerance(np.sqrt(single["js"]), np.sqrt(right["js"]))
    for s, scenario in enumerate(reference.SCENARIOS):
        found[f"set {scenario}"] = float((sets[s] != own[s]).sum())
        found[f"joint {scenario}"] = of_tolerance(joint["relative"][:, s], wanted["relative"][:, s])
        found[f"joint js {scenario}"] = of_tolerance(np.sqrt(joint["js"][s]), np.sqrt(wanted["js"][s]))
    return found


def shown(found):
    """Names of the numbers that are wrong beyond doubt; none may be in between."""
    between = {n: x for n, x in found.items() if 1 <= x < (1 if n.startswith("set") else WRONG)}
    assert not between, between
    return {n for n, x in found.items() if x >= 1}


def failed_control(tmp_path, name, source, tokens=9):
    """The line with which the baseline's controls stop the study; None if they pass."""
    folder, ids = tiny.checkpoint(name), tiny.token_ids(tokens)
    records, last = trace(Checkpoint(folder), ids)
    write_trace(tmp_path, records, last, ids, list("x" * tokens), {"text": "mistaken"})
    try:
        layers = (tmp_path / f"L{layer:02d}.nc" for layer in (source, source + 1))
        baseline.measure_baseline(folder, *layers, tmp_path / "baseline.nc", {})
    except StudyError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "source"), [("hybrid", 0), ("hybrid", 1), ("qwen3", 0), ("llama_odd", 0), ("llama_bias", 0)]
)
def test_without_a_mistake_nothing_shows(tmp_path, name, source):
    assert shown(damage(name, source)) == set()
    assert failed_control(tmp_path, name, source) is None


@pytest.mark.parametrize(("kind", "source"), [(qwen3_5.Qwen35Linear, 0), (qwen3_5.Qwen35Softmax, 2)])
def test_norm_weight_without_its_one(monkeypatch, tmp_path, kind, source):
    monkeypatch.setattr(kind, "norm_offset", 0.0)
    assert "control failed: recomputed q" in failed_control(tmp_path, "hybrid", source)
    assert {"relative q", "relative k", "relative v"} <= shown(damage("hybrid", source))


def test_gated_norm_with_a_one(monkeypatch, tmp_path):
    """The gated norm runs in the real module; what comes out of it is held against the real branch."""
    checkpoint = Checkpoint(tiny.checkpoint("hybrid"))
    weight = checkpoint.tensor("layers.0.linear_attn.norm.weight")
    own = base.DecoderLayer.contributions
    factor = np.tile((1 + weight) / weight, 4)
    monkeypatch.setattr(base.DecoderLayer, "contributions", lambda self, x: own(self, x * factor))
    assert "control failed: branch sum" in failed_control(tmp_path, "hybrid", 0)
    assert {"relative q", "relative k", "relative v"} <= shown(damage("hybrid", 0))


def test_all_queries_then_all_gates(monkeypatch, tmp_path):
    mistaken(
        monkeypatch,
        softmax.SoftmaxLayer,
        "_weights",
        ".reshape(heads, -1, self.hidden)[:, : self.key_dim]",
        "[: heads * self.key_dim].reshape(heads, -1, self.hidden)",
    )
    assert "control failed: recomputed q" in failed_control(tmp_path, "hybrid", 2)
    wrong = shown(damage("hybrid", 2))
    assert {"relative q", "js"} <= wrong
    assert not {"relative k", "relative v"} & wrong


def test_missing_rotary_shows_in_js_only(monkeypatch, tmp_path):
    monkeypatch.setattr(softmax, "rotary", lambda x, cos, sin: x)
    assert "control failed: recomputed q" in failed_control(tmp_path, "qwen3", 0)
    wrong = shown(damage("qwen3", 0))
    assert {n for n in wrong if "js" not in n} == set(), "it cancels in every vector's influence"
    assert {"js", "joint js all"} <= wrong


def test_whole_rotary_where_the_model_turns_a_part(monkeypatch, tmp_path):
    own = softmax.rotary

    def whole(x, cos, sin):
        repeats = -(-x.shape[-1] // cos.shape[-1])
        return own(x, *(np.tile(a, repeats)[:, : x.shape[-1]] for a in (cos, sin)))

    monkeypatch.setattr(softmax, "rotary", whole)
    assert "control failed: recomputed q" in failed_control(tmp_path, "hybrid", 1)
    assert "js" in shown(damage("hybrid", 1))


def test_missing_scale_of_linear_queries_shows_in_the_absolute_change_only(monkeypatch, tmp_path):
    mistaken(monkeypatch, linear.LinearLayer, "effective", "self.key_dim**-0.5", "1")
    assert "control failed: recomputed q" in failed_control(tmp_path, "hybrid", 0)
    assert shown(damage("hybrid", 0)) == {"absolute q", "norm q"}


def test_missing_scale_of_logits_shows_in_js_only(monkeypatch, tmp_path):
    mistaken(monkeypatch, softmax.SoftmaxLayer, "retrieval", "np.float32(scaling)", "1")
    assert "control failed: recomputed retrieval" in failed_control(tmp_path, "qwen3", 0)
    wrong = shown(damage("qwen3", 0))
    assert "js" in wrong
    assert all("js" in n for n in wrong)


def test_removing_at_the_query_token_only(monkeypatch):
    """Earlier keys stay as they were: softmax Q, K, V look right, their rows are wrong."""
    own, first = ablation._retrieval, []

    def query_token_only(transition, vectors):
        first.append(vectors)
        if len(first) == 1:
            return own(transition, vectors)
        rows = [own(transition, {"q": vectors["q"], "k": _but_row(first[0]["k"], vectors["k"], t)})[:, t]
                for t in range(transition.tokens)]  # fmt: skip
        return np.stack(rows, axis=1)

    monkeypatch.setattr(ablation, "_retrieval", query_token_only)
    found = damage("llama", 0)
    assert {n for n in shown(found) if not n.startswith("joint")} == {"js"}
    folder, ids = tiny.checkpoint("llama"), tiny.token_ids(9)
    first.clear()
    js = tiny.measure(folder, ids, 0)[0]["js"]
    right = reference.singles(folder, ids, 0)["js"]
    assert np.median(np.abs(js - right)[:, 1:] / right[:, 1:]) > 0.3


def _but_row(old, new, t):
    mixed = old.copy()
    mixed[t] = new[t]
    return mixed


def test_removing_at_the_query_token_only_before_a_convolution(monkeypatch):
    """Before a linear recipient it shows in the vectors: the convolution carries changes from one token to the next."""
    mistaken(
        monkeypatch, linear.LinearLayer, "effective",
        "y[:, back:] += x[:, : tokens - back]", "y[:, back:] += x[-1:, : tokens - back]",
    )  # fmt: skip
    folder, ids = tiny.checkpoint("hybrid"), tiny.token_ids(9)
    masks = np.zeros((9, 2, 4), bool)
    masks[:, 0] = True
    change = tiny.transition(folder, ids, 0)
    rows = change.recomputed(change.intervened(masks).reshape(18, -1), np.repeat(np.arange(9), 2))
    parts = change.recipient.project(rows)
    sequences = {c: x.reshape(9, 2, *x.shape[1:]).swapaxes(0, 1) for c, x in parts.items()}
    removed, kept = change.recipient.effective(sequences, None, None)["v"]
    size = np.linalg.norm(removed - kept, axis=-1) / np.linalg.norm(kept, axis=-1)
    sets = np.ones((4, 4, 9, 4), bool)
    right = reference.joints(folder, ids, 0, sets, reference.singles(folder, ids, 0))["relative"][2, 3]
    np.testing.assert_allclose(size[0], right[0], rtol=1e-4)
    assert of_tolerance(size[1:], right[1:]) > WRONG


def test_frozen_recipient_norm_shows_in_v_only(monkeypatch, tmp_path):
    def frozen(self, rows, token):
        source, recipient = self.source, self.recipient
        x = source.finish(self.base).astype(float)
        size = np.sqrt((x**2).mean(axis=-1) + recipient.eps).astype(np.float32)
        return source.finish(rows) / size[token][:, None] * recipient._input_norm

    monkeypatch.setattr(ablation.Transition, "recomputed", frozen)
    assert failed_control(tmp_path, "qwen3", 0) is None, "with nothing removed it is right"
    wrong = shown({n: x for n, x in damage("qwen3", 0).items() if not n.startswith(("set", "joint"))})
    assert wrong == {"relative v", "absolute v"}


def test_frozen_gate_of_the_feed_forward_block(monkeypatch, tmp_path):
    """Kept out of the intervention, MLP(r) hides from the baseline's control but in no influence."""
    monkeypatch.setattr(
        ablation.Transition,
        "recomputed",
        lambda self, rows, token: self.recipient.normed(rows + (self.source.finish(self.base) - self.base)[token]),
    )
    assert failed_control(tmp_path, "llama_bias", 0) is None
    assert {"relative q", "relative k", "relative v", "js"} <= shown(damage("llama_bias", 0))


def test_strong_as_all_but_weak_shows_for_odd_numbers_of_heads_only(monkeypatch):
    mistaken(
        monkeypatch, ablation, "joint_masks",
        "np.put_along_axis(masks[1], order[heads - half :], True, axis=0)", "masks[1] = ~masks[0]",
    )  # fmt: skip
    assert shown(damage("llama", 0)) == set()
    wrong = shown(damage("llama_odd", 0))
    assert {"set strong", "joint strong"} <= wrong
    assert not {n for n in wrong if "strong" not in n}
    sets = ablation.joint_masks(np.random.default_rng(0).random((5, 3, 2)), 7, 0, 0)
    assert ablation.check_masks(sets) > 0, "the control notices as well"


def test_strong_from_minus_zero_shows_for_one_head_only(monkeypatch):
    mistaken(monkeypatch, ablation, "joint_masks", "order[heads - half :]", "order[-half:]")
    assert shown(damage("llama", 0)) == shown(damage("llama_odd", 0)) == set()
    assert "set strong" in shown(damage("llama_one_head", 0))
    assert ablation.check_masks(ablation.joint_masks(np.ones((1, 3, 2)), 7, 0, 0)) > 0


def test_ranking_by_unstable_order_shows_in_ties(monkeypatch):
    mistaken(
        monkeypatch, ablation, "joint_masks",
        'qkv.argsort(axis=0, kind="stable")', '(heads - 1 - qkv[::-1].argsort(axis=0, kind="stable"))',
    )  # fmt: skip
    assert shown(damage("llama", 0)) == set()
    assert {"set weak", "set strong"} <= shown(damage("llama_zero", 1))


@pytest.mark.parametrize(("heads", "hides"), [(4, True), (8, True), (3, False), (5, False), (6, False)])
def test_floor_for_ceil_shows_unless_heads_are_a_multiple_of_four(monkeypatch, heads, hides):
    d = np.random.default_rng(heads).random((heads, 3, 2))
    mistaken(monkeypatch, concentration, "concentration", "np.ceil(f * heads)", "max(1, np.floor(f * heads))")
    found = concentration.concentration(d, 0)
    wrong = {
        name
        for name, x in found.items()
        for t in range(3)
        for r in range(2)
        if name not in ("undefined", "small_total")
        and abs(x[t, r] - reference.concentration(list(d[:, t, r]))[name]) > 1e-9
    }
    assert wrong == set() if hides else wrong
    assert wrong <= {"top25", "top50", "bottom25"}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("default_rng(random_seed + 100 * sample_index +", "default_rng(random_seed +"),
        ("sample_index + source_index)\n", "sample_index + source_index + 1)\n"),
        ("(tokens, recipients, heads)).argsort", "(recipients, tokens, heads)).swapaxes(0, 1).argsort"),
        ("drawn.transpose(2, 0, 1)", "drawn[..., ::-1].transpose(2, 0, 1) ^ 1"),
    ],
    ids=["sample index left out", "recipient layer for source layer", "order of dimensions", "other heads"],
)
def test_wrong_random_sets_show_in_random_only(monkeypatch, right, wrong):
    mistaken(monkeypatch, ablation, "joint_masks", right, wrong)
    found = shown(damage("llama", 0))
    assert {"set random", "joint random"} <= found
    assert all("random" in n for n in found)


@pytest.mark.parametrize("epsilon", ["0", "1e-5"])
def test_epsilon_of_the_l2_norm_shows_for_tiny_vectors_only(monkeypatch, tmp_path, epsilon):
    mistaken(monkeypatch, linear.LinearLayer, "effective", "np.float32(1e-6)", f"np.float32({epsilon})")
    if epsilon == "0":
        assert shown(damage("hybrid", 3)) == set()
        assert failed_control(tmp_path, "hybrid", 3) is None
    assert "control failed: recomputed q" in failed_control(tmp_path, "hybrid_small_vectors", 3)
    found = shown({n: x for n, x in damage("hybrid_small_vectors", 3).items() if not n.startswith(("set", "joint"))})
    assert {"relative q", "relative k"} <= found
    assert "relative v" not in found


def test_replicated_left_padding_shows_at_queries_0_to_2_only(monkeypatch, tmp_path):
    right = "y[:, back:] += x[:, : tokens - back] * taps[..., -1 - back]"
    added = "; y[:, :back] += x[:, :1] * taps[..., -1 - back]"
    mistaken(monkeypatch, linear.LinearLayer, "effective", right, right + added)
    assert "control failed: recomputed q" in failed_control(tmp_path, "hybrid", 0)
    folder, ids = tiny.checkpoint("hybrid"), tiny.token_ids(9)
    found, expected = tiny.measure(folder, ids, 0)[0]["relative"], reference.singles(folder, ids, 0)["relative"]
    by_query = [of_tolerance(found[:, :, t], expected[:, :, t]) for t in range(9)]
    assert min(by_query[:3]) > WRONG
    assert max(by_query[3:]) < 1


def test_tiled_for_repeated_heads(monkeypatch, tmp_path):
    monkeypatch.setattr(
        base.DecoderLayer, "slots", lambda self, x, axis=-1: np.concatenate([x] * (self.heads // x.shape[axis]), axis)
    )
    assert "control failed: recomputed k" in failed_control(tmp_path, "llama", 0)
    wrong = shown(damage("llama", 0))
    assert {"relative k", "relative v"} <= wrong
    assert "relative q" not in wrong


def test_heads_cut_after_the_output_projection(monkeypatch, tmp_path):
    """Slices of the branch are residual coordinates: they add up to the branch, which the control cannot see."""

    def coordinates(self, head_values):
        branch = head_values @ self.tensor(f"{self.branch}.{self.projection}.weight").T
        bounds = np.linspace(0, self.hidden, self.heads + 1).astype(int)
        out = np.zeros((self.heads, *branch.shape), np.float32)
        for h in range(self.heads):
            out[h, :, bounds[h] : bounds[h + 1]] = branch[:, bounds[h] : bounds[h + 1]]
        return out

    monkeypatch.setattr(base.DecoderLayer, "contributions", coordinates)
    assert failed_control(tmp_path, "llama", 0) is None
    assert {"relative q", "relative k", "relative v", "js"} <= shown(damage("llama", 0))


def test_bias_removed_with_the_heads(monkeypatch, tmp_path):
    own = base.DecoderLayer.contributions
    monkeypatch.setattr(
        base.DecoderLayer,
        "contributions",
        lambda self, x: own(self, x) + (0 if self.out_bias is None else self.out_bias / self.heads),
    )
    assert "control failed: branch sum" in failed_control(tmp_path, "llama_bias", 0)
    assert {"relative q", "relative k", "relative v"} <= shown(damage("llama_bias", 0))


def test_added_for_removed(monkeypatch):
    mistaken(monkeypatch, ablation.Transition, "intervened_at", "self.base[token] - masks", "self.base[token] + masks")
    assert {"relative q", "relative k", "relative v", "js"} <= shown(damage("llama", 0))


def test_root_of_the_divergence(monkeypatch):
    own = ablation.js_divergence
    monkeypatch.setattr(ablation, "js_divergence", lambda p, q: np.sqrt(own(p, q)))
    wrong = shown(damage("llama", 0))
    assert "js" in wrong
    assert all("js" in n for n in wrong)


@pytest.mark.parametrize("ruled", [True, False], ids=["by the rule", "without it"])
def test_float_noise_where_nothing_changed(monkeypatch, ruled):
    """Kernels treat equal rows of different batches differently: only the rule on bytes keeps a zero exactly zero."""
    own_effective, seen = softmax.SoftmaxLayer.effective, []

    def noisy(self, parts, cos, sin, head=None):
        seen.append(1)
        vectors = own_effective(self, parts, cos, sin, head)
        return {c: x * np.float32(1 + 2e-7 * (len(seen) % 3)) for c, x in vectors.items()}

    monkeypatch.setattr(softmax.SoftmaxLayer, "effective", noisy)
    if not ruled:
        monkeypatch.setattr(ablation.Transition, "unchanged", lambda self, same: (same & False, same & False))
    folder, ids = tiny.checkpoint("llama_zero"), tiny.token_ids(9)
    single, _, _ = tiny.measure(folder, ids, 0)
    expected = reference.singles(folder, ids, 0)
    assert of_tolerance(single["relative"], expected["relative"]) < 1, "the noise is far below any tolerance"
    assert not expected["relative"][:, 1].any()
    assert single["relative"][:, 1].any() != ruled
    assert (single["controls"]["zeroed head"][0] > 0) != ruled, "the control notices as well"
