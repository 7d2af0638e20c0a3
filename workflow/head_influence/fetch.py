"""Fetching a model with the hub's own client, which keeps the files in its cache (HF_HOME).

The study holds a folder of links to them, and a small file that pins the commit.
"""

import errno
import re
from contextlib import contextmanager
from pathlib import Path

from head_influence import StudyError
from head_influence.fingerprint import file_sha256
from head_influence.hub import COMMIT, PIN, validate
from head_influence.json_files import read_json, write_json
from head_influence.layout import CONFIG, INDEX, SINGLE, TOKENIZER_FILES, checkpoint_files, indexed_tensors

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def fetch(place, say=print):
    """Fetch a hub model, or find it in the hub client's cache, and link it into the study.

    A moving revision is resolved once: the commit is pinned before the first download, and stays. What was fetched
    completely before an interruption is not fetched again. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE count.

    Parameters
    ----------
    place : Place
        Of kind "hub".
    say : callable
        Takes lines of progress.

    Raises
    ------
    StudyError
        In one line, if the model cannot be had or is not one that the study can read.
    """
    from huggingface_hub import constants

    wanted = place.pinned() or place.asked or "main"
    with explained(place.source, wanted):
        if constants.HF_HUB_OFFLINE:
            commit, snapshot = cached(place.source, wanted)
        else:
            commit, names = resolve(place.source, wanted)
            write_json(place.folder / PIN, {"checkpoint": place.source, "asked": place.asked, "commit": commit})
            say(f"{place.source} at commit {commit}")
            snapshot = download(place.source, commit, names, say)
    write_json(place.folder / PIN, {"checkpoint": place.source, "asked": place.asked, "commit": commit})
    validate(snapshot)
    link(checkpoint_files(snapshot), place.folder)


def resolve(name, revision):
    """Return the commit of a revision, and the names of its files."""
    from huggingface_hub import HfApi, hf_hub_download

    info = HfApi().model_info(name, revision=revision)
    if not COMMIT.fullmatch(str(info.sha)):
        raise StudyError(f"{name}: the hub gives no commit for revision {revision!r}")
    names = {file.rfilename for file in info.siblings or []}
    if CONFIG in names:
        hf_hub_download(name, CONFIG, revision=revision)  # by this name, the cache knows the revision when offline
    return info.sha, names


def download(name, commit, names, say):
    """Download configuration, tokenizer and safetensors of a commit that has the files `names`; return their folder."""
    from huggingface_hub import hf_hub_download

    def get(file):
        say(f"fetching {file}")
        return Path(hf_hub_download(name, file, revision=commit))

    for file in (CONFIG, TOKENIZER_FILES[0]):
        if file not in names:
            raise StudyError(f"{name} at {commit}: the hub has no {file} for it")
    paths = [get(file) for file in (CONFIG, *TOKENIZER_FILES) if file in names]
    if SINGLE in names:
        weights = [SINGLE]
    elif INDEX in names:
        index = get(INDEX)
        weights = sorted(set(indexed_tensors(f"{name}: {INDEX}", read_json(index)).values()))
        if absent := sorted(set(weights) - names):
            raise StudyError(f"{name} at {commit}: its index names {absent[0]}, which the hub does not have")
    else:
        pickles = sorted(file for file in names if file.endswith((".bin", ".pt", ".pth")))
        found = f"only pickle weights ({pickles[0]}), which can run code when read" if pickles else "no weights"
        raise StudyError(f"{name} at {commit}: {found}; expected {SINGLE}, or {INDEX} and its shards")
    for file in weights:
        verify(get(file))
    return paths[0].parent


def verify(path):
    """Compare a large file with its name in the hub's cache, the sha256 of its content."""
    blob = path.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", blob.name) and file_sha256(blob) != blob.name:
        blob.unlink()
        raise StudyError(f"{path.name}: what arrived has another sha256 than the hub says; run the same command again")


def cached(name, revision):
    """Return commit and folder of a model in the hub client's cache."""
    from huggingface_hub import constants, snapshot_download

    snapshot = Path(snapshot_download(name, revision=revision, local_files_only=True))
    try:
        checkpoint_files(snapshot)
        for file in (CONFIG, TOKENIZER_FILES[0]):
            if not (snapshot / file).exists():
                raise StudyError(f"no {file}")
    except StudyError as error:
        raise StudyError(
            f"{name} at {revision}: incomplete in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set ({error})"
        ) from None
    return snapshot.name, snapshot


def link(files, folder):
    """Make `folder` one of links to `files` (its index among them, if any), the configuration last."""
    source = files[0].parent
    wanted = {path.name: path for path in files}
    if (source / INDEX).exists() and not (source / SINGLE).exists():
        wanted[INDEX] = source / INDEX
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if old.name != PIN:
                old.unlink()
        for name in sorted(wanted, key=lambda name: name == CONFIG):
            (folder / name).symlink_to(wanted[name].absolute())
    except OSError as error:
        raise StudyError(f"{folder}: cannot link the fetched files ({error.strerror})") from None


@contextmanager
def explained(name, revision):
    """Whatever the hub's client raises becomes one line that says what to do."""
    from huggingface_hub import constants, errors

    try:
        yield
    except StudyError:
        raise
    except Exception as error:
        where, status = constants.ENDPOINT, getattr(getattr(error, "response", None), "status_code", None)
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        if isinstance(error, errors.GatedRepoError):
            line = f"access is gated: accept its terms on {where}/{name} and set HF_TOKEN to a token of that account"
        elif isinstance(error, errors.RevisionNotFoundError):
            line = f"{where} has no revision {revision!r} of it"
        elif isinstance(error, errors.RepositoryNotFoundError) or status == 401:
            line = f"{where} has no such model, or it is private and HF_TOKEN does not open it; nor is it a folder here"
        elif status == 403:
            line = f"{where} refuses access; set HF_TOKEN to a token that may read it"
        elif isinstance(error, errors.RemoteEntryNotFoundError):
            line = f"{where} lists a file that it does not have ({first})"
        elif constants.HF_HUB_OFFLINE:
            line = f"revision {revision!r} is not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
        elif status is not None:
            line = f"{where} answers {status} ({first})"
        elif isinstance(error, OSError) and error.errno in UNWRITABLE:
            line = f"cannot write to {constants.HF_HUB_CACHE} ({error.strerror})"
        else:
            line = f"cannot be fetched from {where} ({first}); run the same command again"
        raise StudyError(f"{name}: {line}") from error
