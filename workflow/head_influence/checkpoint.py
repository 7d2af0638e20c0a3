"""A checkpoint as data: its configuration and single float32 tensors straight from mapped safetensors files.

Nothing here runs a model or unpickles anything; every field of the files is treated as untrusted input.
"""

import mmap
import re
from functools import cached_property
from pathlib import Path

import numpy as np

from head_influence import StudyError
from head_influence.json_files import parse_json, read_json, size_of
from head_influence.layout import CONFIG, INDEX, weight_files

ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
MAX_HEADER = 100_000_000  # of the format
MAX_RANK = 8
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


def is_count(value):
    """Whether a value of a JSON file is an integer of 0 or more."""
    return type(value) is int and value >= 0


class SafetensorsFile:
    """One mapped safetensors file.

    Parameters
    ----------
    path : Path
        The file. Its header is checked completely: types, shapes and byte ranges.

    Raises
    ------
    StudyError
        If the file is absent, truncated or its header is not what the format allows.
    """

    def __init__(self, path):
        self.path = Path(path)
        size = size_of(self.path)
        try:
            with self.path.open("rb") as file:
                head = file.read(8)
                length = int.from_bytes(head, "little")
                if len(head) < 8 or length > min(MAX_HEADER, size - 8):
                    raise StudyError(f"{path}: not a safetensors file, or a truncated one ({size} bytes)")
                text = file.read(length)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise StudyError(f"{path}: cannot be read ({error.strerror})") from None
        self._start = 8 + length
        try:
            self.entries = checked_entries(parse_json(text), len(self._map) - self._start)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StudyError(f"{self.path}: unusable safetensors header ({error})") from None

    def read(self, name, rows=None):
        """Return tensor `name` (or its `rows`, indices along the first axis) as a new float32 array."""
        entry = self.entries[name]
        kind, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
        stored = np.uint16 if kind == "BF16" else FLOATS.get(kind)
        if stored is None:
            raise StudyError(f"{self.path}: tensor {name!r} has type {kind}; expected one of BF16, F16, F32, F64")
        count = (end - begin) // np.dtype(stored).itemsize
        values = np.frombuffer(self._map, stored, count, self._start + begin).reshape(shape)
        if rows is not None:
            values = values[rows]
        if kind == "BF16":
            result = values.astype(np.uint32)
            result <<= 16
            result = result.view(np.float32)
        else:
            result = values.astype(np.float32)
        if count:  # what was read need not stay in this process's memory
            first = (self._start + begin) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, self._start + end - first)
        return result


def checked_entries(header, size):
    """Return the tensors of a safetensors header; a ValueError says which is impossible in `size` bytes of data."""
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        shape, kind = entry["shape"], entry["dtype"]
        if not isinstance(shape, list) or not all(map(is_count, (*shape, begin, end))):
            raise ValueError(f"tensor {name!r} has a shape or an offset that is not a count")
        if end > size:
            raise ValueError(f"tensor {name!r} ends beyond the end of the file: it is truncated")
        if len(shape) > MAX_RANK or begin > end:
            raise ValueError(f"tensor {name!r} has {len(shape)} dimensions and the bytes {begin} to {end}")
        product = ITEM_SIZES.get(kind, 0)
        for n in shape:
            product *= n
        if kind in ITEM_SIZES and product != end - begin:
            raise ValueError(f"tensor {name!r} of shape {shape} does not fill its bytes")
    place = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != place:
            raise ValueError(f"tensor {name!r} begins at {begin}, not where the one before ends, {place}")
        place = end
    if place != size:
        raise ValueError(f"the tensors end at {place}, the file's data at {size}")
    return entries


class Checkpoint:
    """A folder in the Hugging Face layout: `config.json`, safetensors (one file or indexed shards), a tokenizer.

    Parameters
    ----------
    folder : path
        The checkpoint's folder.

    Attributes
    ----------
    config : dict
        The whole configuration as it is stored.
    text_config : dict
        The text model's part of it (`text_config` of a multimodal checkpoint, else the whole).
    prefix : str
        What stands before `layers.0. ...` in this checkpoint's tensor names.
    where : dict
        Full tensor name to its `SafetensorsFile`.

    Raises
    ------
    StudyError
        If a file is absent, malformed, of another kind than safetensors, or outside the folder.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise StudyError(f"model.checkpoint: {folder} is not a folder with a checkpoint")
        self.config = read_json(self.folder / CONFIG)
        if not isinstance(self.config, dict):
            raise StudyError(f"{self.folder / CONFIG}: expected a JSON object")
        text = self.config.get("text_config", self.config)
        if not isinstance(text, dict):
            raise StudyError(f"{self.folder / CONFIG}: text_config: expected a JSON object")
        self.text_config = text
        self.where = self._tensors()
        self.prefix = self._prefix()

    def _tensors(self):
        paths, indexed = weight_files(self.folder)
        where = {}
        for file in map(SafetensorsFile, paths):
            for name in file.entries:
                if name in where:
                    raise StudyError(f"{self.folder}: tensor {name} is in {where[name].path.name} and {file.path.name}")
                where[name] = file
        for name, file in (indexed or {}).items():
            if name not in where or where[name].path.name != file:
                raise StudyError(f"{self.folder / INDEX}: tensor {name} is not in {file}")
        return where

    def _prefix(self):
        endings = [n.removesuffix(EMBEDDING) for n in self.where if n.endswith(EMBEDDING) and not n.startswith("mtp.")]
        if len(endings) != 1:
            raise StudyError(f"{self.folder}: expected one tensor named *{EMBEDDING}, found {len(endings)}")
        return endings[0]

    def __contains__(self, name):
        return self.prefix + name in self.where

    def shape(self, name):
        """Shape of a tensor, its name without the prefix."""
        return tuple(self._file(name).entries[self.prefix + name]["shape"])

    def tensor(self, name, rows=None):
        """Return a tensor (name without the prefix; `rows`: indices along the first axis) as a float32 array."""
        return self._file(name).read(self.prefix + name, rows)

    def _file(self, name):
        try:
            return self.where[self.prefix + name]
        except KeyError:
            raise StudyError(f"{self.folder}: tensor {self.prefix + name} is missing") from None

    @cached_property
    def layer_names(self):
        """Layer index to the names, within the layer, of all its tensors."""
        pattern = re.compile(re.escape(self.prefix) + r"layers\.(\d{1,6})\.(.+)", re.ASCII)
        found = {}
        for name in self.where:
            if match := pattern.fullmatch(name):
                found.setdefault(int(match[1]), []).append(match[2])
        return found

    @property
    def tied(self):
        """Whether the language-model head is the embedding."""
        return bool(self.text_config.get("tie_word_embeddings", self.config.get("tie_word_embeddings", False)))

    def head_weight(self):
        """Weight (vocabulary, hidden) of the language-model head."""
        return self.tensor(EMBEDDING) if self.tied else self._head().read(HEAD)

    def head_shape(self):
        """Shape of the language-model head."""
        return self.shape(EMBEDDING) if self.tied else tuple(self._head().entries[HEAD]["shape"])

    def _head(self):
        if HEAD not in self.where:
            raise StudyError(f"{self.folder}: tensor {HEAD} is missing and not tied to the embedding")
        return self.where[HEAD]
