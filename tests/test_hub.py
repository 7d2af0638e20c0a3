"""Naming a model, and fetching one with the real client from a small hub on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from head_influence import StudyError, hub
from head_influence.checkpoint import Checkpoint
from head_influence.families import check
from head_influence.hub import PACKAGED, PIN, REHEARSAL, SOURCE, Place, locate
from head_influence.json_files import write_json
from hub_server import serving
from models_tiny import HYBRID, byte_tokenizer, checkpoint, write
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
NAME = "tests/Tiny-Hybrid"
FIRST, SECOND = "a" * 40, "b" * 40
EXTRA = {"README.md": b"# a model", "pytorch_model.bin": b"\x80\x04", "consolidated.safetensors": b"other"}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Files of a tiny model in the published layout: multimodal names, shards, bfloat16."""
    folder = tmp_path_factory.mktemp("published")
    write(folder, HYBRID, seed=3, wrapped=True, shards=2, dtype=torch.bfloat16)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def server(published):
    with serving() as server:
        server.repositories[NAME] = {"main": FIRST, "v1": FIRST, FIRST: published | EXTRA}
        yield server


@pytest.fixture
def run(server, tmp_path):
    """Run the workflow's program; return its exit status and the lines that it wrote to standard error."""

    def fetch(name=NAME, revision=None, study="one", **environment):
        command = [sys.executable, str(ROOT / "workflow/scripts/fetch_model.py"), "--model", name]
        command += ["--revision", revision] if revision else []
        command += ["--log", str(tmp_path / "log"), str(tmp_path / "results" / study / "checkpoint" / "config.json")]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        paths = {"PYTHONPATH": str(ROOT / "workflow"), "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": server.address}
        done = subprocess.run(command, env=clean | paths | environment, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stderr.strip().splitlines()

    return fetch


@pytest.fixture
def assert_refused(run, tmp_path):
    """Run the program; it must fail with one line like `message`, and leave no checkpoint behind."""

    def fetch(message, **arguments):
        status, lines = run(**arguments)
        last = lines[-1]
        assert status == 1
        assert last.startswith("head-influence: ")
        assert message in last, last
        assert "Traceback" not in "\n".join(lines)
        assert not (tmp_path / "results/one/checkpoint/config.json").exists()

    return fetch


def place(tmp_path, revision=None, study="one"):
    settings = {"study": study, "cache_dir": str(tmp_path / "cache")}
    return locate(settings | {"model": {"checkpoint": NAME, "revision": revision}}, tmp_path / "results")


def test_first_fetch(run, server, published, tmp_path):
    found = place(tmp_path)
    assert (found.kind, found.missing()) == ("hub", f"{NAME} has not been fetched yet")
    status, lines = run()
    assert status == 0, lines
    assert (
        f"{NAME} at commit {FIRST}" in lines and "fetching model-0-of-2.safetensors" in (tmp_path / "log").read_text()
    )
    assert found.missing() is None
    assert found.revision() == FIRST
    assert json.loads((found.folder / PIN).read_text()) == {"checkpoint": NAME, "asked": None, "commit": FIRST}
    assert {path.name: path.read_bytes() for path in found.folder.iterdir() if path.name != PIN} == published
    assert all(str((tmp_path / "hf").resolve()) in str(path.resolve()) for path in found.folder.glob("*.safetensors"))
    assert len(check(Checkpoint(found.folder))) == 5


def test_only_what_the_study_reads_is_fetched(run, server, published):
    run()
    fetched = {Path(path).name for path, _ in server.gets() if "/resolve/" in path}
    assert fetched == set(published)


def test_second_study_fetches_nothing(run, server, tmp_path):
    run()
    server.requests.clear()
    status, _ = run(study="two")
    assert status == 0 and not [path for path, _ in server.gets() if path.endswith(".safetensors")]
    assert place(tmp_path, study="two").missing() is None


def test_moving_revision_is_pinned_once(run, server, published, tmp_path):
    run(revision="main")
    other = published | {"tokenizer_config.json": b"{}"}
    server.repositories[NAME] |= {"main": SECOND, SECOND: other}
    pinned = place(tmp_path, "main")
    (pinned.folder / "config.json").unlink()
    assert pinned.missing() == f"{NAME} has not been fetched yet"
    assert run(revision="main")[0] == 0
    assert place(tmp_path, "main").revision() == FIRST and not (pinned.folder / "tokenizer_config.json").exists()
    assert run(revision="main", study="two")[0] == 0
    assert place(tmp_path, "main", study="two").revision() == SECOND


def test_tag_and_commit(run, tmp_path):
    assert run(revision="v1")[0] == 0
    assert place(tmp_path, "v1").revision() == FIRST
    assert run(revision=FIRST, study="two")[0] == 0
    assert place(tmp_path, FIRST, study="two").revision() == FIRST


def test_other_revision_needs_another_study(run, assert_refused, tmp_path):
    run(revision="v1")
    message = (
        f"this study is pinned to {NAME} at v1, but the settings name {NAME} at {FIRST}; give the study another name"
    )
    with pytest.raises(StudyError, match=message):
        place(tmp_path, FIRST).revision()
    assert message in place(tmp_path, FIRST).missing()
    status, lines = run(revision=FIRST)
    assert status == 1 and message in lines[-1]


def test_transfer_that_breaks_off_is_resumed(run, server, tmp_path):
    """The client goes on where it was, in steps of 10 MB."""
    file = "model-1-of-2.safetensors"
    stored = tmp_path / file
    stored.write_bytes(server.repositories[NAME][FIRST][file])
    tensors = load_file(stored) | {"model.visual.large": torch.zeros(40 << 20, dtype=torch.uint8)}
    save_file(tensors, stored)
    server.repositories[NAME][FIRST][file] = stored.read_bytes()
    server.cut[file] = 1
    assert run()[0] == 0
    assert [part for _, part in server.gets(file)] == [None, f"bytes={20 << 20}-"]
    assert (place(tmp_path).folder / file).read_bytes() == stored.read_bytes()


def test_interrupted_fetch_goes_on_with_the_same_commit(run, assert_refused, server, published, tmp_path):
    """The hub goes away for good half-way; the next run fetches the rest, of the pinned commit."""
    file = "model-1-of-2.safetensors"
    server.lost.add(file)
    del server.repositories[NAME][FIRST][file]
    assert_refused("lists a file that it does not have")
    server.lost.clear()
    server.repositories[NAME][FIRST][file] = published[file]
    server.repositories[NAME] |= {"main": SECOND, SECOND: {}}
    server.requests.clear()
    assert run()[0] == 0
    assert place(tmp_path).revision() == FIRST
    assert {Path(path).name for path, _ in server.gets(".safetensors")} == {file}


def test_damaged_transfer_is_noticed(assert_refused, run, server):
    server.damaged.add("model-0-of-2.safetensors")
    assert_refused(
        "model-0-of-2.safetensors: what arrived has another sha256 than the hub says; run the same command again"
    )
    server.damaged.clear()
    assert run()[0] == 0


def test_lost_cache_is_fetched_again(run, tmp_path):
    run()
    found = place(tmp_path)
    (tmp_path / "hf").rename(tmp_path / "elsewhere")
    assert found.missing() == f"{NAME} has not been fetched yet"
    assert run()[0] == 0 and found.missing() is None
    found.folder.joinpath("model-0-of-2.safetensors").resolve().unlink()
    assert "shard model-0-of-2.safetensors is missing" in found.missing()


def test_wrong_revision(assert_refused, tmp_path):
    assert_refused("has no revision 'v9' of it", revision="v9")
    assert not (tmp_path / "results/one/checkpoint" / PIN).exists()


def test_unknown_model(assert_refused):
    assert_refused("has no such model, or it is private and HF_TOKEN does not open it", name="tests/absent")


def test_private_model_opens_with_its_token(assert_refused, run, server):
    server.private.add(NAME)
    assert_refused("has no such model, or it is private and HF_TOKEN does not open it")
    assert run(HF_TOKEN=server.token)[0] == 0


@pytest.mark.parametrize("token", [None, "hf_other"])
def test_gated_model(token, assert_refused, run, server):
    """The hub answers 401 without a token and 403 to one that may not."""
    server.gated.add(NAME)
    message = f"access is gated: accept its terms on {server.address}/{NAME} and set HF_TOKEN"
    assert_refused(message, **({"HF_TOKEN": token} if token else {}))
    assert run(HF_TOKEN=server.token)[0] == 0


@pytest.mark.parametrize("status", [403, 500])
def test_hub_that_refuses_everything(status, assert_refused, server):
    server.status = status
    assert_refused("refuses access; set HF_TOKEN to a token that may read it" if status == 403 else "answers 500")


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        (("config.json",), "the hub has no config.json for it"),
        (("tokenizer.json",), "the hub has no tokenizer.json for it"),
        (("model-0-of-2.safetensors",), "its index names model-0-of-2.safetensors, which the hub does not have"),
        (("model.safetensors.index.json",), "only pickle weights (pytorch_model.bin), which can run code when read"),
        (("model.safetensors.index.json", "pytorch_model.bin"), "no weights; expected model.safetensors, or"),
    ],
)
def test_missing_file(gone, message, assert_refused, server):
    for file in gone:
        del server.repositories[NAME][FIRST][file]
    assert_refused(message)


def test_index_that_leads_elsewhere_is_not_followed(assert_refused, server):
    index = {"weight_map": {"model.embed_tokens.weight": "../../../../.bashrc"}}
    server.repositories[NAME][FIRST]["model.safetensors.index.json"] = json.dumps(index).encode()
    assert_refused("'../../../../.bashrc' is not the name of a safetensors file in the same folder")


def test_unsupported_model_is_one_line(assert_refused, server):
    config = json.loads(server.repositories[NAME][FIRST]["config.json"])
    config["text_config"]["model_type"] = "gemma2"
    server.repositories[NAME][FIRST]["config.json"] = json.dumps(config).encode()
    assert_refused("model_type 'gemma2' is not supported: it normalises the attention branch")


def test_offline(assert_refused, run, server, tmp_path):
    assert_refused(
        f"{NAME}: revision 'main' is not in {tmp_path}/hf/hub, and HF_HUB_OFFLINE is set", HF_HUB_OFFLINE="1"
    )
    run(study="two")
    server.requests.clear()
    assert run(HF_HUB_OFFLINE="1")[0] == 0
    assert server.requests == [] and place(tmp_path).revision() == FIRST


def test_offline_with_half_of_the_model(assert_refused, run, server, tmp_path):
    run(study="two")
    place(tmp_path, study="two").folder.joinpath("model-1-of-2.safetensors").resolve().unlink()
    assert_refused("and HF_HUB_OFFLINE is set", HF_HUB_OFFLINE="1")


def test_no_hub_at_that_address(assert_refused):
    assert_refused("cannot be fetched from http://127.0.0.1:9", HF_ENDPOINT="http://127.0.0.1:9")


def test_cache_that_cannot_be_written(assert_refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(f"cannot write to {tmp_path}/file/hub", HF_HOME=str(tmp_path / "file"))


# Naming a model: no network.


def settings(tmp_path, checkpoint, revision=None):
    return {
        "study": "one",
        "cache_dir": str(tmp_path / "cache"),
        "model": {"checkpoint": str(checkpoint), "revision": revision},
    }


def test_folder(tmp_path):
    found = locate(settings(tmp_path, checkpoint("llama")))
    assert (found.kind, found.folder, found.missing(), found.revision()) == ("folder", checkpoint("llama"), None, None)


def test_snapshot_folder_of_the_hubs_cache_tells_its_commit(tmp_path):
    folder = tmp_path / "models--a--b/snapshots" / FIRST
    folder.mkdir(parents=True)
    assert locate(settings(tmp_path, folder)).revision() == FIRST


def test_gguf(tmp_path):
    source = tmp_path / "some.gguf"
    source.write_bytes(b"GGUF")
    found = locate(settings(tmp_path, source))
    assert found.kind == "gguf" and found.folder.parent == tmp_path / "cache/models"
    assert found.folder.name.startswith("some-")
    assert found.missing() == f"{source} has not been converted yet"
    for file in checkpoint("llama").iterdir():
        found.folder.mkdir(parents=True, exist_ok=True)
        (found.folder / file.name).write_bytes(file.read_bytes())
    write_json(found.folder / SOURCE, {"state": hub.file_state(source), "sha256": "0" * 64})
    assert found.missing() is None and found.revision() == "sha256:" + "0" * 64
    source.write_bytes(b"GGUF2")
    assert found.missing() == f"{source} has changed since it was converted"


def test_two_files_of_one_name_are_two_models(tmp_path):
    folders = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.gguf").write_bytes(b"GGUF")
        folders.add(locate(settings(tmp_path, tmp_path / name / "m.gguf")).folder)
    assert len(folders) == 2


@pytest.mark.parametrize(("name", "kind"), [(PACKAGED, "gguf"), (REHEARSAL, "rehearsal")])
def test_what_a_rule_makes_need_not_be_there(name, kind, tmp_path):
    found = locate(settings(tmp_path, tmp_path / name))
    assert found.kind == kind and "yet" in found.missing()


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("", None, "model.checkpoint: expected a folder, a .gguf file, or a hub id"),
        ("no such folder", None, "there is no folder no such folder, and it is no hub id"),
        ("a/b/c", None, "there is no folder a/b/c, and it is no hub id"),
        ("../b", None, "there is no folder ../b, and it is no hub id"),
        ("/absent/x", None, "there is no folder /absent/x, and it is no hub id"),
        ("absent.gguf", None, "the file absent.gguf does not exist"),
        ("LICENSE", None, "LICENSE is a file; expected a folder"),
        ("resources", "main", "model.revision: 'main' is for a hub id; resources has no revisions"),
        ("a/b", "../../x", "model.revision: expected a branch, tag or commit"),
        ("a/b", "-x", "model.revision: expected a branch, tag or commit"),
        ("a/b", 7, "model.revision: expected a branch, tag or commit, found 7"),
    ],
)
def test_names_that_cannot_be_models(name, revision, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(StudyError, match=message):
        locate({"study": "one", "cache_dir": "c", "model": {"checkpoint": name, "revision": revision}})


def test_settings_without_a_model():
    with pytest.raises(StudyError, match=r"model\.checkpoint: expected"):
        locate({"study": "one", "model": None})
    with pytest.raises(StudyError, match=r"study: '\.\./x' is not a plain file name"):
        locate({"study": "../x", "model": {"checkpoint": "a/b"}})


def test_damaged_pin(tmp_path):
    found = Place("hub", tmp_path, NAME)
    (tmp_path / PIN).write_text('{"commit": "main"}')
    with pytest.raises(StudyError, match="expected the checkpoint, the revision asked for and its commit"):
        found.revision()


def test_needs_neither_numpy_nor_a_client():
    code = "import sys, head_influence.hub; print({'numpy', 'torch', 'huggingface_hub'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "workflow", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("path", sorted((ROOT / "resources/studies").glob("*.yaml")), ids=lambda path: path.name)
def test_settings_of_known_studies_state_every_key(path):
    """A file given with --configfile is merged over config.yaml: a key left out would silently be that study's."""

    def keys(value, where=""):
        found = {where}
        for key, inner in value.items() if isinstance(value, dict) else ():
            found |= keys(inner, f"{where}.{key}")
        return found

    own, default = (yaml.safe_load(file.read_text()) for file in (path, ROOT / "config.yaml"))
    if own["curves"] is None:  # switches the second study off, whatever its settings
        default["curves"] = None
    assert keys(default) <= keys(own)
    assert own["study"] == path.stem
