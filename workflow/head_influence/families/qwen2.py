"""Qwen2: softmax attention with biases of queries, keys and values; a sliding window in the upper layers, if at all."""

from head_influence.families.softmax import SoftmaxLayer, window_of_layer


class Qwen2Layer(SoftmaxLayer):
    """Softmax attention with input biases."""

    projection_bias = True
    output_bias = False

    def sliding_window(self):
        """See `SoftmaxLayer.sliding_window`."""
        return window_of_layer(self)


def layer(checkpoint, index):
    """Return decoder layer `index` (weights are read when first used)."""
    return Qwen2Layer(checkpoint, index)
