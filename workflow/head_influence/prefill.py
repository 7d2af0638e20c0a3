"""The context read once by the model's own modules: what every layer keeps of it, and the reference queries.

The model reads the context (prefix, article, suffix), the instruction to repeat, and the article again. Layer by layer,
one layer's weights in memory at a time, attention in blocks of queries.
"""

import torch
from transformers import DynamicCache

from head_influence import StudyError
from head_influence.curve_study import cache_kinds
from head_influence.models import embed, empty_model, fill_layer, replaced

BLOCK = 1 << 25  # numbers in one block of the attention matrix
LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope")


def curve_model(checkpoint):
    """Return the model without weights; one whose rotary tables change with the text's length is a `StudyError`."""
    model = empty_model(checkpoint)
    rotary = getattr(model.model.rotary_emb, "rope_type", "default")
    if rotary in LENGTH_DEPENDENT_ROTARY:
        raise StudyError(
            f"{checkpoint.folder / 'config.json'}: rope_type {rotary!r} rotates keys differently in longer texts; "
            "head influence curves need keys that keep their rotation"
        )
    return model


def run_layer(model, index, hidden, start, attention, cache=None):
    """Run decoder layer `index` on tokens at positions `start` and on.

    Parameters
    ----------
    model : transformers model, with the layer's weights
    hidden : tensor (rows, tokens, hidden)
    start : int
        Position of the first token.
    attention : callable
        Takes the place of the modelling file's eager attention: (query, key, value, scaling, window) with query
        (rows, heads, tokens, d) and key and value (rows, kv_heads, tokens, d) after the rotary embedding, to
        (rows, tokens, heads, d).
    cache : transformers Cache, optional
        State of a linear layer.

    Returns
    -------
    tensor (rows, tokens, hidden)
    """
    positions = torch.arange(start, start + hidden.shape[1])[None]

    def eager(module, query, key, value, mask, scaling, sliding_window=None, **_):
        return attention(query, key, value, float(scaling), sliding_window).contiguous(), None

    layer = model.model.layers[index]
    with torch.no_grad(), replaced(layer, eager_attention_forward=eager):
        rotary = model.model.rotary_emb(hidden, positions)
        return layer(hidden, position_embeddings=rotary, attention_mask=None, position_ids=positions, cache=cache)


def causal(query, key, value, scaling, window=None):
    """Causal attention of the last positions of a sequence.

    Parameters
    ----------
    query : tensor (rows, heads, n, d)
        Queries of the last n positions.
    key, value : tensor (rows, kv_heads, m, d)
        Of all m positions.
    scaling : float
    window : int, optional
        Keys that a query sees, its own included.

    Returns
    -------
    tensor (rows, n, heads, d)
    """
    rows, heads, n, _ = query.shape
    groups, m = heads // key.shape[1], key.shape[2]
    out = query.new_empty(rows, n, heads, value.shape[-1])
    grouped = query.unflatten(1, (-1, groups))
    step = max(1, BLOCK // (rows * heads * m))
    for begin in range(0, n, step):
        end = min(n, begin + step)
        first, last = m - n + begin, m - n + end
        low = 0 if window is None else max(0, first - window + 1)
        position = torch.arange(first, last)[:, None]
        other = torch.arange(low, last)
        hidden = other > position
        if window is not None:
            hidden |= position - other >= window
        logits = grouped[:, :, :, begin:end] @ key[:, :, None, low:last].transpose(-1, -2) * scaling
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        out[:, begin:end] = (weights @ value[:, :, None, low:last]).flatten(1, 2).transpose(1, 2)
    return out


def prefill(checkpoint, context):
    """Read a context and the article again.

    Parameters
    ----------
    checkpoint : Checkpoint
    context : TokenContext

    Yields
    ------
    dict
        Per layer, numpy: softmax layers keys, values (kv_head, position, d) of the whole context, queries
        (head, article position, d) of the second reading and float scaling; sliding-window layers keys, values of the
        last positions that new tokens can see, and int window; linear layers conv_state, recurrent_state.
    """
    model, kinds = curve_model(checkpoint), cache_kinds(checkpoint)
    length, tokens = len(context.ids), len(context.article)
    first, second = embed(checkpoint, context.ids), embed(checkpoint, [*context.repeat, *context.article])
    for index, kind in enumerate(kinds):
        fill_layer(model, checkpoint, index)
        if kind == "linear":
            cache = DynamicCache(config=model.config)
            first = run_layer(model, index, first, 0, None, cache)
            states = cache.layers[index]
            record = {
                "conv_state": states.conv_states[0][0].clone(),
                "recurrent_state": states.recurrent_states[0][0].clone(),
            }
            second = run_layer(model, index, second, length, None, cache)
        else:
            seen = {}
            first = run_layer(model, index, first, 0, _remembering(seen))
            key, value = seen["key"], seen["value"]
            second = run_layer(model, index, second, length, _remembering(seen, key, value))
            if (seen["window"] is not None) != (kind == "sliding"):
                raise StudyError(
                    f"{checkpoint.folder / 'config.json'}: layer {index} is {kind} by layer_types, but the model's own "
                    f"module has the window {seen['window']}"
                )
            if kind == "sliding":
                last = max(0, length - seen["window"] + 1)
                record = {"keys": key[0, :, last:], "values": value[0, :, last:], "window": seen["window"]}
            else:
                record = {"keys": key[0], "values": value[0], "scaling": seen["scaling"]}
                record["queries"] = seen["query"][0, :, -tokens:]
        model.model.layers[index].to("meta")
        yield {name: x.contiguous().numpy() if torch.is_tensor(x) else x for name, x in record.items()}


def _remembering(seen, key_before=None, value_before=None):
    """Causal attention that keeps what it was given; earlier keys and values come first."""

    def attention(query, key, value, scaling, window):
        if key_before is not None:
            key, value = torch.cat((key_before, key), 2), torch.cat((value_before, value), 2)
        seen.update(query=query, key=key, value=value, scaling=scaling, window=window)
        return causal(query, key, value, scaling, window)

    return attention
