"""Softmax attention: grouped KV heads, rotary embedding, optional head norms, output gate and sliding window."""

from functools import cached_property

import numpy as np

from head_influence.families import layer_count
from head_influence.families.base import DecoderLayer, linear, rms_norm, rotary

KINDS = ("full_attention", "sliding_attention")


def visible(tokens, window=None):
    """Which key (axis 1) a query (axis 0) sees: causal and, where there is a window, within it."""
    mask = np.tri(tokens, dtype=bool)
    return mask if window is None else mask & ~np.tri(tokens, k=-window, dtype=bool)


def window_of_layer(layer):
    """Window of a layer where `layer_types`, or else `max_window_layers`, says which layers have one; or None."""
    count, types = layer_count(layer.checkpoint), layer.checkpoint.text_config.get("layer_types")
    if types is None:
        local = layer.index >= layer.positive("max_window_layers", 28)
    elif isinstance(types, list) and len(types) == count and all(t in list(KINDS) for t in types):
        local = types[layer.index] == "sliding_attention"
    else:
        raise layer.fault(f"layer_types: expected {count} of {', '.join(KINDS)}")
    if not local or not layer.flag("use_sliding_window"):
        return None
    return layer.positive("sliding_window", 4096)


class SoftmaxLayer(DecoderLayer):
    """Softmax attention with grouped KV heads; a head is a query head."""

    kind = "softmax"
    branch = "self_attn"
    projection = "o_proj"
    gated_query = False  # q_proj holds [query, gate] per head
    head_norm = False  # learned norm of each query and key head

    @property
    def projection_bias(self):
        """Whether the query, key and value projections have biases."""
        return self.flag("attention_bias")

    @property
    def output_bias(self):
        """Whether the output projection has a bias."""
        return self.flag("attention_bias")

    def __init__(self, checkpoint, index):
        super().__init__(checkpoint, index)
        self.heads = self.positive("num_attention_heads")
        self.key_heads = self.value_heads = self.positive("num_key_value_heads", self.heads)
        if self.heads % self.key_heads:
            raise self.fault(
                f"num_attention_heads {self.heads} is not a multiple of num_key_value_heads {self.key_heads}"
            )
        self.key_dim = self.value_dim = self.positive("head_dim", self.hidden // self.heads)
        self.window = self.sliding_window()

    def sliding_window(self):
        """Keys that a query sees, itself included, or None where it sees all earlier ones."""
        return None

    def expected_shapes(self):
        """Name within the layer to shape."""
        wide = self.heads * self.key_dim * (2 if self.gated_query else 1)
        narrow = self.key_heads * self.key_dim
        shapes = super().expected_shapes() | {
            "self_attn.q_proj.weight": (wide, self.hidden),
            "self_attn.k_proj.weight": (narrow, self.hidden),
            "self_attn.v_proj.weight": (narrow, self.hidden),
        }
        if self.projection_bias:
            sizes = {"q": wide, "k": narrow, "v": narrow}
            shapes |= {f"self_attn.{c}_proj.bias": (size,) for c, size in sizes.items()}
        if self.output_bias:
            shapes["self_attn.o_proj.bias"] = (self.hidden,)
        if self.head_norm:
            shapes |= {"self_attn.q_norm.weight": (self.key_dim,), "self_attn.k_norm.weight": (self.key_dim,)}
        return shapes

    @cached_property
    def _weights(self):
        """Per component the weight (distinct heads, D, hidden) and bias (distinct heads, D) or None."""
        out = {}
        for c, heads in (("q", self.heads), ("k", self.key_heads), ("v", self.key_heads)):
            weight, bias = self.tensor(f"self_attn.{c}_proj.weight"), self.optional(f"self_attn.{c}_proj.bias")
            weight = weight.reshape(heads, -1, self.hidden)[:, : self.key_dim]  # of [query, gate] only the query
            bias = None if bias is None else bias.reshape(heads, -1)[:, : self.key_dim]
            out[c] = weight, bias
        return out

    @cached_property
    def _head_norms(self):
        return {c: self.norm_weight(f"self_attn.{c}_norm.weight") for c in "qk"} if self.head_norm else {}

    def project(self, x, head=None):
        """See `DecoderLayer.project`."""
        out = {}
        for c, (weight, bias) in self._weights.items():
            if head is not None:
                own = slice(head, head + 1) if c == "q" else slice(g := head // (self.heads // self.key_heads), g + 1)
                weight, bias = weight[own], None if bias is None else bias[own]
            flat = weight.reshape(-1, self.hidden)
            out[c] = linear(x, flat, None if bias is None else bias.reshape(-1)).reshape(len(x), -1, self.key_dim)
            if c in self._head_norms:
                out[c] = rms_norm(out[c], self._head_norms[c], self.eps)
        return out

    def effective(self, parts, cos, sin, head=None):
        """See `DecoderLayer.effective`."""
        return {"q": rotary(parts["q"], cos, sin), "k": rotary(parts["k"], cos, sin), "v": parts["v"]}

    def retrieval(self, q, k, scaling):
        """Causal softmax rows.

        Parameters
        ----------
        q, k : array (S, T, heads or key heads, D)
            Effective queries and keys.
        scaling : float
            The factor of the logits that the model's own attention uses.

        Returns
        -------
        array (S, q's heads, T, T); a query sees itself, earlier keys, and of those only its window.
        """
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
        k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        logits = q @ k.swapaxes(-1, -2) * np.float32(scaling)
        logits[..., ~visible(q.shape[2], self.window)] = -np.inf
        logits -= logits.max(axis=-1, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(axis=-1, keepdims=True)
        return logits
