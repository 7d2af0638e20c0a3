"""Faults that are really done to a running study; after each it ends with the numbers of an undisturbed one.

The copy of the project that they are done to writes in slow motion: while the file `slow` is there, a stage that it
names waits with its file complete under a temporary name.
"""

import os
import shutil
import signal
import subprocess
import time
from functools import cache
from pathlib import Path

import netCDF4
import pytest
import workflow_runs as runs

pytestmark = pytest.mark.slow

MOMENT = "        temporary.replace(path)\n"
WAIT = """
        while Path("slow").exists() and Path("slow").read_text() in str(path):
            __import__("time").sleep(0.02)
"""
TEXTS = runs.TEXTS[:2]


@cache
def undisturbed():
    """A finished study whose code can be slowed down."""
    project = runs.new(runs.FOLDER / "slow-motion", texts=TEXTS, controls__whole_forward=False)
    files = project.folder / "workflow/head_influence/files.py"
    source = files.read_text(encoding="utf-8")
    first, second = source.split(MOMENT, 1)
    files.write_text(first + WAIT.lstrip("\n") + MOMENT + second, encoding="utf-8")
    project.run()
    return project


@pytest.fixture
def project(tmp_path):
    """A study whose single removals and what follows are still to be done."""
    shutil.copytree(undisturbed().folder, tmp_path / "p")
    found = runs.Project(tmp_path / "p")
    for name in ("single", "joint", "concentration.nc"):
        remove(found.folder / "results/tiny" / name)
    for path in found.folder.glob(".cache/*/*/changes-*"):
        shutil.rmtree(path)
    return found


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
    return found


def slowly(project, part, *arguments, **environment):
    """Start a run and wait until a job has its file complete under a temporary name; return both's process."""
    (project.folder / "slow").write_text(part)
    left = set(project.folder.rglob("*.part"))  # by an earlier kill, its process perhaps not buried yet
    process = project.start("-j2", *(arguments or ("concentration",)), **environment)

    def jobs():
        new = [path for path in project.folder.rglob("*.part") if part in str(path) and path not in left]
        found = [int(path.name.split(".")[-2]) for path in new]
        return [job for job in found if Path(f"/proc/{job}").exists()]

    return process, until(jobs)[0]


def fast(project):
    (project.folder / "slow").unlink()


def assert_ends_well(project, parts=False):
    """The same command again is enough, and nothing tells the study from an undisturbed one.

    With `parts`, what a killed job had begun may still be there under its temporary name: its file is not made again.
    """
    project.run()
    assert project.plan() == {}
    assert runs.same_numbers(project, undisturbed()) == 9
    assert nothing_runs(project) if parts else project.left_over() == []


def nothing_runs(project):
    """No process and no temporary folder is left, but maybe a file under its temporary name."""
    return not [x for x in project.left_over() if not str(x).endswith(".part")]


def said(process):
    output, _ = process.communicate(timeout=120)
    assert "Traceback" not in output, output
    return output


def test_slow_motion_changes_no_number(tmp_path):
    plain = runs.copied(tmp_path)
    plain.texts(TEXTS)
    plain.settings(controls__whole_forward=False)
    plain.run()
    for kind in ("single", "joint"):
        shutil.rmtree(tmp_path / "results/tiny" / kind / runs.TEXTS[2]["id"])
    assert runs.same_numbers(plain, undisturbed()) == 9


def test_a_job_is_killed(project):
    process, job = slowly(project, "/single/")
    os.kill(job, signal.SIGKILL)
    fast(project)
    output = said(process)
    assert process.returncode == 1
    assert "Error in rule single_removals" in output
    assert "log: logs/tiny/single/" in output
    assert_ends_well(project)


@pytest.mark.parametrize("whom", ["scheduler", "group"])
def test_the_scheduler_is_killed(project, whom):
    process, _ = slowly(project, "/single/")
    os.kill(process.pid, signal.SIGKILL) if whom == "scheduler" else os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: nothing_runs(project))
    fast(project)
    assert not list(project.folder.glob("results/tiny/concentration.nc"))
    refused = project.fail()
    assert "It can be removed with the --unlock argument" in " ".join(refused.split())
    project.run("--unlock")
    assert_ends_well(project)


@pytest.mark.parametrize("whom", ["scheduler", "group"])
def test_an_interrupt(project, whom):
    process, _ = slowly(project, "/single/")
    send = os.kill if whom == "scheduler" else os.killpg
    send(process.pid, signal.SIGINT)
    if whom == "scheduler":
        fast(project)  # it waits for what runs
    output = said(process)
    assert process.returncode != 0, output
    until(lambda: nothing_runs(project))
    if whom == "group":
        fast(project)
    assert_ends_well(project)


def test_the_preload_server_is_killed(project):
    process, job = slowly(project, "/single/")
    os.kill(int(Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    fast(project)
    output = said(process)
    assert process.returncode == 0, output
    for left in project.temporary.iterdir():  # a killed server cannot remove its socket's folder
        shutil.rmtree(left)
    assert_ends_well(project, parts=True)


def test_a_killed_rerun_leaves_the_old_cache_whole(tmp_path):
    shutil.copytree(undisturbed().folder, tmp_path / "p")
    project = runs.Project(tmp_path / "p")
    before, numbers = {p: p.read_bytes() for p in project.folder.glob(".cache/**/*.nc")}, project.numbers(".cache")
    process, job = slowly(project, "/baseline-", "--forcerun", "baseline_cache", "--", "concentration")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert {p: p.read_bytes() for p in before} == before
    fast(project)
    project.run("--unlock")
    process, job = slowly(project, "/baseline-", "--forcerun", "baseline_cache", "--", "concentration")
    os.kill(job, signal.SIGKILL)
    fast(project)
    said(process)
    assert process.returncode == 1
    assert project.numbers(".cache") == numbers
    assert_ends_well(project, parts=True)


def test_two_schedulers_at_once(project):
    process, _ = slowly(project, "/single/")
    refused = project.fail()
    assert "Directory cannot be locked" in refused
    fast(project)
    assert process.wait(120) == 0, said(process)
    process.stdout.close()
    assert_ends_well(project)


@pytest.fixture
def mounted(tmp_path):
    """Mount file systems of their own; they are gone afterwards."""
    places = []

    def mount(place, *options):
        place.mkdir(parents=True, exist_ok=True)
        found = subprocess.run(["mount", *options, place], capture_output=True, check=False)
        if found.returncode:
            pytest.skip(f"no file system can be mounted here: {found.stderr.decode().strip()}")
        places.append(place)

    yield mount
    for place in reversed(places):
        subprocess.run(["umount", place], check=True)


def small_disk(mount, place, megabytes):
    mount(place, "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs")


@pytest.mark.parametrize("part", ["results", "cache"])
def test_a_full_disk(project, mounted, part):
    project.settings(cache_dir="cache")
    old, place = project.folder / {"results": "results", "cache": ".cache"}[part], project.folder / part
    kept = project.folder / "kept"
    shutil.move(old, kept)
    small_disk(mounted, place, 8)
    shutil.copytree(kept, place, dirs_exist_ok=True)
    if part == "results":
        shutil.move(project.folder / ".cache", project.folder / "cache")
    filler = place / "filler"
    with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    wrong = project.fail()
    assert "head-influence: " in wrong
    assert "the disk is full" in wrong or "No space left on device" in wrong
    assert "run the same command again" in wrong or "cannot be written" in wrong
    filler.unlink()
    assert_ends_well(project)


@pytest.mark.parametrize("part", ["results", ".cache"])
def test_a_read_only_folder(project, mounted, part):
    place = project.folder / part
    mounted(place, "--bind", place)
    subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
    wrong = project.fail()
    assert "cannot be written" in wrong or "Read-only file system" in wrong
    assert str(part) in wrong
    subprocess.run(["mount", "-o", "remount,rw,bind", place], check=True)
    assert_ends_well(project)


def test_a_cache_on_another_disk(tmp_path, mounted):
    disk = tmp_path / "another disk"
    small_disk(mounted, disk, 50)
    project = runs.new(tmp_path / "p", texts=TEXTS, controls__whole_forward=False, cache_dir=str(disk / "the cache"))
    project.run()
    assert len(list(disk.glob("the cache/*/*/baseline-*/*/L0?.nc"))) == 4
    assert not (project.folder / ".cache").exists()
    project.run("--forcerun", "baseline_cache", "--", "concentration")
    assert runs.same_numbers(project, undisturbed()) == 9


DAMAGE = {
    "truncated": lambda content: content[: len(content) // 2],
    "zero-filled": lambda content: bytes(len(content)),
    "empty": lambda content: b"",
    "foreign": None,
}
KINDS = {
    "trace": (".cache/*/*/trace-*/second/L01.nc", [".cache/*/*/baseline-*/second", "results/tiny/*/second"]),
    "baseline": (".cache/*/*/baseline-*/second/L01.nc", ["results/tiny/single/second", "results/tiny/joint/second"]),
    "single": ("results/tiny/single/second/L00.nc", ["results/tiny/concentration.nc"]),
}


@pytest.mark.parametrize(("kind", "how"), list(zip(KINDS, ("truncated", "zero-filled", "foreign"), strict=True)))
def test_a_damaged_file_under_the_final_name(tmp_path, kind, how):
    """It is refused by what reads it; deleting it, as the message says, is enough."""
    shutil.copytree(undisturbed().folder, tmp_path / "p")
    project = runs.Project(tmp_path / "p")
    damaged, after = next(project.folder.glob(KINDS[kind][0])), KINDS[kind][1]
    date = damaged.stat().st_mtime
    if DAMAGE[how] is None:
        with netCDF4.Dataset(damaged, "w") as data:
            data.createDimension("n", 2)
            data.createVariable("relative", "f4", ("n",))[:] = 1
    else:
        damaged.write_bytes(DAMAGE[how](damaged.read_bytes()))
    os.utime(damaged, (date, date))
    for path in [path for pattern in after for path in project.folder.glob(pattern)]:
        remove(path)
    wrong = project.fail()
    name = str(damaged.relative_to(project.folder))
    line = next(line for line in wrong.splitlines() if line.startswith(f"head-influence: {name}: "))
    assert line.endswith("delete the file and run the same command again")
    damaged.unlink()
    assert_ends_well(project)


def test_damaged_change_vectors_are_made_anew(project):
    project.run("single")
    for path in project.folder.glob(".cache/*/*/changes-*/*/L0?.nc"):
        path.write_bytes(path.read_bytes()[:1000])
    assert_ends_well(project)


def test_files_dated_in_the_future(project):
    later = time.time() + 1e7
    for path in project.folder.glob(".cache/**/*.nc"):
        os.utime(path, (later, later))
    wrong = project.fail()
    line = next(line for line in wrong.splitlines() if line.startswith("head-influence: "))
    assert "dated in the future" in line
    assert not (project.folder / "results/tiny/single").exists()
    command = line.partition("type: ")[2]
    subprocess.run(command, shell=True, check=True, cwd=project.folder)
    assert_ends_well(project)


def test_files_dated_in_the_past(project):
    project.run("single")
    for i, path in enumerate(sorted(project.folder.glob("results/**/*.nc"))):
        os.utime(path, (1e8 + i, 1e8 + i))
    assert_ends_well(project)
