"""The supported architectures: one module each, which says how a layer's tensors are named and used."""

from importlib import import_module

from head_influence import StudyError
from head_influence.checkpoint import EMBEDDING, HEAD
from head_influence.layout import CONFIG

# model_type of the text configuration -> module of this package
MODULES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
POST_NORMS = ("gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "olmo2", "olmo3", "vaultgemma")


def family_of(checkpoint):
    """Return the module that knows `checkpoint`'s architecture; `StudyError` names the supported ones."""
    found = checkpoint.text_config.get("model_type")
    if found in POST_NORMS:
        raise StudyError(
            f"{checkpoint.folder / CONFIG}: model_type {found!r} is not supported: it normalises the attention "
            "branch before adding it to the residual stream, so heads do not contribute additively to that stream"
        )
    if not isinstance(found, str) or found not in MODULES:
        raise StudyError(
            f"{checkpoint.folder / CONFIG}: model_type {found!r:.80} is not supported; "
            f"supported: {', '.join(sorted(MODULES))}"
        )
    return import_module(f"{__name__}.{MODULES[found]}")


def layer_of(checkpoint, index):
    """Return layer `index` of `checkpoint` as its family's layer object (weights are read when first used)."""
    return family_of(checkpoint).layer(checkpoint, index)


def layer_count(checkpoint):
    """Number of decoder layers; `StudyError` if the configuration and the tensors do not give the same one."""
    count, found = positive(checkpoint, "num_hidden_layers"), len(checkpoint.layer_names)
    if count != found:
        raise StudyError(f"{checkpoint.folder / CONFIG}: num_hidden_layers is {count}, but the tensors are of {found}")
    return count


def positive(checkpoint, key, default=None):
    """Return `key` of the text configuration as a positive integer of sane size, or raise a `StudyError`.

    An absent key, and null, stand for `default`.
    """
    value = checkpoint.text_config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 1 << 24:
        raise StudyError(f"{checkpoint.folder / CONFIG}: {key}: expected a positive integer, found {value!r:.80}")
    return value


def check(checkpoint):
    """Compare all that the study will read of a checkpoint with its configuration, without reading any weights.

    Returns
    -------
    list of DecoderLayer

    Raises
    ------
    StudyError
        If the architecture is not supported, or a tensor is missing, foreign, or of another shape.
    """
    if checkpoint.text_config.get("quantization_config") or checkpoint.config.get("quantization_config"):
        raise StudyError(f"{checkpoint.folder / CONFIG}: quantization_config: quantised weights are not supported")
    layers = [layer_of(checkpoint, index) for index in range(layer_count(checkpoint))]
    for layer in layers:
        layer.check()
    hidden = layers[0].hidden
    wide = (positive(checkpoint, "vocab_size"), hidden)
    check_shape(checkpoint, EMBEDDING, checkpoint.shape(EMBEDDING), wide)
    check_shape(checkpoint, "norm.weight", checkpoint.shape("norm.weight"), (hidden,))
    if not checkpoint.tied:
        check_shape(checkpoint, HEAD, checkpoint.head_shape(), wide)
    return layers


def check_shape(checkpoint, name, found, expected):
    """Raise a `StudyError` unless a tensor's stored shape is what the configuration makes it."""
    if found != expected:
        raise StudyError(f"{checkpoint.folder}: tensor {name} has shape {found}; config.json makes it {expected}")
