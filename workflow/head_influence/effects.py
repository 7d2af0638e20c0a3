"""Stages single and joint: read a transition's baseline cache, remove heads, write their effects."""

import numpy as np

from head_influence import StudyError, files
from head_influence.ablation import SCENARIOS, VECTORS, check_masks, joint_masks, joint_removals, single_removals
from head_influence.baseline import open_transition
from head_influence.controls import ONE, control, inherited, token_coordinates
from head_influence.influence import FLOOR

LARGEST_CHANGES = 64 << 20  # bytes of change vectors that are kept; reading more takes longer than computing them
EFFECTS = {
    "relative": "change of the effective vector over its baseline norm; qkv: root mean square of q, k and v",
    "absolute": "Euclidean norm of the change of the effective vector",
    "js": "Jensen-Shannon divergence of the softmax rows",
    "sum_of_singles": "sum of the single removals' relative changes over the query token's set",
    "sum_of_singles_js": "sum of the single removals' divergences over the query token's set",
    "additive": "norm of the sum of the single removals' change vectors over the baseline norm",
    "interaction": "norm of the joint change minus that sum, over the baseline norm",
}
LEADING = {"relative": "component", "sum_of_singles": "component", "absolute": "vector", "additive": "vector",
           "interaction": "vector"}  # fmt: skip


def effect_variables(effects, middle):
    """Effects as netCDF variables over (leading, `middle`, query, recipient_head)."""
    variables = {
        "component": (("component",), [*VECTORS, "qkv"], {"long_name": "component of the influence"}),
        "vector": (("vector",), list(VECTORS), {"long_name": "effective vector"}),
    }
    for name, title in EFFECTS.items():
        if name in effects:
            leading = (LEADING[name],) if name in LEADING else ()
            units = "nat" if name.endswith("js") else ONE
            dims = (*leading, middle, "query", "recipient_head")
            variables[name] = (dims, effects[name], {"long_name": title, "units": units})
    return variables


def measure_single(checkpoint_folder, baseline, output, changes, attributes):
    """Stage single: every source head removed alone; effects to `output`, the change vectors to the cache `changes`."""
    transition, data, inherit = open_transition(checkpoint_folder, baseline)
    effects = single_removals(transition)
    where = f"text {inherit['text']}, transition {inherit['source_layer']}"
    checks = {}
    for name, (value, limit) in effects.pop("controls").items():
        checks |= control(where, name, value, limit)
    common = inherited(inherit) | {"baseline": str(baseline)} | checks | attributes
    vectors = {
        f"change_{c}": (
            ("source_head", "query", "value_head" if c == "v" else f"{c}_head", "value_dim" if c == "v" else "key_dim"),
            effects[f"change_{c}"],
            {"long_name": f"change of the recipient's distinct effective {c.upper()} heads", "units": ONE},
        )
        for c in VECTORS
    }
    if sum(x.nbytes for _, x, _ in vectors.values()) <= LARGEST_CHANGES:
        files.write(changes, vectors, common | {"stage": "changes"})
    norms = (
        ("vector", "query", "recipient_head"),
        effects["baseline_norm"],
        {"long_name": "Euclidean norm of the baseline's effective vector", "units": ONE},
    )
    variables = effect_variables(effects, "source_head") | {"baseline_norm": norms}
    variables |= token_coordinates(data["token_id"], data["token"])
    floored = int((effects["baseline_norm"] < FLOOR).sum())
    files.write(output, variables, common | {"stage": "single", "baseline_norms_under_floor": floored})


def read_changes(path):
    """Read the change vectors that the single stage kept, or return None: the joint stage can make them anew."""
    try:
        return files.read(path)[0]
    except StudyError:
        return None


def measure_joint(checkpoint_folder, baseline, single, changes, output, random_seed, sample_index, attributes):
    """Stage joint: input-adaptive weak, strong, random and all sets removed together."""
    transition, data, inherit = open_transition(checkpoint_folder, baseline)
    effects, _ = files.read(single, ["relative", "js", "baseline_norm"])
    vectors = read_changes(changes) or single_removals(transition)
    index = int(inherit["source_layer"])
    where = f"text {inherit['text']}, transition {index}"
    masks = joint_masks(effects["relative"][3], random_seed, sample_index, index)
    checks = control(where, "mask faults", check_masks(masks), 0)
    joint = joint_removals(transition, masks, vectors | effects)
    finite = all(np.isfinite(x).all() for n, x in joint.items() if not (n.endswith("js") and np.isnan(x).all()))
    checks |= control(where, "joint effects not finite", float(not finite), 0)
    variables = effect_variables(joint, "scenario") | {
        "scenario": (("scenario",), list(SCENARIOS), {"long_name": "which source heads are removed together"}),
        "removed": (
            ("scenario", "source_head", "query", "recipient_head"), masks,
            {"long_name": "1 where the source head is removed at the query's position", "units": ONE},
        ),
    } | token_coordinates(data["token_id"], data["token"])  # fmt: skip
    own = {"stage": "joint", "baseline": str(baseline), "random_seed": random_seed, "sample_index": sample_index}
    files.write(output, variables, inherited(inherit) | own | checks | attributes)
