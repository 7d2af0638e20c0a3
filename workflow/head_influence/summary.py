"""The studied model beside its controls: what is compared, and which differences every control separates."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from head_influence import StudyError, files
from head_influence.distributions import present, separated, spread

CONTROLS = ("random", "permuted")
LABELS = {
    "": "studied model",
    "random": "random weights",
    "permuted": "permuted weights",
    "mean": "mean replacement (not removal)",
}
COMPARED = ("n_eff_fraction", "concentration", "top1", "total")


@dataclass
class Run:
    """Findings and identity of the study or of one of its variants.

    Attributes
    ----------
    name : str
        Folder under results/.
    control : str
        "" for the study itself, else "random", "permuted" or "mean".
    found, identity : dict of arrays
    attributes : dict
        Of the findings.
    """

    name: str
    control: str
    found: dict
    identity: dict
    attributes: dict

    @property
    def label(self):
        """What the run is, in words."""
        seed = self.name.rpartition(self.control)[2] if self.control in CONTROLS else ""
        return f"{LABELS[self.control]} {seed}".strip() if seed not in ("", "0") else LABELS[self.control]

    def index(self, dim, label):
        """Place of a label along a dimension."""
        return [str(value) for value in self.found[dim]].index(str(label))

    def distribution(self, group, component, measure):
        """Quantiles (..., 5) of a measure by `group`."""
        values = self.found[f"{group}_distribution"]
        return values[..., self.index("component", component), self.index("measure", measure), :]

    def observations(self, group, component):
        """Counts (..., 3): defined, undefined, small total."""
        return self.found[f"{group}_observations"][..., self.index("component", component), :]

    def joint(self, group, component, scenario, quantity):
        """Quantiles (..., 5) of a quantity of joint removals by `group`."""
        place = tuple(self.index(d, x) for d, x in (("component", component), ("scenario", scenario)))
        return self.found[f"joint_{group}"][(..., *place, self.index("quantity", quantity), slice(None))]

    def joint_observations(self, group, component, scenario, quantity):
        """Number of observations of the same."""
        place = tuple(self.index(d, x) for d, x in (("component", component), ("scenario", scenario)))
        return self.found[f"joint_{group}_observations"][(..., *place, self.index("quantity", quantity))]

    @property
    def kinds(self):
        """Kind of every transition."""
        return [str(kind) for kind in self.found["transition_kind"]]

    @property
    def texts(self):
        """Ids of the texts."""
        return [str(text) for text in self.found["text"]]


def load_run(folder, name, control=""):
    """Read a run's findings and identity from `folder`/`name`."""
    folder = Path(folder) / name
    found, attributes = files.read(folder / "findings.nc")
    return Run(name, control, found, files.read(folder / "identity.nc")[0], attributes)


def load_runs(folder, runs):
    """Read the study and its variants; all must be of the same texts and transitions.

    Parameters
    ----------
    folder : path
        The results folder.
    runs : list of (name, control)
        The study first.
    """
    loaded = [load_run(folder, name, control) for name, control in runs]
    for run in loaded[1:]:
        if run.texts != loaded[0].texts or run.kinds != loaded[0].kinds:
            raise StudyError(f"{folder}/{run.name}: not of the same texts and layers as {loaded[0].name}")
    return loaded


def controls_of(runs):
    """The runs that a headline must be separated from."""
    return [run for run in runs if run.control in CONTROLS]


def per_text(run, quantity, component):
    """A quantity's value in each text and transition, (X, L).

    `quantity`: a measure of concentration (the text's median), "modal share" (of the text's own modal head), "constant
    share", "neighbouring tokens", "recipient heads" (overlaps), or "strong"/"all" + " departure" (the text's median of
    interaction over additive, mean of Q, K, V where qkv is asked for).
    """
    c = run.index("component", component)
    if quantity == "modal share":
        return run.identity["dominance_by_text"][:, :, c].max(axis=-1, initial=-np.inf, where=_heads(run)).T
    if quantity == "constant share":
        return run.identity["constant_share"][:, :, c].T
    if quantity in (overlaps := [str(o) for o in run.identity["between"]]):
        return run.identity["overlap_by_text"][:, :, c, overlaps.index(quantity)].T
    if quantity.endswith(" departure"):
        return run.joint("text_transition", component, quantity.split()[0], "interaction_over_additive")[..., 2]
    return run.distribution("text_transition", component, quantity)[..., 2]


def _heads(run):
    heads = run.identity["source_heads"]
    return (np.arange(heads.max()) < heads[:, None])[:, None, :]


def compare(runs, values):
    """Compare the study with its controls on one quantity.

    Parameters
    ----------
    runs : list of Run
    values : list of array (X,)
        The quantity in each text, one array per run.

    Returns
    -------
    spreads : list of (centre, low, high)
        One per run.
    signs : list of int
        One per control: -1 or 1 where the study's spread over texts lies below or above the control's, 0 where they
        touch.
    headline : int
        The sign if all controls agree on it, else 0; 0 without controls.
    """
    signs = [separated(values[0], other) for run, other in zip(runs, values, strict=True) if run.control in CONTROLS]
    headline = signs[0] if signs and len(set(signs)) == 1 else 0
    return [spread(v) for v in values], signs, headline


def comparisons(runs):
    """Every comparison of the study with its controls, as rows for the table `comparison.csv`."""
    study = runs[0]
    kinds = present(study.kinds)
    components = [str(c) for c in study.found["component"]]
    quantities = [*COMPARED, "modal share", "constant share", "neighbouring tokens", "recipient heads"]
    rows = []
    for component in components:
        for quantity in [*quantities, *(["strong departure", "all departure"] if component in "qkv" else [])]:
            if component == "qkv" and quantity.endswith("departure"):
                continue
            tables = [per_text(run, quantity, component) for run in runs]
            for j, kind in enumerate(study.kinds):
                rows.append(_row(runs, "transition", j, kind, component, quantity, [t[:, j] for t in tables]))
            if quantity in COMPARED:
                for k, kind in enumerate(kinds):
                    medians = [run.distribution("text_kind", component, quantity)[:, k, 2] for run in runs]
                    rows.append(_row(runs, "kind", "", kind, component, quantity, medians))
    return rows


def _row(runs, group, transition, kind, component, quantity, values):
    spreads, signs, headline = compare(runs, values)
    row = {
        "group": group, "transition": transition, "kind": kind, "component": component, "quantity": quantity,
        "headline": {-1: "below all controls", 0: "", 1: "above all controls"}[headline],
    }  # fmt: skip
    against = iter(signs)
    for run, (centre, low, high) in zip(runs, spreads, strict=True):
        row |= {f"{run.name}": centre, f"{run.name} low": low, f"{run.name} high": high}
        if run.control in CONTROLS:
            row[f"{run.name} separated"] = {-1: "below", 0: "", 1: "above"}[next(against)]
    return row


def write_table(path, rows):
    """Write rows (dicts with the same keys) as CSV; numbers keep six digits, NaN becomes empty."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else ["empty"])
            writer.writeheader()
            writer.writerows({key: plain(value) for key, value in row.items()} for row in rows)
    except OSError as error:
        raise StudyError(f"{path}: cannot be written ({error})") from error


def plain(value):
    """A table's cell: six digits, nothing for NaN."""
    if isinstance(value, (float, np.floating)):
        return "" if np.isnan(value) else f"{value:.6g}"
    return value
