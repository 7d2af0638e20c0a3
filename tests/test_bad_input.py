"""Strange settings and texts: a study or one clear line, and nothing written elsewhere."""

import copy
import json
import os
import re
import shutil
from pathlib import Path

import models_tiny as tiny
import pytest
import workflow_runs as runs
import yaml
from head_influence import StudyError, hub
from head_influence.settings import check_settings
from head_influence.study import Study
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DEFAULT = yaml.safe_load((runs.ROOT / "config.yaml").read_text(encoding="utf-8"))
VALID = DEFAULT | {
    "study": "tiny",
    "model": {"checkpoint": "model", "revision": None},
    "texts": {"file": "texts.json", "tokens": 12},
    "curves": None,
}
TEXTS = json.dumps(runs.TEXTS).encode()
CHECKED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a checkpoint and texts; the tests of this module run in it."""
    folder = tmp_path_factory.mktemp("study")
    shutil.copytree(tiny.checkpoint("llama"), folder / "model")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def plan(found, texts=TEXTS):
    """Do what the Snakefile does first; return the study, or the line that is printed in its place."""
    Path("texts.json").write_bytes(texts)
    try:
        check_settings(found)
        where = hub.locate(found)
        return where.missing() or Study(found, where)
    except (StudyError, OSError) as error:
        line = f"{error}"
        assert "\n" not in line, line
        assert 10 < len(line.encode("utf-8", "backslashreplace")) < 2000, line
        return line


def untouched(place):
    """Nothing but caches appears, and the cache holds remembered hashes only."""
    known = {"model", "texts.json"}
    new = [p for p in place.rglob("*") if p.is_file() and p.relative_to(place).parts[0] not in known]
    assert all(p.name == "content-hashes.json" for p in new), new
    for path in {p.parent for p in new}:
        shutil.rmtree(path)


def paths_of(value, path=()):
    """All keys of nested settings, as paths."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from paths_of(inner, (*path, key))


KEYS = sorted(path for path in paths_of(VALID) if path)
STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**40, -1, 0, 2**31, 2**63]),
    st.floats(),
    st.text(st.characters(), max_size=30),
    st.sampled_from(
        ["..", "/", "../../etc", "~", "a/b", "\0", "\ud800", "{x}", "$(touch x)", "`x`", "-rf", "x" * 5000, "a\nb"]
    ),
    st.lists(st.integers() | st.text(max_size=3) | st.none(), max_size=3),
    st.dictionaries(st.text(max_size=5) | st.integers(), st.integers(), max_size=2),
)


@CHECKED
@given(st.lists(st.tuples(st.sampled_from(KEYS), STRANGE | st.just(...)), min_size=1, max_size=3))
def test_settings_changed_anywhere(place, changes):
    found = copy.deepcopy(VALID)
    for path, value in changes:
        inner = found
        for step in path[:-1]:
            inner = inner.get(step) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            if value is ...:
                inner.pop(path[-1], None)
            else:
                inner[path[-1]] = value
    result = plan(found)
    assert isinstance(result, (str, Study))
    untouched(place)


@CHECKED
@given(st.recursive(STRANGE, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2)))
def test_settings_of_any_kind(place, found):
    assert isinstance(plan(found), str)
    untouched(place)


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "id": st.text(max_size=8) | STRANGE,
        "language": st.text(max_size=4) | STRANGE,
        "text": st.text(min_size=10, max_size=60) | STRANGE,
        "tokens": st.integers(-2, 99) | STRANGE,
        "other": STRANGE,
    },
)
GOOD_ENTRY = st.fixed_dictionaries(
    {
        "id": st.from_regex(r"\w[\w.-]{0,9}", fullmatch=True),
        "language": st.text(max_size=5),
        "text": st.text(min_size=20),
    },
    optional={"tokens": st.integers(8, 10**30)},
)


@CHECKED
@given(st.lists(ENTRY | STRANGE, max_size=3) | STRANGE)
def test_texts_of_any_kind(place, entries):
    result = plan(VALID, json.dumps(entries, default=str).encode())
    assert isinstance(result, (str, Study))
    untouched(place)


@CHECKED
@given(st.lists(GOOD_ENTRY, min_size=1, max_size=3, unique_by=lambda entry: entry["id"].casefold()))
def test_good_texts_are_a_study(place, entries):
    """Whatever characters they are of, if they are characters."""
    result = plan(VALID, json.dumps(entries).encode())
    halves = any(0xD800 <= ord(c) < 0xE000 for entry in entries for c in entry["text"] + entry["language"])
    assert isinstance(result, Study) != halves, result
    untouched(place)


@CHECKED
@given(st.binary(max_size=200))
def test_bytes_as_texts(place, content):
    assert isinstance(plan(VALID, content), str)
    untouched(place)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff\xfe", bytes(100)])
def test_a_damaged_checkpoint(place, name, content):
    path = place / "model" / name
    kept = path.read_bytes()
    path.write_bytes(content)
    try:
        line = plan(VALID)
    finally:
        path.write_bytes(kept)
    assert isinstance(line, str)
    assert "model" in line
    untouched(place)


def test_the_valid_settings_are_a_study(place):
    assert isinstance(plan(VALID), Study)
    untouched(place)


# What follows starts Snakemake itself.


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return runs.new(tmp_path_factory.mktemp("p"), texts=runs.TEXTS[:1])


@pytest.fixture(autouse=True)
def restored(request):
    """Put back what a test of the project changes."""
    if "project" not in request.fixturenames:
        yield
        return
    folder = request.getfixturevalue("project").folder
    kept = {name: (folder / name).read_bytes() for name in ("config.yaml", "texts.json")}
    yield
    for name, content in kept.items():
        (folder / name).write_bytes(content)


def whole_tree(folder):
    outside = {folder / name for name in (".snakemake", "results", ".cache", "logs")}
    return {p for p in folder.rglob("*") if not outside & {p, *p.parents} and "__pycache__" not in p.parts}


REAL = {
    "an unknown key": (lambda p: p.settings(measure__x=1), "settings: measure: .*'x' was unexpected"),
    "no study": (lambda p: p.settings(study="../up"), "settings: study '../up' is not a plain file name"),
    "no texts file": (lambda p: p.settings(texts__file="no.json"), "no.json: the file does not exist"),
    "texts that are no UTF-8": (
        lambda p: (p.folder / "texts.json").write_bytes(b"\xff"),
        "texts.json: cannot be read as UTF-8",
    ),
    "an id that leads elsewhere": (
        lambda p: p.texts([{"id": "../../x", "language": "en", "text": "words"}]),
        r"texts.json: entry 0: id '../../x' is not a plain file name",
    ),
    "a cache that is a file": (lambda p: p.settings(cache_dir="config.yaml"), "cache_dir: .*cannot be written"),
    "a path that is too long": (lambda p: p.settings(texts__file="x" * 5000), "File name too long"),
    "a model that is not there": (lambda p: p.settings(model__checkpoint="no where"), "there is no folder no where"),
    "a file in place of the model": (lambda p: p.settings(model__checkpoint="texts.json"), "texts.json is a file"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_one_line_and_nothing_written(project, name):
    change, match = REAL[name]
    change(project)
    before = whole_tree(project.folder)
    line = project.refused()
    assert re.search(match, line), line
    assert whole_tree(project.folder) == before
    assert not (project.folder / "results").exists()


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"a: [", b"- 1", b"", b"\xff\xfe\xff", b"a: b: c", b"a: \x00", b"[" * 9999, None])
def test_settings_that_cannot_be_read(project, content):
    path = project.folder / "config.yaml"
    path.unlink() if content is None else path.write_bytes(content)
    assert project.refused().startswith("head-influence: config.yaml: ")


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, b"a: [", b"\xff"])
def test_a_settings_file_named_in_the_command(project, content):
    """Snakemake reads it before the project begins, and has the last word about it."""
    if content is not None:
        (project.folder / "own.yaml").write_bytes(content)
    done = project.dry_run("--configfile", "own.yaml", "--", "concentration")
    assert done.returncode != 0
    assert re.search("own.yaml|Config file is not valid|codec can't decode", done.stdout)
    (project.folder / "own.yaml").unlink(missing_ok=True)


@pytest.mark.slow
def test_strange_texts_and_names_are_studied(tmp_path):
    """Blanks, quotes and dollars in every path; emoji, control characters, 10 MB and twice the same text."""
    folder = tmp_path / 'it\'s a "project" $HOME ü'
    texts = [
        {"id": "emoji", "language": "😀", "text": "😀🏴‍☠️👩‍👩‍👧🇩🇪"},
        {"id": "control", "language": "", "text": "\0\x1b[31m\u202e\r\n\t'\"`$(x)"},
        {"id": "large", "language": "en", "text": "word " * 2_000_000},
        {"id": "large.again", "language": "en", "text": "word " * 2_000_000},
    ]
    project = runs.new(folder, texts=texts)
    (folder / "the model's $(place)").mkdir()
    (folder / "model").rename(folder / "the model's $(place)" / "a b")
    (folder / "texts.json").rename(folder / 'texts\' "file".json')
    project.settings(
        model__checkpoint="the model's $(place)/a b", texts__file="texts' \"file\".json",
        cache_dir="a cache's `folder`", study="Studie_1.ü", controls__whole_forward=False,
    )  # fmt: skip
    before = whole_tree(folder)
    project.run("provenance")
    assert {p.relative_to(folder).parts[0] for p in whole_tree(folder) - before} == {"a cache's `folder`"}
    numbers = project.numbers()
    assert len(numbers) == 4 * 2 * 2 + 1
    same = [numbers[f"results/Studie_1.ü/single/{name}/L00.nc"]["relative"] for name in ("large", "large.again")]
    assert same[0] == same[1]
    assert project.plan("provenance") == {}
