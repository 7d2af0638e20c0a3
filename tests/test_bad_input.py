"""Strange settings and texts: always a study or one line, never a traceback, and nothing written anywhere else."""

import json
import os
from pathlib import Path

import models_tiny as tiny
import pytest
import workflow_runs as runs
import yaml
from head_influence import StudyError, hub
from head_influence.settings import check_settings
from head_influence.study import Study
from head_influence.texts import read_texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DEFAULT = yaml.safe_load((runs.ROOT / "config.yaml").read_text(encoding="utf-8"))
KEYS = [("study",), ("model",), ("model", "checkpoint"), ("model", "revision"), ("texts",), ("texts", "file")]
KEYS += [("texts", "tokens"), ("measure", "first_query"), ("measure", "small_total"), ("measure", "random_seed")]
KEYS += [("measure", "small_total", "js"), ("controls",), ("controls", "whole_forward"), ("controls", "random_weights")]
KEYS += [("audit", "singles"), ("figures", "dpi"), ("cache_dir",), ("curves",), ("unknown",), ("texts", "unknown")]
STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
    st.sampled_from(["", "..", "../x", "/", "a/b", "a b", "-x", "\ud800", "\0", "x" * 5000, "{study}", "résumé", "💥"]),
    st.sampled_from([-1, 0, 10**30, float("nan"), float("inf"), [], {}, [[0]], [0, 0], [-1], ["0"]]),
)  # fmt: skip
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
WORDS = "What the heads of one layer write is read by the next one."


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of its own with a model and texts; every file that is there before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(tiny.checkpoint("llama"))
    (tmp_path / "texts.json").write_text(json.dumps([{"id": "a", "language": "en", "text": WORDS}]))
    return tmp_path


def usual(**changes):
    found = json.loads(json.dumps(DEFAULT)) | {"study": "s", "cache_dir": "cache", "curves": None} | changes
    return found | {"model": {"checkpoint": "model"}, "texts": {"file": "texts.json", "tokens": 12}} | changes


def planned(wanted):
    """Plan a study as the Snakefile does; return it, or the line that says why not."""
    try:
        check_settings(wanted)
        return Study(wanted, hub.locate(wanted))
    except (StudyError, OSError) as error:
        line = str(error)
        assert line.strip()
        assert "\n" not in line
        return line


def written(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@FUZZ
@given(key=st.sampled_from(KEYS), value=STRANGE)
def test_any_value_of_any_setting(place, key, value):
    before = written(place)
    wanted = usual()
    inner = wanted
    for step in key[:-1]:
        inner = inner[step]
    inner[key[-1]] = value
    found = planned(wanted)
    assert isinstance(found, (str, Study))
    cache = wanted["cache_dir"] if isinstance(wanted["cache_dir"], str) else "cache"
    assert all(name.startswith((cache, "cache")) for name in written(place) - before)


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "id": STRANGE | st.just("a"),
        "language": STRANGE | st.just("en"),
        "text": STRANGE | st.just(WORDS),
        "tokens": STRANGE | st.just(12),
        "more": STRANGE,
    },
)


@FUZZ
@given(entries=st.lists(ENTRY, max_size=3) | STRANGE)
def test_any_list_of_texts(place, entries):
    Path("texts.json").write_text(json.dumps(entries), encoding="utf-8")
    found = planned(usual())
    if isinstance(found, Study):
        names = [text.id for text in found.texts]
        assert len(set(names)) == len(names)
        assert all(name == Path(name).name and not name.startswith(".") for name in names)
        assert all(found.tokens[name] > 7 for name in names)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not valid JSON"),
        (b"{}", "expected a non-empty JSON list"),
        (b"[]", "expected a non-empty JSON list"),
        (b"[1]", "expected an object"),
        (b"\xff\xfe[", "cannot be read as UTF-8"),
        (b"[" * 100000, "not valid JSON"),
        (b'[{"id": "a", "language": "en", "text": "\\ud800"}]', "half of a surrogate pair"),
        (b'[{"id": "../a", "language": "en", "text": "b"}]', "not a plain file name"),
        (b'[{"id": "a/b", "language": "en", "text": "b"}]', "not a plain file name"),
        (b'[{"id": ".a", "language": "en", "text": "b"}]', "not a plain file name"),
        (b'[{"id": "a\\n", "language": "en", "text": "b"}]', "not a plain file name"),
        (b'[{"id": "a", "language": "en", "text": "b", "tokens": true}]', "tokens: expected a positive integer"),
        (b'[{"id": "a", "language": "en", "text": "b", "x": 1}]', "unknown key 'x'"),
        (b'[{"id": "a", "language": "en"}]', "text: expected a string"),
        (b'[{"id": "a", "language": "en", "text": "b"}, {"id": "A", "language": "", "text": "b"}]', "is already that"),
    ],
)
def test_the_line_names_file_and_fault(place, content, why):
    Path("texts.json").write_bytes(content)
    with pytest.raises(StudyError, match=why) as error:
        read_texts("texts.json", 12)
    assert str(error.value).startswith("texts.json")


def test_texts_that_are_unusual_but_right(place):
    """Emoji only, control characters, markup, the same text twice, ten megabytes."""
    texts = [
        "🐟🐠🐡" * 4,
        "a\tb\x01c\r\nd\x7fefgh",
        "<script>alert(1)</script> & <b>",
        WORDS,
        WORDS,
        "long text " * 1_000_000,
    ]
    entries = [{"id": f"t{i}", "language": "<i>", "text": text} for i, text in enumerate(texts)]
    Path("texts.json").write_text(json.dumps(entries), encoding="utf-8")
    found = planned(usual())
    assert isinstance(found, Study), found
    assert set(found.tokens.values()) == {12}
    assert len({found.window(f"t{i}") for i in range(6)}) == 5


def test_too_few_tokens(place):
    Path("texts.json").write_text(json.dumps([{"id": "a", "language": "en", "text": "1234567"}]))
    assert "text 'a' has 7 tokens; measure.first_query 7 needs at least 8" in planned(usual())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"study": "../elsewhere"}, "settings: study"),
        ({"texts": {"file": "absent.json", "tokens": 12}}, "absent.json: the file does not exist"),
        ({"figures": {"dpi": "many"}}, "settings: figures.dpi"),
        ({"cache_dir": "texts.json"}, "texts.json"),
    ],
)
def test_the_workflow_says_it_in_one_line(tmp_path, change, why):
    project = runs.new(tmp_path / "a folder with 'quotes'")
    for key, value in change.items():
        project.settings(**{key: value})
    before = written(project.folder)
    output = project.fail()
    lines = [line for line in output.splitlines() if line.startswith("head-influence:")]
    assert len(lines) == 1, output
    assert why in lines[0]
    assert "Traceback" not in output
    assert all(name.startswith((".snakemake", "workflow")) for name in written(project.folder) - before)
    assert not os.path.lexists(tmp_path / "elsewhere")
