"""The identity of a checkpoint: it follows every byte of content, and unchanged files are hashed only once."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from head_influence import StudyError, fingerprint
from head_influence.fingerprint import MEMORY
from models_tiny import checkpoint


@pytest.fixture
def folder(tmp_path):
    """A copy of a tiny checkpoint, old enough for its hashes to be remembered."""
    made = shutil.copytree(checkpoint("qwen3_shards"), tmp_path / "model")
    return made


@pytest.fixture
def settled(monkeypatch):
    """No file counts as only just changed."""
    monkeypatch.setattr(fingerprint, "SETTLED", -1.0)


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files whose content is really read."""
    names, own = [], fingerprint.file_sha256
    monkeypatch.setattr(fingerprint, "file_sha256", lambda path: names.append(Path(path).name) or own(path))
    return names


def of(folder):
    return fingerprint.fingerprint(folder, folder.parent / "cache")


def expected(folder, *names):
    """The definition, written out: sha256 over a line of name and content hash for each file."""
    lines = [f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_definition(folder):
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    assert of(folder) == expected(folder, "config.json", "tokenizer.json", *shards)
    (folder / "tokenizer_config.json").write_text("{}")
    assert of(folder) == expected(folder, "config.json", "tokenizer.json", "tokenizer_config.json", *shards)


def test_every_file_is_read_once(folder, hashed, settled):
    first = of(folder)
    assert sorted(hashed) == sorted(["config.json", "tokenizer.json", *(p.name for p in folder.glob("*.safetensors"))])
    hashed.clear()
    assert of(folder) == first and hashed == []


def test_one_changed_byte_changes_it(folder, settled):
    first = of(folder)
    for path in (folder / "config.json", folder / "tokenizer.json", next(folder.glob("*.safetensors"))):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        changed = of(folder)
        assert changed != first
        content[-1] ^= 1
        path.write_bytes(content)
        assert of(folder) == first


def test_replacement_of_same_size_and_time_is_seen(folder, settled):
    """An older file moved over a weight file, its time of change included, is another file."""
    path = next(folder.glob("*.safetensors"))
    first, state = of(folder), path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    (folder / "other").write_bytes(content)
    os.utime(folder / "other", ns=(state.st_atime_ns, state.st_mtime_ns))
    (folder / "other").rename(path)
    assert path.stat().st_size == state.st_size and path.stat().st_mtime_ns == state.st_mtime_ns
    assert of(folder) != first


def test_rewrite_in_place_with_the_old_time_is_seen(folder, settled):
    path = next(folder.glob("*.safetensors"))
    first, state = of(folder), path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert of(folder) != first


def test_only_just_changed_files_are_not_remembered(folder, hashed):
    """Within one tick of the clock a file can change twice and look the same."""
    of(folder)
    count = len(hashed)
    of(folder)
    assert len(hashed) == 2 * count and not (folder.parent / "cache" / MEMORY).exists()


def test_moved_checkpoint_is_the_same(folder, settled):
    first = of(folder)
    assert of(folder.rename(folder.parent / "elsewhere")) == first


def test_links_are_followed_to_content(folder, hashed, settled):
    """Two folders of links to the same files, as the hub's cache has them, share what is remembered."""
    first = of(folder)
    linked = folder.parent / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    hashed.clear()
    assert of(linked) == first and hashed == []


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"x": 1}', "\x00"])
def test_damaged_memory_is_no_memory(content, folder, settled):
    first = of(folder)
    memory = folder.parent / "cache" / MEMORY
    known = json.loads(memory.read_text())
    memory.write_text(content)
    assert of(folder) == first
    assert json.loads(memory.read_text()).items() >= known.items()


def test_missing_files_are_named(folder):
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(StudyError, match=r"index\.json: shard .*safetensors is missing"):
        of(folder)


def test_unwritable_cache_is_named(folder, settled):
    (folder.parent / "cache").write_text("a file")
    with pytest.raises(StudyError, match=r"cache_dir: .* cannot be written"):
        of(folder)


def test_needs_neither_numpy_nor_a_model():
    """It runs whenever the Snakefile is parsed."""
    code = (
        "import sys, head_influence.fingerprint, head_influence.layout\n"
        "print(sorted({'numpy', 'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(fingerprint.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]"


def test_a_remembered_fingerprint_is_quick(tmp_path, settled):
    """256 MiB of weights: hashing takes time, remembering none."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "big")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 28)
    started = time.perf_counter()
    first = of(folder)
    hashing = time.perf_counter() - started
    started = time.perf_counter()
    assert of(folder) == first
    assert time.perf_counter() - started < hashing / 3
