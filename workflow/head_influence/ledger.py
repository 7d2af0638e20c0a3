"""Every number of the report's summary, looked up in the findings and listed.

Each number is found by where it is from: run, group ("transition", "kind" or ""), member (source layer, or kind),
component, scenario (joint removals only), quantity, statistic. The list becomes the table `summary.csv`.
"""

import numpy as np

from head_influence.distributions import ENOUGH_TEXTS, present, spread
from head_influence.findings import ALL_MEASURES, QUANTITIES
from head_influence.summary import per_text

QUANTILE_NAMES = ("q05", "q25", "q50", "q75", "q95")
SPREAD = ("centre", "low", "high")


def look_up(run, group, member, component, quantity, statistic, scenario=""):
    """Return one number of a run's findings; see the module's description."""
    place = int(member) if group == "transition" else present(run.kinds).index(member)
    if quantity in QUANTITIES:
        if statistic == "n":
            return int(run.joint_observations(group, component, scenario, quantity)[place])
        if statistic in SPREAD:
            medians = run.joint(f"text_{group}", component, scenario, quantity)[:, place, 2]
            return float(spread(medians)[SPREAD.index(statistic)])
        return float(run.joint(group, component, scenario, quantity)[place, QUANTILE_NAMES.index(statistic)])
    if quantity in ALL_MEASURES:
        counts = ("n", "undefined", "small total")
        if statistic in counts:
            return int(run.observations(group, component)[place, counts.index(statistic)])
        if statistic in SPREAD:
            medians = run.distribution(f"text_{group}", component, quantity)[:, place, 2]
            return float(spread(medians)[SPREAD.index(statistic)])
        if statistic == "of averaged influences":
            c, m = run.index("component", component), run.index("measure", quantity)
            return float(run.found["averaged"][place, c, m])
        return float(run.distribution(group, component, quantity)[place, QUANTILE_NAMES.index(statistic)])
    return _identity(run, place, component, quantity, statistic)


def _identity(run, j, component, quantity, statistic):
    """One number about the identity of dominant heads in transition j."""
    identity, c = run.identity, run.index("component", component)
    modal = int(identity["modal_head"][j, c])
    if quantity == "modal head":
        return modal
    if quantity == "constant part of the modal head":
        return float(spread(identity["constant_part"][j, :, modal])[SPREAD.index(statistic)]) if modal >= 0 else np.nan
    if quantity == "overlap of random halves":
        return float(identity["overlap_of_random"][j])
    if quantity.startswith("variance "):
        total = float(identity["variance_total"][j, c])
        names = [str(name) for name in identity["source"]]
        part = float(identity["variance"][j, c, names.index(quantity.removeprefix("variance "))])
        return part / total if total > 0 else np.nan
    if quantity == "modal share":
        if statistic == "value":
            return float(identity["modal_share"][j, c])
        values = identity["dominance_by_text"][j, :, c, modal] if modal >= 0 else [np.nan]
        return float(spread(values)[SPREAD.index(statistic)])
    if quantity == "own modal share":
        return float(spread(per_text(run, "modal share", component)[:, j])[SPREAD.index(statistic)])
    between = [str(name) for name in identity["between"]].index(quantity)
    if statistic == "value":
        return float(identity["overlap"][j, c, between])
    return float(spread(identity["overlap_by_text"][j, :, c, between])[SPREAD.index(statistic)])


def shown(value):
    """A number as the report prints it: three digits, whole numbers whole."""
    if isinstance(value, (int, np.integer)):
        return f"{value:,}"
    if not np.isfinite(value):
        return "–"
    value = float(f"{value:.6g}")  # as in the tables: 0.9999999 is 1
    if abs(value) < 1e-12:
        return "0"
    if 1e-4 <= abs(value) < 1e-3:
        return f"{value:.4f}".replace("-", "−")
    if 1e-3 <= abs(value) < 1e4:
        digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
        return f"{value:.{digits}f}".replace("-", "−")
    return f"{value:.2e}".replace("-", "−")


class Ledger:
    """Gives out numbers for the text and keeps the list of them.

    Parameters
    ----------
    runs : list of Run
        The study first.
    """

    def __init__(self, runs):
        self.runs = runs
        self.rows = []

    def value(self, run, *place, **scenario):
        """Number without listing it: to choose what to say."""
        return look_up(run, *place, **scenario)

    def number(self, run, group, member, component, quantity, statistic, scenario=""):
        """HTML of one number, listed."""
        value = look_up(run, group, member, component, quantity, statistic, scenario)
        self.rows.append(
            {
                "run": run.name, "group": group, "member": member, "component": component, "scenario": scenario,
                "quantity": quantity, "statistic": statistic, "value": value, "shown": shown(value),
            }
        )  # fmt: skip
        return f'<b data-n="{len(self.rows) - 1}">{shown(value)}</b>'

    def median(self, run, group, member, component, quantity, scenario=""):
        """HTML of a median with its quartiles."""

        def n(statistic):
            return self.number(run, group, member, component, quantity, statistic, scenario)

        return f"{n('q50')} ({n('q25')}–{n('q75')})"

    def texts(self, run, group, member, component, quantity, scenario=""):
        """HTML of the spread of the medians of single texts."""

        def n(statistic):
            return self.number(run, group, member, component, quantity, statistic, scenario)

        if len(self.runs[0].texts) < ENOUGH_TEXTS:
            return f"{n('low')}–{n('high')}"
        return f"{n('centre')} ({n('low')}–{n('high')})"


def spread_name(run):
    """What `Ledger.texts` shows."""
    if len(run.texts) < ENOUGH_TEXTS:
        return "medians of single texts"
    return "mean of the texts’ medians (95 % of resamplings of the texts)"
