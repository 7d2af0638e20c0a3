"""Stage baseline: what a transition's interventions start from, checked against the model's own modules."""

import numpy as np

from head_influence import files
from head_influence.ablation import VECTORS, Transition
from head_influence.checkpoint import Checkpoint
from head_influence.controls import ONE, control, exceeds, inherited, token_coordinates
from head_influence.families import layer_of

CHECKED = 1e-5  # limit of the controls that compare with the model's own modules


def measure_baseline(checkpoint_folder, trace, index, output, attributes):
    """Write the baseline cache of the transition from layer `index` to the next.

    Contributions of the source heads, and the recipient's Q, K, V and softmax rows, recomputed by the intervention
    arithmetic with nothing removed; the controls compare them with what the model's own modules produced.
    """
    checkpoint = Checkpoint(checkpoint_folder)
    before, inherit = files.read(trace, group=f"L{index:02d}")
    after, recipient_attributes = files.read(trace, group=f"L{index + 1:02d}")
    tokens, _ = files.read(trace)
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
    variables = {}
    for c in VECTORS:
        x = recipient.slots(vectors[c][0], axis=1)
        checks |= control(where, f"recomputed {c}", exceeds(x, after[c]), CHECKED)
        dims = ("query", "recipient_head", "value_dim" if c == "v" else "key_dim")
        variables[c] = (dims, x, {"long_name": f"effective {c.upper()} of the recipient layer", "units": ONE})
    if recipient.kind == "softmax":
        rows = recipient.retrieval(vectors["q"], vectors["k"], transition.scaling)[0]
        checks |= control(where, "recomputed retrieval", exceeds(rows, after["retrieval"]), CHECKED)
        dims = ("recipient_head", "query", "key")
        variables["retrieval"] = (dims, rows, {"long_name": "causal softmax rows of the recipient", "units": ONE})
        for name in ("cos", "sin"):
            title = {"long_name": f"rotary {name} of the recipient", "units": ONE}
            variables[name] = (("query", "rotary_dim"), after[name], title)
    variables |= {
        "residual_in": (
            ("query", "hidden"), before["residual_in"], {"long_name": "residual stream before the source", "units": ONE}
        ),
        "branch_out": (
            ("query", "hidden"), before["branch_out"], {"long_name": "source's token mixer, with bias", "units": ONE}
        ),
        "contribution": (
            ("source_head", "query", "hidden"), contribution,
            {"long_name": "what a source head writes to the residual stream", "units": ONE},
        ),
    } | token_coordinates(tokens["token_id"], tokens["token"])  # fmt: skip
    own = {
        "source_layer": index, "recipient_layer": index + 1, "source_kind": source.kind,
        "recipient_kind": recipient.kind, "scaling": transition.scaling, "stage": "baseline",
    }  # fmt: skip
    files.write(output, variables, inherited(inherit) | own | checks | attributes)


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
