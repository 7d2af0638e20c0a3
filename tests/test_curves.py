"""Head influence curves against the whole real model, whose attention masks take the removed keys away head by head."""

import inspect
import json

import models_tiny as tiny
import numpy as np
import pytest
import torch
from head_influence import StudyError, curves, files, prefill, scoring
from head_influence.answers import greedy_answers
from head_influence.checkpoint import Checkpoint
from head_influence.compaction import HIGH, LOW
from head_influence.contexts import TokenContext, TokenItem
from head_influence.curve_checks import Bench, check_study, sign_check
from head_influence.curve_study import CurveStudy, cache_kinds
from head_influence.curve_table import collect, default_heads, read_table, spearman, stability, write_table
from head_influence.curves import measure_baseline, measure_layer, read_prefill, write_prefill
from scipy.optimize import lsq_linear
from transformers import AutoModelForCausalLM

NEAR = {"abs": 1e-5, "rel": 5e-6}  # float32 noise of scores up to 25 nats
RATIOS = [0, 0.02, 0.05, 0.1, 0.29, 0.5, 1]
SLIDING = tiny.QWEN3 | {
    "use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 4, "num_attention_heads": 6,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
CASES = {
    "llama_bias": {"prefix": 3, "suffix": 2},
    "llama_untied": {"prefix": 0, "suffix": 0},
    "qwen3": {"prefix": 0, "suffix": 4},
    "hybrid": {"prefix": 2, "suffix": 3},
    "hybrid_odd": {"prefix": 0, "suffix": 0},
    "sliding": {"prefix": 5, "suffix": 1},
}


def folder_of(name):
    if name == "sliding":
        folder = tiny.FOLDER / "sliding_curves"
        return folder if folder.exists() else tiny.write(folder, SLIDING, seed=77)
    return tiny.checkpoint(name)


def make_context(prefix, suffix, seed=0, tokens=41):
    rng = np.random.default_rng(seed)

    def ids(n):
        return tuple(rng.integers(0, 250, n).tolist())

    items = (TokenItem("asked", ids(5), ids(4)), TokenItem("one", ids(1), ids(1)), TokenItem("going_on", (), ids(6)))
    return TokenContext("text", ids(prefix), ids(tokens), ids(suffix), ids(3), items)


def settings(bias="none", values="original", **changes):
    fit = {"keys": "rms", "bias": bias, "values": values}
    return {"fit": fit, "baseline": 0.05, "minimum_keys": 0, "max_queries": None, "seed": 0} | changes


class RealModel:
    """The model as transformers loads it, with a mask of its own for every layer and query head."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        config = self.model.config
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.kv_heads = config.num_key_value_heads
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.softmax = [i for i, t in enumerate(types) if t == "full_attention"]

    def attention(self, layer):
        return self.model.model.layers[layer].self_attn

    @torch.no_grad()
    def seen(self, ids):
        """Queries and keys after the rotary embedding, and the factor of the logits, of every softmax layer."""
        source, found = inspect.getmodule(type(self.model.model.layers[0])), {}
        own = source.eager_attention_forward

        def watch(module, query, key, value, *args, scaling, **kwargs):
            found[module.layer_idx] = query[0].double().numpy(), key[0].double().numpy(), scaling
            return own(module, query, key, value, *args, scaling=scaling, **kwargs)

        source.eager_attention_forward = watch
        try:
            self.model(torch.tensor([list(ids)]), use_cache=False)
        finally:
            source.eager_attention_forward = own
        return found

    @torch.no_grad()
    def nll(self, context, item, added):
        """Score an item; `added` is layer to (kv_head, context position) numbers that join new tokens' logits."""
        ids, first = [*context.ids, *item.question, *item.answer], len(context.ids)
        hooks = []
        for layer, numbers in added.items():
            extra = torch.zeros(1, self.kv_heads * self.groups, len(ids), len(ids))
            heads = torch.from_numpy(np.repeat(numbers, self.groups, axis=0)).float()
            extra[0, :, first:, :first] = heads[:, None].clamp(min=-1e9)

            def mask(module, args, kwargs, extra=extra):
                return args, kwargs | {"attention_mask": kwargs["attention_mask"] + extra}

            hooks.append(self.attention(layer).register_forward_pre_hook(mask, with_kwargs=True))
        try:
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0].double()
        finally:
            for hook in hooks:
                hook.remove()
        start = len(ids) - len(item.answer) + (0 if item.question else 1)
        return float(np.mean([-logits[i - 1].log_softmax(0)[ids[i]].item() for i in range(start, len(ids))]))


class Expected:
    """Everything a study of one context should find, by the slow route: option `bias`, the kept keys' own values."""

    def __init__(self, name, bias):
        self.real, self.context = RealModel(folder_of(name)), make_context(**CASES[name])
        c = self.context
        self.tokens, self.start, self.bias = len(c.article), len(c.prefix), bias
        self.attention = self.real.seen([*c.ids, *c.repeat, *c.article])

    def added(self, layer, head, count):
        """What joins the logits of one head at every context position: -inf removed, the bias where kept."""
        query, key, scaling = self.attention[layer]
        g, t = self.real.groups, self.tokens
        queries = query[head * g : (head + 1) * g, -t:].reshape(-1, query.shape[-1])
        logits = queries @ key[head, self.start : self.start + t].T * scaling
        masses = np.exp(logits - logits.max(1, keepdims=True))
        score = np.sqrt(np.square(masses / masses.sum(1, keepdims=True)).mean(0))
        kept = np.sort(np.argsort(-score, kind="stable")[:count])
        beta = np.zeros(count)
        if self.bias == "nnls" and count:
            beta = np.log(lsq_linear(masses[:, kept], masses.sum(1), (LOW, HIGH), method="bvls", tol=1e-14).x)
        out = np.zeros(len(self.context.ids))
        out[self.start : self.start + t] = -np.inf
        out[self.start + kept] = beta
        return out

    def whole(self, count):
        """All heads of all softmax layers at `count` keys."""
        return {i: np.stack([self.added(i, h, count) for h in range(self.real.kv_heads)]) for i in self.real.softmax}

    def nll(self, item, baseline, layer=None, head=None, count=None):
        added = self.whole(baseline)
        if layer is not None:
            added[layer] = added[layer].copy()
            added[layer][head] = self.added(layer, head, count)
        return self.real.nll(self.context, item, added)


def study(name, folder, options, context=None, ratios=RATIOS):
    """Run the stages of one context; return the layer files by layer."""
    checkpoint, context = folder_of(name), context or make_context(**CASES[name])
    kinds = cache_kinds(Checkpoint(checkpoint))
    paths = [folder / f"prefill{i}.nc" for i in range(len(kinds))]
    write_prefill(checkpoint, context, paths, {})
    measure_baseline(checkpoint, context, paths, folder / "baseline.nc", options, {})
    found = {}
    for layer in (i for i, kind in enumerate(kinds) if kind == "softmax"):
        heads = range(len(read_prefill(paths[layer])[0]["keys"]))
        attributes = {"fingerprint": "f", "settings": {"scoring": options}, "study": "s", "model": "m", "revision": ""}
        output = folder / f"L{layer:02d}.nc"
        measure_layer(
            checkpoint,
            context,
            layer,
            list(heads),
            paths[layer],
            folder / "baseline.nc",
            output,
            ratios,
            options,
            attributes,
        )
        found[layer] = files.read(output)
    return found


@pytest.mark.parametrize("bias", ["none", "nnls"])
@pytest.mark.parametrize("name", CASES)
def test_every_number_is_the_real_models(name, bias, tmp_path):
    expected, found = Expected(name, bias), study(name, tmp_path, settings(bias))
    items, counts = expected.context.items, [0, 0, 2, 4, 11, 20, 41]
    baseline = [expected.nll(item, 2) for item in items]
    assert list(found) == expected.real.softmax
    for layer, (data, _) in found.items():
        assert data["keys_used"].tolist() == [counts] * expected.real.kv_heads
        assert data["nll_full"] == pytest.approx([expected.real.nll(expected.context, i, {}) for i in items], **NEAR)
        assert data["nll_none"] == pytest.approx([expected.nll(i, 0) for i in items], **NEAR)
        assert data["nll_baseline"] == pytest.approx(baseline, **NEAR)
        for head in range(expected.real.kv_heads):
            for place in (0, 4, 6):
                nll = [expected.nll(i, 2, layer, head, counts[place]) for i in items]
                assert data["nll"][:, head, place] == pytest.approx(nll, **NEAR), (layer, head, place)
    deltas = np.concatenate([d["delta"].ravel() for d, _ in found.values()])
    assert np.abs(deltas).max() > 1e-3  # heads of these models matter, so that the comparison means something


@pytest.mark.parametrize("name", ["llama_bias", "hybrid", "sliding"])
def test_the_baseline_is_exactly_zero(name, tmp_path):
    for data, _ in study(name, tmp_path, settings("nnls", "ridge"), ratios=[0, 0.02, 0.05, 0.06, 0.1]).values():
        assert (data["delta"][..., 2] == 0).all()
        assert (data["delta"][..., 3] == 0).all()  # 0.06 of 41 are 2 keys as well
        assert (data["nll"][..., 2] == data["nll_baseline"][:, None]).all()
        assert (data["delta"][..., 0] == data["delta"][..., 1]).all()


@pytest.mark.parametrize("name", ["llama_bias", "qwen3", "hybrid", "sliding"])
def test_the_checks_hold(name, tmp_path):
    options = settings("nnls", "ridge")
    found, context = study(name, tmp_path, options), make_context(**CASES[name])
    layer = max(found)
    bench = Bench(
        Checkpoint(folder_of(name)), context, layer, tmp_path / f"prefill{layer}.nc", tmp_path / "baseline.nc", options
    )
    table = collect([[tmp_path / f"L{i:02d}.nc" for i in found]], ["text"])
    checks = check_study(bench, table, [41], tmp_path / f"L{layer:02d}.nc", RATIOS, (), True)
    assert [c.number for c in checks] == [1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 9]
    assert {c.outcome for c in checks if c.number not in (4, 5)} == {"passed"}
    assert checks[4].outcome == "passed"
    assert checks[6].outcome == "not applicable"  # random weights do not use the context


def test_a_wrong_baseline_is_caught(tmp_path, monkeypatch):
    study("qwen3", tmp_path, settings())
    right = curves.BaselineCaches.residual
    monkeypatch.setattr(curves.BaselineCaches, "residual", lambda self, i: [1.01 * x + 0.1 for x in right(self, i)])
    with pytest.raises(StudyError, match=r"context text, layer 0: control failed: restarting at the layer"):
        measure_layer(
            folder_of("qwen3"), make_context(**CASES["qwen3"]), 0, [0], tmp_path / "prefill0.nc",
            tmp_path / "baseline.nc", tmp_path / "out.nc", RATIOS, settings(), {},
        )  # fmt: skip
    assert not (tmp_path / "out.nc").exists()


def test_the_planted_head_has_the_right_sign():
    check = sign_check()
    assert check.outcome == "passed"
    assert check.value > 0.1


@pytest.mark.parametrize("name", ["llama_bias", "hybrid", "sliding"])
def test_batches_and_blocks_change_only_float_noise(name, tmp_path, monkeypatch):
    whole = study(name, tmp_path / "a", settings("nnls", "ridge"))
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 12)
    monkeypatch.setattr(scoring, "LOGITS", 700)
    monkeypatch.setattr(prefill, "BLOCK", 500)
    for layer, (data, _) in study(name, tmp_path / "b", settings("nnls", "ridge")).items():
        assert data["nll"] == pytest.approx(whole[layer][0]["nll"], **NEAR)


def test_batches_hold_the_baseline_and_every_row_once():
    found = scoring.batches(100, 200)
    assert all(batch[0] == 0 and len(batch) * 200 <= scoring.BATCH_TOKENS for batch in found)
    assert sorted(row for batch in found for row in batch[1:]) == list(range(1, 100))
    assert scoring.batches(1, 5) == [[0]]
    assert scoring.batches(3, 10**6) == [[0, 1], [0, 2]]


def test_minimum_keys_and_query_subsets(tmp_path):
    data, _ = study("qwen3", tmp_path / "a", settings(minimum_keys=1))[0]
    assert data["keys_used"][0].tolist() == [1, 1, 2, 4, 11, 20, 41]
    few, _ = study("qwen3", tmp_path / "b", settings("nnls", "ridge", max_queries=60))[0]
    same, _ = study("qwen3", tmp_path / "c", settings("nnls", "ridge", max_queries=60))[0]
    other, _ = study("qwen3", tmp_path / "d", settings("nnls", "ridge", max_queries=60, seed=1))[0]
    assert (few["nll"] == same["nll"]).all()
    assert (few["mass_error"] != other["mass_error"]).any()


@pytest.mark.parametrize("name", ["llama_bias", "hybrid", "sliding"])
def test_greedy_answers_are_the_models_own(name):
    context = make_context(**CASES[name])
    found = greedy_answers(Checkpoint(folder_of(name)), context, 4)
    model = RealModel(folder_of(name)).model
    for item in context.items:
        ids = [*context.ids, *item.question]
        for _ in range(4):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert found[item.id] == ids[-4:]


def test_cache_kinds():
    kinds = {name: cache_kinds(Checkpoint(folder_of(name))) for name in ("llama_bias", "hybrid", "sliding")}
    assert kinds["llama_bias"] == ["softmax"] * 3
    assert kinds["hybrid"] == ["linear", "linear", "softmax", "softmax", "linear"]
    assert kinds["sliding"] == ["softmax", "sliding", "softmax", "sliding"]


class TestTable:
    @pytest.fixture
    def table(self, tmp_path):
        rows = []
        for i, seed in enumerate((0, 1, 2)):
            context = make_context(2, 2, seed, tokens=30 + 10 * i)
            found = study("qwen3", tmp_path / str(i), settings(), context)
            rows.append([tmp_path / str(i) / f"L{layer:02d}.nc" for layer in found])
        return collect(rows, ["a", "b", "c"])

    def test_means_and_errors(self, table, tmp_path):
        assert table.names[:3] == ["L0H0", "L0H1", "L1H0"]
        assert table.samples[3] == "b/asked"
        by_hand = [np.mean([table.delta[3 * c + i, 1, 4] for i in range(3)]) for c in range(3)]
        assert table.mean()[1, 4] == pytest.approx(np.mean(by_hand))
        assert table.standard_error()[1, 4] == pytest.approx(np.std(by_hand, ddof=1) / np.sqrt(3))
        assert table.keys_used[:, 0, -1].tolist() == [30, 40, 50]
        assert table.unit == "context"
        assert (table.mean()[:, table.zero] == 0).all()
        write_table(table, tmp_path / "t.nc", {"code": "c"})
        again = read_table(tmp_path / "t.nc")
        assert np.array_equal(again.delta, table.delta)
        assert (again.names, again.samples, again.contexts) == (table.names, table.samples, table.contexts)

    def test_heads_are_chosen_on_one_half(self, table):
        chosen = default_heads(table)
        first = np.stack([table.delta[(table.half == 0) & (table.context == c)].mean(0) for c in range(3)]).mean(0)
        assert chosen[0] == first[:, 0].argmax()
        assert len(set(chosen)) == 3
        before = default_heads(table)
        table.delta[table.half == 1] *= -5  # what is drawn has no say
        assert default_heads(table) == before

    def test_stability(self, table):
        found = stability(table)
        halves = [table.mean(table.half == h)[:, -1] for h in (0, 1)]
        assert found["gain"]["halves"] == pytest.approx(spearman(*halves))
        low, middle, high = found["gain"]["bootstrap"]
        assert -1 <= low <= middle <= high <= 1
        table.delta[:] = table.delta[:1]
        alike = stability(table)["gain"]
        assert alike["halves"] == pytest.approx(1)
        assert alike["bootstrap"] == pytest.approx([1, 1, 1])
        assert alike["top"] == 1


def test_spearman_by_hand():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 4], [1, 3, 2, 4]) == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert np.isnan(spearman([1, 1], [1, 2]))


class TestSettings:
    @pytest.fixture
    def given(self, tmp_path):
        path = tmp_path / "contexts.json"
        item = {"id": "i", "question": "q", "answer": "abc"}
        path.write_text(json.dumps([{"id": "a", "article": "x" * 100, "items": [item]}]), encoding="utf-8")
        return {"contexts": str(path)}

    def test_defaults(self, given):
        study = CurveStudy(given, tiny.checkpoint("qwen3"))
        assert study.heads == {0: [0, 1], 1: [0, 1], 2: [0, 1]}
        assert study.baseline_keys("a") == 5
        assert study.settings["budgets"] == [0.01, 0.02, 0.05, 0.1]
        assert CurveStudy(given | {"heads": ["L2H1", "L0H0"]}, tiny.checkpoint("qwen3")).heads == {0: [0], 2: [1]}
        assert CurveStudy(given | {"heads": 2}, tiny.checkpoint("qwen3")).heads is None

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"ratios": [0, 0.1]}, "curves.ratios: the baseline 0.05 must be one of them"),
            ({"ratios": [0.1, 0.05]}, "curves.ratios: expected numbers in rising order"),
            ({"heads": ["L3H0"]}, r"curves.heads: L3H0: the model has KV heads 0 to 1 in its softmax layers 0, 1, 2"),
            ({"heads": ["L0H2"]}, "curves.heads: L0H2"),
            ({"heads": 7}, "curves.heads: 7: the model has 6 KV heads"),
            ({"ratios": [0, 0.05], "budgets": [0.1]}, "curves.budgets: 0.1 is beyond the largest ratio 0.05"),
            ({"minimum_keys": 100}, "context 'a': minimum_keys leaves nothing to compact in 100 tokens"),
            ({"contexts": "nowhere.json"}, "curves.contexts: nowhere.json does not exist"),
        ],
    )
    def test_faults_are_one_line(self, given, changes, words):
        with pytest.raises(StudyError, match=words):
            CurveStudy(given | changes, tiny.checkpoint("qwen3"))

    def test_paths_follow_what_is_read_and_asked(self, given):
        base = CurveStudy(given, tiny.checkpoint("qwen3"))
        other = CurveStudy(given | {"prompt": {"suffix": "!"}}, tiny.checkpoint("qwen3"))
        fitted = CurveStudy(given | {"fit": {"bias": "none"}}, tiny.checkpoint("qwen3"))
        assert base.reading("a") != other.reading("a")
        assert base.reading("a") == fitted.reading("a")
        assert base.items_key("a") != fitted.items_key("a")


def test_a_length_dependent_rotary_embedding_is_refused(tmp_path):
    config = tiny.LLAMA | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    folder = tiny.write(tmp_path / "m", config, seed=1)
    with pytest.raises(StudyError, match="rope_type 'dynamic' rotates keys differently in longer texts"):
        prefill.curve_model(Checkpoint(folder))


def test_an_empty_cache_is_stored_and_read(tmp_path):
    context = make_context(0, 0, tokens=12)  # 5 % of 12 keys are none: no entry at all at the baseline
    data, _ = study("llama_untied", tmp_path, settings(), context)[0]
    assert data["nll_baseline"] == pytest.approx(data["nll_none"], abs=1e-6)
    assert (data["delta"][..., 0] == 0).all()
    assert curves.MODES == ("full", "baseline", "none")
