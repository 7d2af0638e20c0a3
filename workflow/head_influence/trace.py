"""One pass of a text through the model's own modules: what the interventions start from and are checked against."""

import inspect
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from head_influence import StudyError, files
from head_influence.controls import ONE, token_coordinates
from head_influence.families import layer_of
from head_influence.models import embed, empty_model, replaced, streamed, whole_model


class Recorder:
    """Hooks on every decoder layer of a model; `records[i]` fills while the model runs.

    Per layer: residual_in (T, hidden); head_values (T, heads * value_dim), the input of the output projection;
    branch_out (T, hidden), its output with bias; q, k, v (T, heads, D), effective and repeated to the heads that use
    them; for softmax layers cos, sin (T, rotary), retrieval (heads, T, T) and the float `scaling`.
    """

    def __init__(self, model, kinds):
        self.records = [{} for _ in kinds]
        self._model, self._kinds = model, kinds
        self._current = None

    def __enter__(self):
        self._stack = ExitStack()
        for index, (layer, kind) in enumerate(zip(self._model.model.layers, self._kinds, strict=True)):
            mixer = layer.linear_attn if kind == "linear" else layer.self_attn
            projection = mixer.out_proj if kind == "linear" else mixer.o_proj
            for handle in (
                layer.register_forward_pre_hook(self._enter_layer(index), with_kwargs=True),
                projection.register_forward_hook(self._see_projection),
            ):
                self._stack.callback(handle.remove)
        layers = self._model.model.layers
        if "softmax" in self._kinds:
            source = inspect.getmodule(type(layers[self._kinds.index("softmax")].self_attn))
            own = source.eager_attention_forward
            self._stack.enter_context(
                replaced(layers[0], eager_attention_forward=lambda *a, **k: self._see_attention(own, *a, **k))
            )
        if "linear" in self._kinds:
            source = inspect.getmodule(type(layers[0]))
            rule, norm = source.torch_chunk_gated_delta_rule, source.l2norm
            self._stack.enter_context(
                replaced(
                    layers[0],
                    torch_chunk_gated_delta_rule=lambda *a, **k: self._see_delta_rule(rule, *a, **k),
                )
            )
            inner = inspect.unwrap(rule).__globals__  # where the rule itself looks l2norm up
            inner["l2norm"] = lambda *a, **k: self._see_l2norm(norm, *a, **k)
            self._stack.callback(inner.__setitem__, "l2norm", norm)
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def _enter_layer(self, index):
        def hook(layer, args, kwargs):
            self._current = self.records[index]
            hidden = args[0] if args else kwargs["hidden_states"]
            self._current["residual_in"] = hidden[0].clone()
            if self._kinds[index] == "softmax":
                cos, sin = kwargs["position_embeddings"]
                self._current |= {"cos": cos.reshape(-1, cos.shape[-1]), "sin": sin.reshape(-1, sin.shape[-1])}

        return hook

    def _see_projection(self, module, args, output):
        self._current |= {"head_values": args[0][0].clone(), "branch_out": output[0].clone()}

    def _see_attention(self, own, module, query, key, value, mask, scaling, **kwargs):
        output, rows = own(module, query, key, value, mask, scaling=scaling, **kwargs)
        groups = query.shape[1] // key.shape[1]
        self._current |= {
            "q": query[0].transpose(0, 1),
            "k": key[0].repeat_interleave(groups, dim=0).transpose(0, 1),
            "v": value[0].repeat_interleave(groups, dim=0).transpose(0, 1),
            "retrieval": rows[0],
            "scaling": float(scaling),
        }
        return output, rows

    def _see_delta_rule(self, own, query, key, value, **kwargs):
        self._normed = []
        output = own(query, key, value, **kwargs)
        if len(self._normed) != 2:
            raise StudyError(
                "the gated delta rule did not run in transformers' own reference code but in another kernel (is the "
                "package flash-linear-attention installed?); remove it from this environment"
            )
        q, k = (x[0].transpose(0, 1) for x in self._normed)
        self._current |= {"q": q * q.shape[-1] ** -0.5, "k": k, "v": value[0]}
        return output

    def _see_l2norm(self, own, x, *args, **kwargs):
        y = own(x, *args, **kwargs)
        self._normed.append(y)
        return y


def record(model, kinds, embeddings):
    """Run `model` on embeddings (1, T, hidden); return the layers' records as arrays, and the last hidden state."""
    with torch.no_grad(), Recorder(model, kinds) as recorder:
        last = model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    return [
        {k: v if isinstance(v, float) else np.ascontiguousarray(v.numpy()) for k, v in r.items()}
        for r in recorder.records
    ], last[0].numpy()


def trace(checkpoint, ids, say=lambda line: None):
    """Trace one text with one layer's weights in memory at a time.

    Parameters
    ----------
    checkpoint : Checkpoint
    ids : sequence of int
        The text's token ids, T of them.
    say : callable, optional
        Is told, in a line, which layer is computed.

    Returns
    -------
    list of dict
        One record per layer, see `Recorder`.
    last : array (T, hidden)
        The output of the final norm.
    """
    model = empty_model(checkpoint)
    kinds = [layer_of(checkpoint, i).kind for i in range(len(model.model.layers))]
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: say(f"layer {i} of {len(kinds)}"))
    with streamed(model, checkpoint):
        return record(model, kinds, embed(checkpoint, ids))


def whole_forward_error(checkpoint, ids, residuals, last):
    """Compare a streamed trace with the whole model's own forward pass.

    Parameters
    ----------
    checkpoint : Checkpoint
    ids : sequence of int
    residuals : list of array (T, hidden)
        The streamed pass's residual stream entering each layer.
    last : array (T, hidden)
        Its final norm's output.

    Returns
    -------
    dict
        "residual stream" and "logits" to the largest absolute difference over the largest absolute value.
    """
    model = whole_model(checkpoint)
    own = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: own.append((args[0] if args else kwargs["hidden_states"])[0]),
            with_kwargs=True,
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(map(int, ids))]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    streamed_logits = torch.from_numpy(np.array(last)) @ model.lm_head.weight.T
    return {
        "residual stream": max(scaled_error(x, y.numpy()) for x, y in zip(residuals, own, strict=True)),
        "logits": scaled_error(streamed_logits.numpy(), logits.numpy()),
    }


def scaled_error(found, expected):
    """Largest absolute difference over the largest absolute expected value; 0 where both are all zero."""
    error = float(np.abs(found - expected).max())
    return error / (float(np.abs(expected).max()) or 1.0)


SHAPES = {
    "residual_in": ("residual stream that enters the layer", ("query", "hidden")),
    "head_values": ("input of the output projection, head by head", ("query", "head_channel")),
    "branch_out": ("output of the token mixer, bias included", ("query", "hidden")),
    "q": ("effective queries", ("query", "head", "key_dim")),
    "k": ("effective keys, repeated to the heads that use them", ("query", "head", "key_dim")),
    "v": ("effective values, repeated to the heads that use them", ("query", "head", "value_dim")),
    "cos": ("cosines of the rotary embedding", ("query", "rotary_dim")),
    "sin": ("sines of the rotary embedding", ("query", "rotary_dim")),
    "retrieval": ("causal softmax rows", ("head", "query", "key")),
    "last": ("output of the final norm", ("query", "hidden")),
}


def write_trace(folder, records, last, ids, strings, attributes):
    """Write a traced text: a file for each layer, `L00.nc` and so on, and `last.nc` with what follows them.

    Parameters
    ----------
    folder : path
    records : list of dict
        From `trace`.
    last : array (T, hidden)
        The final norm's output.
    ids, strings : list
        Token ids and what they cover.
    attributes : dict
        Of every file.
    """
    tokens = token_coordinates(ids, strings)
    parts = {
        f"L{i:02d}": (found, {"layer": i, "scaling": found.get("scaling", 1.0)}) for i, found in enumerate(records)
    }
    for part, (found, own) in (parts | {"last": ({"last": last}, {})}).items():
        variables = {
            name: (dims, found[name], {"long_name": title, "units": ONE})
            for name, (title, dims) in SHAPES.items()
            if name in found
        }
        files.write(Path(folder) / f"{part}.nc", variables | tokens, own | attributes)
