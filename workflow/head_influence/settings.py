"""The study's settings: checked against the schema, with one line that says what is wrong."""

import json
import math
from pathlib import Path

from head_influence import StudyError

SCHEMA = Path(__file__).parents[1] / "schemas" / "config.schema.json"
PATHS = ("model.checkpoint", "texts.file", "cache_dir", "curves.contexts")


def check_file(path):
    """Raise a `StudyError` unless `path` is a YAML file with keys at the top, before Snakemake reads it."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise StudyError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise StudyError(f"{path}: not valid YAML in UTF-8: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(found, dict):
        raise StudyError(f"{path}: expected settings with keys at the top")


def check_settings(settings):
    """Raise a `StudyError` that names the key at fault unless `settings` (dict) follows the schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from jsonschema.validators import extend

    whole = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)  # 3.0 is none
    validator = extend(Draft202012Validator, type_checker=whole)(json.loads(SCHEMA.read_text(encoding="utf-8")))
    error = best_match(validator.iter_errors(settings))
    if error is not None:
        key = ".".join(map(str, error.absolute_path)) or "the settings"
        hint = f" ({error.schema['description']})" if "description" in error.schema and error.absolute_path else ""
        message = " ".join(error.message.split())
        raise StudyError(f"settings: {key}: {message[:300]}{hint}")
    _check_values("", settings)


def _check_values(where, value):
    """Check what a schema cannot say well: finite numbers, characters, names of files."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_values(f"{where}.{key}".strip("."), inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_values(f"{where}.{i}", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise StudyError(f"settings: {where}: expected a finite number, found {value}")
    elif isinstance(value, str):
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise StudyError(f"settings: {where}: holds half of a surrogate pair, which is no character")
        if where in PATHS and (value.startswith("-") or any(c in "{}" or ord(c) < 32 or ord(c) == 127 for c in value)):
            raise StudyError(
                f"settings: {where}: {value[:80]!r} cannot be used as a path: expected no braces, no control "
                "characters, and no '-' in front (write ./-name)"
            )
