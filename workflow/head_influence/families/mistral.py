"""Mistral: softmax attention over a sliding window in every layer, no biases."""

from head_influence.families.softmax import SoftmaxLayer


class MistralLayer(SoftmaxLayer):
    """Softmax attention; a window that the configuration does not mention is transformers' default of 4096."""

    projection_bias = output_bias = False

    def sliding_window(self):
        """See `SoftmaxLayer.sliding_window`; null in the configuration means none."""
        config = self.checkpoint.text_config
        if "sliding_window" in config and config["sliding_window"] is None:
            return None
        return self.positive("sliding_window", 4096)


def layer(checkpoint, index):
    """Return decoder layer `index` (weights are read when first used)."""
    return MistralLayer(checkpoint, index)
