"""Real runs of the workflow: a copy of the project with a tiny study in it, and Snakemake as its user calls it."""

import atexit
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import launch
import models_tiny as tiny
import preload
import pytest
import yaml
from head_influence import files

ROOT = Path(__file__).parents[1]
PARTS = ("Snakefile", "config.yaml", "workflow", "envs", "profiles")
WORDS = "What the heads of one layer write is read by the next one."
TEXTS = [
    {"id": "first", "language": "en", "text": WORDS},
    {"id": "second", "language": "en", "text": WORDS[::-1], "tokens": 9},
    {"id": "dritter-Text_3", "language": "de", "text": "Überall öffnen große Bücher Türen."},
]
FOLDER = Path(tempfile.mkdtemp(prefix="head-influence-runs-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


class Project:
    """A copy of the project in a folder of its own.

    Parameters
    ----------
    folder : Path
        Where it is.
    """

    def __init__(self, folder):
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(dir=FOLDER))  # of all that a run starts; short, for a socket's address

    def settings(self, **changes):
        """Write the settings, changed where a dotted key says so with '__' for its dots."""
        found = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
        for key, value in changes.items():
            *path, last = key.split("__")
            inner = found
            for step in path:
                inner = inner[step]
            inner[last] = value
        (self.folder / "config.yaml").write_text(yaml.safe_dump(found), encoding="utf-8")

    def texts(self, texts):
        (self.folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")

    def environment(self, **more):
        """What a run sees: nothing of the tests' own search path."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HEAD_INFLUENCE_SERVER")}
        return kept | {"TMPDIR": str(self.temporary)} | more

    def start(self, *arguments, command=(), **environment):
        """Start Snakemake as the leader of a process group; stdout and stderr are one stream of text."""
        return subprocess.Popen(
            [*command, sys.executable, "-m", "snakemake", *arguments], cwd=self.folder, start_new_session=True,
            env=self.environment(**environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def snakemake(self, *arguments, **options):
        """Run Snakemake to its end; `returncode` and `stdout` (with what went to stderr)."""
        process = self.start(*arguments, **options)
        try:
            output, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, output, "")

    def run(self, *arguments, **options):
        """Run Snakemake, which has to succeed."""
        done = self.snakemake("-j2", *(arguments or ("concentration",)), **options)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def fail(self, *arguments, **options):
        """Run Snakemake, which has to fail without a traceback; return what it said."""
        done = self.snakemake("-j2", *(arguments or ("concentration",)), **options)
        assert done.returncode != 0, done.stdout
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout

    def dry_run(self, *arguments):
        """Run Snakemake with -n, forked from a process that has imported it: that takes a third of the time."""
        address, program = importer()
        environment = self.environment() | {launch.VARIABLE: address}
        command = [sys.executable, "-I", "-S", launch.__file__, "planning", program, "-n"]
        return subprocess.run(
            [*command, *(arguments or ("concentration",))], cwd=self.folder, env=environment, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        )  # fmt: skip

    def plan(self, *arguments):
        """What a dry run would do: rule to number of jobs, without the targets' own."""
        done = self.dry_run(*arguments)
        assert done.returncode == 0, done.stdout
        return planned(done.stdout)

    def refused(self, *arguments):
        """Plan what cannot be a study; return the one line that says why."""
        done = self.dry_run(*arguments)
        assert done.returncode != 0, done.stdout
        assert "Traceback" not in done.stdout, done.stdout
        lines = [line for line in done.stdout.splitlines() if line.startswith("head-influence: ")]
        assert len(lines) == 1, done.stdout
        return lines[0]

    def numbers(self, part="results"):
        """All numbers in a folder of netCDF files, by file: variable to its bytes."""
        found = {}
        for path in sorted((self.folder / part).rglob("*.nc")):
            variables, _ = files.read(path)
            found[str(path.relative_to(self.folder))] = {
                name: values.tobytes() if values.dtype != object else values.tolist()
                for name, values in variables.items()
            }
        return found

    def left_over(self):
        """Processes and files that a run should have taken with it."""
        processes = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.folder) in command:
                processes.append(command)
        kept = [path for path in self.temporary.rglob("*") if "head-influence" in path.name]
        parts = [path for part in ("results", ".cache") for path in (self.folder / part).rglob("*.part")]
        return processes + kept + parts


@cache
def importer():
    """Start a server for dry runs: its address, and the program that it runs."""
    program = FOLDER / "snakemake_program.py"
    program.write_text("from snakemake.cli import main\n\nmain()\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "workflow"))
        patch.delenv(launch.VARIABLE, raising=False)
        preload.start({"planning": "snakemake.cli,jsonschema"})
        return os.environ.pop(launch.VARIABLE), str(program)


def planned(output):
    """Read the table of jobs of a dry run."""
    if "Nothing to be done" in output:
        return Counter()
    table = re.search(r"^job +count\n-[- ]+\n(.*?)^total ", output, re.M | re.S)
    assert table, output
    rows = dict(line.rsplit(None, 1) for line in table[1].splitlines())
    return Counter({rule: int(count) for rule, count in rows.items() if rule not in TARGETS})


TARGETS = ("all", "report", "trace", "baseline", "single", "joint", "concentration", "audit", "curves", "provenance")


def new(folder, model="llama", texts=TEXTS, **changes):
    """Copy the project's code and settings to `folder`, with a tiny model and texts."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, dirs_exist_ok=True)
        elif (ROOT / part).exists():
            shutil.copy2(ROOT / part, folder)
    shutil.copytree(tiny.checkpoint(model), folder / "model", dirs_exist_ok=True)
    project = Project(folder)
    project.texts(texts)
    project.settings(
        study="tiny", model={"checkpoint": "model", "revision": None}, texts={"file": "texts.json", "tokens": 12},
        measure__first_query=2, controls__random_weights=[], controls__permuted_weights=[], curves=None,
    )  # fmt: skip
    project.settings(**changes)
    return project


@cache
def finished(target="concentration", model="llama"):
    """A finished study, made once to a target or several; tests work on copies."""
    project = new(FOLDER / f"{model}-{target.replace(' ', '-')}", model)
    project.run(*target.split())
    return project


def copied(folder, target="concentration", model="llama"):
    """A copy of a finished study, dates and Snakemake's records included."""
    shutil.copytree(finished(target, model).folder, folder, dirs_exist_ok=True)
    return Project(folder)


def same_numbers(one, other):
    """Compare two studies' numbers byte by byte; return how many files were compared."""
    a, b = one.numbers(), other.numbers()
    assert a.keys() == b.keys()
    for path in a:
        assert a[path] == b[path], path
    return len(a)
