"""The report's summary: what each part says, and its tables."""

import numpy as np

from head_influence.distributions import present
from head_influence.findings import NOISE
from head_influence.ledger import Ledger, shown, spread_name
from head_influence.markup import table
from head_influence.summary import compare, controls_of, per_text

NAMES = {"q": "Q", "k": "K", "v": "V", "qkv": "Q, K, V together", "js": "Retrieval (JS)"}
CELLS = NAMES | {"qkv": "Q, K, V", "js": "JS"}
NOTHING = "<p>No transition has more than one source head and a defined share, so there is nothing to compare.</p>"


def name_of(run, j):
    """A transition in words."""
    heads = int(run.found["source_heads"][j])
    return f"transition {j} ({run.kinds[j]}, {heads} source head{'s' if heads != 1 else ''})"


def telling_transitions(run, component):
    """Source layers with more than one head and at least one defined observation."""
    defined = run.observations("transition", component)[:, 0] > 0
    return [int(j) for j in np.flatnonzero(defined & (run.found["source_heads"] > 1))]


def join(parts):
    """Words as a list in a sentence."""
    parts = list(parts)
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def separated(says):
    """Whether a verdict is that of a headline."""
    return says.endswith(("all controls", "the control"))


def verdict(runs, values):
    """Which controls the study's spread over texts lies apart from, in words; `values` has each run's texts' values."""
    controls = controls_of(runs)
    if not controls:
        return "compared with no control"
    if len(runs[0].texts) < 2:
        return "that of one text: nothing is separated"
    _, signs, headline = compare(runs, values)
    if headline:
        return f"{'below' if headline < 0 else 'above'} {'all controls' if len(controls) > 1 else 'the control'}"
    sides = [f"{'below' if s < 0 else 'above'} {r.label}" for r, s in zip(controls, signs, strict=True) if s]
    return f"{join(sides)} only" if sides else "not separated"


def tally(runs, found):
    """How many of the verdicts are headlines, as a sentence; nothing without controls or with one text."""
    if not controls_of(runs) or len(runs[0].texts) < 2:
        return ""
    below, above = (sum(separated(says) and says.startswith(side) for says in found) for side in ("below", "above"))
    return f"Of {len(found)} transitions the spread over texts lies below every control in {below}, above in {above}."


def most_concentrated(ledger):
    """Which transition has the lowest median N_eff/H, and by how much against the controls."""
    runs, study, out, rows = ledger.runs, ledger.runs[0], [], []
    for component in ("qkv", "js"):
        known = telling_transitions(study, component)
        medians = [
            {j: ledger.value(run, "transition", j, component, "n_eff_fraction", "q50") for j in known} for run in runs
        ]
        if not known:
            continue
        j = min(known, key=medians[0].get)
        at = ("transition", j, component, "n_eff_fraction")
        others = "; ".join(
            f"{run.label} {ledger.number(run, *at, 'q50')}, {'higher' if m[j] > medians[0][j] else 'lower'} by "
            f"{shown(abs(m[j] - medians[0][j]))}" for run, m in zip(runs[1:], medians[1:], strict=True)
        )  # fmt: skip
        says = verdict(runs, [per_text(run, "n_eff_fraction", component)[:, j] for run in runs])
        out.append(
            f"<p>{NAMES[component]}: the lowest median N<sub>eff</sub>/H of {len(known)} transitions is that of "
            f"{name_of(study, j)}: {ledger.number(study, *at, 'q50')} (quartiles {ledger.number(study, *at, 'q25')}, "
            f"{ledger.number(study, *at, 'q75')}; 5, 95 %: {ledger.number(study, *at, 'q05')} and "
            f"{ledger.number(study, *at, 'q95')}; n = {ledger.number(study, *at, 'n')}; {spread_name(study)} "
            f"{ledger.texts(study, *at)}). {'The same transition with ' + others + '. ' if others else ''}"
            f"The spread over the texts is {says}.</p>"
        )
        found = []
        for j in known:
            at = ("transition", j, component, "n_eff_fraction")
            cells = [str(j), study.kinds[j], str(int(study.found["source_heads"][j])), CELLS[component]]
            cells += [ledger.median(study, *at), ledger.number(study, *at, "n"), ledger.texts(study, *at)]
            cells += [f"{ledger.number(run, *at, 'q50')} ({ledger.texts(run, *at)})" for run in runs[1:]]
            found.append(verdict(runs, [per_text(run, "n_eff_fraction", component)[:, j] for run in runs]))
            rows.append([*cells, found[-1]])
        out[-1] = out[-1].replace("</p>", f" {tally(runs, found)}</p>")
    if not out:
        return [NOTHING]
    columns = ["transition", "kind", "source heads", "component", "N<sub>eff</sub>/H: median (quartiles)", "n",
               spread_name(study), *(run.label for run in runs[1:]), "spread over texts"]  # fmt: skip
    note = (
        "N<sub>eff</sub>/H of every transition beside the controls. Transitions of different kinds or numbers of heads "
    )
    note += "are not ranked against each other: the floor is 1/H, and linear recipients mix four tokens."
    return [*out, table(columns, rows, note, "by-transition")]


def kind_by_kind(ledger):
    """What every control separates, for each kind of transition."""
    runs, study, rows, found = ledger.runs, ledger.runs[0], [], []
    for component in ("qkv", "js"):
        for k, kind in enumerate(present(study.kinds)):
            at = ("kind", kind, component, "n_eff_fraction")
            if not study.observations("kind", component)[k, 0]:
                continue
            says = verdict(runs, [run.distribution("text_kind", component, "n_eff_fraction")[:, k, 2] for run in runs])
            found.append((f"{kind}, {NAMES[component]}", says))
            cells = [kind, CELLS[component], str(study.kinds.count(kind)), ledger.median(study, *at)]
            cells += [ledger.number(study, *at, "n"), ledger.texts(study, *at)]
            cells += [f"{ledger.number(run, *at, 'q50')} ({ledger.texts(run, *at)})" for run in runs[1:]]
            rows.append([*cells, says])
    if not rows:
        return ["<p>No observation has a defined share.</p>"]
    if not controls_of(runs):
        text = "No control was run, so nothing is said about learned structure."
    else:
        apart = [f"{what} ({says})" for what, says in found if separated(says)]
        rest = [f"{what} ({says})" for what, says in found if not separated(says)]
        text = (
            f"Separated from every control: {join(apart)}. " if apart else "No kind is separated from every control. "
        )
        text += f"Not separated from every control: {join(rest)}." if apart and rest else ""
    columns = ["kind", "component", "transitions", "N<sub>eff</sub>/H: median (quartiles)", "n", spread_name(study),
               *(run.label for run in runs[1:]), "spread over texts"]  # fmt: skip
    note = (
        "Separated: the spreads over texts of the studied model and of a control do not touch. A headline is only what "
    )
    note += "all controls separate in the same direction."
    return [f"<p>{text}</p>", table(columns, rows, note, "by-kind")]


def same_head(ledger):
    """Whether the same head dominates across tokens."""
    runs, study = ledger.runs, ledger.runs[0]
    known = telling_transitions(study, "qkv")
    if not known:
        return [NOTHING]
    shares = {j: ledger.value(study, "transition", j, "qkv", "modal share", "value") for j in known}
    most, least = max(known, key=shares.get), min(known, key=shares.get)
    text = "Q, K, V together: the head that is most often dominant has the largest share in "
    text += f"{ledger.number(study, 'transition', least, 'qkv', 'modal share', 'value')} of observations in transition "
    text += (
        f"{least} and in {ledger.number(study, 'transition', most, 'qkv', 'modal share', 'value')} in transition {most}"
    )
    text += f" (of {len(known)} transitions the least and the most). "
    text += tally(runs, [verdict(runs, [per_text(run, "modal share", "qkv")[:, j] for run in runs]) for j in known])
    dominance, stability = [], []
    for component in ("qkv", "js"):
        for j in telling_transitions(study, component):

            def n(quantity, statistic="value", run=study, at=("transition", j, component)):
                return ledger.number(run, *at, quantity, statistic)

            name = [str(j), study.kinds[j], CELLS[component]]
            cells = [n("modal head"), n("modal share"), f"{n('modal share', 'low')}–{n('modal share', 'high')}"]
            cells += [verdict(runs, [per_text(run, "modal share", component)[:, j] for run in runs])]
            for run in runs:
                low, high = (n("own modal share", statistic, run=run) for statistic in ("low", "high"))
                cells.append(f"{n('own modal share', 'centre', run=run)} ({low}–{high})")
            dominance.append([*name, *cells, n("constant part of the modal head", "centre")])
            cells = [n("neighbouring tokens"), n("recipient heads"), n("texts"), n("overlap of random halves")]
            cells += [n(f"variance {source}") for source in ("head", "head x text", "head x token", "head x recipient")]
            stability.append([*name, *cells])
    columns = ["transition", "kind", "component", "modal head", "its frequency", "over texts",
               "spread over texts", *(f"own modal head of a text, {run.label}" for run in runs),
               "constant part of its contribution"]  # fmt: skip
    note = "Modal head: the one that most often has the largest share. A head whose contribution is constant dominates "
    note += "without carrying anything of the input. Own modal head: how often the head that is modal in one text has "
    note += "the largest share there, mean (spread) over texts; that is what is compared with the controls."
    out = [f"<p>{text}</p>", table(columns, dominance, note, "by-head")]
    columns = ["transition", "kind", "component", "overlap: neighbouring tokens", "recipient heads", "texts",
               "random halves", "variation: head", "head × text", "head × token", "head × recipient"]  # fmt: skip
    note = "Overlap: Jaccard overlap of the halves of heads with the larger influence. Variation: parts of the mean "
    note += "square of (share − 1/H). None of these sets is called removable."
    return [*out, table(columns, stability, note, "by-stability")]


def joint_effects(ledger):
    """How far joint effects are from additive ones, and where that may be said."""
    runs, study, rows, sizes, lead = ledger.runs, ledger.runs[0], [], [], []
    for kind in present(study.kinds):
        softmax = kind.endswith("softmax")
        for scenario in ("strong", "all"):
            for component in "qkv":
                at = ("kind", kind, component, "interaction_over_additive")
                if not ledger.value(study, *at, "n", scenario=scenario):
                    continue
                noise = ledger.value(study, *at[:3], "interaction", "q50", scenario=scenario) < NOISE
                allowed = "yes" if softmax or scenario == "all" else "no"
                length = ledger.number(study, *at[:3], "effect_over_additive", "q50", scenario)
                cells = [kind, "strong half" if scenario == "strong" else "all heads", CELLS[component], allowed]
                cells += [ledger.median(study, *at, scenario) + (" (noise)" if noise else "")]
                cells += [ledger.number(study, *at, "n", scenario), ledger.texts(study, *at, scenario), length]
                rows.append([*cells, *(ledger.number(r, *at, "q50", scenario) for r in runs[1:])])
        if softmax and ledger.value(study, "kind", kind, "q", "interaction_over_additive", "n", scenario="strong"):
            at = ("interaction_over_additive", "q50", "strong")
            values = [ledger.number(study, "kind", kind, c, *at) for c in "qkv"]
            lead.append(f"{kind}: median {values[0]} (Q), {values[1]} (K), {values[2]} (V)")
    for component in ("qkv", "js"):
        for kind in present(study.kinds):
            at = ("kind", kind, component, "effect_over_all")
            if ledger.value(study, *at, "n", scenario="strong") and max(study.found["source_heads"]) > 1:
                parts = [ledger.median(study, *at, s) for s in ("weak", "random", "strong")]
                ratio = ledger.number(study, *at[:3], "effect_over_sum", "q50", "strong")
                total = ledger.median(study, *at[:3], "effect", "all")
                n = ledger.number(study, *at[:3], "effect", "n", "all")
                sizes.append([kind, CELLS[component], n, total, *parts, ratio])
    if not rows and not sizes:
        return ["<p>No joint removal has an effect in this study.</p>"]
    text = "Departure from additivity is the length of (joint change − sum of the single changes) over the length of "
    text += "that sum. It may be called synergy or cancellation only where the query token’s set is the whole "
    text += (
        "intervention: Q, K, V of softmax recipients, and removal of all heads. Elsewhere the sets at other positions "
    )
    text += "take part. "
    if lead:
        text += f"For the strong half, where it may be said: {'; '.join(lead)}."
    else:
        text += "In this study it may be said of the removal of all heads only."
    columns = ["kind", "removed", "component", "may be said", "departure / additive: median (quartiles)", "n",
               spread_name(study), "length of joint / additive",
               *(f"departure, {run.label}" for run in runs[1:])]  # fmt: skip
    note = "Joint changes beside the sum of the single changes. May be said: synergy or cancellation, see above."
    out = [f"<p>{text}</p>", table(columns, rows, note, "by-joint")]
    if sizes:
        columns = ["kind", "component", "n", "all heads: effect", "weak half / all", "random half / all",
                   "strong half / all", "strong half: joint / sum of singles"]  # fmt: skip
        note = (
            "Size of joint effects: medians (quartiles). Effect: relative change of the vector; nats for JS. The last "
        )
        note += "column compares norms; below 1 is the triangle inequality, not cancellation."
        out.append(table(columns, sizes, note, "by-scenario"))
    return out


def averaging(ledger):
    """What the concentration of averaged influences hides."""
    study = ledger.runs[0]
    gaps = {}
    for component in ("qkv", "js"):
        for j in telling_transitions(study, component):
            at = ("transition", j, component, "n_eff_fraction")
            median = ledger.value(study, *at, "q50")
            gaps[j, component] = ledger.value(study, *at, "of averaged influences") / median - 1
    if not gaps:
        return [NOTHING]
    j, component = max(gaps, key=lambda key: abs(gaps[key]))
    at = ("transition", j, component, "n_eff_fraction")
    return [
        f"<p>N<sub>eff</sub>/H of influences averaged over texts, tokens and recipient heads is furthest from the "
        f"median of single observations in {name_of(study, j)}, {NAMES[component]}: "
        f"{ledger.number(study, *at, 'of averaged influences')} against {ledger.number(study, *at, 'q50')} "
        f"({'+' if gaps[j, component] > 0 else ''}{shown(100 * gaps[j, component])} %). It is shown as a contrast.</p>"
    ]


def summary(runs):
    """The summary's parts.

    Returns
    -------
    parts : list of (id, heading, list of HTML)
    rows : list of dict
        Every number in them.
    """
    ledger = Ledger(runs)
    parts = [
        ("most", "Which transition is most concentrated, and by how much against the controls?", most_concentrated),
        ("kinds", "What do the controls separate, kind by kind?", kind_by_kind),
        ("head", "Does the same head dominate across tokens?", same_head),
        ("departure", "How far is a joint effect from the additive one, and where may that be said?", joint_effects),
        ("average", "What would averaging first have hidden?", averaging),
    ]
    return [(name, heading, part(ledger)) for name, heading, part in parts], ledger.rows
