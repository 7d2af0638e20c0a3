"""Controls for learned structure: the same architecture with random weights, or with its own weights shuffled.

Both are written as ordinary checkpoints of the text model, in the type and under the names of the studied one.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from head_influence import StudyError
from head_influence.layout import TOKENIZER_FILES
from head_influence.models import text_configuration


def write_random(checkpoint, seed, folder):
    """Write the architecture with weights as its own initialisation in transformers draws them.

    Parameters
    ----------
    checkpoint : Checkpoint
    seed : int
        Of torch's generator.
    folder : path
        Where the new checkpoint goes.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(text_configuration(checkpoint), dtype=torch.float32)
    kind = stored_type(checkpoint)
    tensors = {name: x.to(kind).contiguous() for name, x in model.state_dict().items() if name != "lm_head.weight"}
    if not model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.lm_head.weight.detach().to(kind)
    _write(checkpoint, tensors, folder)


def write_permuted(checkpoint, seed, folder):
    """Write the studied weights, each matrix with its entries shuffled; vectors (norms, biases) stay as they are.

    Parameters
    ----------
    checkpoint : Checkpoint
    seed : int
        Of numpy's generators, one per tensor in the order of their names.
    folder : path
        Where the new checkpoint goes.
    """
    tensors = {}
    for i, name in enumerate(sorted(checkpoint.where)):
        if not name.startswith(checkpoint.prefix) and name != "lm_head.weight":
            continue
        with safe_open(checkpoint.where[name].path, framework="pt") as file:
            x = file.get_tensor(name)
        if x.ndim > 1:
            order = np.random.default_rng([seed, i]).permutation(x.numel())
            x = x.reshape(-1)[torch.from_numpy(order)].reshape(x.shape)
        own = name if name == "lm_head.weight" else "model." + name.removeprefix(checkpoint.prefix)
        tensors[own] = x
    _write(checkpoint, tensors, folder)


def stored_type(checkpoint):
    """Return the torch type of the checkpoint's embedding."""
    name = checkpoint.prefix + "embed_tokens.weight"
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    return kinds.get(checkpoint.where[name].entries[name]["dtype"], torch.float32)


def _write(checkpoint, tensors, folder):
    """Write config, tokenizer and, last, the weights: each whole or not at all."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config = checkpoint.text_config | {"tie_word_embeddings": "lm_head.weight" not in tensors}
        (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True), encoding="utf-8")
        for name in TOKENIZER_FILES:
            if (checkpoint.folder / name).exists():
                shutil.copyfile(checkpoint.folder / name, folder / name)
        handle, temporary = tempfile.mkstemp(suffix=".part", dir=folder)
        os.close(handle)
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
            Path(temporary).chmod(0o644)
            Path(temporary).replace(folder / "model.safetensors")
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise StudyError(f"{folder}: cannot write the control's weights ({error})") from error
