"""The rules that make a model: one command fetches or converts it, checks it, and goes on with the study."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from gguf import GGMLQuantizationType
from hub_server import serving
from models_tiny import HYBRID, LLAMA, byte_tokenizer, write
from test_gguf import write_gguf

ROOT = Path(__file__).parents[1]
NAME, COMMIT = "tests/Tiny-Hybrid", "c" * 40


@pytest.fixture
def workspace(tmp_path):
    """A copy of the repository's workflow in a folder of its own."""
    for name in ("Snakefile", "config.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("envs", "workflow", "resources"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "corpus"))
    return tmp_path


def snakemake(workspace, *arguments, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-m", "snakemake", *arguments],
        cwd=workspace, env=clean | environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def study(workspace, **model):
    """Write the settings of a study of two short texts."""
    settings = yaml.safe_load((ROOT / "config.yaml").read_text())
    settings |= {"study": "tiny", "model": {"revision": None} | model}
    settings["texts"] |= {"file": "texts.json", "tokens": 12}
    settings["controls"] |= {"random_weights": [], "permuted_weights": []}
    (workspace / "tiny.yaml").write_text(yaml.safe_dump(settings))
    texts = [{"id": "a", "language": "en", "text": "some words to read"}]
    (workspace / "texts.json").write_text(json.dumps(texts))
    return "--configfile", "tiny.yaml"


def traces(workspace):
    return list((workspace / ".cache").glob("*/*/trace-*/a/last.nc"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "resources/studies").glob("*.yaml")))
def test_settings_of_known_studies_can_be_planned(name, workspace):
    """Offline, with nothing fetched."""
    done = snakemake(workspace, "-n", "--configfile", f"resources/studies/{name}.yaml", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "study follows in the same run" in done.stdout
    assert not (workspace / "results" / name).exists()


@pytest.mark.slow
def test_one_command_fetches_and_studies(workspace, tmp_path_factory):
    published = tmp_path_factory.mktemp("published")
    write(published, HYBRID, seed=3, wrapped=True, shards=2, dtype=torch.bfloat16)
    byte_tokenizer().save(str(published / "tokenizer.json"))
    files = {path.name: path.read_bytes() for path in published.iterdir()}
    settings = study(workspace, checkpoint=NAME)
    with serving() as server:
        server.repositories[NAME] = {"main": COMMIT, COMMIT: files}
        hub = {"HF_HOME": str(workspace / "hf"), "HF_ENDPOINT": server.address}
        done = snakemake(workspace, "-j1", "trace", *settings, **hub)
        assert done.returncode == 0, done.stderr
        assert len(traces(workspace)) == 1
        assert json.loads((workspace / "results/tiny/checkpoint/revision.json").read_text())["commit"] == COMMIT
        server.requests.clear()
        again = snakemake(workspace, "-j1", "trace", *settings, **hub)
        assert again.returncode == 0 and "Nothing to be done" in again.stderr + again.stdout
        assert server.requests == []
        (workspace / "hf").rename(workspace / "gone")
        lost = snakemake(workspace, "-j1", "trace", *settings, **hub)
        assert lost.returncode == 0, lost.stderr
        assert server.gets(".safetensors") and len(traces(workspace)) == 1

    # The cache is lost and the hub is away: one line, and what was there is still there.
    (workspace / "hf").rename(workspace / "gone, too")
    away = snakemake(workspace, "-j1", "trace", *settings, **hub)
    assert away.returncode != 0
    assert f"head-influence: {NAME}: cannot be fetched from {server.address}" in away.stderr
    assert "Traceback" not in away.stderr and len(traces(workspace)) == 1


@pytest.mark.slow
def test_unsupported_model_stops_before_any_job_of_the_study(workspace, tmp_path_factory):
    published = write(tmp_path_factory.mktemp("published") / "m", LLAMA, seed=3)
    files = {path.name: path.read_bytes() for path in published.iterdir()}
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | {"model_type": "gemma3_text"}).encode()
    settings = study(workspace, checkpoint=NAME)
    with serving() as server:
        server.repositories[NAME] = {"main": COMMIT, COMMIT: files}
        done = snakemake(workspace, "-j1", *settings, HF_HOME=str(workspace / "hf"), HF_ENDPOINT=server.address)
    assert done.returncode != 0
    assert "model_type 'gemma3_text' is not supported: it normalises the attention branch" in done.stderr
    assert "Traceback" not in done.stderr and traces(workspace) == []


@pytest.mark.slow
def test_one_command_converts_and_studies(workspace):
    write_gguf(workspace / "tiny.gguf")
    settings = study(workspace, checkpoint="tiny.gguf")
    done = snakemake(workspace, "-j1", "trace", *settings)
    assert done.returncode == 0, done.stderr
    assert len(traces(workspace)) == 1
    assert len(list((workspace / ".cache/models").glob("tiny-*/config.json"))) == 1
    write_gguf(workspace / "tiny.gguf", kind=GGMLQuantizationType.Q4_1)
    os.utime(workspace / "tiny.gguf", (1e9, 1e9))
    older = snakemake(workspace, "-j1", "trace", *settings)
    assert older.returncode == 0, older.stderr
    assert len(traces(workspace)) == 2, "an older file of the same name is another model"
