"""A slow, obviously right route to every number: the whole real model with hooks, then plain loops in float64.

It shares no code with the library, reads checkpoints with transformers itself, and runs one whole forward pass for
each removal. Heads, masks and dimensions are named as in the library: H source heads, R recipient heads, T tokens.
"""

import math
import sys
from functools import cache

import numpy as np
import torch
from transformers import AutoModelForCausalLM

SCENARIOS = ("weak", "strong", "random", "all")


@cache
def load(folder):
    """The whole model in float32 with eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def mixer(layer):
    """The token mixer of a decoder layer, its output projection, and whether it is a linear one."""
    linear = hasattr(layer, "linear_attn")
    module = layer.linear_attn if linear else layer.self_attn
    return module, module.out_proj if linear else module.o_proj, linear


def head_count(model, index):
    """Heads of a layer as the study counts them: query heads, or value heads of a linear layer."""
    module, _, linear = mixer(model.model.layers[index])
    return module.num_v_heads if linear else module.config.num_attention_heads


@torch.no_grad()
def run(folder, ids, source, removed=None):
    """One forward pass of the whole model, with heads of layer `source` removed.

    Parameters
    ----------
    folder : path
    ids : list of int
    source : int
    removed : array of bool (T, H), optional
        Heads of the source layer whose contribution is taken out of the residual stream at these tokens.

    Returns
    -------
    dict of numpy arrays
        residual_in, branch_out (T, hidden); contribution (H, T, hidden); after_branch (T, hidden), the residual stream
        after the branch; of the next layer q, k, v (T, R, D) and, where it is softmax, rows (R, T, T); logits; window,
        the number of positions that an effective vector depends on.
    """
    model = load(folder)
    layers = model.model.layers
    _, projection, _ = mixer(layers[source])
    recipient, _, linear = mixer(layers[source + 1])
    heads = head_count(model, source)
    code = sys.modules[type(recipient).__module__]
    seen, active = {}, []

    def remove(module, args):
        values = args[0].clone()
        size = values.shape[-1] // heads
        contribution = torch.stack(
            [
                values[0, :, h * size : (h + 1) * size] @ module.weight[:, h * size : (h + 1) * size].T
                for h in range(heads)
            ]
        )
        seen["contribution"] = contribution
        if removed is not None:
            for h in range(heads):
                for t in range(values.shape[1]):
                    if removed[t, h]:
                        values[0, t, h * size : (h + 1) * size] = 0
        return (values,)

    def keep(name):
        def hook(module, args, kwargs):
            seen[name] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return hook

    def attention(module, query, key, value, mask, scaling, **kwargs):
        output, rows = own_attention(module, query, key, value, mask, scaling=scaling, **kwargs)
        if module is recipient:
            repeats = query.shape[1] // key.shape[1]
            seen["q"] = query[0].transpose(0, 1)
            seen["k"] = key[0].repeat_interleave(repeats, dim=0).transpose(0, 1)
            seen["v"] = value[0].repeat_interleave(repeats, dim=0).transpose(0, 1)
            seen["rows"] = rows[0]
        return output, rows

    def delta_rule(query, key, value, **kwargs):
        if active:
            repeats = value.shape[2] // key.shape[2]
            q = code.l2norm(query[0]) * query.shape[-1] ** -0.5
            seen["q"] = q.repeat_interleave(repeats, dim=1)
            seen["k"] = code.l2norm(key[0]).repeat_interleave(repeats, dim=1)
            seen["v"] = value[0]
        return own_delta_rule(query, key, value, **kwargs)

    hooks = [
        projection.register_forward_pre_hook(remove),
        projection.register_forward_hook(lambda m, a, y: seen.__setitem__("branch_out", y[0].clone())),
        layers[source].register_forward_pre_hook(keep("residual_in"), with_kwargs=True),
        layers[source].post_attention_layernorm.register_forward_pre_hook(keep("after_branch"), with_kwargs=True),
        recipient.register_forward_pre_hook(lambda *a, **k: active.append(True), with_kwargs=True),
        recipient.register_forward_hook(lambda *a, **k: active.clear(), with_kwargs=True),
    ]
    own_attention = code.eager_attention_forward
    own_delta_rule = getattr(code, "torch_chunk_gated_delta_rule", None)
    try:
        code.eager_attention_forward = attention
        code.torch_chunk_gated_delta_rule = delta_rule
        seen["logits"] = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        code.eager_attention_forward = own_attention
        code.torch_chunk_gated_delta_rule = own_delta_rule
        for hook in hooks:
            hook.remove()
    found = {name: np.ascontiguousarray(value.numpy()) for name, value in seen.items()}
    return found | {"window": recipient.conv_kernel_size if linear else 1}


def norm(x):
    return math.sqrt(sum(float(a) ** 2 for a in x))


def jensen_shannon(p, q):
    """Nats, from two float32 rows."""
    total = 0.0
    for a, b in zip(map(float, p), map(float, q), strict=True):
        mean = (a + b) / 2
        total += (a * math.log(a / mean) if a > 0 else 0.0) + (b * math.log(b / mean) if b > 0 else 0.0)
    return max(total / 2, 0.0)


def effects(base, changed, t, r):
    """Change of one query token at one recipient head: (vectors, absolute, relative q k v qkv, js).

    What depends on nothing that changed is exactly 0: residual rows are compared by their bytes, over the
    convolution's window for vectors, over all keys for the softmax row.
    """
    same = [(a == b).all() for a, b in zip(base["after_branch"], changed["after_branch"], strict=True)]
    untouched = all(same[max(0, t - base["window"] + 1) : t + 1])
    vectors, absolute, relative = {}, [], []
    for c in "qkv":
        x, y = base[c][t, r].astype(float), changed[c][t, r].astype(float)
        vectors[c] = np.zeros_like(x) if untouched else y - x
        absolute.append(norm(vectors[c]))
        relative.append(absolute[-1] / max(norm(x), 1e-12))
    relative.append(math.sqrt(sum(a * a for a in relative) / 3))
    js = math.nan
    if "rows" in base:
        js = 0.0 if all(same[: t + 1]) else jensen_shannon(base["rows"][r, t], changed["rows"][r, t])
    return vectors, absolute, relative, js


def singles(folder, ids, source):
    """Each source head removed at all tokens: arrays named and shaped as the library's, and the change vectors."""
    base = run(folder, ids, source)
    heads, tokens, recipients = len(base["contribution"]), len(ids), base["q"].shape[1]
    out = {
        "relative": np.empty((4, heads, tokens, recipients)),
        "absolute": np.empty((3, heads, tokens, recipients)),
        "js": np.empty((heads, tokens, recipients)),
        "baseline_norm": np.array(
            [[[norm(base[c][t, r]) for r in range(recipients)] for t in range(tokens)] for c in "qkv"]
        ),
        "vectors": {},
        "base": base,
    }
    for h in range(heads):
        removed = np.zeros((tokens, heads), bool)
        removed[:, h] = True
        changed = run(folder, ids, source, removed)
        for t in range(tokens):
            for r in range(recipients):
                vectors, absolute, relative, js = effects(base, changed, t, r)
                out["vectors"][h, t, r] = vectors
                out["absolute"][:, h, t, r], out["relative"][:, h, t, r], out["js"][h, t, r] = absolute, relative, js
    return out


def masks(qkv, seed, sample_index, source):
    """The four sets per token and recipient head, from relative qkv (H, T, R)."""
    heads, tokens, recipients = qkv.shape
    half = heads // 2
    random = np.random.default_rng(seed + 100 * sample_index + source).random((tokens, recipients, heads))
    out = np.zeros((4, heads, tokens, recipients), bool)
    for t in range(tokens):
        for r in range(recipients):
            order = sorted(range(heads), key=lambda h: (qkv[h, t, r], h))
            drawn = sorted(range(heads), key=lambda h: (random[t, r, h], h))
            sets = order[:half], order[heads - half :], drawn[:half], range(heads)
            for scenario, chosen in enumerate(sets):
                for h in chosen:
                    out[scenario, h, t, r] = True
    return out


def firm(qkv):
    """Where a rounding error cannot change the weak or strong set: (2, T, R)."""
    heads = len(qkv)
    half = heads // 2
    ordered = np.sort(qkv, axis=0)
    out = []
    for cut in (half, heads - half):
        if half == 0:
            out.append(np.ones(qkv.shape[1:], bool))
            continue
        low, high = ordered[cut - 1], ordered[cut]
        out.append((high - low > 1e-3 * high) | (high == low))
    return np.array(out)


def joints(folder, ids, source, sets, single):
    """Each scenario's set removed, one coherent sequence per recipient head, of which only that head is scored."""
    base = single["base"]
    _, heads, tokens, recipients = sets.shape
    shape = (4, tokens, recipients)
    out = {name: np.empty((3, *shape)) for name in ("absolute", "additive", "interaction")}
    out |= {name: np.zeros((4, *shape)) for name in ("relative", "sum_of_singles")}
    out |= {"js": np.empty(shape), "sum_of_singles_js": np.zeros(shape)}
    for s in range(4):
        for r in range(recipients):
            changed = run(folder, ids, source, sets[s, :, :, r].T)
            for t in range(tokens):
                vectors, absolute, relative, js = effects(base, changed, t, r)
                out["absolute"][:, s, t, r], out["relative"][:, s, t, r], out["js"][s, t, r] = absolute, relative, js
                chosen = [h for h in range(heads) if sets[s, h, t, r]]
                for h in chosen:
                    out["sum_of_singles"][:, s, t, r] += single["relative"][:, h, t, r]
                    out["sum_of_singles_js"][s, t, r] += single["js"][h, t, r]
                if math.isnan(js):
                    out["sum_of_singles_js"][s, t, r] = math.nan
                for i, c in enumerate("qkv"):
                    total = sum((single["vectors"][h, t, r][c] for h in chosen), np.zeros_like(vectors[c]))
                    size = max(single["baseline_norm"][i, t, r], 1e-12)
                    out["additive"][i, s, t, r] = norm(total) / size
                    out["interaction"][i, s, t, r] = norm(vectors[c] - total) / size
    return out


def concentration(d):
    """Measures of one observation's influences d (H,); NaN everywhere where they are absent or their total is zero."""
    heads = len(d)
    total = sum(d)
    names = ("n_eff", "n_eff_fraction", "concentration", "top1", "top25", "top50", "bottom25", "n90")
    if math.isnan(total) or total == 0:
        return {"total": total} | dict.fromkeys(names, math.nan)
    p = sorted((x / total for x in d), reverse=True)
    squares = sum(x * x for x in p)
    quarter, half = math.ceil(heads / 4), math.ceil(heads / 2)
    n90 = next(n for n in range(1, heads + 1) if sum(p[:n]) >= 0.9 - 1e-12)
    return {
        "total": total,
        "n_eff": 1 / squares,
        "n_eff_fraction": 1 / squares / heads,
        "concentration": (squares - 1 / heads) / (1 - 1 / heads) if heads > 1 else math.nan,
        "top1": p[0],
        "top25": sum(p[:quarter]),
        "top50": sum(p[:half]),
        "bottom25": sum(p[heads - quarter :]),
        "n90": n90,
    }
