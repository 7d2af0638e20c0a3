"""Exactly what is run again after a change: dry runs of copies of a finished study. README.md has the same table."""

import json
import os
import shutil
import time
from collections import Counter

import models_tiny as tiny
import pytest
import workflow_runs as runs
import yaml
from head_influence import files
from workflow_runs import TEXTS

pytestmark = pytest.mark.slow

# Three texts, three layers: what a run of everything is made of.
ONE_TEXT = Counter(trace_text=1, baseline_cache=2, single_removals=2, joint_removals=2)
ALL_TEXTS = Counter(trace_text=3, baseline_cache=6, single_removals=6, joint_removals=6)
FORWARD = Counter(whole_forward=1)
TABLE = Counter(concentration_table=1)
RECORD = Counter(provenance_record=1)
SUMMARY = TABLE + RECORD
JOINT = Counter(joint_removals=2)  # of one text
EVERYTHING = ALL_TEXTS + FORWARD + SUMMARY
NOTHING = Counter()
TARGETS = ("concentration", "provenance")


def text_changed(index, **changes):
    def change(project):
        project.texts([t | changes if i == index else t for i, t in enumerate(TEXTS)])

    return change


def texts_are(*indices, more=()):
    return lambda project: project.texts([*(TEXTS[i] for i in indices), *more])


def settings_are(**changes):
    return lambda project: project.settings(**changes)


def code_changed(module, old, new):
    def change(project):
        path = project.folder / "workflow" / module
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


def other_code(module):
    """Add a statement to a module."""
    return code_changed(module, "\n\n\n", "\n\nADDED_BY_TEST = 1\n\n")


def checkpoint_replaced(date=None):
    def change(project):
        tiny.write(project.folder / "model", tiny.LLAMA, seed=77)
        if date is not None:
            for path in (project.folder / "model").iterdir():
                os.utime(path, (date, date))

    return change


def touched(*patterns):
    def change(project):
        for pattern in patterns:
            for path in project.folder.glob(pattern):
                if path.is_file():
                    path.touch()

    return change


def keys_reordered(project):
    path = project.folder / "config.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    turned = {k: dict(reversed(v.items())) if isinstance(v, dict) else v for k, v in reversed(settings.items())}
    assert list(turned) != list(settings)
    path.write_text(yaml.safe_dump(turned, sort_keys=False), encoding="utf-8")
    project.texts([dict(reversed(text.items())) for text in TEXTS])


def cloned(project):
    """Snakemake's records are not there, and the code is newer than the results."""
    shutil.rmtree(project.folder / ".snakemake")
    touched("workflow/**/*", "Snakefile", "config.yaml", "texts.json", "model/*", "envs/*")(project)


NEW = {"id": "new", "language": "fr", "text": "Un texte de plus, qui est nouveau."}
# README.md's table: what was changed, how, and exactly what is run again up to the concentration and provenance.json.
CHANGES = {
    "nothing": (lambda project: None, NOTHING),
    "a text edited": (text_changed(1, text="Something else that is long enough."), ONE_TEXT + SUMMARY),
    "the first text edited": (text_changed(0, text="Something else to begin with."), ONE_TEXT + FORWARD + SUMMARY),
    "a text's language": (text_changed(1, language="la"), ONE_TEXT + SUMMARY),
    "a text's own tokens": (text_changed(1, tokens=8), ONE_TEXT + SUMMARY),
    "a text added at the end": (texts_are(0, 1, 2, more=[NEW]), ONE_TEXT + SUMMARY),
    "a text added in front": (
        lambda project: project.texts([NEW, *TEXTS]),
        ONE_TEXT + FORWARD + JOINT + JOINT + JOINT + SUMMARY,
    ),
    "the last text removed": (texts_are(0, 1), SUMMARY),
    "the first text removed": (texts_are(1, 2), FORWARD + JOINT + JOINT + SUMMARY),
    "the last two texts reordered": (texts_are(0, 2, 1), JOINT + JOINT + SUMMARY),
    "the first two texts reordered": (texts_are(1, 0, 2), FORWARD + JOINT + JOINT + SUMMARY),
    "tokens": (settings_are(texts__tokens=11), ONE_TEXT + ONE_TEXT + FORWARD + SUMMARY),
    "first_query": (settings_are(measure__first_query=3), RECORD),
    "small_total.vectors": (settings_are(measure__small_total__vectors=1e-3), SUMMARY),
    "small_total.js": (settings_are(measure__small_total__js=1e-7), SUMMARY),
    "random_seed": (settings_are(measure__random_seed=31001), JOINT + JOINT + JOINT + RECORD),
    "figures": (settings_are(figures__dpi=100), RECORD),
    "audit": (settings_are(audit__seed=1), RECORD),
    "whole_forward off": (settings_are(controls__whole_forward=False), RECORD),
    "a control's seed added": (settings_are(controls__random_weights=[5]), RECORD),
    "keys reordered": (keys_reordered, NOTHING),
    "another checkpoint at the same path": (checkpoint_replaced(), EVERYTHING),
    "another checkpoint with an older date": (checkpoint_replaced(date=1e9), EVERYTHING),
    "files touched": (touched("model/*", "texts.json", "config.yaml", "Snakefile", "workflow/**/*"), NOTHING),
    "the caches touched": (touched(".cache/**/*"), NOTHING),
    "a fresh clone over finished results": (cloned, NOTHING),
    "code of the trace": (other_code("head_influence/trace.py"), EVERYTHING),
    "code of the files": (other_code("head_influence/files.py"), EVERYTHING),
    "code of the model's family": (other_code("head_influence/families/llama.py"), EVERYTHING),
    "code of another family": (other_code("head_influence/families/qwen3.py"), NOTHING),
    "code of the baseline": (
        other_code("head_influence/baseline.py"),
        EVERYTHING - Counter(trace_text=3) - FORWARD,
    ),
    "code of the effects": (
        other_code("head_influence/effects.py"),
        EVERYTHING - Counter(trace_text=3, baseline_cache=6) - FORWARD,
    ),
    "code of a stage's program": (
        code_changed("scripts/joint.py", "from pathlib", "import sys\nfrom pathlib"),
        JOINT + JOINT + JOINT + RECORD,
    ),
    "code of the concentration": (other_code("head_influence/concentration.py"), SUMMARY),
    "code of the report": (other_code("head_influence/report.py"), NOTHING),
    "code of the study's plan": (other_code("head_influence/study.py"), NOTHING),
    "a comment and a docstring": (
        lambda project: [
            code_changed("head_influence/trace.py", "import inspect", "# A comment.\nimport inspect")(project),
            code_changed("head_influence/effects.py", '"""Stage', '"""The stage')(project),
            code_changed("scripts/joint.py", '"""Remove', '"""Take')(project),
        ],
        NOTHING,
    ),
}


def without_markers(plan):
    return Counter({rule: count for rule, count in plan.items() if count})


@pytest.mark.parametrize("name", CHANGES)
def test_exactly_this_is_run_again(name, tmp_path):
    change, expected = CHANGES[name]
    project = runs.copied(tmp_path, " ".join(TARGETS))
    change(project)
    assert without_markers(project.plan(*TARGETS)) == without_markers(expected)
    if name == "a fresh clone over finished results":
        assert not list(tmp_path.glob("results/tiny/.*"))


FINDINGS = {"findings_of_study", "explorer_page", "figures_of_concentration", "figures_of_heads", "report_page"}
SEEN = {"figures_of_concentration", "figures_of_heads", "report_page"}
REPORT_CHANGES = {  # and which rules are run again by the report
    "first_query": (settings_are(measure__first_query=3), {"identity_of_heads", "provenance_record"} | FINDINGS),
    "small_total": (
        settings_are(measure__small_total__js=1e-7),
        {"concentration_table", "audit_study", "provenance_record"} | FINDINGS,
    ),
    "random_seed": (
        settings_are(measure__random_seed=1),
        {"joint_removals", "audit_study", "provenance_record"} | FINDINGS,
    ),
    "figures": (settings_are(figures__dpi=100), {"provenance_record"} | SEEN),
    "audit": (settings_are(audit__seed=1), {"audit_study", "provenance_record", "report_page"}),
    "a control's seed added": (
        settings_are(controls__random_weights=[5]),
        {"control_weights", "trace_text", "baseline_cache", "single_removals", "joint_removals", "concentration_table"}
        | {"identity_of_heads", "findings_of_study", "provenance_record"}
        | SEEN,
    ),
    "code of the figures": (other_code("head_influence/figures.py"), SEEN),
    "code of the report": (other_code("head_influence/report.py"), {"report_page", "explorer_page"}),
    **{
        f"program of the {name}": (
            code_changed(f"scripts/{name}.py", "from pathlib", "import sys\nfrom pathlib"),
            rules,
        )
        for name, rules in (
            ("findings", {"findings_of_study"} | FINDINGS),
            ("figures", SEEN),
            ("explorer", {"explorer_page", "report_page"}),
            ("report", {"report_page"}),
            ("audit", {"audit_study", "report_page", "provenance_record"}),
        )
    },
    "words of a caption": (code_changed("report/joint.rst", "\n", " \n"), {"report_page", "explorer_page"}),
}


@pytest.mark.parametrize("name", REPORT_CHANGES)
def test_exactly_these_rules_up_to_the_report(name, tmp_path):
    change, expected = REPORT_CHANGES[name]
    project = runs.copied(tmp_path, "all")
    change(project)
    assert project.plan("all").keys() == expected


CURVES = {
    "contexts": "contexts.json",
    "ratios": [0, 0.1, 0.5],
    "baseline": 0.1,
    "heads": "all",
    "budgets": [0.1],
    "figure_heads": None,
}
CONTEXT = {
    "id": "c",
    "article": "The heads of one layer write what the next one reads, and so on.",
    "items": [{"id": "i", "question": "Who reads?", "answer": "the next"}],
}
PAGES = {"curve_figures", "curve_report"}
BUDGETS = {"curve_plan", "curve_budget", "curve_compare", "curve_checks"} | PAGES
CURVE = {"curve_layer", "curve_table"} | BUDGETS
CURVE_CHANGES = {  # what runs besides the forecast, which every change makes anew
    "ratios": ([0, 0.1, 0.2, 0.5], CURVE),
    "seed": (9, CURVE | {"curve_baseline"}),
    "minimum_keys": (1, CURVE | {"curve_baseline"}),
    "budgets": ([0.1, 0.3], BUDGETS),
    "figure_heads": (["L0H0"], PAGES),
    "prompt": ({"prefix": "x"}, CURVE | {"curve_prefill", "curve_baseline"}),
}


def test_head_influence_curves(tmp_path):
    """Each change of their settings, in a dry run."""
    project = runs.new(tmp_path, curves=CURVES)
    (tmp_path / "contexts.json").write_text(json.dumps([CONTEXT]))
    project.run("curves")
    assert project.plan("curves") == NOTHING
    for key, (value, expected) in CURVE_CHANGES.items():
        project.settings(curves=CURVES | {key: value})
        assert project.plan("curves").keys() == {"curve_forecast", *expected}, key


def test_after_each_change_a_run_is_enough(tmp_path):
    """A run after changes leaves nothing to do, and the numbers of a study that began with the changed settings."""
    project = runs.copied(tmp_path / "changed", " ".join(TARGETS))
    changed = [TEXTS[2], TEXTS[0] | {"text": "Now this one reads otherwise."}, NEW]
    project.texts(changed)
    project.settings(measure__random_seed=5)
    project.run(*TARGETS)
    assert project.plan(*TARGETS) == NOTHING
    fresh = runs.new(tmp_path / "fresh", texts=changed, measure__random_seed=5)
    fresh.run(*TARGETS)
    shutil.rmtree(project.folder / "results/tiny/single/second")
    shutil.rmtree(project.folder / "results/tiny/joint/second")
    assert runs.same_numbers(project, fresh) == 13


def test_results_of_a_removed_text_never_enter(tmp_path):
    project = runs.copied(tmp_path)
    project.texts(TEXTS[:2])
    project.run("concentration")
    table, attributes = files.read(project.folder / "results/tiny/concentration.nc")
    assert table["text"].tolist() == ["first", "second"]
    assert table["total"].shape[0] == 2
    assert (project.folder / "results/tiny/single/dritter-Text_3/L00.nc").exists()
    assert "dritter" not in json.dumps(attributes, default=str)


def test_no_cache_is_deleted(tmp_path):
    """Changes write beside the old caches, whose bytes and dates stay; going back finds them."""
    project = runs.copied(tmp_path)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.glob(".cache/**/*.nc")}
    assert len(before) == 3 * 4 + 6 + 6
    other_code("head_influence/trace.py")(project)
    project.texts([TEXTS[0] | {"text": "Another text, in the same place."}])
    project.settings(texts__tokens=10)
    project.run("concentration")
    assert before.items() <= {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before if p.exists()}.items()
    assert len(list(tmp_path.glob(".cache/**/*.nc"))) == len(before) + 4 + 2 + 2
    code_changed("head_influence/trace.py", "\n\nADDED_BY_TEST = 1\n\n", "\n\n\n")(project)
    project.texts(TEXTS)
    project.settings(texts__tokens=12)
    again = project.plan("concentration")
    assert not again["trace_text"]
    assert not again["baseline_cache"]


def test_results_of_another_checkpoint_are_refused(tmp_path):
    project = runs.copied(tmp_path)
    shutil.copytree(project.folder / "model", project.folder / "moved")
    project.settings(model__checkpoint="moved")
    assert project.plan() == EVERYTHING - RECORD  # the same weights under another name, which every file states
    tiny.write(tmp_path / "other", tiny.LLAMA, seed=78)
    project.settings(model__checkpoint="other")
    assert project.refused() == (
        "head-influence: results/tiny was made from another checkpoint, model, not other; "
        "give this study a name of its own (study: ...)"
    )
    project.settings(study="other")
    assert project.plan() == EVERYTHING - RECORD


UNRECORDED = {
    "settings (measure)": settings_are(measure__random_seed=1),
    "texts": texts_are(0, 1),
    "code": other_code("head_influence/concentration.py"),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_a_change_without_snakemakes_records_is_refused(name, tmp_path):
    """Nothing but those records says by which parameters a file was made."""
    project = runs.copied(tmp_path)
    cloned(project)
    UNRECORDED[name](project)
    assert f"results/tiny was made with other {name}, and Snakemake's record of that" in project.refused()
    shutil.rmtree(tmp_path / "results")
    assert project.plan()["concentration_table"] == 1


def test_two_changes_at_once(tmp_path):
    """One that runs a cached stage again does not hide another further down (it would behind an `ancient` input)."""
    project = runs.copied(tmp_path, " ".join(TARGETS))
    text_changed(1, language="la")(project)
    project.settings(measure__random_seed=7)
    assert project.plan(*TARGETS) == ONE_TEXT + JOINT + JOINT + SUMMARY


def test_dates_in_the_copy_were_kept(tmp_path):
    """The dry runs above would mean little in a copy with new dates."""
    project = runs.copied(tmp_path)
    newest = max(path.stat().st_mtime for path in project.folder.glob("results/**/*.nc"))
    assert newest < time.time()
    assert project.dry_run().stdout.count("Nothing to be done") == 1
