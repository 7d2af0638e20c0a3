"""The workflow from end to end on tiny studies: targets, numbers, logs, and that how it is run changes nothing."""

import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import reference
import workflow_runs as runs
from head_influence import files

pytestmark = pytest.mark.slow

STAGES = {
    "trace": Counter(trace_text=3),
    "baseline": Counter(trace_text=3, baseline_cache=6),
    "single": Counter(trace_text=3, baseline_cache=6, single_removals=6),
    "joint": Counter(trace_text=3, baseline_cache=6, single_removals=6, joint_removals=6),
}
STAGES["concentration"] = STAGES["joint"] + Counter(whole_forward=1, concentration_table=1)
STAGES["provenance"] = STAGES["joint"] + Counter(concentration_table=1, provenance_record=1)
STAGES["audit"] = STAGES["concentration"] + Counter(audit_study=1)


@pytest.fixture(scope="module")
def unmade(tmp_path_factory):
    return runs.new(tmp_path_factory.mktemp("unmade"))


@pytest.mark.parametrize("target", STAGES)
def test_a_target_makes_its_stage_and_what_it_needs(unmade, target):
    assert unmade.plan(target) == STAGES[target]


def test_the_whole_is_the_default(unmade):
    plan = unmade.plan("-j1")
    assert not STAGES["audit"] - plan
    assert plan["report_page"] == plan["provenance_record"] == 1
    assert plan == unmade.plan("all") == unmade.plan("report")


def test_each_control_is_a_study_of_its_own(tmp_path):
    project = runs.new(
        tmp_path, controls__random_weights=[0, 3], controls__permuted_weights=[0], controls__mean_replacement=True
    )
    plan = project.plan("all")
    assert plan["control_weights"] == 3
    assert plan["trace_text"] == 3 * (1 + 3)
    assert plan["baseline_cache"] == 6 * (1 + 3)
    assert plan["replace_by_mean"] == 6
    assert plan["single_removals"] == plan["joint_removals"] == 6 * (1 + 4)
    assert plan["concentration_table"] == 1 + 4
    assert plan["whole_forward"] == plan["audit_study"] == 1


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_its_numbers_are_those_of_hooks_on_the_whole_model(model):
    """Every transition of a text whose window is its own, by the tests' independent route."""
    project = runs.finished("concentration", model)
    folder, texts = project.folder / "results/tiny", {text["id"]: i for i, text in enumerate(runs.TEXTS)}
    last = 0
    for path in sorted(folder.glob("single/second/L*.nc")):
        source = int(path.stem[1:])
        found, attributes = files.read(path)
        joint, _ = files.read(folder / "joint/second" / path.name)
        ids = found["token_id"].tolist()
        assert (len(ids), attributes["source_layer"], attributes["study"]) == (9, source, "tiny")
        want = reference.singles(project.folder / "model", ids, source)
        sets = reference.masks(want["relative"][3], 31000, texts["second"], source)
        together = reference.joints(project.folder / "model", ids, source, sets, want)
        assert (joint["removed"] == sets).all()
        for ours, theirs in ((found, want), (joint, together)):
            for name in ("relative", "js"):
                assert (np.isnan(ours[name]) == np.isnan(theirs[name])).all()
                assert (
                    np.nanmax(np.abs(ours[name] - theirs[name]) / (1e-5 + 1e-4 * np.abs(theirs[name])), initial=0) < 1
                )
        last = source
    assert last == len(list(folder.glob("single/second/*"))) - 1 > 0


def test_the_table_is_of_all_texts_in_their_order():
    project = runs.finished()
    table, _ = files.read(project.folder / "results/tiny/concentration.nc")
    assert table["text"].tolist() == [text["id"] for text in runs.TEXTS]
    for i, text in enumerate(runs.TEXTS):
        single, _ = files.read(project.folder / f"results/tiny/single/{text['id']}/L01.nc")
        tokens = single["relative"].shape[2]
        assert np.allclose(table["total"][i, 1, :4, :tokens], single["relative"].sum(axis=1), rtol=1e-6)
        assert (table["undefined"][i, 1, :, tokens:] == -1).all()


def test_a_second_call_has_nothing_to_do():
    project = runs.finished()
    assert "Nothing to be done" in project.run("concentration")
    assert project.left_over() == []


def test_neither_jobs_nor_order_nor_the_server_change_a_number(tmp_path):
    changes = {"texts": runs.TEXTS[:2], "controls__whole_forward": False}
    two = runs.new(tmp_path / "two", **changes)
    two.run()
    one = runs.new(tmp_path / "one", **changes)
    done = one.snakemake("-j1", "concentration", HEAD_INFLUENCE_SERVER="", PYTHONHASHSEED="7", OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stdout
    assert runs.same_numbers(one, two) == 9
    for project in (one, two):
        assert project.left_over() == []


@pytest.mark.parametrize("stage", ["cache/*/*/*/baseline-*-L00", "tiny/single/first/L00", "tiny/joint/first/L00"])
def test_the_hot_stages_import_no_model_and_no_figures(stage, tmp_path):
    """By the command in a log, which runs as it is: to a file of its own here."""
    project = runs.finished()
    log = next((project.folder / "logs").glob(f"{stage}.log"))
    command = shlex.split(log.read_text().splitlines()[0])
    command[command.index("--log") + 1] = str(tmp_path / "log")
    output, command[-1] = command[-1], str(tmp_path / "again.nc")
    if "--changes" in command and "single.py" in command[0]:
        command[command.index("--changes") + 1] = str(tmp_path / "changes.nc")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command], cwd=project.folder, check=True, text=True,
        env=project.environment(PYTHONPATH="workflow"), stderr=subprocess.PIPE,
    )  # fmt: skip
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert {"numpy", "netCDF4", "head_influence"} <= loaded
    assert not loaded & {"torch", "transformers", "xarray", "matplotlib", "pandas", "scipy", "tokenizers", "snakemake"}
    again, first = files.read(tmp_path / "again.nc")[0], files.read(project.folder / output)[0]
    assert all(np.array_equal(again[n], first[n], equal_nan=again[n].dtype.kind == "f") for n in first)


def test_every_job_has_a_log_of_its_own():
    project = runs.finished()
    logs = sorted((project.folder / "logs").rglob("*.log"))
    commands = [path.read_text().splitlines()[0] for path in logs]
    assert len(set(commands)) == len(logs) == sum(STAGES["concentration"].values())
    for path, command in zip(logs, commands, strict=True):
        assert f"--log {path.relative_to(project.folder)}" in command
        assert re.fullmatch(r"finished after \d+\.\d\d s", path.read_text().splitlines()[-1])
        head, row = path.with_suffix(".tsv").read_text().splitlines()
        assert head == "s\tcpu_time\tmax_rss"
        assert all(float(x) >= 0 for x in row.split("\t"))


def test_a_failure_says_where_what_and_why(tmp_path):
    """Rule, wildcards, the reason in one line, and the log, which has the reason too."""
    project = runs.copied(tmp_path)
    for path in ("results/tiny/single/second", "results/tiny/joint/second"):
        shutil.rmtree(tmp_path / path)
    next(tmp_path.glob(".cache/*/*/baseline-*/second/L01.nc")).unlink()
    next(tmp_path.glob(".cache/*/*/trace-*/second/L01.nc")).write_bytes(b"not a trace")
    output = project.fail()
    assert "Baseline of text second, transition 01" in output
    assert "Error in rule baseline_cache" in output
    log = re.search(r"log: (logs/cache/\S+/baseline-\S+-L01.log) \(check log file", output)[1]
    line = next(line for line in output.splitlines() if line.startswith("head-influence: "))
    assert line.endswith("delete the file and run the same command again")
    assert line.removeprefix("head-influence: ") in (tmp_path / log).read_text()


def test_slow_programs_show_progress():
    """A line for every layer while a text is traced."""
    project = runs.finished()
    for path in (project.folder / "logs/cache").rglob("trace-*.log"):
        assert [line for line in path.read_text().splitlines() if line.startswith("layer ")] == [
            f"layer {i} of 3" for i in range(3)
        ]
