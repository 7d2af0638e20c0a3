"""Mixture-of-experts feed-forward blocks: every row goes to the experts that the router chooses for it.

After an intervention the routing is recomputed, so a removed head can send a row to other experts.
"""

from functools import cached_property

import numpy as np

from head_influence.families.base import linear, mlp_shapes

FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


class SparseMLP:
    """Mixin for a `DecoderLayer` whose feed-forward block, in all or some layers, is a mixture of experts.

    Checkpoints store the experts one by one or, as the modules of transformers have them, fused in two tensors.
    """

    shared_expert = False  # one more expert sees every row, behind a sigmoid gate of its own
    normalised = None  # see `weights_sum_to_one`; None: the configuration says
    normalised_default = False

    @cached_property
    def sparse(self):
        """Whether this layer has experts."""
        dense = self.checkpoint.text_config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise self.fault("mlp_only_layers: expected a list of layers")
        return self.index not in dense and (self.index + 1) % self.positive("decoder_sparse_step", 1) == 0

    @cached_property
    def experts(self):
        """Number of experts; transformers saves it under another key than the one that models are published with."""
        saved = "num_local_experts"
        return self.positive(saved if saved in self.checkpoint.text_config else "num_experts")

    @cached_property
    def chosen(self):
        """Number of experts that see one row."""
        chosen = self.positive("num_experts_per_tok")
        if chosen > self.experts:
            raise self.fault(f"num_experts_per_tok {chosen} is more than num_experts {self.experts}")
        return chosen

    @cached_property
    def weights_sum_to_one(self):
        """Whether the chosen experts' weights are made to add up to 1."""
        return self.normalised if self.normalised is not None else self.flag("norm_topk_prob", self.normalised_default)

    @cached_property
    def fused(self):
        """Whether the checkpoint stores the experts fused."""
        return self.name(FUSED[0]) in self.checkpoint

    def mlp_shapes(self):
        """Shapes of the feed-forward block's tensors as the checkpoint stores them."""
        if not self.sparse:
            return super().mlp_shapes()
        inner = self.positive("moe_intermediate_size")
        shapes = {"mlp.gate.weight": (self.experts, self.hidden)}
        if self.fused:
            sizes = (self.experts, 2 * inner, self.hidden), (self.experts, self.hidden, inner)
            shapes |= dict(zip(FUSED, sizes, strict=True))
        else:
            for expert in range(self.experts):
                shapes |= mlp_shapes(f"mlp.experts.{expert}", self.hidden, inner)
        if self.shared_expert:
            shapes |= mlp_shapes("mlp.shared_expert", self.hidden, self.positive("shared_expert_intermediate_size"))
            shapes["mlp.shared_expert_gate.weight"] = (1, self.hidden)
        return shapes

    def check(self):
        """See `DecoderLayer.check`; the routing's own settings are checked as well."""
        super().check()
        if self.sparse:
            _ = self.chosen, self.weights_sum_to_one

    def expert(self, index):
        """Weights of one expert: gate and up (2 inner, hidden), one after the other, and down (hidden, inner)."""
        if self.fused:
            return tuple(self.tensor(name, rows=[index])[0] for name in FUSED)
        gate, up, down = (self.tensor(f"mlp.experts.{index}.{part}_proj.weight") for part in ("gate", "up", "down"))
        return np.concatenate([gate, up]), down

    def module_tensors(self):
        """Return the tensors that the model's own module wants; the experts always fused."""
        if not self.sparse or self.fused:
            return super().module_tensors()
        others = [name for name in self.expected_shapes() if not name.startswith("mlp.experts.")]
        inner = self.positive("moe_intermediate_size")
        fused = (
            np.empty((self.experts, 2 * inner, self.hidden), np.float32),
            np.empty((self.experts, self.hidden, inner), np.float32),
        )
        for index in range(self.experts):
            fused[0][index], fused[1][index] = self.expert(index)
        return {name: self.tensor(name) for name in others} | dict(zip(FUSED, fused, strict=True))

    @cached_property
    def _router(self):
        return self.tensor("mlp.gate.weight")

    def route(self, x):
        """Choose experts for rows (N, hidden): their indices and weights, each (N, chosen)."""
        logits = linear(x, self._router)
        logits -= logits.max(axis=-1, keepdims=True)
        share = np.exp(logits)
        share /= share.sum(axis=-1, keepdims=True)
        chosen = np.argsort(-share, axis=-1, kind="stable")[:, : self.chosen]
        weight = np.take_along_axis(share, chosen, axis=-1)
        if self.weights_sum_to_one:
            weight /= weight.sum(axis=-1, keepdims=True)
        return chosen, weight

    @cached_property
    def _shared(self):
        return self.gated_mlp("mlp.shared_expert"), self.tensor("mlp.shared_expert_gate.weight")

    def mlp(self, x):
        """The feed-forward block on rows (N, hidden).

        An expert's weights are read each time it is needed: all experts of a layer would not fit in a job's memory.
        """
        if not self.sparse:
            return super().mlp(x)
        chosen, weight = self.route(x)
        out = np.zeros_like(x)
        for index in np.unique(chosen):
            row, place = np.nonzero(chosen == index)
            gate_up, down = self.expert(index)
            inner = down.shape[1]
            y = linear(x[row], gate_up)
            y = linear(self.act(y[:, :inner]) * y[:, inner:], down)
            out[row] += y * weight[row, place, None]
        if self.shared_expert:
            mlp, gate = self._shared
            with np.errstate(over="ignore"):
                out += self.apply_mlp(x, *mlp) / (1 + np.exp(-linear(x, gate)))
        return out
