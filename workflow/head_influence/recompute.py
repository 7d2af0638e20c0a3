"""Removals recomputed through the whole real model with hooks: the audit's own route, slow and independent.

It shares no arithmetic with the stages that made the files. A forward pass runs a batch of copies of one text: the
first is left alone, each of the others loses heads of a layer of its own.
Dimensions: H source heads, R recipient heads, T tokens.
"""

import sys
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from head_influence.checkpoint import Checkpoint
from head_influence.models import embed, empty_model, streamed

BATCH_TOKENS = 4096  # of one forward pass: bounds its memory
SOFTMAX, DELTA_RULE = "eager_attention_forward", "torch_chunk_gated_delta_rule"


class WholeModel:
    """The whole real model, read by transformers itself.

    Parameters
    ----------
    folder : path
        The checkpoint.
    in_memory : bool
        Whether all of it is in memory. Otherwise its own forward pass runs with one layer's weights at a time, read
        by this library, and there are no logits.
    """

    def __init__(self, folder, in_memory=True):
        self.folder, self.in_memory = folder, in_memory
        if in_memory:
            logging.disable_progress_bar()
            self.model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager",
                local_files_only=True, use_safetensors=True, trust_remote_code=False,
            )  # fmt: skip
            if self.model._can_set_experts_implementation():
                self.model.set_experts_implementation("eager")
            self.model.eval().requires_grad_(False)
        else:
            self.model = empty_model(Checkpoint(folder))

    def observe(self, ids, removals=()):
        """Run a text with and without heads.

        Parameters
        ----------
        ids : sequence of int
            Token ids.
        removals : sequence of (int, array of bool (T, H))
            Source layer, and which of its heads lose their contribution at which token.

        Returns
        -------
        baseline : list of dict
            Per layer, nothing removed: kind; residual_in, branch_out (T, hidden); contribution (H, T, hidden);
            effective q, k, v (T, heads, D); of softmax layers retrieval (heads, T, T), cos and sin (T, rotary).
        changed : list of dict
            Per removal: q, k, v and retrieval of the layer after its source.
        logits : array (T, vocabulary) or None
            Nothing removed.
        """
        size = max(1, BATCH_TOKENS // len(ids) - 1)
        parts = [removals[i : i + size] for i in range(0, len(removals), size)] or [[]]
        first = self._pass(ids, parts[0])
        changed = [*first.changed, *(x for part in parts[1:] for x in self._pass(ids, part).changed)]
        return first.baseline, changed, first.logits

    def logits(self, hidden):
        """Logits (T, vocabulary) of the final norm's output (T, hidden); the model must be in memory."""
        with torch.no_grad():
            return self.model.lm_head(torch.from_numpy(np.array(hidden))).numpy()

    def _pass(self, ids, removals):
        seen = _Pass(self.model, removals)
        with torch.no_grad(), seen.hooked():
            if self.in_memory:
                tokens = torch.tensor([list(map(int, ids))] * (1 + len(removals)))
                hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
                seen.logits = self.model.lm_head(hidden[0]).numpy()
            else:
                checkpoint = Checkpoint(self.folder)
                with streamed(self.model, checkpoint):
                    rows = embed(checkpoint, ids).expand(1 + len(removals), -1, -1).contiguous()
                    self.model.model(inputs_embeds=rows, use_cache=False)
        return seen


class _Pass:
    """What one forward pass shows; see `WholeModel.observe`."""

    def __init__(self, model, removals):
        self.layers = list(model.model.layers)
        self.baseline = [{} for _ in self.layers]
        self.changed = [{} for _ in removals]
        self.removals = removals
        self.logits = None
        self._layer = 0

    @contextmanager
    def hooked(self):
        """Hooks on every layer and its output projection, and on the functions that see effective Q, K, V."""
        with ExitStack() as stack:
            for index, layer in enumerate(self.layers):
                mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
                projection = mixer.out_proj if hasattr(layer, "linear_attn") else mixer.o_proj
                for handle in (
                    layer.register_forward_pre_hook(self._entering(index), with_kwargs=True),
                    projection.register_forward_pre_hook(self._remove),
                    projection.register_forward_hook(self._projected),
                ):
                    stack.callback(handle.remove)
            code = sys.modules[type(self.layers[0]).__module__]
            for name, wrapper in ((SOFTMAX, self._softmax), (DELTA_RULE, self._delta_rule)):
                if hasattr(code, name):
                    own = getattr(code, name)
                    setattr(code, name, wrapper(own))
                    stack.callback(setattr, code, name, own)
            yield self

    def _entering(self, index):
        def hook(layer, args, kwargs):
            self._layer = index
            hidden = args[0] if args else kwargs["hidden_states"]
            cos, sin = kwargs["position_embeddings"]
            self.baseline[index] |= {"residual_in": _array(hidden[0]), "rotary": (_array(cos[0]), _array(sin[0]))}

        return hook

    def _softmax(self, own):
        def attention(module, query, key, value, mask, *args, **kwargs):
            output, rows = own(module, query, key, value, mask, *args, **kwargs)
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            self._keep("softmax", q=q, k=k, v=v, retrieval=rows)
            return output, rows

        return attention

    def _delta_rule(self, own):
        def rule(query, key, value, *args, **kwargs):
            groups = value.shape[2] // key.shape[2]
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
            q, k = (x.repeat_interleave(groups, dim=2) for x in (q / query.shape[-1] ** 0.5, k))
            self._keep("linear", q=q, k=k, v=value)
            return own(query, key, value, *args, **kwargs)

        return rule

    def _keep(self, kind, **effective):
        own = self.baseline[self._layer]
        cos, sin = own.pop("rotary")
        own |= {"kind": kind} | ({"cos": cos, "sin": sin} if kind == "softmax" else {})
        own |= {name: _array(x[0]) for name, x in effective.items()}
        for row, (source, _) in enumerate(self.removals):
            if source + 1 == self._layer:
                self.changed[row] |= {name: _array(x[row + 1]) for name, x in effective.items()}

    def _remove(self, projection, args):
        own = self.baseline[self._layer]
        heads = own["q"].shape[1]
        batch, tokens, width = args[0].shape
        values = args[0].reshape(batch, tokens, heads, width // heads).clone()
        weight = projection.weight.reshape(-1, heads, width // heads)
        own["contribution"] = _array(torch.einsum("thd,ohd->hto", values[0], weight))
        for row, (source, mask) in enumerate(self.removals):
            if source == self._layer:
                values[row + 1, torch.from_numpy(np.array(mask, bool))] = 0
        return (values.reshape(batch, tokens, width),)

    def _projected(self, projection, args, output):
        self.baseline[self._layer]["branch_out"] = _array(output[0])


def _array(x):
    return np.array(x.detach().numpy())


def effects(baseline, changed):
    """What a removal does to a layer, by the definitions, in float64.

    Parameters
    ----------
    baseline, changed : dict
        q, k, v (T, R, D) and, of softmax layers, retrieval (R, T, T), from `WholeModel.observe`.

    Returns
    -------
    dict
        change: per vector (T, R, D); absolute (3, T, R); relative (4, T, R) of q, k, v, qkv; js (T, R), NaN for linear
        layers; norm (3, T, R).
    """
    wide = {c: baseline[c].astype(float) for c in "qkv"}
    change = {c: changed[c].astype(float) - wide[c] for c in "qkv"}
    absolute, norm = (np.sqrt([(x[c] ** 2).sum(-1) for c in "qkv"]) for x in (change, wide))
    relative = absolute / np.maximum(norm, 1e-12)
    js = np.full(norm.shape[1:], np.nan)
    if "retrieval" in baseline:
        p, q = baseline["retrieval"].astype(float), changed["retrieval"].astype(float)
        mean = np.where(p + q > 0, (p + q) / 2, 1)
        terms = [x * np.log(np.where(x > 0, x / mean, 1)) for x in (p, q)]
        js = np.maximum((terms[0] + terms[1]).sum(-1) / 2, 0).T
    qkv = np.sqrt((relative**2).sum(0) / 3)
    return {
        "change": change, "absolute": absolute, "norm": norm, "js": js,
        "relative": np.concatenate([relative, qkv[None]]),
    }  # fmt: skip
