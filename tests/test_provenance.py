"""What results were made from: the code's version, and a file by which a third party comes to equal numbers."""

import ast
import hashlib
import json
import platform
from importlib.metadata import version

import numpy as np
import pytest
import workflow_runs as runs
import yaml
from head_influence import files, provenance
from head_influence.provenance import closure, code_version
from head_influence.record import numbers_hash


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small library with a program."""
    package = tmp_path / "head_influence"
    for name, text in {
        "__init__": '"""Library."""\n',
        "a": '"""Doc."""\nfrom head_influence import b\n\ndef f(x):\n    """Doc."""\n    return b.g(x)\n',
        "b": "from head_influence.sub.c import h\n\ndef g(x):\n    return h(x)\n",
        "sub/__init__": "",
        "sub/c": "def h(x):\n    return x + 1\n",
        "other": "import numpy\n",
        "../scripts/p": '"""Program."""\n\ndef main():\n    from head_influence.other import x\n',
    }.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(provenance, "PACKAGE", package)
    monkeypatch.setattr(provenance, "SCRIPTS", tmp_path / "scripts")

    def rewrite(name, old, new):
        path = package / f"{name}.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        forget()

    def forget():
        provenance._module.cache_clear()
        code_version.cache_clear()

    forget()
    yield rewrite
    forget()


def test_closure(library):
    assert closure("a") == ["", "a", "b", "sub", "sub.c"]
    assert closure("b") == ["", "b", "sub", "sub.c"]
    assert closure("other") == ["", "other"]
    assert closure("b", "scripts.p") == ["", "b", "scripts.p", "sub", "sub.c"]


def test_the_library_imports_itself_only_so():
    """As `from head_influence... import ...`, which is what the closure follows."""
    for path in provenance.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not [a.name for a in node.names if a.name.startswith("head_influence")], path
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, path


@pytest.mark.parametrize(
    ("module", "old", "new", "changes"),
    [
        ("sub/c", "x + 1", "x + 2", True),
        ("b", "g(x)", "g(x, y=1)", True),
        ("a", "return b.g(x)", "return b.g(x) + 0", True),
        ("__init__", '"""Library."""\n', "X = 1\n", True),
        ("a", '"""Doc."""', '"""Another text\n    on two lines."""', False),
        ("sub/c", "    return x + 1", "    # why\n    return (x  +  1)  # how", False),
        ("other", "import numpy", "import scipy", False),
    ],
)
def test_only_code_that_is_used_counts(library, module, old, new, changes):
    before = code_version("a")
    library(module, old, new)
    assert (code_version("a") != before) == changes


def test_a_program_counts_alone(library):
    before = code_version("a", "scripts.p")
    assert before != code_version("a")
    library("other", "import numpy", "import scipy")
    assert code_version("a", "scripts.p") == before
    library("../scripts/p", '"""Program."""', '"""The program."""')
    assert code_version("a", "scripts.p") == before
    library("../scripts/p", "def main():", "def main(x=1):")
    assert code_version("a", "scripts.p") != before


def test_environment():
    found = provenance.environment()
    assert found["numpy"] == version("numpy")
    assert found["netCDF4"] == version("netCDF4")
    assert found["torch"].split("+")[0] == version("torch").split("+")[0]
    assert found["python"].count(".") == 2


@pytest.mark.slow
def test_following_it_leads_to_equal_numbers(tmp_path):
    """All that the third party has is the code, the checkpoint and provenance.json."""
    first = runs.finished("provenance")
    text = (first.folder / "results/tiny/provenance.json").read_text(encoding="utf-8")
    record = json.loads(text)
    second = runs.new(tmp_path / "elsewhere")
    (second.folder / "texts.json").unlink()
    (second.folder / "config.yaml").write_text("study: none\n")
    (second.folder / record["settings"]["texts"]["file"]).write_text(json.dumps(record["texts"]))
    (second.folder / "theirs.yaml").write_text(yaml.safe_dump(record["settings"]))
    second.run("provenance", "--configfile", "theirs.yaml")
    again = json.loads((second.folder / "results/tiny/provenance.json").read_text(encoding="utf-8"))
    assert again["numbers"] == record["numbers"]
    assert again["model"] == record["model"]
    assert again["code"] == record["code"]
    assert runs.same_numbers(first, second) == 13


@pytest.mark.slow
def test_what_it_says():
    project = runs.finished("provenance")
    text = (project.folder / "results/tiny/provenance.json").read_text(encoding="utf-8")
    record = json.loads(text)
    assert record["settings"] == yaml.safe_load((project.folder / "config.yaml").read_text())
    assert record["command"] == "snakemake -j2 provenance"
    weights = hashlib.sha256((project.folder / "model/model.safetensors").read_bytes()).hexdigest()
    assert record["model"]["files"]["model.safetensors"] == weights
    assert [t["text"] for t in record["texts"]] == [t["text"] for t in runs.TEXTS]
    assert [t["tokens"] for t in record["texts used"]] == [12, 9, 12]
    assert record["texts used"][2]["sha256"] == hashlib.sha256(runs.TEXTS[2]["text"].encode()).hexdigest()
    assert record["packages"]["torch"] == version("torch")
    assert record["code"].keys() >= {"trace", "baseline", "single", "joint", "concentration", "audit"}
    _, attributes = files.read(project.folder / "results/tiny/joint/first/L00.nc")
    assert attributes["code"] == record["code"]["joint"]
    assert record["model"]["fingerprint"].startswith(attributes["fingerprint"])
    for private in (str(project.folder), platform.node(), str(runs.ROOT)):
        assert private not in text


def test_hash_of_numbers(tmp_path):
    def hashed(values, attributes, name="x", strings=("a", "b")):
        variables = {name: (("n",), values, {}), "s": (("m",), list(strings), {})}
        files.write(tmp_path / "f.nc", variables, attributes)
        return numbers_hash([tmp_path / "f.nc"])

    values = np.arange(3, dtype=np.float32)
    first = hashed(values, {"study": "a"})
    assert hashed(values, {"study": "b"}) == first
    assert hashed(np.nextafter(values, np.float32(9)), {"study": "a"}) != first
    assert hashed(values.astype(np.float64), {"study": "a"}) != first
    assert hashed(values, {"study": "a"}, name="y") != first
    assert hashed(values, {"study": "a"}, strings=("a", "c")) != first
