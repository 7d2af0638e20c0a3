"""The findings of one run as CSV tables: one row per group, component and measure."""

import numpy as np

from head_influence.distributions import present, spread
from head_influence.summary import write_table

LEVELS = ("q05", "q25", "q50", "q75", "q95")
FILES = ("transitions", "kinds", "texts", "text_kinds", "positions", "heads", "identity", "joint", "joint_kinds")


def five(values):
    """Five quantiles as cells."""
    return dict(zip(LEVELS, map(float, values), strict=True))


def _groups(run):
    """Group name to the cells that name each of its members, in the order of the array's leading axes."""
    kinds, texts = present(run.kinds), run.texts
    transitions = [
        {"transition": j, "kind": kind, "source_heads": int(h)}
        for j, (kind, h) in enumerate(zip(run.kinds, run.found["source_heads"], strict=True))
    ]
    by_kind = [{"kind": kind} for kind in kinds]
    return {
        "transition": transitions,
        "kind": by_kind,
        "text_transition": [{"text": x} | t for x in texts for t in transitions],
        "text_kind": [{"text": x} | k for x in texts for k in by_kind],
    }


def concentration_table(run, group):
    """Distributions of all measures of a group."""
    values, average = run.found[f"{group}_distribution"], run.found[f"{group}_mean"]
    counts = run.found[f"{group}_observations"]
    rows = []
    for i, member in enumerate(_groups(run)[group]):
        at = np.unravel_index(i, values.shape[:-3])
        for c, component in enumerate(run.found["component"]):
            defined, undefined, small = map(int, counts[at][c])
            for m, measure in enumerate(run.found["measure"]):
                row = member | {"component": component, "measure": measure}
                row |= {"defined": defined, "undefined": undefined, "small_total": small}
                if group == "transition":
                    row["under_floor"] = int(run.identity["under_floor"][at[0], :, c].sum())
                row |= five(values[at][c, m]) | {"mean": float(average[at][c, m])}
                if group == "transition":
                    row["of_averaged_influences"] = float(run.found["averaged"][at[0], c, m])
                rows.append(row)
    return rows


def positions_table(run):
    """Distributions by token position, early queries included."""
    values, counts = run.found["position_distribution"], run.found["position_observations"]
    first = int(run.attributes["first_query"])
    return [
        {"kind": kind, "query": t, "primary": int(t >= first), "component": component, "measure": measure,
         "defined": int(counts[k, t, c])} | five(values[k, t, c, m])
        for k, kind in enumerate(present(run.kinds))
        for t in range(values.shape[1])
        for c, component in enumerate(run.found["component"])
        for m, measure in enumerate(run.found["measure"])
    ]  # fmt: skip


def heads_table(run):
    """Every source head: how often it dominates, its influence, and what of its contribution is constant."""
    identity, rows = run.identity, []
    for j, member in enumerate(_groups(run)["transition"]):
        for h in range(member["source_heads"]):
            for c, component in enumerate(run.found["component"]):
                row = member | {"source_head": h, "component": component}
                row |= {"dominance": float(identity["dominance"][j, c, h])} | five(identity["head_change"][j, c, h])
                centre, low, high = spread(identity["constant_part"][j, :, h])
                row |= {"constant_part": centre, "constant_part_low": low, "constant_part_high": high}
                rows.append(row | {"constant_part_across_texts": float(identity["constant_part_across_texts"][j, h])})
    return rows


def identity_table(run):
    """Stability of the dominant heads and of the strong halves, and where the shares vary."""
    identity, rows = run.identity, []
    for j, member in enumerate(_groups(run)["transition"]):
        for c, component in enumerate(run.found["component"]):
            modal = int(identity["modal_head"][j, c])
            row = member | {"component": component, "modal_head": modal if modal >= 0 else ""}
            row["modal_share"] = float(identity["modal_share"][j, c])
            if modal >= 0:
                low, high = spread(identity["dominance_by_text"][j, :, c, modal])[1:]
            else:
                low = high = np.nan
            row |= {"modal_share_low": low, "modal_share_high": high}
            for b, between in enumerate(identity["between"]):
                row[f"overlap_{between}".replace(" ", "_")] = float(identity["overlap"][j, c, b])
            row["overlap_of_random_halves"] = float(identity["overlap_of_random"][j])
            total = float(identity["variance_total"][j, c])
            for s, source in enumerate(identity["source"]):
                row[f"variance_{source}".replace(" ", "_")] = (
                    float(identity["variance"][j, c, s]) / total if total > 0 else np.nan
                )
            row |= {"variance_total": total, "balanced": int(identity["variance_balanced"][j, c])}
            rows.append(row)
    return rows


def joint_table(run, group):
    """Distributions of every quantity of the joint removals."""
    values, counts, rows = run.found[f"joint_{group}"], run.found[f"joint_{group}_observations"], []
    for i, member in enumerate(_groups(run)[group]):
        for c, component in enumerate(run.found["component"]):
            for s, scenario in enumerate(run.found["scenario"]):
                for q, quantity in enumerate(run.found["quantity"]):
                    n = int(counts[i, c, s, q])
                    if n:
                        row = member | {"component": component, "scenario": scenario, "quantity": quantity}
                        if group == "transition":
                            row["set_is_whole_intervention"] = int(run.found["speaks"][i, c, s])
                        rows.append(row | {"n": n} | five(values[i, c, s, q]))
    return rows


def write_tables(run, folder):
    """Write all tables of a run."""
    made = {
        "transitions": concentration_table(run, "transition"),
        "kinds": concentration_table(run, "kind"),
        "texts": concentration_table(run, "text_transition"),
        "text_kinds": concentration_table(run, "text_kind"),
        "positions": positions_table(run),
        "heads": heads_table(run),
        "identity": identity_table(run),
        "joint": joint_table(run, "transition"),
        "joint_kinds": joint_table(run, "kind"),
    }
    for name in FILES:
        write_table(f"{folder}/{name}.csv", made[name])
