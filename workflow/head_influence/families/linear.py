"""Linear attention: the gated delta net, a causal convolution before Q, K, V and normalised queries and keys."""

from functools import cached_property

import numpy as np

from head_influence.families.base import DecoderLayer, linear


class LinearLayer(DecoderLayer):
    """Gated delta net: causal depthwise convolution and SiLU before Q, K, V; a head is a value head."""

    kind = "linear"
    branch = "linear_attn"
    projection = "out_proj"

    def __init__(self, checkpoint, index):
        super().__init__(checkpoint, index)
        self.heads = self.value_heads = self.positive("linear_num_value_heads")
        self.key_heads = self.positive("linear_num_key_heads")
        if self.heads % self.key_heads:
            raise self.fault(
                f"linear_num_value_heads {self.heads} is not a multiple of linear_num_key_heads {self.key_heads}"
            )
        self.key_dim = self.positive("linear_key_head_dim")
        self.value_dim = self.positive("linear_value_head_dim")
        self.reach = self.positive("linear_conv_kernel_dim") - 1

    @property
    def _channels(self):
        keys = self.key_heads * self.key_dim
        return {"q": slice(0, keys), "k": slice(keys, 2 * keys), "v": slice(2 * keys, None)}

    def expected_shapes(self):
        """Name within the layer to shape."""
        channels = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        inputs = {f"linear_attn.{name}.weight": (rows, self.hidden) for name, rows in self.input_rows().items()}
        return (
            super().expected_shapes()
            | inputs
            | {
                "linear_attn.conv1d.weight": (channels, 1, self.reach + 1),
                "linear_attn.norm.weight": (self.value_dim,),
                "linear_attn.A_log": (self.heads,),
                "linear_attn.dt_bias": (self.heads,),
            }
        )

    def input_rows(self):
        """Name to number of rows of the projections of the layer's input."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        return {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_a": self.heads, "in_proj_b": self.heads}

    def qkv_weight(self):
        """Projection to all channels, queries, keys and values one after the other: (channels, hidden)."""
        return self.tensor("linear_attn.in_proj_qkv.weight")

    @cached_property
    def _weights(self):
        """Per component the projection (heads, D, hidden), the convolution's taps (heads, D, kernel) and its bias."""
        weight, taps = self.qkv_weight(), self.tensor("linear_attn.conv1d.weight")
        bias = self.optional("linear_attn.conv1d.bias")
        out = {}
        for c, part in self._channels.items():
            size = self.value_dim if c == "v" else self.key_dim
            out[c] = (
                weight[part].reshape(-1, size, self.hidden),
                taps[part].reshape(-1, size, self.reach + 1),
                None if bias is None else bias[part].reshape(-1, size),
            )
        return out

    def _own(self, component, head):
        if head is None:
            return slice(None)
        index = head if component == "v" else head // (self.heads // self.key_heads)
        return slice(index, index + 1)

    def project(self, x, head=None):
        """See `DecoderLayer.project`."""
        out = {}
        for c, (weight, _, _) in self._weights.items():
            weight = weight[self._own(c, head)]
            out[c] = linear(x, weight.reshape(-1, self.hidden)).reshape(len(x), *weight.shape[:2])
        return out

    def effective(self, parts, cos, sin, head=None):
        """See `DecoderLayer.effective`; Q and K are normalised and Q scaled as the delta rule does it."""
        out = {}
        for c, (_, taps, bias) in self._weights.items():
            own, x = self._own(c, head), parts[c]
            taps, tokens = taps[own], x.shape[1]
            y = x * taps[..., -1]
            for back in range(1, min(self.reach, tokens - 1) + 1):  # before the first token there are zeros
                y[:, back:] += x[:, : tokens - back] * taps[..., -1 - back]
            if bias is not None:
                y += bias[own]
            y = self.act(y)
            if c != "v":
                y *= 1 / np.sqrt(np.einsum("...d,...d->...", y, y)[..., None] + np.float32(1e-6))
            if c == "q":
                y *= np.float32(self.key_dim**-0.5)
            out[c] = y
        return out
