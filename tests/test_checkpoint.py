"""Reading checkpoints: exact values in every stored type and layout, and a clear refusal of anything malformed."""

import json
import os
import shutil
import struct

import numpy as np
import pytest
import torch
from head_influence import StudyError, ablation
from head_influence.checkpoint import Checkpoint, SafetensorsFile
from head_influence.families import check, layer_of
from head_influence.hub import validate
from head_influence.json_files import read_json
from head_influence.texts import Text, load_tokenizer, tokenise
from head_influence.trace import trace
from models_tiny import HYBRID, LLAMA, byte_tokenizer, checkpoint, token_ids, write
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing


@pytest.fixture
def folder(tmp_path):
    """A copy of a tiny checkpoint that a test may break."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "llama")


@pytest.fixture
def shards(tmp_path):
    """A copy of a tiny checkpoint in three shards."""
    return shutil.copytree(checkpoint("qwen3_shards"), tmp_path / "shards")


def assert_refused(folder, message):
    with pytest.raises(StudyError, match=message) as error:
        check(Checkpoint(folder))
    assert "\n" not in str(error.value)


def safetensors(path, header, data=b"", length=None):
    """Write a file in the safetensors format with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape=(2,), kind="F32", begin=0, end=8):
    return {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_are_those_of_the_type(kind, tmp_path):
    x = torch.randn(40, 7, generator=torch.Generator().manual_seed(0)).to(kind)
    x[0, :4] = torch.tensor([0.0, -0.0, 1e-30, float("inf")])
    save_file({"other": torch.ones(3, dtype=torch.uint8), "x": x}, tmp_path / "f.safetensors")
    file = SafetensorsFile(tmp_path / "f.safetensors")
    expected = x.to(torch.float32).numpy()
    assert file.read("x").dtype == np.float32
    assert file.read("x").tobytes() == expected.tobytes()
    assert file.read("x", rows=[5, 0, 5]).tobytes() == expected[[5, 0, 5]].tobytes()
    with pytest.raises(StudyError, match="tensor 'other' has type U8; expected one of BF16, F16, F32, F64"):
        file.read("other")


def test_published_layout_gives_the_same_bits_as_a_plain_one(tmp_path):
    """Multimodal names, two shards and bf16 against one text-only float32 file of the same (rounded) weights."""
    wrapped = write(tmp_path / "wrapped", HYBRID, seed=5, wrapped=True, shards=2, dtype=torch.bfloat16)
    plain = tmp_path / "plain"
    plain.mkdir()
    state = {}
    for file in wrapped.glob("*.safetensors"):
        state |= load_file(file)
    text = {n.replace("language_model.", ""): x.float() for n, x in state.items() if "language_model." in n}
    save_file(text, plain / "model.safetensors")
    config = json.loads((wrapped / "config.json").read_text())["text_config"]
    (plain / "config.json").write_text(json.dumps(config))
    ids, found = token_ids(11), []
    for folder in (wrapped, plain):
        point = Checkpoint(folder)
        check(point)
        records, last = trace(point, ids)
        results = {"last": np.asarray(last)} | {f"{i}{k}": v for i, r in enumerate(records) for k, v in r.items()}
        for index in range(len(records) - 1):
            source, before, after = layer_of(point, index), records[index], records[index + 1]
            change = ablation.Transition(
                source, layer_of(point, index + 1), before["residual_in"] + before["branch_out"],
                source.contributions(before["head_values"]), after.get("cos"), after.get("sin"),
                after.get("scaling", 1.0),
            )  # fmt: skip
            single = ablation.single_removals(change)
            masks = ablation.joint_masks(single["relative"][3], 31000, 0, index)
            joint = ablation.joint_removals(change, masks, single)
            results |= {f"{index}single{k}": v for k, v in single.items() if k != "controls"}
            results |= {f"{index}joint{k}": v for k, v in joint.items()}
        found.append(results)
    assert found[0].keys() == found[1].keys() and len(found[0]) > 80
    for name, value in found[0].items():
        assert np.asarray(value).tobytes() == np.asarray(found[1][name]).tobytes(), name


def test_layouts_have_the_prefix_that_their_names_have(shards):
    assert Checkpoint(shards).prefix == "model."
    assert Checkpoint(checkpoint("hybrid_wrapped")).prefix == "model.language_model."


def test_tied_head_is_the_embedding_even_if_one_is_stored(folder):
    state = load_file(folder / "model.safetensors")
    save_file(state | {"lm_head.weight": torch.zeros(260, 20)}, folder / "model.safetensors")
    point = Checkpoint(folder)
    assert (point.head_weight() == state["model.embed_tokens.weight"].numpy()).all()
    check(point)


def test_links_to_regular_files_are_read(shards, tmp_path):
    """The cache of the hub's own client is made of them."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in shards.iterdir():
        (linked / file.name).symlink_to(file)
    assert check(Checkpoint(linked))[0].heads == 4
    name = next(shards.glob("*.safetensors")).name
    (shards / name).unlink()
    assert_refused(linked, f"index.json: shard {name} is missing from the folder")
    (linked / "config.json").unlink()
    (linked / "config.json").symlink_to(tmp_path / "nowhere.json")
    assert_refused(linked, r"config\.json: the link leads nowhere")


def test_no_folder_and_no_files(tmp_path, folder):
    assert_refused(tmp_path / "absent", r"model\.checkpoint: .*absent is not a folder with a checkpoint")
    assert_refused(tmp_path, r"config\.json: the file does not exist")
    (folder / "model.safetensors").unlink()
    assert_refused(
        folder, r"no weights: expected model\.safetensors, or model\.safetensors\.index\.json and its shards"
    )


def test_pickles_are_refused_by_name(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert_refused(
        folder, r"only pickle weights found \(pytorch_model\.bin\), which can run code when read; expected model"
    )


def test_what_is_no_regular_file_is_not_opened(folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert_refused(folder, r"config\.json: not a regular file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        (
            '{"model_type": "llama", "model_type": "qwen3"}',
            r"not valid JSON \(key 'model_type' appears twice in one object\)",
        ),
        ('{"text_config": 3}', "text_config: expected a JSON object"),
        ('{"model_type": "llama", "num_hidden_layers": ' + "9" * 5000 + "}", "not valid JSON"),
        ("\udcff", "cannot be read as UTF-8 text"),
    ],
)
def test_unusable_configuration(text, message, folder):
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert_refused(folder, rf"config\.json: {message}")


def test_enormous_json_is_not_read(tmp_path):
    with (tmp_path / "big.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StudyError, match="1099511627776 bytes; expected a JSON file of at most"):
        read_json(tmp_path / "big.json")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "weight_map: expected an object"),
        ({"weight_map": {}}, "weight_map: expected an object"),
        (
            {"weight_map": {"x": "../llama/model.safetensors"}},
            "is not the name of a safetensors file in the same folder",
        ),
        ({"weight_map": {"x": "/etc/passwd"}}, "'/etc/passwd' is not the name of a safetensors file"),
        ({"weight_map": {"x": "..\\a.safetensors"}}, "is not the name of a safetensors file"),
        ({"weight_map": {"x": "pytorch_model.bin"}}, "'pytorch_model.bin' is not the name of a safetensors file"),
        ({"weight_map": {"x": ["a"]}}, "is not the name of a safetensors file"),
        ({"weight_map": {"x": "absent.safetensors"}}, "shard absent.safetensors is missing from the folder"),
    ],
)
def test_index_that_cannot_be_followed(index, message, shards):
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(shards, rf"index\.json: .*{message}")


def test_index_and_shards_that_disagree(shards):
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {"model.extra": files[0]}}))
    assert_refused(shards, rf"index\.json: tensor model\.extra is not in {files[0]}")
    path.write_text(json.dumps(index))
    one, other = (load_file(shards / name) for name in files[:2])
    save_file(other | {next(iter(one)): next(iter(one.values()))}, shards / files[1])
    assert_refused(shards, rf"tensor {next(iter(one))} is in {files[0]} and {files[1]}")


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_truncated_weights(kept, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert_refused(
        folder, r"model\.safetensors: (not a safetensors file, or a truncated one|unusable .* it is truncated)"
    )


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "unusable safetensors header"),
        (b"[1]", b"", "unusable safetensors header"),
        (b'{"a": 1}', b"", "unusable safetensors header"),
        (b'{"a": {"dtype": "F32"}}', b"", "unusable safetensors header"),
        (b'{"a": ' * 50_000, b"", "unusable safetensors header"),
        ({"a": entry(kind=["F32"])}, bytes(8), "unusable safetensors header"),
        ({"a": entry(shape=(-1, -2))}, bytes(8), "not a count"),
        ({"a": entry(shape=(True, 2))}, bytes(8), "not a count"),
        ({"a": entry(shape=(2.0,))}, bytes(8), "not a count"),
        ({"a": entry(shape=(3,))}, bytes(8), r"of shape \[3\] does not fill its bytes"),
        ({"a": entry(shape=(10**30, 0), end=0)}, bytes(8), "the tensors end at 0, the file's data at 8"),
        ({"a": entry(shape=(1,) * 5000)}, bytes(8), "has 5000 dimensions"),
        ({"a": entry(begin=8, end=0)}, bytes(8), "the bytes 8 to 0"),
        ({"a": entry(end=16, shape=(4,))}, bytes(8), "ends beyond the end of the file: it is truncated"),
        ({"a": entry(), "b": entry()}, bytes(8), "tensor 'b' begins at 0, not where the one before ends, 8"),
        ({"a": entry(begin=4, end=12)}, bytes(12), "begins at 4, not where the one before ends, 0"),
        ({"a": entry()}, bytes(12), "the tensors end at 8, the file's data at 12"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": {}}', bytes(8), "'a' appears twice"),
    ],
)
def test_impossible_header(header, data, message, tmp_path):
    safetensors(tmp_path / "f.safetensors", header, data)
    with pytest.raises(StudyError, match=message) as error:
        SafetensorsFile(tmp_path / "f.safetensors")
    assert str(tmp_path / "f.safetensors") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("length", [9, 1 << 40, (1 << 64) - 1])
def test_header_longer_than_the_file(length, tmp_path):
    path = safetensors(tmp_path / "f.safetensors", {}, b"", length)
    with pytest.raises(StudyError, match="not a safetensors file, or a truncated one"):
        SafetensorsFile(path)


def test_header_larger_than_the_format_allows(tmp_path):
    path = tmp_path / "f.safetensors"
    safetensors(path, {}, b"", length=100_000_001)
    with path.open("r+b") as file:
        file.truncate(200_000_000)
    with pytest.raises(StudyError, match="not a safetensors file"):
        SafetensorsFile(path)


def test_offsets_that_no_alignment_fits_are_read(tmp_path):
    header = {"a": entry((1,), "U8", 0, 1), "b": entry((2,), "F32", 1, 9)}
    path = safetensors(tmp_path / "f.safetensors", header, b"\1" + np.array([1.5, -2], "<f4").tobytes())
    assert SafetensorsFile(path).read("b").tolist() == [1.5, -2.0]


@pytest.mark.parametrize(("names", "count"), [([], 0), (["a.embed_tokens.weight", "b.embed_tokens.weight"], 2)])
def test_embedding_says_where_the_text_model_is(names, count, folder):
    save_file({name: torch.ones(2, 2) for name in [*names, "mtp.embed_tokens.weight"]}, folder / "model.safetensors")
    assert_refused(folder, rf"expected one tensor named \*embed_tokens\.weight, found {count}")


def test_configuration_cannot_ask_for_code(tmp_path):
    """Keys that make transformers fetch or run something are not passed on."""
    folder = write(tmp_path / "llama", LLAMA, seed=1)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            config
            | {
                "auto_map": {"AutoModelForCausalLM": "evil--evil.Model", "AutoConfig": "evil--evil.Config"},
                "attn_implementation": "evil/kernel",
                "_attn_implementation": "evil/kernel",
                "experts_implementation": "evil/kernel",
            }
        )
    )
    assert trace(Checkpoint(folder), [1, 2, 3])[1].shape == (3, 20)


def test_tokenizer_that_adds_a_bos_by_default(tmp_path):
    """No special tokens are added, whatever the tokenizer does on its own."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("ab").ids[0] == bos
    ids, strings = tokenise(loaded, Text(0, "a", "en", "ab", 9))
    assert bos not in ids and strings == ["a", "b"]


def test_slow_tokenizer_is_not_enough(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(StudyError, match=r"tokenizer\.json: the file does not exist; a checkpoint needs its fast"):
        validate(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(StudyError, match=r"tokenizer\.json: not a usable tokenizer"):
        validate(folder)
