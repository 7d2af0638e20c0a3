"""Settings: everything that is not a study is refused with one line that names the key."""

import copy
import math
from pathlib import Path

import pytest
import yaml
from head_influence import StudyError
from head_influence.settings import check_settings

ROOT = Path(__file__).parents[1]
DEFAULT = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))


def changed(key, value):
    """The default settings with the value of a dotted key replaced; `...` deletes it."""
    settings = copy.deepcopy(DEFAULT)
    *path, last = key.split(".")
    inner = settings
    for step in path:
        inner = inner[step]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return settings


def test_the_default_and_the_known_studies_are_valid():
    check_settings(DEFAULT)
    paths = sorted((ROOT / "resources/studies").glob("*.yaml"))
    assert paths
    for path in paths:
        own = yaml.safe_load(path.read_text(encoding="utf-8"))
        check_settings(
            {k: DEFAULT[k] | v if isinstance(v, dict) and DEFAULT[k] else v for k, v in (DEFAULT | own).items()}
        )


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("study", ..., "'study' is a required property"),
        ("study", 7, "study: 7 is not of type 'string'"),
        ("unknown", 1, "'unknown' was unexpected"),
        ("measure.unknown", 1, "measure: .*'unknown' was unexpected"),
        ("measure", None, "measure: None is not of type 'object'"),
        ("measure.first_query", -1, "measure.first_query: -1 is less than the minimum"),
        ("measure.first_query", 7.5, "measure.first_query: 7.5 is not of type 'integer'"),
        ("measure.first_query", True, "measure.first_query: True is not of type 'integer'"),
        ("measure.random_seed", 10**30, "measure.random_seed: 1000.* is greater than the maximum"),
        ("measure.small_total.js", math.nan, "measure.small_total.js: expected a finite number, found nan"),
        ("measure.small_total.js", math.inf, "measure.small_total.js: inf is greater than the maximum"),
        ("measure.small_total.vectors", "1e-4", "measure.small_total.vectors: '1e-4' is not of type 'number'"),
        ("texts.tokens", 0, "texts.tokens: 0 is less than the minimum"),
        ("texts.file", "", "texts.file: "),
        ("texts.file", [], "texts.file: .* is not of type 'string'"),
        ("controls.random_weights", [1, 1], "controls.random_weights: .* has non-unique elements"),
        ("controls.random_weights", 3, "controls.random_weights: 3 is not of type 'array'"),
        ("controls.random_weights", [-1], "controls.random_weights.0: -1 is less than the minimum"),
        ("controls.whole_forward", "yes", "controls.whole_forward: 'yes' is not of type 'boolean'"),
        ("figures.dpi", 10**6, "figures.dpi: 1000000 is greater than the maximum"),
        ("cache_dir", "-cache", "cache_dir: '-cache' cannot be used as a path"),
        ("cache_dir", "a{b}", "cache_dir: 'a{b}' cannot be used as a path"),
        ("cache_dir", "a\0b", "cache_dir: .* cannot be used as a path"),
        ("texts.file", "a\nb", "texts.file: .* cannot be used as a path"),
        ("model.checkpoint", "\ud800", "model.checkpoint: holds half of a surrogate pair"),
    ],
)
def test_refused_with_the_key(key, value, named):
    with pytest.raises(StudyError, match=f"^settings: (the settings: )?.*{named}") as caught:
        check_settings(changed(key, value))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_settings_that_are_no_object():
    for value in (None, [], "text", 3):
        with pytest.raises(StudyError, match=r"settings: the settings: .* is not of type 'object'"):
            check_settings(value)


def test_the_line_says_what_the_key_means():
    with pytest.raises(StudyError, match=r"\(First query position of the primary observations;"):
        check_settings(changed("measure.first_query", "x"))


def test_integers_that_yaml_writes_as_floats_are_no_surprise():
    """JSON Schema takes 3.0 for an integer; what is used must be one."""
    with pytest.raises(StudyError, match=r"measure.random_seed: 3.0 is not of type 'integer'"):
        check_settings(changed("measure.random_seed", 3.0))
    check_settings(changed("measure.small_total.js", 0))
