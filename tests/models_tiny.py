"""Tiny seeded checkpoints, one for each family and edge, whose heads matter; and how the tests measure them."""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from head_influence import ablation
from head_influence.checkpoint import Checkpoint
from head_influence.families import layer_of
from head_influence.trace import trace
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(tempfile.mkdtemp(prefix="head-influence-tests-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

COMMON = {
    "vocab_size": 260,
    "hidden_size": 20,
    "intermediate_size": 23,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
HYBRID = COMMON | {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 5,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
LLAMA = COMMON | {"model_type": "llama"}
QWEN3 = COMMON | {"model_type": "qwen3"}

# name -> (configuration, options of `write`)
CHECKPOINTS = {
    "llama": (LLAMA, {}),
    "llama_untied": (LLAMA | {"tie_word_embeddings": False, "num_key_value_heads": 4}, {}),
    "llama_bias": (LLAMA | {"attention_bias": True, "mlp_bias": True}, {}),
    "llama_odd": (LLAMA | {"num_attention_heads": 5, "num_key_value_heads": 5, "num_hidden_layers": 4}, {}),
    "llama_one_head": (LLAMA | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 10}, {}),
    "llama_zero": (
        LLAMA | {"hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 4},
        {"zeroed": {0: [1], 1: [0, 1, 2], 2: [0, 2]}},
    ),
    "llama_f16": (LLAMA, {"dtype": torch.float16}),
    "qwen3": (QWEN3 | {"num_attention_heads": 6}, {}),
    "qwen3_shards": (QWEN3, {"shards": 3, "dtype": torch.bfloat16}),
    "hybrid": (HYBRID, {}),
    "hybrid_wrapped": (HYBRID, {"wrapped": True, "shards": 2, "dtype": torch.bfloat16}),
    "hybrid_odd": (HYBRID | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "num_attention_heads": 3}
                   | {"num_key_value_heads": 1}, {"zeroed": {1: [2], 2: [0, 1, 2]}}),
    "hybrid_one_head": (HYBRID | {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "num_attention_heads": 1}
                        | {"num_key_value_heads": 1}, {}),
    "hybrid_small_vectors": (HYBRID, {"vectors": 1e-4}),
}  # fmt: skip


@cache
def checkpoint(name):
    """Folder of the checkpoint `name`, written once in a test run."""
    configuration, options = CHECKPOINTS[name]
    return write(FOLDER / name, configuration, seed=sorted(CHECKPOINTS).index(name), **options)


def weights(model, rng, zeroed, vectors):
    """Random weights by tensor name; every linear map about keeps the size of what goes in."""
    values = {}
    for name, parameter in sorted(model.named_parameters()):
        if name.endswith("norm.weight"):
            centre = 0.0 if _means_one_plus(model, name) else 1.0
            values[name] = centre + 0.3 * rng.standard_normal(parameter.shape)
        elif parameter.ndim == 1:  # biases, dt_bias, A_log
            values[name] = 0.3 * rng.standard_normal(parameter.shape)
        elif name.endswith("conv1d.weight"):
            values[name] = rng.standard_normal(parameter.shape)
            values[name][: 2 * model.config.linear_num_key_heads * model.config.linear_key_head_dim] *= vectors
        else:
            values[name] = rng.standard_normal(parameter.shape) / np.sqrt(parameter.shape[-1])
    values["model.embed_tokens.weight"] *= np.sqrt(model.config.hidden_size)
    for layer, heads in zeroed.items():
        for name, value in values.items():
            if name.startswith(f"model.layers.{layer}.") and name.endswith(("o_proj.weight", "out_proj.weight")):
                size = value.shape[1] // _heads(model, layer)
                for head in heads:
                    value[:, head * size : (head + 1) * size] = 0
    return {name: torch.from_numpy(np.asarray(value, np.float32)) for name, value in values.items()}


def _means_one_plus(model, name):
    """Qwen3.5's norms store w of 1 + w, its gated norm excepted."""
    return model.config.model_type == "qwen3_5_text" and not name.endswith("linear_attn.norm.weight")


def _heads(model, layer):
    linear = hasattr(model.model.layers[layer], "linear_attn")
    return model.config.linear_num_value_heads if linear else model.config.num_attention_heads


def write(folder, configuration, seed, dtype=torch.float32, shards=1, wrapped=False, zeroed=None, vectors=1.0):
    """Write a checkpoint in the Hugging Face layout.

    Parameters
    ----------
    folder : Path
    configuration : dict
        Fields of the text model's configuration, `model_type` among them.
    seed : int
    dtype : torch.dtype
    shards : int
        More than one makes an index file.
    wrapped : bool
        The layout of published multimodal checkpoints: text_config, other names, tensors that the text model lacks.
    zeroed : dict, optional
        Source layer to heads whose slice of the output projection is zero.
    vectors : float
        Size of linear layers' Q and K before they are normalised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = dict(configuration)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config)
    state = weights(model, np.random.default_rng(seed), zeroed or {}, vectors)
    state = {name: value.to(dtype) for name, value in state.items()}
    stored = config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    if wrapped:
        state = {name.replace("model.", "model.language_model.", 1): value for name, value in state.items()}
        state |= {"mtp.fc.weight": torch.ones(3, 4), "model.visual.pos_embed.weight": torch.ones(2, 2)}
        stored = {"model_type": "qwen3_5", "text_config": stored, "tie_word_embeddings": True, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(stored, default=str))
    names = sorted(state)
    files = ["model.safetensors"] if shards == 1 else [f"model-{i}-of-{shards}.safetensors" for i in range(shards)]
    parts = {file: names[i::shards] for i, file in enumerate(files)}
    for file, part in parts.items():
        save_file({name: state[name].contiguous() for name in part}, folder / file)
    if shards > 1:
        where = {name: file for file, part in parts.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer():
    """One token for each byte of UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def token_ids(count, seed=0):
    """Seeded token ids with no pattern."""
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


@cache
def traced(folder, ids):
    """The library's trace of a checkpoint: records of every layer (ids as a tuple)."""
    return trace(Checkpoint(folder), list(ids))[0]


def transition(folder, ids, source):
    """The library's `Transition` of one text, straight from the trace."""
    checkpoint = Checkpoint(folder)
    before, after = traced(folder, tuple(ids))[source : source + 2]
    layer = layer_of(checkpoint, source)
    return ablation.Transition(
        layer,
        layer_of(checkpoint, source + 1),
        before["residual_in"] + before["branch_out"],
        layer.contributions(before["head_values"]),
        after.get("cos"),
        after.get("sin"),
        after.get("scaling", 1.0),
    )


def measure(folder, ids, source, sample_index=0, seed=31000):
    """The library's single removals, masks and joint removals of one transition."""
    change = transition(folder, ids, source)
    single = ablation.single_removals(change)
    sets = ablation.joint_masks(single["relative"][3], seed, sample_index, source)
    return single, sets, ablation.joint_removals(change, sets, single)
