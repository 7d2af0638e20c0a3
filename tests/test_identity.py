"""Identity and stability of dominant heads against enumeration, loops and hand-worked values."""

from itertools import combinations, product

import numpy as np
import pytest
import xarray as xr
from head_influence import ablation, identity
from small_studies import FIRST_QUERY, study


@pytest.mark.parametrize(("heads", "size"), [(2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (7, 3)])
def test_expected_overlap_of_random_halves_is_that_of_all_pairs_of_sets(heads, size):
    sets = [set(c) for c in combinations(range(heads), size)]
    expected = np.mean([len(a & b) / len(a | b) for a, b in product(sets, sets)])
    assert identity.jaccard_of_random(heads, size) == pytest.approx(expected, abs=1e-14)


def test_one_head_has_no_half():
    assert np.isnan(identity.jaccard_of_random(1, 0))
    assert not identity.strong_halves(np.ones((1, 2, 3))).any()


def test_strong_halves_are_the_strong_sets_of_the_joint_removals():
    influence = np.random.default_rng(0).integers(0, 4, (5, 6, 3)).astype(float)  # with ties
    expected = ablation.joint_masks(influence, 31000, 0, 0)[ablation.SCENARIOS.index("strong")]
    assert np.array_equal(identity.strong_halves(influence), expected)


def sums_of_squares(texts):
    """The decomposition by loops over every observation: what each term predicts, and what is left of y."""
    heads = texts[0].shape[0]
    y = [p - 1 / heads for p in texts]
    count = len(texts)
    text_mean = [x.mean(axis=(1, 2)) for x in y]
    head = np.mean(text_mean, axis=0)
    recipient = np.mean([x.mean(axis=1) for x in y], axis=0)
    found = dict.fromkeys((*identity.SOURCES, "total"), 0.0)
    for x, own in zip(y, text_mean, strict=True):
        weight = 1 / (count * x.shape[1] * x.shape[2])
        for h, t, r in np.ndindex(x.shape):
            terms = [
                head[h],
                own[h] - head[h],
                x[h, t].mean() - own[h],
                recipient[h, r] - head[h],
            ]
            for name, term in zip(identity.SOURCES, [*terms, x[h, t, r] - sum(terms)], strict=False):
                found[name] += weight * term**2
            found["total"] += weight * x[h, t, r] ** 2
    return found


def random_shares(rng, shape):
    p = rng.random(shape) ** 3
    return p / p.sum(axis=0)


def test_variance_shares_are_the_projections_and_add_up():
    rng = np.random.default_rng(1)
    texts = [random_shares(rng, (5, 7, 3)), random_shares(rng, (5, 4, 3)), random_shares(rng, (5, 6, 3))]
    variance = identity.VarianceShares()
    for p in texts:
        variance.add(p)
    parts, total = variance.result()
    expected = sums_of_squares(texts)
    assert parts.sum() == pytest.approx(total, rel=1e-12)
    assert total == pytest.approx(expected["total"], rel=1e-12)
    for name, part in zip(identity.SOURCES, parts, strict=True):
        assert part == pytest.approx(expected[name], rel=1e-9), name
    assert variance.balanced


def test_variance_shares_by_hand():
    """Two heads: (1, 0) in one text and (0, 1) in the other, whatever the token: all of it is head x text."""
    variance = identity.VarianceShares()
    for p in ((1, 0), (0, 1)):
        share = variance.add(np.broadcast_to(np.array(p, float)[:, None, None], (2, 3, 2)))
        assert share == pytest.approx(1)
    parts, total = variance.result()
    assert total == pytest.approx(0.5)
    assert parts == pytest.approx([0, 0.5, 0, 0, 0], abs=1e-15)


def test_missing_observations_are_left_out_and_said():
    rng = np.random.default_rng(2)
    p = random_shares(rng, (3, 5, 2))
    p[:, 2, 1] = np.nan
    variance = identity.VarianceShares()
    variance.add(p)
    assert not variance.balanced
    known = np.isfinite(p[0])
    assert variance.result()[1] == pytest.approx(np.mean(np.square(p[:, known] - 1 / 3).sum(axis=0)))
    whole = identity.VarianceShares()
    q = random_shares(rng, (3, 5, 2))
    q[:, 0] = np.nan  # a whole token is missing: what remains is balanced
    whole.add(q)
    assert whole.balanced
    assert whole.result()[0].sum() == pytest.approx(whole.result()[1])


def test_no_defined_share_gives_nothing():
    variance = identity.VarianceShares()
    assert np.isnan(variance.add(np.full((3, 2, 2), np.nan)))
    assert np.isnan(variance.result()[0]).all()


def test_constant_part():
    rng = np.random.default_rng(3)
    contribution = np.zeros((4, 6, 5), np.float32)
    contribution[0] = rng.standard_normal(5)  # the same at every token
    contribution[1] = rng.standard_normal(5) * np.array([1, -1, 1, -1, 1, -1])[:, None]
    contribution[2] = rng.standard_normal((6, 5))
    within, across = identity.constant_parts([contribution, -contribution])
    mean = sum(contribution[2].astype(float)) / 6
    expected = mean @ mean / (sum(v @ v for v in contribution[2].astype(float)) / 6)
    assert within[0] == pytest.approx([1, 0, expected, np.nan], abs=1e-6, nan_ok=True)
    assert across == pytest.approx([0, 0, 0, np.nan], abs=1e-12, nan_ok=True)


def test_dominance_ties_go_to_the_lowest_head_and_texts_weigh_the_same():
    one = np.zeros((5, 3, 1, 2))
    one[:, 1] = one[:, 2] = 1.0  # a tie of heads 1 and 2
    two = np.zeros((5, 3, 4, 2))
    two[:, 0] = 1.0
    two[:, :, 0] = 0.0  # undefined observations count nowhere
    found = identity.of_transition([one, two], [np.ones((3, 1, 2)), np.ones((3, 4, 2))])
    assert found["dominance"][0] == pytest.approx([0.5, 0.5, 0])
    assert found["modal_head"][0] == 0
    assert found["defined"][:, 0].tolist() == [2, 6]


def jaccard(a, b):
    return len(a & b) / len(a | b)


def raw(folder, text, transition):
    """One single file's influences by xarray: component, head, query, recipient."""
    with xr.open_dataset(folder / "single" / text / f"L{transition:02d}.nc") as data:
        return np.concatenate([data["relative"].values, data["js"].values[None]])[:, :, FIRST_QUERY:]


@pytest.mark.parametrize("name", ["hybrid", "llama_odd", "llama_zero"])
def test_file_agrees_with_loops_over_the_raw_files(name):
    folder, _ = study(name, False)
    found = xr.open_dataset(folder / "identity.nc")
    texts = found["text"].values.tolist()
    for j, c in product(range(found.sizes["transition"]), range(5)):
        heads = int(found["source_heads"][j])
        sets, dominant = {}, {}
        for x, text in enumerate(texts):
            d = raw(folder, text, j)[c]
            for t, r in np.ndindex(d.shape[1:]):
                if d[:, t, r].sum() > 0:
                    order = sorted(range(heads), key=lambda h, d=d, t=t, r=r: (d[h, t, r], h))
                    sets[x, t, r] = set(order[heads - heads // 2 :])
                    dominant[x, t, r] = int(d[:, t, r].argmax())
        here = found.isel(transition=j, component=c)
        assert here["defined"].values.tolist() == [sum(key[0] == x for key in sets) for x in range(len(texts))]
        if not sets:
            assert np.isnan(here["dominance"].values[:heads]).all()
            assert int(here["modal_head"]) == -1
            continue
        known = sorted({x for x, _, _ in sets})
        frequency = [
            np.mean([np.mean([v == h for k, v in dominant.items() if k[0] == x]) for x in known]) for h in range(heads)
        ]
        assert here["dominance"].values[:heads] == pytest.approx(frequency)
        assert int(here["modal_head"]) == int(np.argmax(frequency))
        tokens, recipients, between = [], [], []
        for x in known:
            own = {key[1:]: value for key, value in sets.items() if key[0] == x}
            pairs = [jaccard(own[t, r], own[t + 1, r]) for t, r in own if (t + 1, r) in own]
            tokens += [np.mean(pairs)] if pairs else []
            pairs = [jaccard(own[t, r], own[t, s]) for t, r in own for s in range(r) if (t, s) in own]
            recipients += [np.mean(pairs)] if pairs else []
        for x, y in combinations(known, 2):
            pairs = [jaccard(sets[x, t, r], sets[y, t, r]) for i, t, r in sets if i == x and (y, t, r) in sets]
            between += [np.mean(pairs)] if pairs else []
        expected = [np.mean(values) if values else np.nan for values in (tokens, recipients, between)]
        assert here["overlap"].values == pytest.approx(expected, nan_ok=True)


def test_mean_influence_and_quantiles_of_heads_are_those_of_the_raw_files():
    folder, _ = study("hybrid", False)
    found = xr.open_dataset(folder / "identity.nc")
    texts = found["text"].values.tolist()
    for j in range(found.sizes["transition"]):
        influences = [raw(folder, text, j) for text in texts]
        for x, d in enumerate(influences):
            assert found["mean_influence"].values[j, x] == pytest.approx(d.mean(axis=(2, 3)), nan_ok=True)
        pooled = np.concatenate([d.reshape(*d.shape[:2], -1) for d in influences], axis=-1)
        expected = np.moveaxis(np.quantile(pooled, [0.05, 0.25, 0.5, 0.75, 0.95], axis=-1), 0, -1)
        assert found["head_change"].values[j] == pytest.approx(expected, nan_ok=True)


def test_constant_part_of_the_file_is_that_of_the_baseline_caches():
    folder, _ = study("hybrid", False)
    found = xr.open_dataset(folder / "identity.nc")
    for x, text in enumerate(found["text"].values.tolist()):
        with xr.open_dataset(folder / "single" / text / "L01.nc") as single:
            cache = single.attrs["baseline"]
        with xr.open_dataset(cache) as data:
            contribution = data["contribution"].astype(float).isel(query=slice(FIRST_QUERY, None))
            mean = contribution.mean("query")
            expected = (mean**2).sum("hidden") / (contribution**2).sum("hidden").mean("query")
        assert found["constant_part"].values[1, x] == pytest.approx(expected.values)
