"""Figures: drawn from every kind of study without a warning, small enough, readable with and without a Chinese font."""

import struct
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from head_influence import drawing, figures
from head_influence.catalogue import FIGURES, title
from small_studies import reported, study

CAPTIONS = Path(__file__).parents[1] / "workflow" / "report"


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize(
    ("name", "controls", "count"),
    [("hybrid", True, 3), ("llama_zero", False, 3), ("hybrid_odd", False, 2), ("llama_one_head", False, 1)],
)
def test_every_figure_is_drawn_without_a_warning(name, controls, count, tmp_path):
    folder, runs = study(name, controls, count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures.draw_all(folder.parent, runs, tmp_path, 150)
    for figure in FIGURES:
        width, height = png_size(tmp_path / f"{figure}.png")
        assert height < 1000 and 1000 < width < 1500
        assert ET.parse(tmp_path / f"{figure}.svg").getroot().tag.endswith("svg")
    assert len(list(tmp_path.iterdir())) == 2 * len(FIGURES)


def test_resolution_is_the_settings_but_no_figure_is_too_high(tmp_path):
    folder, runs = study("hybrid", False, 1)
    sizes = {}
    for dpi in (60, 120, 600):
        figures.draw_all(folder.parent, runs, tmp_path, dpi, ["distributions"])
        sizes[dpi] = png_size(tmp_path / "distributions.png")
    assert sizes[120] == tuple(2 * n for n in sizes[60])
    assert sizes[600][1] < 1000


def test_figures_are_the_same_bytes_when_drawn_again(tmp_path):
    folder, runs = study("hybrid", False, 1)
    for part in ("a", "b"):
        figures.draw_all(folder.parent, runs, tmp_path / part, 60, ["variance", "heatmap"])
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_every_figure_asks_a_question_and_has_a_caption_that_limits_it():
    for name in FIGURES:
        assert title(name).endswith("?")
        caption = (CAPTIONS / f"{name}.rst").read_text(encoding="utf-8")
        assert len(caption.split()) > 25
        pooled = name not in ("heatmap", "texts")
        assert ("no statement about other" in " ".join(caption.split())) is pooled, name


def test_labels_show_what_has_no_shape_and_box_what_has_no_glyph():
    drawing.start()
    label = drawing.Labels([" a", "雾", "\n", "\ue000"])
    assert label(" a") == "␣a"
    assert label("\n\t") == "↵⇥"
    assert label("") == "∅"
    assert label("\ue000") == "□"
    assert label("abcdefghijklm", 5) == "abcd…"
    assert label("雾") == ("雾" if drawing.chinese_font() else "□")


def test_without_the_chinese_font_labels_are_boxes_and_nothing_warns(monkeypatch, tmp_path):
    folder, runs = study("hybrid", False, 3)
    monkeypatch.setattr(drawing, "chinese_font", lambda: None)
    assert drawing.Labels(["雾a"])("雾a") == "□a"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures.draw_all(folder.parent, runs, tmp_path, 60, ["heatmap"])


def test_the_heat_map_shows_the_shares_of_the_raw_file():
    folder, runs = study("hybrid", False, 3)
    drawing.start()
    material = figures.Material(folder.parent, figures.load_runs(folder.parent, runs))
    head, shares, tokens = material.shares_at(1, 0)
    from head_influence import files

    relative = files.read(folder / "single" / "first" / "L01.nc")[0]["relative"][3]
    assert shares == pytest.approx(relative[:, :, head] / relative[:, :, head].sum(axis=0))
    assert tokens[:4] == ["The", " ", "$a$", "</script>"]
    n_eff = 1 / np.square(relative[:, 4:] / relative[:, 4:].sum(axis=0)).sum(axis=0)
    distance = np.abs(np.median(n_eff, axis=0) - material.runs[0].distribution("transition", "qkv", "n_eff")[1, 2])
    assert distance[head] == distance.min()


def test_log_scale_needs_two_different_positive_values():
    drawing.start()
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    drawing.log_scale(ax, [0, 0.5, np.nan])
    assert ax.get_yscale() == "linear"
    drawing.log_scale(ax, [0, 0.5, 0.01])
    assert ax.get_yscale() == "log"


def test_drawing_does_not_need_torch_or_pyplot():
    import subprocess
    import sys

    code = "import head_influence.figures, head_influence.report, sys; assert not set(sys.argv[1:]) & set(sys.modules)"
    unwanted = ["torch", "transformers", "xarray", "pandas", "matplotlib.pyplot"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1] / "workflow")}
    done = subprocess.run([sys.executable, "-c", code, *unwanted], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_reported_studies_keep_their_figures():
    folder, _ = reported("hybrid")
    assert {path.stem for path in (folder / "figures").iterdir()} == set(FIGURES)
