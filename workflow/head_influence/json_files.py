"""JSON files: read as untrusted input, written whole or not at all. Nothing heavy is imported."""

import json
import os
import stat
from pathlib import Path

from head_influence import StudyError

LARGEST_JSON = 256 << 20


def _no_duplicates(pairs):
    result = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"key {name[:80]!r} appears twice in one object")
        result[name] = value
    return result


def parse_json(text):
    """Parse JSON; an object with the same key twice is a ValueError."""
    return json.loads(text, object_pairs_hook=_no_duplicates)


def size_of(path):
    """Size in bytes of a regular file (links are followed); anything else is a `StudyError`."""
    try:
        found = Path(path).stat()
    except FileNotFoundError:
        reason = "the link leads nowhere" if Path(path).is_symlink() else "the file does not exist"
        raise StudyError(f"{path}: {reason}") from None
    except (OSError, ValueError) as error:
        raise StudyError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from None
    if not stat.S_ISREG(found.st_mode):
        raise StudyError(f"{path}: not a regular file")
    return found.st_size


def read_json(path):
    """Parse a UTF-8 JSON file; any fault is a `StudyError` that names the file."""
    path = Path(path)
    size = size_of(path)
    if size > LARGEST_JSON:
        raise StudyError(f"{path}: {size} bytes; expected a JSON file of at most {LARGEST_JSON}")
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{path}: not valid JSON ({error})") from None


def write_json(path, content):
    """Write a JSON file whole or not at all; its folder is made. A fault of the disk is a `StudyError`."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StudyError(f"{path}: cannot be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)
