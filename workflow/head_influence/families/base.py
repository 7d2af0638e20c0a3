"""What all supported decoder layers share: norms, the gated MLP, the output projection, names and shapes of tensors.

A layer object answers the questions that removing a head raises: what one head writes to the residual stream, what
the rest of its layer makes of a changed residual stream, and what the effective Q, K, V of a layer are for a given
residual input. There is no attention and no delta rule here: those run once, in the model's own modules.
Arrays are float32; N counts residual rows, S sequences, T tokens.
"""

from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np

from head_influence import StudyError
from head_influence.families import check_shape, positive
from head_influence.layout import CONFIG

SILU_SIZE = 1 << 16
FEW_ROWS = 128


def silu(x):
    """Return x * sigmoid(x), overwriting nothing; some rows at a time, whose temporary values stay in the cache."""
    out = np.empty_like(x)
    rows = max(1, SILU_SIZE * len(x) // max(x.size, 1))
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, -0
        for start in range(0, len(x), rows):
            part, y = x[start : start + rows], out[start : start + rows]
            np.negative(part, out=y)
            np.exp(y, out=y)
            y += 1
            np.divide(part, y, out=y)
    return out


def gelu_tanh(x):
    """GELU in its tanh form."""
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)))


ACTIVATIONS = {"silu": silu, "swish": silu, "gelu_pytorch_tanh": gelu_tanh, "relu": lambda x: np.maximum(x, 0)}


def rms_norm(x, weight, eps):
    """Root-mean-square norm over the last axis; `weight` is the factor itself (1 + w where the family says so)."""
    scale = np.einsum("...d,...d->...", x, x)[..., None] / np.float32(x.shape[-1])
    return x * (1 / np.sqrt(scale + np.float32(eps))) * weight


def linear(x, weight, bias=None):
    """Return x W^T (+ b): (N, in) and (out, in) to (N, out)."""
    if len(x) <= FEW_ROWS:
        return np.ascontiguousarray(columns(x.T, weight, bias).T)
    y = x @ weight.T
    if bias is not None:
        y += bias
    return y


def columns(x, weight, bias=None):
    """Return W x (+ b): (in, N) and (out, in) to (out, N). BLAS is faster with the weights on the left."""
    y = weight @ x
    if bias is not None:
        y += bias[:, None]
    return y


def rotary(x, cos, sin):
    """Rotate the first `cos.shape[-1]` dimensions of x (..., T, heads, D) by the model's cos and sin (T, rotary)."""
    size = cos.shape[-1]
    half = size // 2
    turned = np.concatenate((-x[..., half:size], x[..., :half]), axis=-1)
    out = x.copy()
    out[..., :size] = x[..., :size] * cos[:, None] + turned * sin[:, None]
    return out


IGNORED = {"self_attn.rotary_emb.inv_freq"}  # old checkpoints store this table, the modules make it anew


def mlp_shapes(name, hidden, inner):
    """Name to shape of a gated MLP's tensors."""
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


class DecoderLayer(ABC):
    """One pre-norm decoder layer: x + branch, then r + MLP(norm(r)).

    Attributes
    ----------
    kind : str
        "softmax" or "linear".
    heads, key_heads, value_heads : int
        Heads as the study counts them (query heads or value heads), and how many distinct K and V there are.
    key_dim, value_dim : int
        Dimensions of one head's Q and K, and of its V.
    window : int or None
        Keys that a query sees, itself included, where attention is local.
    reach : int
        Earlier positions that a position's effective Q, K, V depend on (the convolution's left context).
    """

    branch = ""  # name of the token mixer within the layer
    projection = ""  # name of its output projection
    norm_offset = 0.0  # 1.0 where a stored norm weight w means 1 + w
    mlp_bias = False
    window = None
    reach = 0

    def __init__(self, checkpoint, index):
        self.checkpoint, self.index = checkpoint, index
        self.hidden = self.positive("hidden_size")
        self.eps = checkpoint.text_config.get("rms_norm_eps", 1e-6)
        if type(self.eps) not in (int, float) or not 0 <= self.eps < 1:
            raise self.fault(f"rms_norm_eps: expected a small number, found {self.eps!r:.80}")
        act = checkpoint.text_config.get("hidden_act", "silu")
        if not isinstance(act, str) or act not in ACTIVATIONS:
            raise self.fault(f"hidden_act {act!r:.80} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}")
        self.act = ACTIVATIONS[act]

    def fault(self, reason):
        """Return the `StudyError` that blames the configuration."""
        return StudyError(f"{self.checkpoint.folder / CONFIG}: {reason}")

    def positive(self, key, default=None):
        """Return a positive integer of the configuration; null and an absent key mean the default, if there is one."""
        return positive(self.checkpoint, key, default)

    def name(self, suffix):
        """Full name (without the checkpoint's prefix) of one of this layer's tensors."""
        return f"layers.{self.index}.{suffix}"

    def tensor(self, suffix, rows=None):
        """One of this layer's tensors as float32."""
        return self.checkpoint.tensor(self.name(suffix), rows)

    def optional(self, suffix):
        """Return a tensor, or None where the checkpoint has none of that name."""
        return self.tensor(suffix) if self.name(suffix) in self.checkpoint else None

    def norm_weight(self, suffix):
        """A norm's factor, by the family's convention."""
        return self.tensor(suffix) + np.float32(self.norm_offset)

    def flag(self, key, default=False):
        """Return a yes-or-no setting of the configuration."""
        value = self.checkpoint.text_config.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(f"{key}: expected true or false, found {value!r:.80}")
        return value

    def expected_shapes(self):
        """Name within the layer to shape, for every tensor of the layer."""
        hidden = (self.hidden,)
        return {
            "input_layernorm.weight": hidden,
            "post_attention_layernorm.weight": hidden,
            f"{self.branch}.{self.projection}.weight": (self.hidden, self.heads * self.value_dim),
        } | self.mlp_shapes()

    def mlp_shapes(self):
        """Shapes of the feed-forward block's tensors."""
        shapes = mlp_shapes("mlp", self.hidden, self.positive("intermediate_size"))
        if self.mlp_bias:
            shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
        return shapes

    def check(self):
        """Compare the layer's stored tensors with the configuration; a difference is a `StudyError`."""
        expected = self.expected_shapes()
        for suffix, shape in expected.items():
            name = self.name(suffix)
            check_shape(self.checkpoint, self.checkpoint.prefix + name, self.checkpoint.shape(name), shape)
        foreign = sorted(set(self.checkpoint.layer_names[self.index]) - set(expected) - IGNORED)
        if foreign:
            raise StudyError(
                f"{self.checkpoint.folder}: tensor {self.checkpoint.prefix}{self.name(foreign[0])} is not part of "
                f"model_type {self.checkpoint.text_config['model_type']} as config.json describes it"
            )

    def module_tensors(self):
        """Return the tensors that the model's own module of this layer wants: name to float32 array."""
        return {suffix: self.tensor(suffix) for suffix in self.expected_shapes()}

    @cached_property
    def out_bias(self):
        """Bias of the output projection (hidden,), or None."""
        return self.optional(f"{self.branch}.{self.projection}.bias")

    def contributions(self, head_values):
        """Return what each head writes to the residual stream.

        Parameters
        ----------
        head_values : array (T, heads * value_dim)
            The input of the output projection: after the gate or the gated norm, where there is one.

        Returns
        -------
        array (heads, T, hidden), without the projection's bias
        """
        weight = self.tensor(f"{self.branch}.{self.projection}.weight")
        slices = head_values.reshape(len(head_values), self.heads, self.value_dim).swapaxes(0, 1)
        weights = weight.reshape(self.hidden, self.heads, self.value_dim).transpose(1, 2, 0)
        return slices @ weights

    def gated_mlp(self, name):
        """Weight and bias (or None) of the gate, up and down projections of the gated MLP `name`."""
        parts = (f"{name}.{part}_proj" for part in ("gate", "up", "down"))
        return [(self.tensor(f"{part}.weight"), self.optional(f"{part}.bias")) for part in parts]

    @cached_property
    def _mlp_weights(self):
        return self.gated_mlp("mlp")

    @cached_property
    def _post_norm(self):
        return self.norm_weight("post_attention_layernorm.weight")

    @cached_property
    def _input_norm(self):
        return self.norm_weight("input_layernorm.weight")

    def mlp(self, x):
        """The feed-forward block on rows (N, hidden)."""
        return self.apply_mlp(x, *self._mlp_weights)

    def apply_mlp(self, x, gate, up, down):
        """Apply a gated MLP, given as weight and bias of its three projections, to rows (N, hidden)."""
        y = self.act(columns(x.T, *gate))
        y *= columns(x.T, *up)
        return np.ascontiguousarray(columns(y, *down).T)

    def post_norm(self, r):
        """The norm before the feed-forward block, on residual rows (N, hidden)."""
        return rms_norm(r, self._post_norm, self.eps)

    def finish(self, r):
        """The rest of the layer after its token mixer: r + MLP(post_attention_norm(r)), rows (N, hidden)."""
        return r + self.mlp(self.post_norm(r))

    def normed(self, x):
        """The layer's input norm on residual rows (N, hidden)."""
        return rms_norm(x, self._input_norm, self.eps)

    def slots(self, x, axis=-1):
        """Repeat the distinct heads of Q, K or V (along `axis`) to the heads that use them."""
        return np.repeat(x, self.heads // x.shape[axis], axis=axis)

    @abstractmethod
    def project(self, x, head=None):
        """Project normed rows, pointwise in tokens.

        Parameters
        ----------
        x : array (N, hidden)
        head : int, optional
            Only what this head uses; all heads otherwise.

        Returns
        -------
        dict
            "q", "k", "v" to (N, distinct heads, D) before everything that looks at positions.
        """

    @abstractmethod
    def effective(self, parts, cos, sin, head=None):
        """Effective Q, K, V of whole sequences.

        Parameters
        ----------
        parts : dict
            Outputs of `project` gathered to sequences, (S, T, distinct heads, D).
        cos, sin : array (T, rotary)
            The model's rotary tables (unused by linear layers).
        head : int, optional
            As in `project`.

        Returns
        -------
        dict
            "q", "k", "v" to (S, T, distinct heads, D).
        """
