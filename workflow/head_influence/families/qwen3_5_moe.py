"""Qwen3.5 with mixtures of experts in every layer, one of them shared."""

from head_influence.families.experts import SparseMLP
from head_influence.families.qwen3_5 import Qwen35Linear, Qwen35Softmax, layer_kinds


class Qwen35Experts(SparseMLP):
    """Experts of Qwen3.5: the chosen ones' weights always add up to 1."""

    sparse = True
    shared_expert = True
    normalised = True


class Qwen35MoeSoftmax(Qwen35Experts, Qwen35Softmax):
    """Gated softmax attention and experts."""


class Qwen35MoeLinear(Qwen35Experts, Qwen35Linear):
    """Gated delta net and experts."""


def layer(checkpoint, index):
    """Return decoder layer `index` (weights are read when first used)."""
    kind = layer_kinds(checkpoint)[index]
    return (Qwen35MoeLinear if kind == "linear" else Qwen35MoeSoftmax)(checkpoint, index)
