"""Naming a model: where the checkpoint folder of `model.checkpoint` is or will be, without any network.

It runs whenever the Snakefile is parsed: nothing here imports numpy or transformers before it is needed.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from head_influence import StudyError
from head_influence.json_files import read_json
from head_influence.layout import CONFIG, checkpoint_files

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
REVISION = re.compile(r"\w[\w./-]{0,200}", re.ASCII)
PIN = "revision.json"
SOURCE = "source.json"
REHEARSAL = "rehearsal-2b"  # folder that a rule writes: the published layout with random weights
PACKAGED = "SmolLM2-135M-Instruct.Q4_1.gguf"  # file that a rule takes out of a Python package


@dataclass(frozen=True)
class Place:
    """Where a model's checkpoint folder is or will be.

    Attributes
    ----------
    kind : str
        "folder" (nothing has to be done), "hub", "gguf" or "rehearsal".
    folder : Path
        The checkpoint folder.
    source : str
        What the settings name: a hub id, a .gguf file or the folder.
    asked : str or None
        Revision of a hub id as the settings have it.
    """

    kind: str
    folder: Path
    source: str
    asked: str | None = None

    @property
    def mark(self):
        """File that is written last: with it the folder is complete."""
        return str(self.folder / CONFIG)

    def missing(self):
        """Say what is missing, or return None where the checkpoint is there. Files are only looked at, not read."""
        if self.kind == "folder":
            return None
        if not (self.folder / CONFIG).exists():
            what = {"hub": "fetched", "gguf": "converted", "rehearsal": "written"}[self.kind]
            return f"{self.source} has not been {what} yet"
        try:
            checkpoint_files(self.folder)
            if self.kind == "hub":
                self.pinned()
            elif self.kind == "gguf" and Path(self.source).exists():
                if self._converted()["state"] != file_state(self.source):
                    return f"{self.source} has changed since it was converted"
        except StudyError as error:
            return str(error)
        return None

    def pinned(self):
        """Return the commit that the study's hub model is pinned to, or None before it is first resolved."""
        path = self.folder / PIN
        if not path.exists():
            return None
        pin = read_json(path)
        if not isinstance(pin, dict) or not COMMIT.fullmatch(str(pin.get("commit"))):
            raise StudyError(f"{path}: expected the checkpoint, the revision asked for and its commit; delete the file")
        if (pin.get("checkpoint"), pin.get("asked")) != (self.source, self.asked):
            raise StudyError(
                f"{path}: this study is pinned to {pin.get('checkpoint')} at {pin.get('asked') or 'main'}, but the "
                f"settings name {self.source} at {self.asked or 'main'}; give the study another name, or delete "
                f"{self.folder}"
            )
        return pin["commit"]

    def _converted(self):
        record = read_json(self.folder / SOURCE)
        if not isinstance(record, dict) or not {"state", "sha256"} <= set(record):
            raise StudyError(
                f"{self.folder / SOURCE}: expected state and sha256 of the .gguf file; delete {self.folder}"
            )
        return record

    def revision(self):
        """Commit of a hub model (in a snapshot folder of the hub's cache, too), hash of a .gguf file, or None."""
        if self.kind == "hub":
            return self.pinned()
        if self.kind == "gguf":
            return f"sha256:{self._converted()['sha256']}"
        snapshot = self.folder.resolve()
        return snapshot.name if COMMIT.fullmatch(snapshot.name) and snapshot.parent.name == "snapshots" else None


def locate(settings, results="results"):
    """Find where the settings' model is or will be, without any network.

    Parameters
    ----------
    settings : dict
        With model.checkpoint, model.revision, study and cache_dir.
    results : path
        Folder of the studies' results; the links to a hub model and its pin are in the study's.

    Returns
    -------
    Place

    Raises
    ------
    StudyError
        If the settings name something that cannot be a model.
    """
    model = settings.get("model")
    name = model.get("checkpoint") if isinstance(model, dict) else None
    if not isinstance(name, str) or not name:
        raise StudyError("settings: model.checkpoint: expected a folder, a .gguf file, or a hub id (owner/name)")
    asked, path = model.get("revision"), Path(name)
    if asked is not None and (not isinstance(asked, str) or not REVISION.fullmatch(asked) or ".." in asked):
        raise StudyError(f"settings: model.revision: expected a branch, tag or commit, found {asked!r:.80}")
    if name.endswith(".gguf"):
        place = _locate_gguf(path, settings)
    elif path.name == REHEARSAL:
        place = Place("rehearsal", path, name)
    elif path.is_dir():
        place = Place("folder", path, name)
    elif path.exists():
        raise StudyError(f"settings: model.checkpoint: {name} is a file; expected a folder, a .gguf file, or a hub id")
    elif HUB_ID.fullmatch(name):
        study = str(settings.get("study"))
        if not re.fullmatch(r"\w[\w.-]*", study):
            raise StudyError(f"settings: study: {study[:40]!r} is not a plain file name")
        return Place("hub", Path(results) / study / "checkpoint", name, asked)
    else:
        raise StudyError(f"settings: model.checkpoint: there is no folder {name}, and it is no hub id (owner/name)")
    if asked is not None:
        raise StudyError(f"settings: model.revision: {asked!r} is for a hub id; {name} has no revisions (set null)")
    return place


def _locate_gguf(path, settings):
    if path.name != PACKAGED and not path.is_file():
        raise StudyError(f"settings: model.checkpoint: the file {path} does not exist")
    mark = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:8]
    folder = Path(str(settings.get("cache_dir"))) / "models" / f"{path.stem}-{mark}"
    return Place("gguf", folder, str(path))


def gguf_memory(path):
    """Rough memory in MB of converting a .gguf file: its values in float32, and some room."""
    size = Path(path).stat().st_size if Path(path).exists() else 0
    return 1000 + 12 * (size >> 20)


def file_state(path):
    """Size and time of change of a file, to notice that it is another one."""
    found = Path(path).stat()
    return [found.st_size, found.st_mtime_ns]


def validate(folder):
    """Check a checkpoint folder completely, without reading weights: layout, architecture, shapes, tokenizer.

    Raises
    ------
    StudyError
        With the first problem, in one line.
    """
    from head_influence.checkpoint import Checkpoint
    from head_influence.families import check
    from head_influence.texts import load_tokenizer

    check(Checkpoint(folder))
    load_tokenizer(folder)
