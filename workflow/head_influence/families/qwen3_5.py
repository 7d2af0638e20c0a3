"""Qwen3.5: gated delta net layers and gated softmax layers mixed; norm weights w mean 1 + w."""

from head_influence import StudyError
from head_influence.families import layer_count, positive
from head_influence.families.linear import LinearLayer
from head_influence.families.softmax import SoftmaxLayer
from head_influence.layout import CONFIG

KINDS = {"full_attention": "softmax", "linear_attention": "linear"}


class Qwen35Softmax(SoftmaxLayer):
    """Softmax attention with head norms and a sigmoid output gate that shares the query projection."""

    norm_offset = 1.0
    gated_query = True
    head_norm = True


class Qwen35Linear(LinearLayer):
    """Gated delta net; its own gated norm (plain weight) lies before the output projection."""

    norm_offset = 1.0


def layer_kinds(checkpoint):
    """Return the kind of every layer; by default three linear ones and a softmax one in turn."""
    count = layer_count(checkpoint)
    every = positive(checkpoint, "full_attention_interval", 4)
    types = checkpoint.text_config.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)
    ]
    if not isinstance(types, list) or len(types) != count or any(t not in list(KINDS) for t in types):
        raise StudyError(f"{checkpoint.folder / CONFIG}: layer_types: expected {count} of {', '.join(KINDS)}")
    return [KINDS[t] for t in types]


def layer(checkpoint, index):
    """Return decoder layer `index` (weights are read when first used)."""
    return (Qwen35Linear if layer_kinds(checkpoint)[index] == "linear" else Qwen35Softmax)(checkpoint, index)
