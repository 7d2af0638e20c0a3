"""Qwen3 with mixtures of experts: attention as in Qwen3, the same window, if any, in every layer."""

from head_influence.families.experts import SparseMLP
from head_influence.families.softmax import SoftmaxLayer


class Qwen3MoeLayer(SparseMLP, SoftmaxLayer):
    """Softmax attention with head norms, and experts."""

    head_norm = True

    def sliding_window(self):
        """See `SoftmaxLayer.sliding_window`."""
        return self.positive("sliding_window", 4096) if self.flag("use_sliding_window") else None


def layer(checkpoint, index):
    """Return decoder layer `index` (weights are read when first used)."""
    return Qwen3MoeLayer(checkpoint, index)
