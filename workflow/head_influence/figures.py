"""Drawing the figures of a study from its results."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from head_influence import figures_concentration, figures_identity, figures_joint, files
from head_influence.catalogue import FIGURES
from head_influence.concentration import shares
from head_influence.drawing import save, start
from head_influence.identity import read_influence
from head_influence.summary import load_runs

MODULES = {"concentration": figures_concentration, "identity": figures_identity, "joint": figures_joint}


@dataclass
class Material:
    """What the figures are drawn from.

    Attributes
    ----------
    folder : Path
        The results folder that holds the runs' folders.
    runs : list of Run
        The study first.
    """

    folder: Path
    runs: list

    @property
    def small_total(self):
        """Limits of the small-total flag."""
        return json.loads(self.runs[0].attributes["small_total"])

    def fractions(self, run):
        """N_eff/H of every observation, (X, L, C, T, R)."""
        return files.read(self.folder / run.name / "concentration.nc", ["n_eff_fraction"])[0]["n_eff_fraction"]

    def shares_at(self, transition, text):
        """Shares of one recipient head in a text and transition of the study (Q, K, V together).

        Returns
        -------
        head : int
            The recipient head whose median effective number of heads is nearest to the transition's.
        shares : array (H, T)
        tokens : list of str
        """
        run = self.runs[0]
        path = self.folder / run.name / "single" / run.texts[text] / f"L{transition:02d}.nc"
        influence, data, _ = read_influence(path, 0, ["token"])
        p = shares(influence[run.index("component", "qkv")])
        squares = np.square(p[:, int(run.attributes["first_query"]) :]).sum(axis=0)
        wanted = run.distribution("transition", "qkv", "n_eff")[transition, 2]
        columns = [1 / column[np.isfinite(column)] for column in squares.T]
        distance = [abs(np.median(column) - wanted) if column.size else np.inf for column in columns]
        head = int(np.argmin(distance))
        return head, p[:, :, head], [str(token) for token in data["token"]]


def draw_all(folder, runs, output, dpi, names=tuple(FIGURES)):
    """Draw figures as `output`/<name>.png and .svg.

    Parameters
    ----------
    folder : path
        The results folder.
    runs : list of (name, control)
        The study first.
    output : path
    dpi : int
        Of the PNG files; lower where a figure would be too high.
    names : sequence of str
    """
    start()
    material = Material(Path(folder), load_runs(folder, runs))
    for name in names:
        save(getattr(MODULES[FIGURES[name][0]], name)(material), Path(output) / name, dpi)
