"""What a study found: distributions of every measure and of joint effects, in one file and as tables."""

import json
from collections import Counter

import numpy as np

from head_influence import StudyError, files
from head_influence.ablation import SCENARIOS, VECTORS
from head_influence.concentration import COMPONENTS, MEASURES, concentration
from head_influence.controls import ONE, controls_of
from head_influence.distributions import (
    QUANTILES,
    by_position,
    five_numbers,
    grouped,
    kind_name,
    means,
    present,
)
from head_influence.identity import worst_controls

ALL_MEASURES = ("total", *MEASURES)
COUNTS = ("defined", "undefined", "small total")
QUANTITIES = {
    "effect": "effect of the joint removal: relative change of the vector; divergence in nats for js",
    "sum_of_singles": "sum of the single removals' effects over the query token's set",
    "additive": "norm of the sum of the single change vectors over the baseline norm",
    "interaction": "norm of the joint change minus that sum, over the baseline norm",
    "effect_over_sum": "effect over the sum of singles: a comparison of norms",
    "effect_over_additive": "length of the joint change over the length of the additive one",
    "interaction_over_additive": "departure from additivity as a fraction of the additive change",
    "effect_over_all": "effect over the effect of removing all heads",
    "effect_over_random": "effect over the effect of removing a random half",
}
NOISE = 1e-6  # additive changes below it give no ratio
GROUPS = {
    "transition": ("transition",),
    "text_transition": ("text", "transition"),
    "kind": ("kind",),
    "text_kind": ("text", "kind"),
}


def speaks(component, scenario, recipient_kind):
    """Whether `interaction` is about the query token's own set alone, so that it may be called synergy or cancellation.

    True for q, k, v of softmax recipients and for `all`; elsewhere it includes the sets at other positions.
    """
    return component in VECTORS and (scenario == "all" or recipient_kind == "softmax")


def _number_of_observations(data, first_query):
    """Counts in the order of `COUNTS`: arrays (X, L, C, T, R, 3) of 0 and 1."""
    flags = [np.isfinite(data["n_eff"]), data["undefined"] == 1, data["small_total"] == 1]
    return [flag[:, :, :, first_query:] for flag in flags]


def concentration_variables(data, kinds, first_query):
    """Distributions of every measure by transition, kind, text and position, and how many observations they are of."""
    variables = {}
    tail = ("component", "measure", "quantile")
    collected = {group: [] for group in (*GROUPS, "position")}
    averages = {group: [] for group in GROUPS}
    for name in ALL_MEASURES:
        primary = data[name][:, :, :, first_query:]
        for group, found in grouped(primary, kinds, five_numbers).items():
            collected[group].append(found)
        for group, found in grouped(primary, kinds, lambda v: means(v)[..., None]).items():
            averages[group].append(found[..., 0])
        collected["position"].append(by_position(data[name], kinds, five_numbers))
    for group, dims in GROUPS.items():
        title = {"long_name": f"quantiles of the measures by {' and '.join(dims)}", "units": ONE}
        variables[f"{group}_distribution"] = ((*dims, *tail), np.stack(collected[group], axis=-2), title)
        title = {"long_name": f"means of the measures by {' and '.join(dims)}", "units": ONE}
        variables[f"{group}_mean"] = ((*dims, *tail[:2]), np.stack(averages[group], axis=-1), title)
    title = {"long_name": "quantiles of the measures by token position, all queries", "units": ONE}
    position = np.stack(collected["position"], axis=-2)
    variables["position_distribution"] = (("kind", "query", *tail), position, title)
    flags = _number_of_observations(data, first_query)
    counts = [grouped(flag, kinds, lambda v: v.sum(axis=-1, keepdims=True)) for flag in flags]
    for group, dims in GROUPS.items():
        title = {"long_name": f"number of observations by {' and '.join(dims)}", "units": ONE}
        number = np.concatenate([count[group] for count in counts], axis=-1)
        variables[f"{group}_observations"] = ((*dims, "component", "count"), number, title)
    defined = by_position(np.isfinite(data["n_eff"]), kinds, lambda v: v.sum(axis=-1, keepdims=True))[..., 0]
    title = {"long_name": "number of defined observations by token position", "units": ONE}
    variables["position_observations"] = (("kind", "query", "component"), defined, title)
    return variables


def averaged_variables(mean_influence, source_heads, small_total):
    """Concentration of the influences averaged over texts, tokens and recipient heads: a contrast, not a result."""
    averaged = mean_influence.mean(axis=1)
    out = np.full((*averaged.shape[:2], len(ALL_MEASURES)), np.nan)
    for j, heads in enumerate(source_heads):
        for c, component in enumerate(COMPONENTS):
            limit = small_total["js" if component == "js" else "vectors"]
            found = concentration(averaged[j, c, :heads], limit)
            out[j, c] = [found[name] for name in ALL_MEASURES]
    title = {"long_name": "measures of the averaged influences, as a contrast", "units": ONE}
    return {"averaged": (("transition", "component", "measure"), out, title)}


def read_joint(path, first_query):
    """Effect, sum of singles, additive, interaction of one joint file.

    Returns
    -------
    array (4, C * scenarios, T, R), float32
        Primary observations; NaN where a component has no such quantity.
    attributes : dict
    """
    names = ["relative", "js", "sum_of_singles", "sum_of_singles_js", "additive", "interaction"]
    data, attributes = files.read(path, names)
    nothing = np.full((len(COMPONENTS) - len(VECTORS), *data["js"].shape), np.nan)
    stacked = [
        np.concatenate([data["relative"], data["js"][None]]),
        np.concatenate([data["sum_of_singles"], data["sum_of_singles_js"][None]]),
        np.concatenate([data["additive"], nothing]),
        np.concatenate([data["interaction"], nothing]),
    ]
    found = np.stack(stacked)[..., first_query:, :].astype(np.float32)
    return found.reshape(4, -1, *found.shape[-2:]), attributes


def ratios(base):
    """All `QUANTITIES` of base (4, X, L, C * scenarios, T, R), one at a time."""
    effect, sums, additive, interaction = base
    by_scenario = effect.reshape(*effect.shape[:2], len(COMPONENTS), len(SCENARIOS), *effect.shape[3:])

    def against(scenario):
        own = by_scenario[:, :, :, [SCENARIOS.index(scenario)]]
        return np.broadcast_to(own, by_scenario.shape).reshape(effect.shape)

    def over(numerator, denominator, least=0.0):
        usable = denominator > least
        return np.where(usable, numerator / np.where(usable, denominator, 1), np.nan)

    yield from base
    yield over(effect, sums)
    yield over(effect, additive, NOISE)
    yield over(interaction, additive, NOISE)
    yield over(effect, against("all"))
    yield over(effect, against("random"))


def joint_variables(joints, first_query, shape):
    """Distributions of the joint effects by transition, kind and text.

    Parameters
    ----------
    joints : list of list of path
        By text, then transition.
    first_query : int
    shape : tuple
        Largest number of primary queries and of recipient heads.

    Returns
    -------
    variables, controls : dict, dict
    """
    inner = len(COMPONENTS) * len(SCENARIOS)
    base = np.full((4, len(joints), len(joints[0]), inner, *shape), np.nan, np.float32)
    kinds, recipients, checks = [None] * len(joints[0]), [None] * len(joints[0]), []
    for i, row in enumerate(joints):
        for j, path in enumerate(row):
            found, attributes = read_joint(path, first_query)
            base[:, i, j, :, : found.shape[2], : found.shape[3]] = found
            recipients[j] = attributes["recipient_kind"]
            kinds[j] = kind_name(attributes["source_kind"], recipients[j])
            checks += controls_of(attributes).items()
    collected = {group: [] for group in GROUPS}
    numbers = {group: [] for group in GROUPS}
    for values in ratios(base):
        for group, found in grouped(values, kinds, five_numbers).items():
            collected[group].append(found)
        counted = grouped(np.isfinite(values), kinds, lambda v: v.sum(axis=-1, keepdims=True))
        for group, found in counted.items():
            numbers[group].append(found[..., 0])
    variables = {}
    for group, dims in GROUPS.items():
        full = np.stack(collected[group], axis=-2)
        full = full.reshape(*full.shape[:-3], len(COMPONENTS), len(SCENARIOS), *full.shape[-2:])
        tail = ("component", "scenario", "quantity", "quantile")
        title = {"long_name": f"quantiles of joint effects by {' and '.join(dims)}", "units": ONE}
        variables[f"joint_{group}"] = ((*dims, *tail), full, title)
        count = np.stack(numbers[group], axis=-1).reshape(full.shape[:-1])
        title = {"long_name": f"number of observations of joint effects by {' and '.join(dims)}", "units": ONE}
        variables[f"joint_{group}_observations"] = ((*dims, *tail[:3]), count, title)
    allowed = [[[speaks(c, s, kind) for s in SCENARIOS] for c in COMPONENTS] for kind in recipients]
    title = {"long_name": "1 where interaction may be called synergy or cancellation", "units": ONE}
    variables["speaks"] = (("transition", "component", "scenario"), np.array(allowed), title)
    return variables, worst_controls(checks)


def measure_findings(concentration_file, identity_file, joints, output, attributes):
    """Stage findings: every distribution of one study, or of one of its controls, in one file.

    Parameters
    ----------
    concentration_file, identity_file : path
        Results of the stages of these names.
    joints : list of list of path
        By text, then transition.
    output : path
    attributes : dict

    Raises
    ------
    StudyError
        If the files are not of the same texts.
    """
    data, found = files.read(concentration_file)
    identity, inherit = files.read(identity_file)
    if list(data["text"]) != list(identity["text"]) or len(joints) != len(data["text"]):
        raise StudyError(f"{identity_file}: not of the same texts as {concentration_file}; delete it and run again")
    first_query = int(inherit["first_query"])
    kinds = [kind_name(*pair) for pair in zip(data["source_kind"], data["recipient_kind"], strict=True)]
    primary = (data["n_eff"].shape[3] - first_query, data["n_eff"].shape[4])
    small_total = json.loads(found["small_total"])
    joint, checks = joint_variables(joints, first_query, primary)
    controls = json.loads(inherit["controls"]) | checks
    variables = {
        name: ((name,), list(values), {"long_name": title})
        for name, values, title in (
            ("text", data["text"], "text id"),
            ("component", COMPONENTS, "component of the influence"),
            ("kind", present(kinds), "kind of transition"),
            ("measure", ALL_MEASURES, "measure of concentration; total: sum of the influences"),
            ("scenario", SCENARIOS, "which source heads are removed together"),
            ("quantity", QUANTITIES, "quantity of a joint removal"),
            ("count", COUNTS, "what is counted"),
        )
    }
    variables |= {
        "transition": (("transition",), data["transition"], {"long_name": "source layer", "units": ONE}),
        "query": (("query",), np.arange(data["n_eff"].shape[3]), {"long_name": "token position", "units": ONE}),
        "quantile": (("quantile",), np.array(QUANTILES), {"long_name": "quantile", "units": ONE}),
        "transition_kind": (("transition",), kinds, {"long_name": "kind of transition"}),
        "source_heads": (("transition",), data["source_heads"], {"long_name": "number of source heads", "units": ONE}),
    }
    variables |= concentration_variables(data, kinds, first_query)
    variables |= averaged_variables(identity["mean_influence"], data["source_heads"], small_total)
    variables |= joint
    kept = {key: inherit[key] for key in ("model", "revision", "fingerprint", "replacement") if key in inherit}
    own = {
        "stage": "findings",
        "first_query": first_query,
        "small_total": small_total,
        "controls": controls,
        "kinds_of_transitions": dict(Counter(kinds)),
    }
    files.write(output, variables, kept | own | attributes)
