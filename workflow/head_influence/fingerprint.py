"""Identity of a checkpoint's content, computed once per file and remembered; neither numpy nor a model is needed."""

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

from head_influence import StudyError
from head_influence.json_files import size_of
from head_influence.layout import checkpoint_files

MEMORY = "content-hashes.json"
SETTLED = 2.0  # seconds: a file changed more recently may change again without its times showing it


def fingerprint(folder, cache_dir):
    """Identity of a checkpoint: sha256 over the names and contents of its configuration, tokenizer and weight files.

    Parameters
    ----------
    folder : path
        The checkpoint.
    cache_dir : path
        Where the hashes of single files are remembered, by path, size, inode and times of change.

    Returns
    -------
    str
        64 hexadecimal digits.

    Raises
    ------
    StudyError
        If a file is absent or cannot be read.
    """
    memory = Memory(Path(cache_dir) / MEMORY)
    digest = hashlib.sha256()
    for path in checkpoint_files(folder):
        digest.update(f"{path.name} {memory.sha256(path)}\n".encode())
    memory.save()
    return digest.hexdigest()


def file_sha256(path):
    """Hash of a file's content: 64 hexadecimal digits."""
    size_of(path)
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StudyError(f"{path}: cannot be read ({error.strerror})") from None


class Memory:
    """Remembered hashes of files; an unreadable memory is an empty one, for it holds nothing that cannot be recomputed.

    Parameters
    ----------
    path : Path
        Its JSON file: absolute path to [[size, mtime_ns, ctime_ns, inode, device], sha256].
    """

    def __init__(self, path):
        self.path = path
        self._known, self._new = self._load(), {}

    def _load(self):
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}

    def sha256(self, path):
        """Hash of a file's content, from memory if the file is the one that was hashed."""
        size_of(path)
        real = str(Path(path).resolve())
        state = _state(real)
        known = self._known.get(real)
        if isinstance(known, list) and len(known) == 2 and known[0] == state and isinstance(known[1], str):
            return known[1]
        started = time.time()
        found = file_sha256(real)
        changed = max(state[1], state[2]) / 1e9
        if _state(real) == state and changed < started - SETTLED:
            self._new[real] = [state, found]
        return found

    def save(self):
        """Add what was hashed to the file, which other processes may have extended meanwhile."""
        if not self._new:
            return
        temporary = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f".{MEMORY}.", dir=self.path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self._load() | self._new, file, indent=0, sort_keys=True)
            Path(temporary).replace(self.path)
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            raise StudyError(f"cache_dir: {self.path} cannot be written ({error.strerror})") from None


def _state(path):
    found = Path(path).stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
