"""The rehearsal's checkpoint: the published layout, right shapes, values as transformers would initialise them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from head_influence import StudyError, rehearsal
from head_influence.checkpoint import Checkpoint
from head_influence.families import check
from head_influence.trace import trace
from models_tiny import checkpoint
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

PUBLISHED = Path(__file__).parents[1] / "resources/models/qwen3.5-2b/config.json"
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "vocab_size": 300, "num_hidden_layers": 4, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The same layout, small, in several shards."""
    folder = tmp_path_factory.mktemp("rehearsal")
    config = json.loads(PUBLISHED.read_text())
    config["text_config"] |= SMALL | {"layer_types": config["text_config"]["layer_types"][:4]}
    config["text_config"]["rope_parameters"]["mrope_section"] = [1, 1, 0]
    config["vision_config"] |= {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    (folder / "published.json").write_text(json.dumps(config))
    rehearsal.write_rehearsal(
        folder / "published.json", checkpoint("hybrid"), folder / "made", seed=1, largest=60_000, say=lambda line: None
    )
    return folder


def stored(folder):
    state = {}
    for path in folder.glob("*.safetensors"):
        state |= load_file(path)
    return state


def real_shapes(config_file):
    """Shapes of the modules of transformers for the multimodal model."""
    fields = json.loads(config_file.read_text())
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(config)
    return {name: tuple(x.shape) for name, x in model.state_dict().items() if name != "lm_head.weight"}


def test_full_size_is_the_published_model():
    shapes = rehearsal.tensor_shapes(json.loads(PUBLISHED.read_text()))
    text = {name: shape for name, shape in shapes.items() if not name.startswith("mtp.")}
    assert text == real_shapes(PUBLISHED)
    assert shapes["model.language_model.embed_tokens.weight"] == (248320, 2048)
    assert shapes["model.language_model.layers.0.linear_attn.in_proj_qkv.weight"] == (6144, 2048)
    assert shapes["model.language_model.layers.3.self_attn.q_proj.weight"] == (4096, 2048)
    assert 4.5e9 < 2 * sum(int(np.prod(shape)) for shape in shapes.values()) < 4.6e9
    parts = rehearsal.shards(shapes, 1 << 30)
    assert len(parts) == 5 and [name for part in parts for name in part] == list(shapes)


def test_written_files_are_a_checkpoint_of_transformers(small):
    model, loading = Qwen3_5ForConditionalGeneration.from_pretrained(
        small / "made", dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in loading["unexpected_keys"])
    assert len(list((small / "made").glob("*.safetensors"))) > 2
    assert len(check(Checkpoint(small / "made"))) == 4
    ids = [5, 6, 7, 250]
    last = trace(Checkpoint(small / "made"), ids)[1]
    with torch.no_grad():
        expected = model.model.language_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    assert np.abs(last - expected.numpy()).max() <= 1e-5 * expected.abs().max()


def test_values_are_those_of_a_new_model(small):
    state = stored(small / "made")
    start = "model.language_model.layers.0."
    assert (state["model.language_model.norm.weight"] == 0).all()  # means 1 + 0
    assert (state[start + "input_layernorm.weight"] == 0).all()
    assert (state[start + "linear_attn.norm.weight"] == 1).all()
    assert (state[start + "linear_attn.dt_bias"] == 1).all()
    assert (state["model.visual.blocks.0.norm1.weight"] == 1).all()
    assert (state["model.visual.blocks.0.norm1.bias"] == 0).all()
    decay = state[start + "linear_attn.A_log"].float()
    assert (decay > np.log(0.0099)).all() and (decay < np.log(16.1)).all()
    matrix = state[start + "mlp.up_proj.weight"].float()
    assert abs(matrix.std().item() - 0.02) < 0.002 and abs(matrix.mean().item()) < 0.002
    assert all(x.dtype == torch.bfloat16 for x in state.values())


def test_seed_decides(small, tmp_path):
    again = tmp_path / "again"
    quiet = {"largest": 60_000, "say": lambda line: None}
    rehearsal.write_rehearsal(small / "published.json", checkpoint("hybrid"), again, seed=1, **quiet)
    for path in (small / "made").iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    rehearsal.write_rehearsal(small / "published.json", checkpoint("hybrid"), again, seed=2, **quiet)
    name = "model.language_model.embed_tokens.weight"
    assert (stored(again)[name] != stored(small / "made")[name]).float().mean() > 0.9


def test_blocks_do_not_change_values(monkeypatch):
    whole = np.concatenate(list(rehearsal.values("x.weight", (100, 7), 3, 0.02)))
    monkeypatch.setattr(rehearsal, "BLOCK", 64)
    assert (np.concatenate(list(rehearsal.values("x.weight", (100, 7), 3, 0.02))) == whole).all()


def test_rounding_is_to_nearest_even():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    x = np.concatenate([x, np.array([1.00390625, 1.01171875, 0, -0.0, 1e-40], np.float32)])
    expected = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (rehearsal.bfloat16(x) == expected).all()


def test_interrupted_writing_is_not_taken_for_whole(small, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    made = tmp_path / "made"
    made.mkdir()
    (made / "config.json").write_text("{}")
    monkeypatch.setattr(rehearsal, "write_shard", full)
    with pytest.raises(StudyError, match=r"cannot be written \(No space left on device\)"):
        rehearsal.write_rehearsal(small / "published.json", checkpoint("hybrid"), made, say=lambda line: None)
    assert not (made / "config.json").exists()


@pytest.mark.parametrize("config", [{}, [], {"text_config": {}, "vision_config": {}}, {"text_config": 3}])
def test_other_configurations_are_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StudyError):
        rehearsal.write_rehearsal(tmp_path / "config.json", tmp_path, tmp_path / "made")
