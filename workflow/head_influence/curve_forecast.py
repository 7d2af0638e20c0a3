"""A forecast of what a study of curves costs, from the time that its parts take on this machine."""

import time

import numpy as np
import torch

from head_influence.budgets import keys_at
from head_influence.compaction import Fit, compact
from head_influence.curve_study import cache_kinds
from head_influence.families import layer_of
from head_influence.prefill import causal, run_layer
from head_influence.scoring import BATCH_TOKENS, HeadCache, Scorer, SoftmaxCache

START = 3.0  # seconds that a job takes to begin, without a server of loaded modules


def measured(function, least=0.2):
    """Seconds of processor time of one call, over as many calls as fill `least` seconds."""
    function()
    calls, begin = 0, time.process_time()
    while time.process_time() - begin < least:
        function()
        calls += 1
    return (time.process_time() - begin) / calls


def parts(checkpoint, context, counts, baseline, settings):
    """Time the parts of a study on one softmax layer of one context, with random inputs of its sizes.

    Parameters
    ----------
    checkpoint : Checkpoint
    context : TokenContext
    counts : list of int
        Keys at the ratios.
    baseline : int
        Keys at the baseline.
    settings : dict
        fit, max_queries.

    Returns
    -------
    dict
        Seconds: token (one new token, one layer), reading (one token of the context, one layer), load (one layer's
        weights), head (one answer token's logits), compaction (one KV head, all ratios), baseline (at one count).
    """
    layer = cache_kinds(checkpoint).index("softmax")
    shape, rng = layer_of(checkpoint, layer), np.random.default_rng(0)
    tokens, heads, groups = len(context.article), shape.key_heads, shape.heads // shape.key_heads
    scorer = Scorer(checkpoint, len(context.ids))
    load = measured(lambda: scorer.load(layer))
    item = max(context.items, key=lambda i: len(i.live))
    rows = max(2, BATCH_TOKENS // len(item.live))
    hidden = torch.randn(rows, len(item.live), shape.hidden)
    entries = len(context.ids) - tokens + baseline
    cache = HeadCache(torch.randn(entries, shape.key_dim), torch.randn(entries, shape.value_dim), torch.zeros(entries))
    step = measured(lambda: scorer.step(layer, hidden, SoftmaxCache([cache] * heads)))
    long = torch.randn(1, len(context.ids), shape.hidden)
    reading = measured(lambda: run_layer(scorer.model, layer, long, 0, causal))
    answers = hidden[: max(1, rows // 4)]
    head = measured(lambda: scorer.nll(item, answers)) / (len(answers) * len(item.targets))
    queries = min(groups * tokens, settings["max_queries"] or groups * tokens)
    q, k, v = (rng.standard_normal((n, shape.key_dim)) for n in (queries, tokens, tokens))
    scaling, fit = shape.key_dim**-0.5, Fit(**settings["fit"])
    return {
        "token": step / (rows * len(item.live)), "reading": reading / len(context.ids), "load": load, "head": head,
        "compaction": measured(lambda: compact(q, k, v, scaling, counts, fit)),
        "baseline": measured(lambda: compact(q, k, v, scaling, [0, baseline], fit)),
    }  # fmt: skip


def forecast(checkpoint, contexts, heads, settings):
    """Forecast the processor time of prefill, baseline and layers, in seconds.

    Parameters
    ----------
    checkpoint : Checkpoint
    contexts : list of TokenContext
    heads : dict
        Softmax layer to the number of KV heads that get a curve.
    settings : dict
        ratios, baseline, minimum_keys, fit, max_queries.

    Returns
    -------
    dict
        seconds, jobs, and the measured parts of the largest context.
    """
    kinds = cache_kinds(checkpoint)
    depth, softmax = len(kinds), [i for i, kind in enumerate(kinds) if kind == "softmax"]
    kv_heads = {i: layer_of(checkpoint, i).key_heads for i in softmax}
    largest = max(contexts, key=lambda c: len(c.article))

    def counts(context):
        return [keys_at(r, len(context.article), settings["minimum_keys"]) for r in settings["ratios"]]

    def baseline(context):
        return keys_at(settings["baseline"], len(context.article), settings["minimum_keys"])

    cost = parts(checkpoint, largest, counts(largest), baseline(largest), settings)
    total = jobs = 0
    for context in contexts:
        live = sum(len(item.live) for item in context.items)
        answers = sum(len(item.targets) for item in context.items)
        relative = len(context.article) / len(largest.article)
        variants = len(set(counts(context)) - {baseline(context)})
        reading = (len(context.ids) + len(context.repeat) + len(context.article)) * cost["reading"]
        total += depth * (cost["load"] + reading * 1.5)  # the second reading attends to the first as well
        total += (
            depth * (cost["load"] + 3 * live * cost["token"]) + sum(kv_heads.values()) * cost["baseline"] * relative
        )
        for layer, number in heads.items():
            rows = 1 + number * variants
            above = depth - layer
            total += START + above * (cost["load"] + rows * live * cost["token"]) + rows * answers * cost["head"]
            total += number * cost["compaction"] * relative**2
        jobs += 2 + len(heads)
    return {"seconds": total, "jobs": jobs, "parts": cost}


def sentence(found, heads, ratios, contexts, items):
    """Return the forecast in one line."""
    minutes = found["seconds"] / 60
    return (
        f"forecast: {heads} heads x {ratios} ratios on {contexts} context{'s' if contexts != 1 else ''} with {items} "
        "items, "
        f"{found['jobs']} jobs: about {minutes:.1f} minutes of processor time"
    )
