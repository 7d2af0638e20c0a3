"""Measure the workflow's speed and print one table.

    envs/run python workflow/benchmarks/run.py [study transition overhead growth scale]

Everything is written below `--work` (10 GB, most of it a checkpoint of Qwen3.5-2B's size and its caches). `transition`
needs the results of `study` and the environment that README.md beside this file describes.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import floor
import numpy as np
from studies import KINDS, REPOSITORY, TINY, checkpoint, layer_types, prepare, snakemake

TEXTS = REPOSITORY / "resources/texts/fresh_samples.json"
PEERS = Path(__file__).with_name("peers.py")


def study(a):
    """(a) The rehearsal study against its matrix products."""
    model = checkpoint(a.work / "rehearsal-2b")
    folder = prepare(a.work / "study", model, TEXTS, 32)
    planned = snakemake(folder, "--dry-run", "concentration")  # the weights' fingerprint is taken once, then remembered
    before = floor.machine(model, a.cores)
    run = snakemake(folder, f"-j{a.cores}", "concentration")
    after = floor.machine(model, a.cores)
    rates = np.mean([before, after], axis=0)
    flops, read = floor.products(folder, model)
    least, products = floor.seconds(flops, read, rates), floor.seconds(flops, 0, rates)
    count, forwards = len(run.jobs["single"]), floor.forwards(folder)
    record = {"cpu": run.cpu, "transitions": count, "forwards": forwards}
    (a.work / "study.json").write_text(json.dumps(record))
    used = {kind: sum(job[1] for job in run.jobs[kind]) for kind in KINDS}
    peak = {kind: max(job[2] for job in run.jobs[kind]) for kind in KINDS}
    speed = " and ".join(f"{rate[0, 1] / 1e9:.0f}" for rate in (before, after))
    yield "first planning, with the fingerprint of 4.5 GB of weights", f"{planned.cpu:.0f} CPU s", ""
    yield (
        f"whole command at -j {a.cores}, {count} transitions of texts",
        f"{run.seconds:.0f} s, {run.cpu:.0f} CPU s",
        "",
    )
    yield "floor: products, and reading the weights once a job", f"{least[0]:.0f} s, {least[1]:.0f} CPU s", ""
    yield (
        "study / floor",
        f"**{run.seconds / least[0]:.2f}** in time, **{run.cpu / least[1]:.2f}** in CPU time",
        "<= 1.5",
    )
    yield "rate of the products on one core, before and after", f"{speed} GFLOP/s", ""
    yield "reading's share of the floor", f"{1 - products[1] / least[1]:.0%}", ""
    yield "CPU seconds of the jobs by stage", ", ".join(f"{k} {v:.0f}" for k, v in used.items()), ""
    yield "of them the products", ", ".join(f"{k} {v / rates[0, 1]:.0f}" for k, v in flops.items()), ""
    yield "largest memory of a job by stage", ", ".join(f"{k} {v:.0f} MB" for k, v in peak.items()), "<= 1500 MB"
    yield "Snakemake itself", f"{run.scheduler_cpu:.0f} CPU s, {run.scheduler_mb:.0f} MB", ""


def transition(a):
    """(b) One transition against interventions on the whole model."""
    small = checkpoint(a.work / "small", layer_types(6), **TINY)
    folder = prepare(a.work / "small-study", small, 1, 12)
    snakemake(folder, f"-j{a.cores}", "concentration")
    results = folder / "results/benchmark"
    pairs = [str(results / kind / "t000" / f"L{i:02d}.nc") for i in (1, 2, 3) for kind in ("single", "joint")]
    same = peers(a, "check", small, *pairs)
    del same["versions"]
    for name, found in same.items():
        yield (
            f"{name}: all numbers of three small transitions, {found['forwards']} forwards",
            f"{found['worst']:.3f} of the tolerance",
            "<= 1",
        )
        if found["worst"] > 1:
            raise SystemExit(f"{name} does not give the same numbers")
    record = json.loads((a.work / "study.json").read_text())
    own = record["cpu"] / record["transitions"]
    yield "the study, everything included, for each transition of a text", f"{own:.2f} CPU s", ""
    first = next(iter(sorted((a.work / "study/results/benchmark/single").glob("*/L00.nc"))))
    times = peers(a, "time", a.work / "rehearsal-2b", str(first), "--batch", "16")
    del times["versions"]
    forwards = record["forwards"]
    for name, found in times.items():
        stopped = float(np.mean(list(found["stopped"].values())))
        rows = [("whole model", found["whole"], 40), ("stopping after the recipient", stopped, 20)]
        if "batched" in found:
            rows.append(("whole model, 16 sequences at once", found["batched"], None))
        for what, each, target in rows:
            goal = f">= {target}" if target else ""
            ratio = each * forwards / own
            yield f"{name}, {what}: {each:.2f} CPU s a forward pass, {forwards:.0f} of them", f"**{ratio:.0f} x**", goal


def peers(a, *arguments):
    """Run peers.py in its own environment and return what it prints."""
    run = subprocess.run([a.peers, PEERS, *arguments], stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise SystemExit(f"peers.py failed in {a.peers}; README.md beside it says how its environment is made")
    return json.loads(run.stdout.splitlines()[-1])


def overhead(a):
    """(c) What a job costs beyond its arithmetic: a model so small that it has none."""
    model = checkpoint(a.work / "tiny-24", layer_types(24), **TINY)
    folder = prepare(a.work / "overhead", model, 4, 12)
    run = snakemake(folder, f"-j{a.cores}", "concentration")
    jobs = run.cpu - run.scheduler_cpu
    yield (
        f"CPU of {run.count} jobs of a tiny model, everything but Snakemake's own process",
        f"{jobs / run.count:.3f} s a job",
        "<= 0.1 s",
    )
    yield "Snakemake's own process", f"{run.scheduler_cpu / run.count:.3f} s a job", ""
    run = snakemake(
        prepare(a.work / "overhead", model, 1, 12), f"-j{a.cores}", "concentration", HEAD_INFLUENCE_SERVER=""
    )
    yield (
        f"CPU of {run.count} such jobs by ordinary starts",
        f"{(run.cpu - run.scheduler_cpu) / run.count:.3f} s a job",
        "",
    )


def growth(a):
    """(d) Growth with tokens (layers of full size), and with texts and layers (tiny ones)."""
    wide = checkpoint(a.work / "wide-3", ["linear_attention", "linear_attention", "full_attention"])
    for tokens in (32, 128, 512):
        run = snakemake(prepare(a.work / "tokens", wide, 1, tokens), "-j1", "concentration")
        parts = [f"{kind} {sum(job[0] for job in run.jobs[kind]) / tokens * 1e3:.1f} ms" for kind in KINDS[:4]]
        peak = max(job[2] for kind in KINDS for job in run.jobs[kind])
        yield (
            f"{tokens} tokens, two transitions at full size: for each token; largest memory of a job",
            f"{', '.join(parts)}; {peak:.0f} MB",
            "",
        )
    for texts, layers in ((2, 8), (8, 8), (2, 32), (8, 32)):
        model = checkpoint(a.work / f"tiny-{layers}", layer_types(layers), **TINY)
        run = snakemake(prepare(a.work / "growth", model, texts, 12), f"-j{a.cores}", "concentration")
        yield (
            f"{texts} texts x {layers - 1} transitions, tiny: {run.count} jobs",
            f"{run.seconds:.1f} s, {run.cpu / run.count:.3f} CPU s a job",
            "",
        )


def scale(a):
    """(e) 3,780 jobs."""
    model = checkpoint(a.work / "tiny-64", layer_types(64), **TINY)
    folder = prepare(a.work / "scale", model, 20, 12)
    start = time.perf_counter()
    snakemake(folder, "--dry-run", "concentration")
    planning = time.perf_counter() - start
    run = snakemake(folder, f"-j{a.cores}", "concentration")
    table = run.jobs["concentration"][0]
    yield "20 texts x 63 transitions, tiny: planning (dry run)", f"{planning:.1f} s", "seconds"
    yield f"the run: {run.count} jobs", f"{run.seconds:.0f} s, {run.seconds / run.count * 1e3:.0f} ms a job", ""
    yield (
        "CPU: jobs; Snakemake's own process",
        f"{(run.cpu - run.scheduler_cpu) / run.count:.3f} s a job; {run.scheduler_cpu / run.count:.3f} s a job",
        "",
    )
    yield (
        "memory: Snakemake's own process; aggregation",
        f"{run.scheduler_mb:.0f} MB; {table[2]:.0f} MB in {table[0]:.1f} s",
        "",
    )
    start = time.perf_counter()
    snakemake(folder, "--dry-run", "concentration")
    yield "finding that nothing is left to do", f"{time.perf_counter() - start:.1f} s", "seconds"


SECTIONS = {"study": study, "transition": transition, "overhead": overhead, "growth": growth, "scale": scale}


def main():
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[], help="all by default")
    p.add_argument("--work", type=Path, default=REPOSITORY / ".cache/benchmarks", help="folder for what is measured")
    p.add_argument("--cores", type=int, default=2)
    p.add_argument(
        "--peers", default=REPOSITORY / ".venv-benchmarks/bin/python", help="Python of the other environment"
    )
    a = p.parse_args()
    a.work = a.work.resolve()
    print("| measured | value | target |\n| --- | --- | --- |")
    for name in a.sections or SECTIONS:
        print(f"| **{name}**: {SECTIONS[name].__doc__} | | |")
        for row in SECTIONS[name](a):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
