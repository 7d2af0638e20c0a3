"""The audit passes a right study and notices each thing that is wrong with a study."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import models_tiny as tiny
import netCDF4
import numpy as np
import pytest
import reference
from head_influence import StudyError, audit, audit_sample, effects, files, invariants, recompute, table
from head_influence.baseline import measure_baseline
from head_influence.checkpoint import Checkpoint
from head_influence.controls import control
from head_influence.json_files import write_json
from head_influence.texts import Text
from head_influence.trace import trace, write_trace

SMALL_TOTAL = {"vectors": 1e-4, "js": 1e-8}
CODES = {stage: f"code of {stage}" for stage in ("trace", "baseline", "single", "joint", "concentration")}
HYBRID = tiny.HYBRID | {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3,
    "linear_num_value_heads": 6,
}


def make_study(folder, checkpoint, texts):
    """Run the stages over all texts and transitions; return what the audit expects of them, and the first trace."""
    results, cache = folder / "results", folder / "cache"
    fingerprint = audit.content_fingerprint(checkpoint)[:16]
    layers = Checkpoint(checkpoint).text_config["num_hidden_layers"]
    for index, (text, ids, strings) in enumerate(texts):
        top = {
            "stage": "trace", "text": text.id, "language": text.language, "text_sha256": text.sha256,
            "tokens": len(ids), "model": "tiny", "revision": "", "fingerprint": fingerprint, "code": CODES["trace"],
        }  # fmt: skip
        records, last = trace(Checkpoint(checkpoint), ids)
        write_trace(cache / "trace" / text.id, records, last, ids, strings, top)
        for layer in range(layers - 1):
            base, single, joint = (
                place / kind / text.id / f"L{layer:02d}.nc"
                for place, kind in ((cache, "baseline"), (results, "single"), (results, "joint"))
            )
            layers_traced = (cache / "trace" / text.id / f"L{i:02d}.nc" for i in (layer, layer + 1))
            measure_baseline(checkpoint, *layers_traced, base, {"code": CODES["baseline"]})
            of_study = {"study": "tiny", "code": CODES["single"]}
            effects.measure_single(checkpoint, base, single, cache / "changes.nc", of_study)
            of_study = {"study": "tiny", "code": CODES["joint"]}
            effects.measure_joint(checkpoint, base, single, cache / "changes.nc", joint, 31000, index, of_study)
    singles = [[results / "single" / t.id / f"L{i:02d}.nc" for i in range(layers - 1)] for t, _, _ in texts]
    attributes = {"study": "tiny", "small_total": SMALL_TOTAL, "code": CODES["concentration"]}
    names = [text.id for text, _, _ in texts]
    table.measure_concentration(singles, results / "concentration.nc", names, SMALL_TOTAL, attributes)
    checks = control("text", "whole forward logits", 1e-7, 1e-4)
    write_json(results / "whole_forward.json", {"text": names[0], "controls": checks})
    return audit.Expected(
        study="tiny", fingerprint=fingerprint, results=results, checkpoint=checkpoint,
        texts=texts, codes=CODES, random_seed=31000, small_total=SMALL_TOTAL, whole_forward=True,
    )  # fmt: skip


def make_texts(*counts):
    texts = []
    for i, count in enumerate(counts):
        ids = tiny.token_ids(count, seed=i)
        texts.append((Text(i, f"text{i}", "xx", f"content {i}", count), ids, [chr(97 + x % 26) for x in ids]))
    return texts


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of a finished study that no test changes, and what the audit expects of it."""
    folder = tmp_path_factory.mktemp("study")
    with contextlib.chdir(folder):
        tiny.write(Path("model"), HYBRID, seed=3)
        return folder, make_study(Path(), Path("model"), make_texts(8, 11))


@pytest.fixture
def study(finished, tmp_path, monkeypatch):
    """A copy of the finished study in the working folder; the model is read once for all tests."""
    origin, expected = finished
    shutil.copytree(origin, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(audit, "WholeModel", lambda folder, in_memory: whole(origin / "model", in_memory))
    return expected


MODELS = {}


def whole(folder, in_memory):
    if (folder, in_memory) not in MODELS:
        MODELS[folder, in_memory] = recompute.WholeModel(folder, in_memory)
    return MODELS[folder, in_memory]


def change_file(path, change, marked=True):
    """Change an open file; with its checksum made right again, as a wrong program would have written it."""
    with netCDF4.Dataset(path, "a") as data:
        data.set_auto_maskandscale(False)
        change(data)
        if marked:
            data.setncattr(files.MARK, files.content_hash(data))


def run(study, singles=6, joints=6, seed=0):
    return audit.audit(study, Path("cache/trace/text0"), singles, joints, seed)


def failures(study, **options):
    """The failed checks, as "group: name"."""
    place = Path("cache/trace/text0")
    options = {"singles": 6, "joints": 6, "seed": 0} | options
    items, _ = audit.examine(study, place, progress=lambda line: None, **options)
    return {f"{row['group']}: {row['name']}" for row in items.failed()}


FILES = {
    "baseline": "cache/baseline/*/*.nc",
    "single": "results/single/*/*.nc",
    "joint": "results/joint/*/*.nc",
    "concentration": "results/concentration.nc",
}


def paths(kind):
    found = sorted(Path().glob(FILES[kind]))
    assert found
    return found


def names_in(path):
    with netCDF4.Dataset(path) as data:
        return set(data.variables)


def variables(kind):
    """Numeric variables of a kind of file that hold measurements."""
    own = {
        "baseline": ["residual_in", "branch_out", "contribution", "q", "k", "v", "retrieval", "cos", "sin"],
        "single": ["relative", "absolute", "js", "baseline_norm"],
        "joint": ["relative", "absolute", "js", "sum_of_singles", "sum_of_singles_js", "additive", "interaction"],
        "concentration": ["total", "n_eff", "n_eff_fraction", "concentration", "top1", "top25", "top50", "bottom25",
                          "n90"],
    }  # fmt: skip
    return own[kind]


VARIABLES = [(kind, name) for kind in FILES for name in variables(kind)]


def test_a_right_study_passes(study):
    report = run(study)
    rows = {(row["group"], row["name"]): row for row in report["items"]}
    assert all(row["value"] <= row["limit"] for row in rows.values())
    assert len(report["sample"]) >= 11
    assert {s["removal"] for s in report["sample"]} == {"single", *invariants.SCENARIOS}
    assert {s["transition"] for s in report["sample"]} == {0, 1}
    assert report["whole_forward"] is True
    forward = rows["whole forward pass", "residual stream of the streaming pass"]
    assert (forward["checks"], forward["limit"]) == (3, 1e-4)
    assert rows["control", "branch sum"]["checks"] == 4
    assert 0 < rows["recomputed", "single relative, in units of its tolerance"]["value"] < 0.5
    assert rows["control", "whole forward logits"]["value"] == 1e-7
    json.dumps(report, allow_nan=False)


def test_every_variable_of_every_file_is_covered(study):
    """The lists above are complete: what is not in them are labels, sets and flags, tested one by one below."""
    labels = {"component", "vector", "scenario", "text", "transition", "token_id", "token", "source_heads"}
    labels |= {"source_kind", "recipient_kind", "removed", "undefined", "small_total", "baseline_norms_under_floor"}
    for kind in FILES:
        found = set().union(*map(names_in, paths(kind)))
        assert found - labels == set(variables(kind)), kind


@pytest.mark.parametrize(("kind", "name"), VARIABLES)
def test_one_changed_value_is_caught_by_the_checksum(study, kind, name):
    path = next(p for p in paths(kind) if name in names_in(p))

    def change(data):
        values = data[name][...]
        place = np.argwhere(np.isfinite(values) if np.isfinite(values).any() else np.isnan(values))[-1]
        values[tuple(place)] = np.nan_to_num(values[tuple(place)]) * 1.0001 + 1e-6
        data[name][...] = values

    change_file(path, change, marked=False)
    with pytest.raises(StudyError, match=r"content differs from its checksum; delete the file") as caught:
        run(study)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("kind", "name"), VARIABLES)
def test_a_systematic_error_is_caught_by_the_recomputed_sample(study, kind, name):
    """One part in a thousand in every file of a kind, with right checksums."""
    for path in paths(kind):
        if name in names_in(path):
            change_file(path, lambda d: d[name].__setitem__(..., d[name][...] * d[name].dtype.type(1.001)))
    found = failures(study)
    recomputed = {f.partition(": ")[2] for f in found if f.startswith("recomputed")}
    if kind == "concentration":
        assert f"invariant: concentration {name}: as the singles give" in found
    else:
        shown = f"root of {name}" if name.endswith("js") else name
        assert any(f.startswith(f"{kind} {shown}, ") for f in recomputed), recomputed


@pytest.mark.parametrize("name", ["relative", "absolute", "sum_of_singles", "additive", "interaction"])
def test_an_added_error_is_caught(study, name):
    for path in paths("joint"):
        change_file(path, lambda d: d[name].__setitem__(..., d[name][...] + 1e-3))
    assert any(f.startswith(f"recomputed: joint {name}, in units of its tolerance") for f in failures(study))


def test_consistent_errors_are_caught_by_recomputation_alone(study):
    """A thousandth in everything that the stages made of one another: no file contradicts another."""
    for kind, names in (
        ("single", ["relative", "absolute"]),
        ("joint", ["relative", "absolute", "sum_of_singles", "additive", "interaction"]),
    ):
        for path in paths(kind):
            for name in names:
                change_file(path, lambda d, name=name: d[name].__setitem__(..., d[name][...] * 1.001))
    change_file(paths("concentration")[0], lambda d: d["total"].__setitem__(
        (slice(None), slice(None), slice(0, 4)), d["total"][:, :, :4] * 1.001))  # fmt: skip
    found = failures(study)
    assert found
    assert all(f.startswith("recomputed") for f in found), found


@pytest.mark.parametrize(
    ("kind", "change", "check"),
    [
        ("joint", lambda d: swap(d["removed"], 0, 1), "weak and strong not as the singles rank"),
        ("joint", lambda d: swap(d["removed"], 0, 2), "random not as its seed gives"),
        ("joint", lambda d: d["removed"].__setitem__((0, slice(None), 0, 0), 1), "sets of another size"),
        ("joint", lambda d: d["removed"].__setitem__((1, ...), d["removed"][0]), "heads both weak and strong"),
        ("joint", lambda d: d["scenario"].__setitem__(slice(0, 2), np.array(["strong", "weak"], object)), "labels"),
        ("single", lambda d: d["component"].__setitem__(slice(0, 2), np.array(["k", "q"], object)), "labels"),
        ("single", lambda d: d["js"].__setitem__((0, 2, 0), 0.7), "js: outside its range"),
        ("single", lambda d: d["js"].__setitem__((0, 2, 0), np.nan), "js: absent or present where it should not be"),
        ("single", lambda d: d["js"].__setitem__((0, 0, 0), 1e-9), "js: at query 0"),
        ("single", lambda d: d["relative"].__setitem__((0, 0, 2, 0), np.nan), "relative: not finite or negative"),
        ("single", lambda d: d["absolute"].__setitem__((0, 0, 2, 0), -1e-9), "absolute: not finite or negative"),
        ("single", lambda d: d["token_id"].__setitem__(0, 255), "tokens as the text gives"),
        ("joint", lambda d: d["token"].__setitem__(0, "?"), "tokens as the text gives"),
        ("joint", lambda d: d["interaction"].__setitem__((0, 0, 3, 0), 9), "interaction: above joint plus additive"),
        ("joint", lambda d: d["interaction"].__setitem__((0, 3, 3, 0), 0), "interaction: below their difference"),
        ("joint", lambda d: d["additive"].__setitem__((0, 0, 3, 0), 9), "additive: above the sum of singles"),
        ("concentration", lambda d: d["undefined"].__setitem__((0, 0, 0, 0, 0), 1), "undefined: as the singles give"),
        ("concentration", lambda d: d["small_total"].__setitem__((0, 0, 0, 0, 0), 1), "small_total: as the singles"),
        ("concentration", lambda d: d["n90"].__setitem__((0, 0, 0, 3, 0), 1), "n90: as the singles give"),
        ("concentration", lambda d: d["n_eff"].__setitem__((0, 0, 0, 10, 0), 1), "no observation"),
        ("concentration", lambda d: d["undefined"].__setitem__((0, 0, 0, 10, 0), 0), "no observation"),
        ("concentration", lambda d: d["source_heads"].__setitem__(0, 3), "heads and kinds"),
        ("concentration", lambda d: d["recipient_kind"].__setitem__(0, "softmax"), "heads and kinds"),
        ("concentration", lambda d: d["text"].__setitem__(slice(0, 2), np.array(["text1", "text0"], object)), "labels"),
        ("concentration", lambda d: d["transition"].__setitem__(0, 1), "labels"),
        ("concentration", lambda d: d["baseline_norms_under_floor"].__setitem__((0, 0), 1), "norms under the floor"),
    ],
)
def test_what_no_right_file_can_hold(study, kind, change, check):
    path = paths(kind)[1 if kind == "single" else 0]  # transition 1 has a softmax recipient
    change_file(path, change)
    found = failures(study, singles=0, joints=0)
    assert any(f.startswith("invariant: ") and check in f for f in found), found


def test_a_failed_audit_says_so_in_one_line(study):
    path = paths("joint")[0]
    change_file(path, lambda d: swap(d["removed"], 0, 1))
    check = "invariant: joint removed: weak and strong not as the singles rank"
    line = rf"^audit of tiny failed: {check}: \d+, limit 0 \({path}\); \d"
    with pytest.raises(StudyError, match=line) as caught:
        run(study)
    assert "\n" not in str(caught.value)


def swap(variable, a, b):
    values = variable[...]
    values[[a, b]] = values[[b, a]]
    variable[...] = values


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("baseline", "code", "an older version"),
        ("single", "code", "an older version"),
        ("joint", "code", "an older version"),
        ("concentration", "code", "an older version"),
        ("baseline", "fingerprint", "0123456789abcdef"),
        ("single", "text_sha256", "another text"),
        ("joint", "random_seed", 31001),
        ("joint", "sample_index", 1),
        ("joint", "baseline", "another/cache.nc"),
        ("single", "source_layer", 5),
        ("single", "recipient_kind", "softmax"),
        ("single", "study", "another"),
        ("single", "baseline_norms_under_floor", 3),
        ("concentration", "small_total", '{"js": 1e-08, "vectors": 0.5}'),
        ("single", "protocol", "0"),
    ],
)
def test_wrong_provenance(study, kind, key, value):
    change_file(paths(kind)[0], lambda d: d.setncattr(key, value))
    with pytest.raises(
        StudyError, match=rf"provenance: attribute {key}: 1, limit 0 .* {key} is {re.escape(str(value))}, exp"
    ):
        run(study, singles=0, joints=0)


def test_failed_control_in_a_file(study):
    change_file(paths("baseline")[0], lambda d: d.setncattr("control_branch_sum", "[0.01, 1e-05]"))
    with pytest.raises(StudyError, match=r"control: branch sum: 0.01, limit 1e-05 \(.*L00.nc\)"):
        run(study)


def test_controls_that_are_not_numbers_fail(study):
    change_file(paths("baseline")[0], lambda d: d.setncattr("control_branch_sum", "[NaN, 1e-05]"))
    assert failures(study, singles=0, joints=0) == {"control: branch sum"}


@pytest.mark.parametrize("kind", FILES)
def test_missing_file(study, kind):
    path = paths(kind)[0]
    path.unlink()
    with pytest.raises(StudyError, match=f"{path}: not a complete netCDF file") as caught:
        run(study)
    assert "\n" not in str(caught.value)


def test_another_checkpoint_in_the_same_place(study):
    path = Path(study.checkpoint) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StudyError, match="provenance: content of the checkpoint"):
        run(study)


def test_another_trace(study):
    path = Path("cache/trace/text0/L01.nc")
    change_file(path, lambda d: d["residual_in"].__setitem__(..., d["residual_in"][...] * np.float32(1.001)))
    assert failures(study, singles=0, joints=0) == {"whole forward pass: residual stream of the streaming pass"}


def test_wrong_logits(study):
    path = Path("cache/trace/text0/last.nc")
    change_file(path, lambda d: d["last"].__setitem__(..., d["last"][...] * np.float32(1.001)))
    assert failures(study, singles=0, joints=0) == {"whole forward pass: logits of the streaming pass"}


def test_without_the_whole_model_in_memory(study):
    (Path(study.results) / "whole_forward.json").unlink()
    report = run(audit.Expected(**vars(study) | {"whole_forward": False}))
    assert report["whole_forward"] is False
    assert not [row for row in report["items"] if row["group"] == "whole forward pass"]
    assert [row for row in report["items"] if row["group"] == "recomputed"]
    for path in paths("single"):
        change_file(path, lambda d: d["relative"].__setitem__(..., d["relative"][...] * 1.001))
    assert failures(audit.Expected(**vars(study) | {"whole_forward": False}))


def test_the_sample_is_seeded_and_covers_all_kinds(study):
    kinds, heads = ["linear", "linear", "softmax", "linear"], [6, 6, 4, 6]
    chosen = [audit_sample.choose(study, kinds, heads, 20, 40, seed) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == len(chosen[0])
    for text, layer, what, head in chosen[0]:
        assert text in ("text0", "text1")
        assert 0 <= layer < 3
        assert 0 <= head < (heads[layer] if what == "single" else heads[layer + 1])
    for scenario in ("single", *invariants.SCENARIOS):
        assert {kinds[c[1] + 1] for c in chosen[0] if c[2] == scenario} == {"linear", "softmax"}
    assert audit_sample.choose(study, kinds, heads, 0, 0, 0) == []


@pytest.mark.parametrize("name", ["hybrid_odd", "llama_zero", "llama_one_head", "hybrid_wrapped", "llama_bias"])
def test_edges_pass(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    study = make_study(Path(), tiny.checkpoint(name), make_texts(9))
    report = run(study, singles=8, joints=12)
    assert max(row["value"] for row in report["items"] if row["group"] == "recomputed") < 0.5


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_recomputation_agrees_with_the_reference(monkeypatch, name, in_memory):
    """The audit's own route, many removals of several layers in batches, against one plain forward pass for each."""
    monkeypatch.setattr(recompute, "BATCH_TOKENS", 30)
    folder, ids = tiny.checkpoint(name), tiny.token_ids(8)
    model = recompute.WholeModel(folder, in_memory)
    rng = np.random.default_rng(0)
    layers = len(model.model.model.layers)
    sizes = [reference.head_count(reference.load(folder), i) for i in range(layers - 1)]
    removals = [(i, rng.random((8, sizes[i])) > 0.5) for i in range(layers - 1) for _ in range(2)]
    baseline, changed, logits = model.observe(ids, removals)
    for (source, mask), found in zip(removals, changed, strict=True):
        base, after = reference.run(folder, ids, source), reference.run(folder, ids, source, mask)
        own = recompute.effects(baseline[source + 1], found)
        for t in range(8):
            for r in range(base["q"].shape[1]):
                _, absolute, relative, js = reference.effects(base, after, t, r)
                np.testing.assert_allclose(own["absolute"][:, t, r], absolute, rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(own["relative"][:, t, r], relative, rtol=1e-4, atol=2e-5)
                np.testing.assert_allclose(np.sqrt(own["js"][t, r]), np.sqrt(js), rtol=1e-4, atol=2e-6)
        np.testing.assert_allclose(baseline[source]["contribution"], base["contribution"], atol=5e-6)
    assert (logits is None) != in_memory
    if in_memory:
        np.testing.assert_allclose(logits, base["logits"], atol=1e-4)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8])
def test_measures_by_ranks_agree_with_the_reference(heads):
    d = np.random.default_rng(heads).integers(0, 4, (2, heads, 5, 3)).astype(float)  # ties and zeros
    found = invariants.measures(d, [0.5, 0.5])
    for c, t, r in np.ndindex(2, 5, 3):
        expected = reference.concentration(list(d[c, :, t, r]))
        n90 = expected.pop("n90")
        for name, value in expected.items():
            assert found[name][c, t, r] == pytest.approx(value, abs=1e-12, nan_ok=True), name
        low, high = (x[c, t, r] for x in found["n90"])
        assert (low <= n90 <= high) or (np.isnan(n90) and np.isnan(low))


def test_place_ranks_ties_by_index():
    assert invariants.place(np.array([[3.0], [1], [3], [0], [1]])).ravel().tolist() == [3, 1, 4, 0, 2]


@pytest.mark.slow
def test_the_workflows_target(tmp_path):
    """The target passes a study that Snakemake ran, is then up to date, and fails on a changed file in one line."""
    project = Path(audit.__file__).parents[2]
    shutil.copytree(tiny.checkpoint("hybrid"), tmp_path / "model")
    text = {"id": "a", "language": "en", "text": "Heads differ by token."}
    (tmp_path / "texts.json").write_text(json.dumps([text]), encoding="utf-8")
    settings = {
        "study": "tiny",
        "model": {"checkpoint": "model"},
        "texts": {"file": "texts.json", "tokens": 12},
        "controls": {"random_weights": [], "permuted_weights": []},
    }
    (tmp_path / "tiny.json").write_text(json.dumps(settings), encoding="utf-8")
    shutil.copy(project / "config.yaml", tmp_path)
    command = [sys.executable, "-m", "snakemake", "audit", "-s", project / "Snakefile", "-j", "1"]

    def run_snakemake():
        return subprocess.run(
            [*command, "--configfile", "tiny.json"], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    first = run_snakemake()
    assert first.returncode == 0, first.stderr
    report = json.loads((tmp_path / "results/tiny/audit.json").read_text(encoding="utf-8"))
    assert all(row["value"] <= row["limit"] for row in report["items"])
    assert "Nothing to be done" in run_snakemake().stderr
    change_file(tmp_path / "results/tiny/joint/a/L01.nc", lambda d: swap(d["removed"], 0, 1))
    failed = run_snakemake()
    assert failed.returncode != 0
    assert "head-influence: audit of tiny failed: invariant: joint removed: weak and strong not as" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "results/tiny/audit.json").exists()
