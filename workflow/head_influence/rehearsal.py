"""A checkpoint in the published layout of Qwen3.5, at full size, with seeded random weights.

Names, shapes, type and sharding are those of the published multimodal files: text model, vision tower and the head that
predicts several tokens. Values are drawn as transformers initialises them, a block at a time.
"""

import json
import math
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from head_influence import StudyError
from head_influence.families import layer_count, layer_of, positive
from head_influence.families.qwen3_5 import Qwen35Softmax
from head_influence.hub import validate
from head_influence.json_files import read_json, write_json
from head_influence.layout import CONFIG, INDEX, TOKENIZER_FILES

TEXT = "model.language_model."
BLOCK = 1 << 22  # values drawn at a time
LAYER_NORMS = ("norm1.", "norm2.", "merger.norm.")  # of the vision tower: their weight is the factor itself


def tensor_shapes(config):
    """Name to shape of every tensor of the published layout.

    Parameters
    ----------
    config : dict
        A multimodal configuration of Qwen3.5 with tied embeddings.
    """
    text, vision = config["text_config"], config["vision_config"]
    described = SimpleNamespace(
        folder=Path("rehearsal"), text_config=text, layer_names=range(text.get("num_hidden_layers", 0))
    )
    hidden = positive(described, "hidden_size")
    shapes = {
        f"{TEXT}embed_tokens.weight": (positive(described, "vocab_size"), hidden),
        f"{TEXT}norm.weight": (hidden,),
    }
    for index in range(layer_count(described)):
        for name, shape in layer_of(described, index).expected_shapes().items():
            shapes[f"{TEXT}layers.{index}.{name}"] = shape
    for name, shape in Qwen35Softmax(described, 0).expected_shapes().items():
        shapes[f"mtp.layers.0.{name}"] = shape
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return shapes | {f"model.visual.{name}": shape for name, shape in vision_shapes(vision).items()}


def vision_shapes(vision):
    """Name to shape of the vision tower's tensors, which the study never reads."""
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = size * vision["spatial_merge_size"] ** 2

    def affine(name, *shape):
        return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}

    shapes = affine("patch_embed.proj", size, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    shapes["pos_embed.weight"] = (vision["num_position_embeddings"], size)
    for block in (f"blocks.{index}" for index in range(vision["depth"])):
        shapes |= affine(f"{block}.norm1", size) | affine(f"{block}.norm2", size)
        shapes |= affine(f"{block}.attn.qkv", 3 * size, size) | affine(f"{block}.attn.proj", size, size)
        shapes |= affine(f"{block}.mlp.linear_fc1", inner, size) | affine(f"{block}.mlp.linear_fc2", size, inner)
    shapes |= affine("merger.norm", size) | affine("merger.linear_fc1", merged, merged)
    return shapes | affine("merger.linear_fc2", vision["out_hidden_size"], merged)


def values(name, shape, seed, scale):
    """Yield a tensor's values in blocks, flat float32, as transformers would initialise them."""
    count, rng = math.prod(shape), np.random.default_rng([seed, zlib.crc32(name.encode())])
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        if name.endswith("A_log"):
            yield np.log(rng.uniform(0.01, 16, size).astype(np.float32))
        elif name.endswith(("dt_bias", "linear_attn.norm.weight")):
            yield np.ones(size, np.float32)
        elif len(shape) == 1:  # biases, and norms whose weight w means 1 + w
            layer_norm = name.endswith("weight") and any(part in name for part in LAYER_NORMS)
            yield np.full(size, float(layer_norm), np.float32)
        else:
            yield rng.standard_normal(size, np.float32) * np.float32(scale)


def bfloat16(x):
    """Round float32 values to the nearest bfloat16, ties to even, as uint16."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def shards(shapes, largest):
    """Divide tensors, in their order, into lists of at most `largest` bytes (a larger tensor has its own)."""
    parts, size = [[]], 0
    for name, shape in shapes.items():
        need = 2 * math.prod(shape)
        if parts[-1] and size + need > largest:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += need
    return parts


def write_shard(path, shapes, seed, scale):
    """Write one safetensors file of bfloat16 tensors, value by value."""
    header, place = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end = place + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for block in values(name, shape, seed, scale):
                file.write(bfloat16(block))


def write_rehearsal(config_file, tokenizer_folder, folder, seed=0, largest=1 << 30, say=print):
    """Write the checkpoint; `config.json` comes last, so that an interrupted one is not taken for whole.

    Parameters
    ----------
    config_file : path
        A published multimodal configuration of Qwen3.5.
    tokenizer_folder : path
        Whose tokenizer is copied; its vocabulary may be smaller.
    folder : path
        Where the checkpoint goes.
    seed : int
    largest : int
        Bytes of a shard.
    say : callable
        Takes lines of progress.

    Raises
    ------
    StudyError
        If the configuration is not of that kind, or the disk is full.
    """
    config, folder = read_json(config_file), Path(folder)
    try:
        shapes = tensor_shapes(config)
    except (KeyError, TypeError, AttributeError) as error:
        raise StudyError(f"{config_file}: not a multimodal configuration of Qwen3.5 ({error!r})") from None
    parts = shards(shapes, largest)
    names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    total = 2 * sum(map(math.prod, shapes.values()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        for part, name in zip(parts, names, strict=True):
            say(f"writing {name}")
            write_shard(folder / name, {n: shapes[n] for n in part}, seed, config["text_config"]["initializer_range"])
        where = {tensor: name for part, name in zip(parts, names, strict=True) for tensor in part}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        for name in TOKENIZER_FILES:
            if (Path(tokenizer_folder) / name).exists():
                shutil.copyfile(Path(tokenizer_folder) / name, folder / name)
        write_json(folder / CONFIG, config)
    except OSError as error:
        raise StudyError(f"{folder}: cannot be written ({error.strerror})") from error
    validate(folder)
