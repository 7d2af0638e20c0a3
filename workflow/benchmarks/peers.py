"""The same numbers by interventions on the whole model: plain forward hooks, nnsight and TransformerLens.

Runs in an environment of its own (requirements.lock beside this file), prints JSON and shares no code with the study.

    python peers.py check CHECKPOINT SINGLE JOINT    all numbers of one transition, compared with the study's two files
    python peers.py time CHECKPOINT SINGLE           seconds of one forward pass of each kind
"""

import argparse
import json
import statistics
import time
import warnings
from importlib.metadata import version

import netCDF4
import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.qwen3_5 import modeling_qwen3_5 as modelling

RELATIVE = 3e-5, 5e-4  # tolerance of the study's definition: absolute, and as a fraction
SQRT_JS = 1e-5, 1e-3  # of the square root of the divergence
REPEATS = 5


class Stop(Exception):
    """Ends a forward pass after the recipient layer."""


class Hooks:
    """PyTorch's own forward hooks on the modules of transformers."""

    def __init__(self, model, checkpoint):
        self.model, self.config = model, model.config

    def layer(self, index):
        """Decoder layer, its token mixer, and whether that is linear attention."""
        layer = self.model.model.layers[index]
        linear = hasattr(layer, "linear_attn")
        return layer, layer.linear_attn if linear else layer.self_attn, linear

    def run(self, ids, source, removed, stop):
        """Return what `effective` needs of the layer after `source`, with heads (sequences, T, H) removed."""
        _, mixer, source_linear = self.layer(source)
        _, recipient, linear = self.layer(source + 1)
        seen = {}

        def remove(module, args):
            x = args[0].reshape(*removed.shape, -1) * ~removed[..., None]
            return (x.reshape(args[0].shape),)

        def keep(name, last=False):
            def hook(module, args, output):
                seen[name] = output
                if last and stop:
                    raise Stop

            return hook

        wanted = {"qkv": "in_proj_qkv"} if linear else {"q": "q_norm", "k": "k_norm", "v": "v_proj"}
        handles = [(mixer.out_proj if source_linear else mixer.o_proj).register_forward_pre_hook(remove)]
        for name, module in wanted.items():
            handles.append(getattr(recipient, module).register_forward_hook(keep(name, last=name in ("qkv", "v"))))
        try:
            self.model(input_ids=ids.expand(len(removed), -1), use_cache=False)
        except Stop:
            pass
        for handle in handles:
            handle.remove()
        return seen


class NNsight(Hooks):
    """nnsight's tracing of the same modules."""

    def __init__(self, model, checkpoint):
        import nnsight

        super().__init__(nnsight.NNsight(model), checkpoint)
        self.config = model.config

    def layer(self, index):
        """See `Hooks.layer`."""
        layer = self.model.model.layers[index]
        linear = self.config.layer_types[index] == "linear_attention"
        return layer, layer.linear_attn if linear else layer.self_attn, linear

    def run(self, ids, source, removed, stop):
        """See `Hooks.run`."""
        _, mixer, source_linear = self.layer(source)
        _, recipient, linear = self.layer(source + 1)
        projection = mixer.out_proj if source_linear else mixer.o_proj
        kept = (~removed)[..., None]
        with self.model.trace(input_ids=ids.expand(len(removed), -1), use_cache=False) as tracer:
            x = projection.input
            projection.input = (x.reshape(*removed.shape, -1) * kept).reshape(x.shape)
            if linear:
                qkv = recipient.in_proj_qkv.output.save()
            else:
                q = recipient.q_norm.output.save()
                k = recipient.k_norm.output.save()
                v = recipient.v_proj.output.save()
            if stop:
                tracer.stop()
        return {"qkv": qkv} if linear else {"q": q, "k": k, "v": v}


class TransformerLens(Hooks):
    """The bridge of TransformerLens around the same modules; its own `stop_at_layer`."""

    def __init__(self, model, checkpoint):
        from transformer_lens.model_bridge import TransformerBridge

        tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{checkpoint}/tokenizer.json")
        super().__init__(model, checkpoint)
        self.bridge = TransformerBridge.boot_transformers(str(checkpoint), hf_model=model, tokenizer=tokenizer)

    def run(self, ids, source, removed, stop):
        """See `Hooks.run`. A head that is zero before the gated norm is zero after it."""
        linear = [kind == "linear_attention" for kind in self.config.layer_types]
        seen = {}

        def remove(x, hook):
            return x * ~removed[..., None]

        def keep(name):
            def hook(x, hook):
                seen[name] = x

            return hook

        cut = "linear_attn.hook_recurrence_out" if linear[source] else "attn.o.hook_in"
        if linear[source + 1]:
            points = {c: f"linear_attn.hook_{c}" for c in "qkv"}
        else:
            points = {"rotated_q": "attn.hook_rot_q", "rotated_k": "attn.hook_rot_k", "v": "attn.v.hook_out"}
        hooks = [(f"blocks.{source}.{cut}", remove)]
        hooks += [(f"blocks.{source + 1}.{point}", keep(name)) for name, point in points.items()]
        self.bridge.run_with_hooks(
            ids.expand(len(removed), -1), fwd_hooks=hooks, return_type=None, stop_at_layer=source + 2 if stop else None
        )
        return seen


def effective(seen, model, index):
    """Effective q, k, v (sequences, T, heads, D) of layer `index`, and its softmax rows or None."""
    layer, config = model.model.layers[index], model.config
    if hasattr(layer, "linear_attn"):
        mixer = layer.linear_attn
        if "qkv" in seen:
            x = F.pad(seen["qkv"].transpose(1, 2), (mixer.conv_kernel_size - 1, 0))
            x = F.silu(F.conv1d(x, mixer.conv1d.weight, mixer.conv1d.bias, groups=x.shape[1])).transpose(1, 2)
            sizes = mixer.key_dim, mixer.key_dim, mixer.value_dim
            dims = mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim
            parts = zip(x.split(sizes, dim=-1), dims, strict=True)
            q, k, v = (part.reshape(*part.shape[:2], -1, dim) for part, dim in parts)
        else:
            q, k, v = seen["q"], seen["k"], seen["v"]
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
        return {"q": q * mixer.head_k_dim**-0.5, "k": k, "v": v}, None
    v = seen["v"].reshape(*seen["v"].shape[:2], -1, config.head_dim)
    if "rotated_q" in seen:
        q, k = seen["rotated_q"].transpose(1, 2), seen["rotated_k"].transpose(1, 2)
    else:
        q, k = seen["q"].transpose(1, 2), seen["k"].transpose(1, 2)
        cos, sin = model.model.rotary_emb(v, torch.arange(v.shape[1])[None])
        q, k = modelling.apply_rotary_pos_emb(q, k, cos, sin)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=2)
    logits = q @ k.transpose(-1, -2) * config.head_dim**-0.5
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    rows = logits.masked_fill(future, -torch.inf).softmax(-1)
    return {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v}, rows


def divergence(p, q):
    """Jensen-Shannon divergence in nats, in float64."""
    p, q = p.double(), q.double()
    m = (p + q) / 2
    return (torch.xlogy(p, p / m).nan_to_num() + torch.xlogy(q, q / m).nan_to_num()).sum(-1) / 2


def effects(base, changed):
    """Relative changes (q, k, v, qkv; sequences, T, R) and divergences (sequences, T, R) or None."""
    norms = {c: base[0][c].double().norm(dim=-1) for c in "qkv"}
    relative = torch.stack([(changed[0][c].double() - base[0][c]).norm(dim=-1) / norms[c] for c in "qkv"])
    relative = torch.cat([relative, relative.square().mean(0, keepdim=True).sqrt()])
    js = None if base[1] is None else divergence(changed[1], base[1]).transpose(1, 2)
    return relative.numpy(), js


def worst(found, expected, tolerance):
    """Largest difference as a fraction of the tolerance."""
    return float((np.abs(found - expected) / (tolerance[0] + tolerance[1] * np.abs(expected))).max())


def masks_of(removed):
    """Every removal of a transition: none, each head, each recipient head's three sets, all: (66 of 16 heads, T, H)."""
    _, heads, tokens, _ = removed.shape
    each = np.broadcast_to(np.eye(heads, dtype=bool)[:, None], (heads, tokens, heads))
    sets = removed[:3].transpose(0, 3, 2, 1).reshape(-1, tokens, heads)
    ends = np.zeros((1, tokens, heads), bool), np.ones((1, tokens, heads), bool)
    return torch.from_numpy(np.concatenate([ends[0], each, sets, ends[1]]))


def check(tool, model, single, joint):
    """Compute all numbers of a transition with `tool`; return the worst difference in tolerances and the forwards."""
    source, heads = int(single.source_layer), single["relative"].shape[1]
    ids = torch.from_numpy(np.asarray(single["token_id"][:]))[None]
    masks = masks_of(np.asarray(joint["removed"][:]).astype(bool))
    runs = [effective(tool.run(ids, source, mask[None], stop=i % 2), model, source + 1) for i, mask in enumerate(masks)]
    figures = []
    recipients = joint["removed"].shape[3]
    for i, run in enumerate(runs[1:]):
        relative, js = effects(runs[0], run)
        if i < heads:
            stored, own = single["relative"][:, i], single["js"][i]
            found, found_js = relative[:, 0], None if js is None else js[0]
        else:
            scenario, r = divmod(i - heads, recipients)
            own_r = slice(None) if scenario == 3 else slice(r, r + 1)
            stored, own = joint["relative"][:, scenario, :, own_r], joint["js"][scenario, :, own_r]
            found, found_js = relative[:, 0][..., own_r], None if js is None else js[0][:, own_r]
        figures.append(worst(found, stored, RELATIVE))
        if js is not None:
            figures.append(worst(np.sqrt(found_js.clip(min=0).numpy()), np.sqrt(own), SQRT_JS))
    return max(figures), len(masks)


def seconds(run, repeats=REPEATS):
    """Median CPU seconds of `run`, after one that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken[1:])


TOOLS = {"hooks": Hooks, "nnsight": NNsight, "TransformerLens": TransformerLens}


def load(checkpoint):
    """Return the whole model as transformers runs it, float32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def main():
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["check", "time"])
    p.add_argument("checkpoint")
    p.add_argument("files", nargs="+")
    p.add_argument("--batch", type=int, default=0, help="also time plain hooks on this many sequences at once")
    a = p.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model, out = (
        load(a.checkpoint),
        {"versions": {n: version(n) for n in ("torch", "transformers", "nnsight", "transformer-lens")}},
    )
    data = [netCDF4.Dataset(file) for file in a.files]
    for x in data:
        x.set_auto_mask(False)
    with torch.no_grad():
        if a.what == "check":
            pairs = list(zip(data[::2], data[1::2], strict=True))
            for name, kind in TOOLS.items():
                tool = kind(model, a.checkpoint)
                found = [check(tool, model, *pair) for pair in pairs]
                out[name] = {"worst": max(f[0] for f in found), "forwards": sum(f[1] for f in found)}
        else:
            heads, tokens = data[0]["relative"].shape[1:3]
            ids = torch.from_numpy(np.asarray(data[0]["token_id"][:]))[None]
            layers = len(model.model.layers)
            mask = torch.zeros(1, tokens, heads, dtype=torch.bool)
            mask[..., 0] = True
            depths = [i for i in (0, layers // 2 - 2, layers - 2) if model.config.layer_types[i] == "linear_attention"]
            for name, kind in TOOLS.items():
                tool = kind(model, a.checkpoint)
                out[name] = {
                    "whole": seconds(lambda tool=tool: tool.run(ids, 0, mask, stop=False)),
                    "stopped": {d: seconds(lambda tool=tool, d=d: tool.run(ids, d, mask, stop=True)) for d in depths},
                }
                if a.batch and name == "hooks":
                    wide = mask.expand(a.batch, -1, -1)
                    out[name]["batched"] = (
                        seconds(lambda tool=tool, w=wide: tool.run(ids, 0, w, stop=False), 1) / a.batch
                    )
    print(json.dumps(out))


if __name__ == "__main__":
    main()
