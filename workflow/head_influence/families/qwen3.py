"""Qwen3: softmax attention with a learned norm of each query and key head, plain norm weights."""

from head_influence.families.softmax import SoftmaxLayer, window_of_layer


class Qwen3Layer(SoftmaxLayer):
    """Softmax attention with head norms; a sliding window in the upper layers, if at all."""

    head_norm = True

    def sliding_window(self):
        """See `SoftmaxLayer.sliding_window`."""
        return window_of_layer(self)


def layer(checkpoint, index):
    """Return decoder layer `index` (weights are read when first used)."""
    return Qwen3Layer(checkpoint, index)
