"""Which files make up a checkpoint folder; each is untrusted input. Neither numpy nor a model is needed."""

import json
import stat
from pathlib import Path

from head_influence import StudyError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
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


def indexed_tensors(index, content):
    """Check the `content` of an index file; return tensor name to the name of its shard in the same folder."""
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise StudyError(f"{index}: weight_map: expected an object of tensor name to file name")
    for name in set(map(str, found.values())):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise StudyError(f"{index}: {name!r} is not the name of a safetensors file in the same folder")
    return {tensor: str(name) for tensor, name in found.items()}


def weight_files(folder):
    """Find the weights of a checkpoint.

    Parameters
    ----------
    folder : path

    Returns
    -------
    paths : list of Path
        `model.safetensors`, or the shards that the index names.
    where : dict or None
        Tensor name to file name as the index has it; None where there is no index.

    Raises
    ------
    StudyError
        If there are none, if a shard is missing or outside the folder, or if the weights are pickles.
    """
    folder = Path(folder)
    if (folder / SINGLE).exists():
        return [folder / SINGLE], None
    index = folder / INDEX
    if index.exists():
        where = indexed_tensors(index, read_json(index))
        names = sorted(set(where.values()))
        for name in names:
            if not (folder / name).exists():
                raise StudyError(f"{index}: shard {name} is missing from the folder")
        return [folder / name for name in names], where
    pickles = sorted(path.name for ending in PICKLES for path in folder.glob(ending))
    if pickles:
        raise StudyError(
            f"{folder}: only pickle weights found ({', '.join(pickles[:3])}), which can run code when read; "
            f"expected {SINGLE}, or {INDEX} and its shards"
        )
    raise StudyError(f"{folder}: no weights: expected {SINGLE}, or {INDEX} and its shards")


def checkpoint_files(folder):
    """Return the files that say what a checkpoint is: configuration, tokenizer (as far as it is there), weights."""
    folder = Path(folder)
    tokenizer = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    return [folder / CONFIG, *tokenizer, *weight_files(folder)[0]]
