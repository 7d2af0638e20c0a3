"""The checks that head influence curves have to pass, run on a study's own model and on the planted one."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from head_influence import StudyError, files
from head_influence.budgets import keys_at
from head_influence.checkpoint import Checkpoint
from head_influence.compaction import Fit
from head_influence.curves import (
    Article,
    BaselineCaches,
    measure_baseline,
    measure_layer,
    noise_limit,
    read_prefill,
    write_prefill,
)
from head_influence.models import whole_model
from head_influence.planted import RETRIEVAL, planted_context, write_planted
from head_influence.scoring import HeadCache, Scorer, SoftmaxCache, score

FITTED = 1e-3  # nats: limit of the full ratio with fitted values
FITTED_WHOLE = (
    "ratio 1 fitted (ridge) against the head's full cache"  # says how good the fit is, not that code is wrong
)
LONG = 4096  # tokens from which on the whole model does not hold its attention matrix
ITEMS = 2  # items that the checks score


@dataclass(frozen=True)
class Check:
    """One check: what was found (a number, or a word) and what it has to be."""

    number: int
    what: str
    value: float | None
    limit: str
    outcome: str  # passed, failed, not applicable, not run

    @classmethod
    def at_most(cls, number, what, value, limit, unit="nats"):
        """A number that may not exceed a limit."""
        value = float(value)
        return cls(number, what, value, f"<= {limit:.3g} {unit}".strip(), "passed" if value <= limit else "failed")


class Bench:
    """One layer of one context, ready to be scored in other ways than the study's.

    Parameters
    ----------
    checkpoint : Checkpoint
    context : TokenContext
    layer : int
    prefill_path, baseline_path : path
    settings : dict
    """

    def __init__(self, checkpoint, context, layer, prefill_path, baseline_path, settings):
        self.checkpoint, self.layer, self.settings = checkpoint, layer, settings
        self.context, self.items = context, context.items[:ITEMS]
        self.scorer = Scorer(checkpoint, len(context.ids))
        self.base = BaselineCaches(baseline_path, context.items)
        record, attributes = read_prefill(prefill_path)
        self.article = Article(record, float(attributes["scaling"]), context, settings, layer)
        self.heads = sorted({0, self.article.heads - 1})
        self.noise = noise_limit(self.base.nll["none"][:ITEMS])

    def restart(self, variants):
        """Score (items, variants) from the layer on; variants are (head, HeadCache)."""
        differs = dict(enumerate(variants, 1))
        found, zero = score(
            self.scorer, self.layer, self.base.residual(self.layer)[:ITEMS],
            lambda i: self.base.cache(i, differs if i == self.layer else None), len(differs) + 1, self.items,
        )  # fmt: skip
        return found[:, 1:], zero

    def rebuild(self, variant):
        """Score (items,) one variant from the embeddings on, every layer anew."""
        hidden = [self.scorer.embed(item)[None] for item in self.items]
        for index in range(self.scorer.layers):
            cache = self.base.cache(index)
            if index == self.layer and variant is not None:
                heads = list(cache.heads)
                heads[variant[0]] = variant[1]
                cache = SoftmaxCache(heads)
            self.scorer.load(index)
            hidden = [self.scorer.step(index, h, cache) for h in hidden]
            self.scorer.release(index)
        return np.array([self.scorer.nll(item, h)[0] for item, h in zip(self.items, hidden, strict=True)])

    def at(self, head, ratio, fit=None):
        """Variant (head, HeadCache) of a head at a ratio."""
        count = self.article.count(ratio)
        return head, self.article.cache(head, self.article.compact(head, [count], fit)[count])


def full_cache_check(bench):
    """Check 1: own scorer with the full cache against the model on the concatenated text."""
    model, worst = whole_model(bench.checkpoint), 0.0
    if len(bench.context.ids) > LONG:
        model.set_attn_implementation("sdpa")
    for item, own in zip(bench.items, bench.base.nll["full"], strict=False):
        with torch.no_grad():
            ids = torch.tensor([[*bench.context.ids, *item.live]])
            logits = model(ids, use_cache=False, logits_to_keep=len(item.live)).logits[0, item.predicting].double()
        nll = (logits.logsumexp(1) - logits[torch.arange(len(logits)), list(item.targets)]).mean()
        worst = max(worst, abs(float(nll) - own))
    return Check.at_most(
        1, "own scorer with the full cache against the model on the concatenated text", worst, bench.noise
    )


def baseline_checks(bench, layer_path):
    """Check 2: delta at the baseline, as written and as evaluated in an extra row."""
    written, _ = files.read(layer_path)
    zero = int(np.flatnonzero(written["ratio"] == bench.settings["baseline"])[0])
    found, _ = bench.restart([bench.at(h, bench.settings["baseline"]) for h in bench.heads])
    return [
        Check.at_most(2, "delta at the baseline ratio, as written", np.abs(written["delta"][..., zero]).max(), 0),
        Check.at_most(2, "delta at the baseline ratio, evaluated as an extra row", np.abs(found).max(), bench.noise),
    ]


def restart_check(bench, ratios):
    """Check 3: restarting at the layer against rescoring a rebuilt cache."""
    variants = [bench.at(bench.heads[0], ratios[0]), bench.at(bench.heads[-1], ratios[-1])]
    delta, zero = bench.restart(variants)
    worst = max(np.abs(zero + d - bench.rebuild(v)).max() for d, v in zip(delta.T, variants, strict=True))
    return Check.at_most(3, "restarting at the layer against a rebuilt cache", worst, bench.noise)


def whole_ratio_checks(bench):
    """Check 4: a head at ratio 1, without fitting and with."""
    article, heads = bench.article, bench.heads
    plain = [bench.at(h, 1, Fit("rms", "none", "original")) for h in heads]
    full = [(h, article.full(h)) for h in heads]
    different = max(
        float((getattr(a, name) - getattr(b, name)).abs().max())
        for (_, a), (_, b) in zip(plain, full, strict=True)
        for name in ("keys", "values", "bias")
    )
    fitted = [bench.at(h, 1, Fit(bench.settings["fit"]["keys"], "nnls", "ridge")) for h in heads]
    # Each in a batch of its own: a row has the same bits in the same place of a batch of the same size only.
    a, b, c = (bench.restart(variants)[0] for variants in (plain, full, fitted))
    worst = max(different, np.abs(a - b).max())
    return [
        Check.at_most(4, "ratio 1 without fitting against the head's full cache", worst, 0),
        Check.at_most(4, FITTED_WHOLE, np.abs(c - b).max(), FITTED),
    ]


def context_check(table):
    """Check 5: the model uses its context."""
    gain, error, holds = table.uses_context()
    words = "nll_full < nll_baseline < nll_none, nll_none - nll_full above two standard errors"
    return Check(5, words, gain, f"> {2 * error:.3g} nats, in this order", "passed" if holds else "not applicable")


def order_check(bench, ratios, seed=0):
    """Check 6: order of the kept keys, padding, and the batch's size."""
    head, cache = bench.at(bench.heads[0], ratios[-1])
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(cache.keys)))
    permuted = HeadCache(cache.keys[order], cache.values[order], cache.bias[order])
    pad = torch.zeros(7, cache.keys.shape[1])
    padded = HeadCache(
        torch.cat((cache.keys, pad)),
        torch.cat((cache.values, pad)),
        torch.cat((cache.bias, torch.full((7,), -torch.inf))),
    )
    together, _ = bench.restart([(head, cache), (head, permuted), (head, padded), *[(head, cache)] * 9])
    alone, _ = bench.restart([(head, cache)])
    worst = np.abs(together - alone).max()
    return Check.at_most(6, "order of the kept keys, padding, batch size", worst, bench.noise)


def keys_check(table, tokens, settings, budgets=()):
    """Check 7: whole keys add up, in the curves and in the budgets.

    Parameters
    ----------
    table : CurveTable
    tokens : list of int
        The articles' lengths, by context.
    settings : dict
        minimum_keys.
    budgets : list of path
        Files of the tried budgets.
    """
    wrong = 0
    for used, length in zip(table.keys_used, tokens, strict=True):
        announced = [keys_at(float(r), length, settings["minimum_keys"]) for r in table.ratios]
        wrong += int(np.abs(used.sum(0) - len(used) * np.array(announced)).sum())
    for path, length in zip(budgets, tokens, strict=bool(budgets)):
        data, _ = files.read(path)
        announced = [len(data["head"]) * keys_at(float(t), length) for t in data["target"]]
        wrong += int(np.abs(data["keys"].sum(2) - np.array(announced)[:, None]).sum())
    return Check.at_most(7, "keys used minus the announced budget", wrong, 0, "keys")


def group_check(bench, ratios):
    """Check 8: a changed KV head changes, at its layer, only its own query group."""
    head, other = bench.at(bench.heads[-1], ratios[-1])
    seen = []

    def watched(cache):
        def attention(*arguments):
            seen.append(cache.attention(*arguments))
            return seen[-1]

        return _Watched(attention)

    hidden = bench.base.residual(bench.layer)[0][None]
    base = bench.base.cache(bench.layer)
    heads = list(base.heads)
    heads[head] = other
    bench.scorer.load(bench.layer)
    for cache in (base, SoftmaxCache(heads)):
        bench.scorer.step(bench.layer, hidden, watched(cache))
    bench.scorer.release(bench.layer)
    change = (seen[0] - seen[1]).abs().amax(dim=(0, 1, 3)).unflatten(0, (len(heads), -1)).amax(1)
    others = [float(x) for h, x in enumerate(change) if h != head]
    return Check.at_most(8, "change of other query groups at the head's layer", max(others, default=0.0), 0, "")


@dataclass(frozen=True)
class _Watched:
    """A cache whose attention is looked at."""

    attention: object


def sign_check():
    """Check 9: the planted model's retrieval head gains from keys and loses without them."""
    settings = {
        "fit": {"keys": "rms", "bias": "none", "values": "original"}, "baseline": 0.05, "minimum_keys": 0,
        "max_queries": None, "seed": 0,
    }  # fmt: skip
    ratios, (layer, head) = [0, 0.05, 0.1, 0.2, 0.3, 0.5], RETRIEVAL
    with tempfile.TemporaryDirectory(prefix="head-influence-planted-") as name:
        folder, context = Path(name), planted_context()
        write_planted(folder / "model")
        paths = [folder / f"L{i}.nc" for i in range(2)]
        write_prefill(folder / "model", context, paths, {})
        measure_baseline(folder / "model", context, paths, folder / "baseline.nc", settings, {})
        measure_layer(
            folder / "model", context, layer, [head], paths[layer], folder / "baseline.nc", folder / "curve.nc", ratios,
            settings, {},
        )  # fmt: skip
        delta = files.read(folder / "curve.nc")[0]["delta"].mean(0)[0]
    right = delta[0] > 0 and (delta[2:] < 0).all()
    what = "planted retrieval head: delta(0), which is above 0 while delta is below 0 at every ratio above the baseline"
    return Check(9, what, float(delta[0]), "> 0 nats", "passed" if right else "failed")


def check_study(bench, table, tokens, layer_path, ratios, budgets, whole_forward):
    """Run all checks; one that fails is a `StudyError`, but for the fit at ratio 1: its failure is only reported.

    Returns
    -------
    list of Check
    """
    first = full_cache_check(bench) if whole_forward else None
    checks = [
        first
        or Check(1, "own scorer with the full cache against the model on the concatenated text", None, "", "not run"),
        *baseline_checks(bench, layer_path),
        restart_check(bench, ratios),
        *whole_ratio_checks(bench),
        context_check(table),
        order_check(bench, ratios),
        keys_check(table, tokens, bench.settings, budgets),
        group_check(bench, ratios),
        sign_check(),
    ]
    for check in checks:
        if check.outcome == "failed" and check.what != FITTED_WHOLE:
            raise StudyError(
                f"curves: check {check.number} failed: {check.what}: {check.value:.3g}, expected {check.limit}"
            )
    return checks


def open_bench(checkpoint_folder, context, layer, prefill_path, baseline_path, settings):
    """Return a `Bench` for a study's files."""
    return Bench(Checkpoint(checkpoint_folder), context, layer, prefill_path, baseline_path, settings)
