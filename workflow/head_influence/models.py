"""The model's own modules from transformers, filled layer by layer or whole; float32, eager attention."""

import sys
from contextlib import contextmanager

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from head_influence import StudyError
from head_influence.checkpoint import EMBEDDING
from head_influence.families import layer_of

# Keys of a stored configuration that are about loading, not about the model: code from elsewhere, kernels, types.
NOT_THE_MODEL = (
    "model_type", "dtype", "torch_dtype", "auto_map", "attn_implementation", "_attn_implementation",
    "experts_implementation", "_experts_implementation", "quantization_config",
)  # fmt: skip


def text_configuration(checkpoint):
    """Return the transformers configuration of the text model."""
    fields = {k: v for k, v in checkpoint.text_config.items() if k not in NOT_THE_MODEL}
    fields["tie_word_embeddings"] = checkpoint.tied  # a multimodal layout may state it at the top only
    try:
        return AutoConfig.for_model(checkpoint.text_config["model_type"], **fields)
    except Exception as error:  # the configuration class's own validation, of many types
        reason = " ".join(str(error).split())
        raise StudyError(f"{checkpoint.folder / 'config.json'}: transformers does not accept it: {reason}") from error


def empty_model(checkpoint):
    """Build the causal language model without weights (on the meta device), rotary tables excepted."""
    config = text_configuration(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")
    model.eval().requires_grad_(False)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config)
    return model


def tensors(values):
    """Name to array as name to torch tensor, without a copy."""
    return {name: torch.from_numpy(array) for name, array in values.items()}


def fill(module, values, what):
    """Give a module on the meta device its weights; missing or foreign tensors are a `StudyError`."""
    try:
        module.load_state_dict(tensors(values), strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise StudyError(f"{what}: weights do not fit the model's modules: {reason}") from error
    module.requires_grad_(False)


def fill_layer(model, checkpoint, index):
    """Read decoder layer `index` into its module."""
    layer = model.model.layers[index]
    fill(layer, layer_of(checkpoint, index).module_tensors(), f"{checkpoint.folder}: layer {index}")
    return layer


def fill_final_norm(model, checkpoint):
    """Read the norm before the language-model head."""
    fill(model.model.norm, {"weight": checkpoint.tensor("norm.weight")}, f"{checkpoint.folder}: final norm")


def head_weight(checkpoint):
    """Weight (vocabulary, hidden) of the language-model head, which may be tied to the embedding."""
    return checkpoint.head_weight()


def embed(checkpoint, ids):
    """Embeddings (1, T, hidden) of token ids; only their rows are read."""
    ids, size = np.asarray(ids, int), checkpoint.shape(EMBEDDING)[0]
    if ids.max(initial=0) >= size:
        raise StudyError(
            f"{checkpoint.folder}: the tokenizer gives token {ids.max()}, but the model's vocabulary has {size}: "
            "tokenizer.json belongs to another model"
        )
    return torch.from_numpy(checkpoint.tensor(EMBEDDING, rows=ids))[None]


def whole_model(checkpoint):
    """Build the whole model in memory, as transformers would run it."""
    model = empty_model(checkpoint)
    for index in range(len(model.model.layers)):
        fill_layer(model, checkpoint, index)
    fill_final_norm(model, checkpoint)
    fill(
        model.model.embed_tokens,
        {"weight": checkpoint.tensor(EMBEDDING)},
        f"{checkpoint.folder}: embedding",
    )
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        fill(model.lm_head, {"weight": head_weight(checkpoint)}, f"{checkpoint.folder}: language-model head")
    return model


@contextmanager
def streamed(model, checkpoint):
    """Run the model's own forward pass with one decoder layer's weights in memory at a time."""

    def load(layer, args, kwargs):
        fill_layer(model, checkpoint, list(model.model.layers).index(layer))

    def release(layer, args, kwargs, output):
        layer.to("meta")

    handles = []
    for layer in model.model.layers:
        handles.append(layer.register_forward_pre_hook(load, with_kwargs=True))
        handles.append(layer.register_forward_hook(release, with_kwargs=True))
    fill_final_norm(model, checkpoint)
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replaced(module, **functions):
    """Replace functions of the modelling file that defines `module`'s class, for a while."""
    source = sys.modules[type(module).__module__]
    before = {name: getattr(source, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(source, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(source, name, function)
