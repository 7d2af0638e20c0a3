"""Qwen3-Next: as Qwen3.5 but for the linear layers' projections, interleaved by key head, and the experts."""

import numpy as np

from head_influence.families.experts import SparseMLP
from head_influence.families.qwen3_5 import Qwen35Linear, Qwen35Softmax, layer_kinds


class Qwen3NextExperts(SparseMLP):
    """Experts of Qwen3-Next."""

    shared_expert = True
    normalised_default = True


class Qwen3NextSoftmax(Qwen3NextExperts, Qwen35Softmax):
    """Gated softmax attention and experts."""


class Qwen3NextLinear(Qwen3NextExperts, Qwen35Linear):
    """Gated delta net and experts."""

    def input_rows(self):
        """Name to number of rows of the projections of the layer's input."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        return {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * self.heads}

    def qkv_weight(self):
        """See `LinearLayer.qkv_weight`; stored is, for each key head, [query, key, its values, its gates]."""
        stored = self.tensor("linear_attn.in_proj_qkvz.weight").reshape(self.key_heads, -1, self.hidden)
        values = self.heads // self.key_heads * self.value_dim
        parts = np.split(stored, np.cumsum([self.key_dim, self.key_dim, values]), axis=1)[:3]
        return np.concatenate([part.reshape(-1, self.hidden) for part in parts])


def layer(checkpoint, index):
    """Return decoder layer `index` (weights are read when first used)."""
    kind = layer_kinds(checkpoint)[index]
    return (Qwen3NextLinear if kind == "linear" else Qwen3NextSoftmax)(checkpoint, index)
