"""Stage baseline: what a transition's interventions start from, checked against the model's own modules."""

import numpy as np

from head_influence import files
from head_influence.ablation import VECTORS, Transition
from head_influence.checkpoint import Checkpoint
from head_influence.controls import ONE, control, exceeds, inherited, token_coordinates
from head_influence.families import layer_of

CHECKED = 1e-5  # limit of the controls that compare with the model's own modules


def measure_baseline(checkpoint_folder, source_trace, recipient_trace, output, attributes):
    """Write the baseline cache of the transition between two layers, given the traces of both.

    Contributions of the source heads, and the recipient's Q, K, V and softmax rows, recomputed by the intervention
    arithmetic with nothing removed; the controls compare them with what the model's own modules produced.
    """
    checkpoint = Checkpoint(checkpoint_folder)
    before, inherit = files.read(source_trace)
    after, recipient_attributes = files.read(recipient_trace)
    index = int(inherit["layer"])
    source, recipient = layer_of(checkpoint, index), layer_of(checkpoint, index + 1)
    where = f"text {inherit['text']}, transition {index}"
    contribution = source.contributions(before["head_values"])
    branch = contribution.astype(np.float64).sum(axis=0)
    if source.out_bias is not None:
        branch += source.out_bias
    transition = Transition(
        source, recipient, before["residual_in"] + before["branch_out"], contribution,
        after.get("cos"), after.get("sin"), float(recipient_attributes["scaling"]),
    )  # fmt: skip
    nothing = np.zeros((transition.tokens, 1, source.heads), bool)
    rows = transition.intervened(nothing)[:, 0]
    parts = recipient.project(transition.recomputed(rows, np.arange(transition.tokens)))
    vectors = recipient.effective({c: x[None] for c, x in parts.items()}, transition.cos, transition.sin)
    checks = control(where, "branch sum", exceeds(branch, before["branch_out"]), CHECKED)
    data = {name: before[name] for name in ("residual_in", "branch_out", "token_id", "token")}
    data["contribution"] = contribution
    for c in VECTORS:
        data[c] = recipient.slots(vectors[c][0], axis=1)
        checks |= control(where, f"recomputed {c}", exceeds(data[c], after[c]), CHECKED)
    if recipient.kind == "softmax":
        data["retrieval"] = recipient.retrieval(vectors["q"], vectors["k"], transition.scaling)[0]
        checks |= control(where, "recomputed retrieval", exceeds(data["retrieval"], after["retrieval"]), CHECKED)
        data |= {"cos": after["cos"], "sin": after["sin"]}
    own = {
        "source_layer": index, "recipient_layer": index + 1, "source_kind": source.kind,
        "recipient_kind": recipient.kind, "scaling": transition.scaling, "stage": "baseline",
    }  # fmt: skip
    files.write(output, _variables(data), inherited(inherit) | own | checks | attributes)


TITLES = {
    "residual_in": (("query", "hidden"), "residual stream that enters the source layer"),
    "branch_out": (("query", "hidden"), "output of the source's token mixer, bias included"),
    "contribution": (("source_head", "query", "hidden"), "what a source head writes to the residual stream"),
    "q": (("query", "recipient_head", "key_dim"), "effective Q of the recipient"),
    "k": (("query", "recipient_head", "key_dim"), "effective K of the recipient, repeated to the heads that use it"),
    "v": (("query", "recipient_head", "value_dim"), "effective V of the recipient, repeated to the heads that use it"),
    "retrieval": (("recipient_head", "query", "key"), "causal softmax rows of the recipient"),
    "cos": (("query", "rotary_dim"), "cosines of the recipient's rotary embedding"),
    "sin": (("query", "rotary_dim"), "sines of the recipient's rotary embedding"),
}


def _variables(data):
    known = {
        name: (dims, data[name], {"long_name": title, "units": ONE})
        for name, (dims, title) in TITLES.items()
        if name in data
    }
    return known | token_coordinates(data["token_id"], data["token"])


def replace_by_mean(baselines, own, output, attributes):
    """Write a baseline cache whose removals put a head's mean in its place: not the study's removal, a contrast to it.

    Parameters
    ----------
    baselines : list of path
        The transition's baseline caches of all texts; the mean is over all their tokens.
    own : path
        The one of them whose text is measured.
    output : path
    attributes : dict
    """
    total, tokens = 0.0, 0
    for path in baselines:
        contribution = files.read(path, ["contribution"])[0]["contribution"]
        total = total + contribution.sum(axis=1, dtype=np.float64)
        tokens += contribution.shape[1]
    data, inherit = files.read(own)
    data["contribution"] = (data["contribution"] - (total / tokens)[:, None]).astype(np.float32)
    kept = {"scaling": inherit["scaling"], "replacement": "mean over the study's tokens", "stage": "baseline"}
    files.write(output, _variables(data), inherited(inherit) | kept | attributes)


def open_transition(checkpoint_folder, baseline):
    """Read a baseline cache; return its `Transition`, variables and attributes."""
    checkpoint = Checkpoint(checkpoint_folder)
    names = ["residual_in", "branch_out", "contribution", "token_id", "token"]
    softmax = ["cos", "sin"]
    data, attributes = files.read(baseline, names, optional=softmax)
    source = layer_of(checkpoint, int(attributes["source_layer"]))
    recipient = layer_of(checkpoint, int(attributes["recipient_layer"]))
    base = data["residual_in"] + data["branch_out"]
    transition = Transition(
        source, recipient, base, data["contribution"], data.get("cos"), data.get("sin"), float(attributes["scaling"])
    )
    return transition, data, attributes
