"""Distributions, counts, joint quantities, comparisons and tables against xarray and numpy by hand."""

import csv
import json

import numpy as np
import pytest
import xarray as xr
from head_influence import StudyError, distributions, files, findings, summary
from head_influence.influence import FLOOR
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from small_studies import FIRST_QUERY, FOLDER, study
from small_studies import TEXTS as ALL_TEXTS

TEXTS = ALL_TEXTS[:3]

LEVELS = [0.05, 0.25, 0.5, 0.75, 0.95]
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:Mean of empty:RuntimeWarning")


@given(
    hnp.arrays(float, hnp.array_shapes(min_dims=1, max_dims=3, max_side=6), elements=st.floats(-1e3, 1e3)),
    st.integers(0, 2**31),
)
def test_quantiles_are_numpys_without_the_missing(values, seed):
    values = np.where(np.random.default_rng(seed).random(values.shape) < 0.3, np.nan, values)
    found = distributions.quantiles(values)
    for at in np.ndindex(values.shape[:-1]):
        known = values[at][np.isfinite(values[at])]
        expected = np.quantile(known, LEVELS) if known.size else np.full(5, np.nan)
        assert found[(slice(None), *at)] == pytest.approx(expected, nan_ok=True, abs=1e-9)


def test_quantiles_of_no_observation():
    assert np.isnan(distributions.quantiles(np.empty((2, 0)))).all()


def test_spread_of_few_texts_is_the_texts_themselves():
    assert distributions.spread([3.0, np.nan, 1.0]) == (2.0, 1.0, 3.0)
    assert np.isnan(distributions.spread([np.nan])).all()
    seven = np.arange(7.0)
    assert distributions.spread(seven)[1:] == (0, 6)


def test_spread_of_many_texts_is_a_bootstrap_of_their_mean():
    values = np.random.default_rng(0).normal(5, 2, 40)
    centre, low, high = distributions.spread(values)
    assert centre == pytest.approx(values.mean())
    error = values.std() / np.sqrt(40)
    assert low == pytest.approx(centre - 1.96 * error, abs=0.15 * error + 0.05)
    assert high == pytest.approx(centre + 1.96 * error, abs=0.15 * error + 0.05)
    assert distributions.spread(values) == (centre, low, high)


@pytest.mark.parametrize(
    ("own", "control", "sign"),
    [([1, 2], [3, 4], -1), ([5, 6], [3, 4], 1), ([1, 3], [3, 4], 0), ([1, 5], [2, 3], 0), ([1], [3], 0)],
)
def test_separated_means_that_the_spreads_do_not_touch(own, control, sign):
    assert distributions.separated(np.array(own, float), np.array(control, float)) == sign


def opened(name="hybrid"):
    folder, _ = study(name, False)
    return folder, xr.open_dataset(folder / "findings.nc"), xr.open_dataset(folder / "concentration.nc")


def kinds_of(table):
    pairs = zip(table["source_kind"].values, table["recipient_kind"].values, strict=True)
    return np.array([f"{source} to {recipient}" for source, recipient in pairs])


@pytest.mark.parametrize("name", ["hybrid", "hybrid_odd"])
def test_distributions_are_xarrays_quantiles_of_the_table(name):
    _, found, table = opened(name)
    kinds = kinds_of(table)
    primary = table.isel(query=slice(FIRST_QUERY, None))
    for measure in found["measure"].values:
        values = primary[str(measure)]
        here = found.sel(measure=measure)
        everything = ["text", "query", "recipient_head"]
        expected = values.quantile(LEVELS, everything).transpose("transition", "component", "quantile")
        assert here["transition_distribution"].values == pytest.approx(expected.values, nan_ok=True, rel=1e-6)
        assert here["transition_mean"].values == pytest.approx(values.mean(everything).values, nan_ok=True, rel=1e-5)
        expected = values.quantile(LEVELS, everything[1:]).transpose("text", "transition", "component", "quantile")
        assert here["text_transition_distribution"].values == pytest.approx(expected.values, nan_ok=True, rel=1e-6)
        for kind in found["kind"].values:
            chosen = values.isel(transition=np.flatnonzero(kinds == kind))
            expected = chosen.quantile(LEVELS, [*everything, "transition"]).transpose("component", "quantile")
            got = here.sel(kind=kind)["kind_distribution"].values
            assert got == pytest.approx(expected.values, nan_ok=True, rel=1e-6)
            chosen = table[str(measure)].isel(transition=np.flatnonzero(kinds == kind))
            expected = chosen.quantile(LEVELS, ["text", "transition", "recipient_head"])
            expected = expected.transpose("query", "component", "quantile")
            got = here.sel(kind=kind)["position_distribution"].values
            assert got == pytest.approx(expected.values, nan_ok=True, rel=1e-6)


def test_the_kinds_are_those_that_occur_in_a_fixed_order():
    _, found, table = opened("hybrid_odd")
    assert found["kind"].values.tolist() == [
        "linear to linear",
        "linear to softmax",
        "softmax to linear",
        "softmax to softmax",
    ]
    assert found["transition_kind"].values.tolist() == kinds_of(table).tolist()


@pytest.mark.parametrize("name", ["hybrid", "llama_zero"])
def test_every_observation_is_counted_once(name):
    folder, found, _ = opened(name)
    for j, (text, _, count, _) in ((j, t) for j in range(found.sizes["transition"]) for t in TEXTS):
        here = found.sel(text=text, transition=j)["text_transition_observations"]
        with xr.open_dataset(folder / "single" / text / f"L{j:02d}.nc") as single:
            total = single["relative"].sum("source_head").isel(query=slice(FIRST_QUERY, None))
            assert here.sel(component="qkv", count="defined") == int((total.sel(component="qkv") > 0).sum())
            assert here.sel(component="qkv", count="undefined") == int((total.sel(component="qkv") == 0).sum())
            small = (total > 0) & (total < 1e-4)
            assert here.sel(component="qkv", count="small total") == int(small.sel(component="qkv").sum())
            everything = (count - FIRST_QUERY) * single.sizes["recipient_head"]
            assert here.sel(component="q").values[:2].sum() == everything
            js = here.sel(component="js").values[:2].sum()
            assert js == (everything if single.attrs["recipient_kind"] == "softmax" else 0)
    if name == "llama_zero":  # a source layer whose whole projection is zero
        here = found["transition_observations"].sel(transition=1, component="q")
        assert here.sel(count="defined") == 0 < here.sel(count="undefined")


def test_averaged_influences():
    folder, found, _ = opened()
    for j in range(found.sizes["transition"]):
        means = []
        for text, *_ in TEXTS:
            with xr.open_dataset(folder / "single" / text / f"L{j:02d}.nc") as single:
                means.append(single["relative"].isel(query=slice(FIRST_QUERY, None)).mean(["query", "recipient_head"]))
        d = np.mean([m.sel(component="qkv").values for m in means], axis=0)
        p = d / d.sum()
        here = found["averaged"].sel(transition=j, component="qkv")
        assert here.sel(measure="n_eff") == pytest.approx(1 / np.square(p).sum())
        assert here.sel(measure="top1") == pytest.approx(p.max())


def test_baseline_norms_under_the_floor_are_counted():
    folder, _, _ = opened()
    found = xr.open_dataset(folder / "identity.nc")["under_floor"]
    for x, (text, *_) in enumerate(TEXTS):
        with xr.open_dataset(folder / "single" / text / "L00.nc") as single:
            under = single["baseline_norm"].isel(query=slice(FIRST_QUERY, None)) < FLOOR
        assert found.values[0, x, :3].tolist() == under.sum(["query", "recipient_head"]).values.tolist()


def joint_values(folder, text, j):
    """Quantities of a joint file by hand: component, scenario, query, recipient."""
    with xr.open_dataset(folder / "joint" / text / f"L{j:02d}.nc") as data:
        data = data.isel(query=slice(FIRST_QUERY, None)).load()
        kind = data.attrs["recipient_kind"]
    effect = np.concatenate([data["relative"].values, data["js"].values[None]])
    sums = np.concatenate([data["sum_of_singles"].values, data["sum_of_singles_js"].values[None]])
    padding = np.full((2, *effect.shape[1:]), np.nan)
    additive = np.concatenate([data["additive"].values, padding])
    interaction = np.concatenate([data["interaction"].values, padding])
    scenarios = data["scenario"].values.tolist()

    def over(a, b, least=0):
        return np.array([x / y if y > least else np.nan for x, y in zip(a.ravel(), b.ravel(), strict=True)]).reshape(
            a.shape
        )

    whole = np.repeat(effect[:, [scenarios.index("all")]], 4, axis=1)
    drawn = np.repeat(effect[:, [scenarios.index("random")]], 4, axis=1)
    return kind, {
        "effect": effect, "sum_of_singles": sums, "additive": additive, "interaction": interaction,
        "effect_over_sum": over(effect, sums), "effect_over_additive": over(effect, additive, 1e-6),
        "interaction_over_additive": over(interaction, additive, 1e-6), "effect_over_all": over(effect, whole),
        "effect_over_random": over(effect, drawn),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["hybrid", "llama_odd"])
def test_joint_distributions_are_those_of_the_raw_files(name):
    folder, found, _ = opened(name)
    by_kind = {}
    for j in range(found.sizes["transition"]):
        parts = [joint_values(folder, text, j) for text, *_ in TEXTS]
        kind = str(found["transition_kind"].values[j])
        for quantity in found["quantity"].values:
            texts = [p[quantity].reshape(5, 4, -1) for _, p in parts]
            pooled = np.concatenate(texts, axis=-1)
            by_kind.setdefault((kind, quantity), []).append(pooled)
            expected = [[quantiles_of(pooled[c, s]) for s in range(4)] for c in range(5)]
            here = found.sel(transition=j, quantity=quantity)
            assert here["joint_transition"].values == pytest.approx(np.array(expected), nan_ok=True, rel=1e-4, abs=1e-7)
            counts = np.isfinite(pooled).sum(axis=-1)
            assert here["joint_transition_observations"].values.tolist() == counts.tolist()
        for c, component in enumerate(found["component"].values):
            for s, scenario in enumerate(found["scenario"].values):
                allowed = component in "qkv" and component != "qkv" and (parts[0][0] == "softmax" or scenario == "all")
                assert bool(found["speaks"].values[j, c, s]) is allowed
    for (kind, quantity), values in by_kind.items():
        pooled = np.concatenate(values, axis=-1)
        expected = [[quantiles_of(pooled[c, s]) for s in range(4)] for c in range(5)]
        here = found.sel(kind=kind, quantity=quantity)["joint_kind"].values
        assert here == pytest.approx(np.array(expected), nan_ok=True, rel=1e-4, abs=1e-7)


def quantiles_of(values):
    known = values[np.isfinite(values)]
    return np.quantile(known, LEVELS) if known.size else np.full(5, np.nan)


def test_controls_of_all_files_are_kept_with_their_worst_value():
    folder, found, _ = opened()
    controls = json.loads(found.attrs["controls"])
    worst = 0
    for path in folder.glob("single/*/*.nc"):
        with xr.open_dataset(path) as data:
            worst = max(worst, np.atleast_1d(json.loads(str(data.attrs["control_null_mask"])))[0])
    assert controls["null_mask"][0] == worst
    assert controls["null_mask"][2] == len(TEXTS) * found.sizes["transition"]
    assert {"branch_sum", "recomputed_q", "mask_faults"} <= set(controls)


def test_findings_refuse_another_studys_identity():
    (folder, _), (other, _) = study("hybrid", False), study("hybrid", False, 1)
    joints = [[folder / "joint" / text / "L00.nc"] for text, *_ in TEXTS]
    with pytest.raises(StudyError, match="not of the same texts"):
        findings.measure_findings(folder / "concentration.nc", other / "identity.nc", joints, FOLDER / "x.nc", {})


def read_table(folder, name):
    with (folder / "tables" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_tables_say_what_the_file_says():
    folder, found, _ = opened()
    rows = read_table(folder, "transitions")
    assert len(rows) == found.sizes["transition"] * 5 * found.sizes["measure"]
    for row in rows:
        at = {"transition": int(row["transition"]), "component": row["component"], "measure": row["measure"]}
        expected = found["transition_distribution"].sel(at).values
        got = [float(row[q] or "nan") for q in ("q05", "q25", "q50", "q75", "q95")]
        assert got == pytest.approx(expected, rel=1e-5, nan_ok=True)
        counts = found["transition_observations"].sel(transition=at["transition"], component=at["component"])
        assert [int(row[c]) for c in ("defined", "undefined", "small_total")] == counts.values.tolist()
    joint = read_table(folder, "joint")
    row = next(r for r in joint if r["quantity"] == "interaction_over_additive" and r["scenario"] == "strong")
    at = {"transition": int(row["transition"]), "component": row["component"], "scenario": "strong"}
    expected = found["joint_transition"].sel(at | {"quantity": "interaction_over_additive"}).values
    assert float(row["q50"]) == pytest.approx(expected[2], rel=1e-5)
    assert int(row["set_is_whole_intervention"]) == int(found["speaks"].sel(at))
    for name in ("kinds", "texts", "text_kinds", "positions", "heads", "identity", "joint_kinds"):
        assert read_table(folder, name), name


def test_a_headline_needs_every_control_on_the_same_side():
    folder, runs = study("hybrid")
    loaded = summary.load_runs(folder.parent, runs)
    low, middle, high = (np.array(v, float) for v in ([1, 2, 1.5], [3, 4, 3.5], [5, 6, 5.5]))
    assert summary.compare(loaded, [low, middle, high])[2] == -1
    assert summary.compare(loaded, [high, middle, low])[2] == 1
    assert summary.compare(loaded, [middle, low, high])[2] == 0
    assert summary.compare(loaded, [low, low, high])[1] == [0, -1]
    assert summary.compare(loaded[:1], [low])[2] == 0
    rows = summary.comparisons(loaded)
    row = next(
        r for r in rows if r["group"] == "kind" and r["component"] == "qkv" and r["quantity"] == "n_eff_fraction"
    )
    for name, _ in runs:
        with xr.open_dataset(folder.parent / name / "concentration.nc") as table:
            chosen = np.flatnonzero(kinds_of(table) == row["kind"])
            values = (
                table["n_eff_fraction"].sel(component="qkv").isel(transition=chosen, query=slice(FIRST_QUERY, None))
            )
            medians = values.median(["transition", "query", "recipient_head"]).values
        assert row[name] == pytest.approx(medians.mean(), rel=1e-6)
        assert (row[f"{name} low"], row[f"{name} high"]) == pytest.approx((medians.min(), medians.max()), rel=1e-6)


def test_runs_of_other_texts_are_refused():
    folder, runs = study("hybrid")
    other, _ = study("hybrid", False, 1)
    with pytest.raises(StudyError, match="not of the same texts"):
        summary.load_runs(folder.parent, [runs[0], (other.name, "random")])


def test_a_changed_findings_file_is_refused(tmp_path):
    folder, _ = study("hybrid", False)
    (tmp_path / "s").mkdir()
    content = bytearray((folder / "findings.nc").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "s" / "findings.nc").write_bytes(content)
    with pytest.raises(StudyError):
        files.read(tmp_path / "s" / "findings.nc")
