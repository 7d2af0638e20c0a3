"""The layer-by-layer pass through the model's own modules against the whole model with hooks of the tests' own."""

import inspect

import models_tiny as tiny
import numpy as np
import pytest
import reference
import torch
from head_influence import StudyError, files, models
from head_influence.checkpoint import Checkpoint
from head_influence.families import layer_of
from head_influence.trace import Recorder, trace, whole_forward_error, write_trace


def near(found, expected, limit=2e-6):
    return np.abs(found - expected).max() <= limit * (np.abs(expected).max() or 1)


@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_records_what_the_whole_model_does(name):
    folder, ids = tiny.checkpoint(name), tiny.token_ids(9)
    records, last = trace(Checkpoint(folder), ids)
    for source in range(len(records) - 1):
        base = reference.run(folder, ids, source)
        assert near(records[source]["residual_in"], base["residual_in"]), source
        assert near(records[source]["branch_out"], base["branch_out"]), source
        for c in "qkv":
            assert records[source + 1][c].shape == base[c].shape
            assert near(records[source + 1][c], base[c]), (source, c)
        assert ("retrieval" in records[source + 1]) == ("rows" in base)
        if "rows" in base:
            assert near(records[source + 1]["retrieval"], base["rows"]), source
    model = reference.load(folder)
    logits = torch.from_numpy(last) @ model.lm_head.weight.detach().T
    assert near(logits.numpy(), base["logits"])


@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_contributions_are_the_projected_slices(name):
    folder, ids = tiny.checkpoint(name), tiny.token_ids(9)
    checkpoint = Checkpoint(folder)
    records = tiny.traced(folder, tuple(ids))
    for source in range(len(records) - 1):
        expected = reference.run(folder, ids, source)["contribution"]
        found = layer_of(checkpoint, source).contributions(records[source]["head_values"])
        assert found.shape == expected.shape
        assert near(found, expected), source
        assert ((found == 0) == (expected == 0)).all()


def test_text_longer_than_a_chunk_of_the_delta_rule():
    folder, ids = tiny.checkpoint("hybrid"), tiny.token_ids(131)
    records, _ = trace(Checkpoint(folder), ids)
    base = reference.run(folder, ids, 3)
    for name in ("residual_in", "branch_out"):
        assert near(records[3][name], base[name])
    for c in "qkv":
        assert near(records[4][c], base[c])


@pytest.mark.parametrize("name", ["llama_untied", "qwen3_shards", "hybrid", "hybrid_wrapped"])
def test_whole_forward_agrees_and_notices_a_difference(name):
    checkpoint, ids = Checkpoint(tiny.checkpoint(name)), tiny.token_ids(9)
    records, last = trace(checkpoint, ids)
    residuals = [r["residual_in"] for r in records]
    errors = whole_forward_error(checkpoint, ids, residuals, last)
    assert set(errors) == {"residual stream", "logits"}
    assert max(errors.values()) < 2e-6
    largest = np.abs(residuals[1]).max()
    residuals[1] = residuals[1].copy()
    residuals[1][4, 3] += 1e-3 * largest
    changed = whole_forward_error(checkpoint, ids, residuals, last)
    assert changed["residual stream"] == pytest.approx(1e-3, rel=0.01)
    assert changed["logits"] == errors["logits"]
    assert whole_forward_error(checkpoint, ids, residuals, last * 1.001)["logits"] == pytest.approx(1e-3, rel=0.1)


def test_one_layers_weights_at_a_time():
    checkpoint, ids = Checkpoint(tiny.checkpoint("hybrid")), tiny.token_ids(5)
    model, filled = models.empty_model(checkpoint), []

    def count(*_):
        filled.append([i for i, each in enumerate(model.model.layers) if next(each.parameters()).device.type != "meta"])

    with models.streamed(model, checkpoint):
        for layer in model.model.layers:
            layer.register_forward_pre_hook(count)
        with torch.no_grad():
            model.model(inputs_embeds=models.embed(checkpoint, ids), use_cache=False)
    assert filled == [[0], [1], [2], [3], [4]]
    count()
    assert filled[-1] == []


def test_everything_is_put_back():
    checkpoint = Checkpoint(tiny.checkpoint("hybrid"))
    model = models.whole_model(checkpoint)
    source = inspect.getmodule(type(model.model.layers[0]))
    names = ("eager_attention_forward", "torch_chunk_gated_delta_rule", "l2norm")
    before = [getattr(source, name) for name in names]
    kinds = [layer_of(checkpoint, i).kind for i in range(5)]
    with pytest.raises(ZeroDivisionError), Recorder(model, kinds):
        assert source.l2norm is not before[2]
        raise ZeroDivisionError
    assert [getattr(source, name) for name in names] == before
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert not any(hooks)


def test_another_kernel_is_refused(monkeypatch):
    checkpoint = Checkpoint(tiny.checkpoint("hybrid"))
    source = inspect.getmodule(type(models.empty_model(checkpoint).model.layers[0]))
    monkeypatch.setattr(source, "torch_chunk_gated_delta_rule", lambda q, k, v, **_: (torch.zeros_like(v), None))
    with pytest.raises(StudyError, match="another kernel"):
        trace(checkpoint, tiny.token_ids(5))


@pytest.mark.parametrize("name", ["qwen3_shards", "hybrid_wrapped", "llama_f16"])
def test_half_precision_checkpoints_are_computed_in_float32(name):
    records, last = trace(Checkpoint(tiny.checkpoint(name)), tiny.token_ids(5))
    assert {x.dtype for r in records for x in r.values() if not isinstance(x, float)} == {np.dtype(np.float32)}
    assert last.dtype == np.float32
    assert (last.view(np.uint32) & 0x1FFF).any(), "the last bits of a float32 are in use"


def test_written_trace_reads_back(tmp_path):
    folder, ids = tiny.checkpoint("hybrid"), tiny.token_ids(5)
    records, last = trace(Checkpoint(folder), ids)
    write_trace(tmp_path, records, last, ids, list("abcd注"), {"text": "a"})
    parts = {f"L{i:02d}": (i, record, record.get("scaling", 1.0)) for i, record in enumerate(records)}
    for part, (layer, record, scaling) in (parts | {"last": (None, {"last": last}, None)}).items():
        found, attributes = files.read(tmp_path / f"{part}.nc")
        assert found.pop("token_id").tolist() == ids
        assert found.pop("token").tolist() == list("abcd注")
        assert set(found) == set(record) - {"scaling"}
        assert all((found[name] == record[name]).all() for name in found)
        assert attributes["text"] == "a"
        assert (attributes.get("layer"), attributes.get("scaling")) == (layer, scaling)
