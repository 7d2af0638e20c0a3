"""A study's provenance in one file: what a third party needs to make its numbers again, and hashes to compare with."""

import hashlib
import os
import platform
import subprocess
from pathlib import Path

import numpy as np

from head_influence import PROTOCOL, __version__, files
from head_influence.fingerprint import MEMORY, Memory, file_sha256
from head_influence.layout import checkpoint_files
from head_influence.provenance import environment
from head_influence.texts import load_tokenizer, read_texts, tokenise

COMMAND = "HEAD_INFLUENCE_COMMAND"  # variable with the command that the study was run by
FOLLOW = (
    "Check out `commit`, or code whose `code` versions are these, and install `packages`. Write `settings` to a file, "
    "the list `texts` to settings.texts.file, and put the checkpoint whose files have these hashes where "
    "settings.model.checkpoint says. Then `snakemake -j 1 --configfile <the settings> provenance`: `numbers` of the "
    "new provenance.json are these on a machine of this kind; on another, effects differ in the last float32 digits."
)


def record(settings, checkpoint, revision, fingerprint, cache, codes, results):
    """Collect a study's provenance.

    Parameters
    ----------
    settings : dict
        All of them.
    checkpoint : path
        Folder of the studied model.
    revision, fingerprint : str
        Of that model.
    cache : path
        Where hashes of the checkpoint's files are remembered.
    codes : dict
        Stage to version of its code.
    results : path
        Folder of the study's results.

    Returns
    -------
    dict
        What provenance.json holds.

    Raises
    ------
    StudyError
        If a text, the checkpoint or a result cannot be read.
    """
    texts = read_texts(settings["texts"]["file"], settings["texts"]["tokens"])
    tokenizer, memory = load_tokenizer(checkpoint), Memory(Path(cache) / MEMORY)
    seed = settings["measure"]["random_seed"]
    return {
        "study": settings["study"],
        "how to follow": FOLLOW,
        "command": os.environ.get(COMMAND, ""),
        "settings": settings,
        "texts file sha256": file_sha256(settings["texts"]["file"]),
        "texts": [{"id": t.id, "language": t.language, "text": t.text, "tokens": t.tokens} for t in texts],
        "texts used": [
            {"id": t.id, "sample_index": t.index, "sha256": t.sha256, "tokens": len(tokenise(tokenizer, t)[0])}
            for t in texts
        ],
        "model": {
            "checkpoint": settings["model"]["checkpoint"],
            "revision": revision,
            "fingerprint": fingerprint,
            "files": {path.name: memory.sha256(path) for path in checkpoint_files(checkpoint)},
        },
        "seeds": {
            "random sets": f"numpy default_rng({seed} + 100 * sample_index + source_layer)",
            "random weights": settings["controls"]["random_weights"],
            "permuted weights": settings["controls"]["permuted_weights"],
            "audit": settings["audit"]["seed"],
        },
        "protocol": PROTOCOL,
        "version": __version__,
        "commit": commit(),
        "code": codes,
        "packages": environment(),
        "machine": machine(),
        "numbers": {"concentration.nc": numbers_hash([Path(results) / "concentration.nc"])}
        | {f"joint/{t.id}": numbers_hash(sorted((Path(results) / "joint" / t.id).glob("L*.nc"))) for t in texts},
    }


def numbers_hash(paths):
    """Hash the variables of files that `files.write` made, without their attributes: equal for equal numbers."""
    digest = hashlib.sha256()
    for path in paths:
        for name, values in sorted(files.read(path)[0].items()):
            digest.update(f"{name}:{values.shape}:{values.dtype}".encode())
            digest.update("\0".join(values).encode() if values.dtype == object else np.ascontiguousarray(values))
    return digest.hexdigest()


def commit():
    """Commit of the code with "-dirty" if it was changed since, or "" outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def machine():
    """Kind of this machine, without its name: numbers may differ in their last digits between kinds."""
    model = ""
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        lines = cpu.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": model,
        "libc": " ".join(platform.libc_ver()),
        "blas": f"{blas.get('name', '')} {blas.get('version', '')}",
    }
