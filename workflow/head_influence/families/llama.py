"""Llama: softmax attention throughout, plain norm weights, optional biases."""

from head_influence.families.softmax import SoftmaxLayer


class LlamaLayer(SoftmaxLayer):
    """Softmax attention; the feed-forward block can have biases."""

    @property
    def mlp_bias(self):
        """Whether the feed-forward block has biases."""
        return self.flag("mlp_bias")


def layer(checkpoint, index):
    """Return decoder layer `index` (weights are read when first used)."""
    return LlamaLayer(checkpoint, index)
