"""Whole studies of tiny checkpoints, measured by the stages and carried on to findings, figures and report."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import models_tiny as tiny
from head_influence.baseline import measure_baseline
from head_influence.checkpoint import Checkpoint
from head_influence.control_weights import write_permuted, write_random
from head_influence.effects import measure_joint, measure_single
from head_influence.explorer import write_explorer
from head_influence.families import layer_count
from head_influence.figures import draw_all
from head_influence.findings import measure_findings
from head_influence.identity import measure_identity
from head_influence.report import write_report
from head_influence.summary import load_run
from head_influence.table import measure_concentration
from head_influence.tables import write_tables
from head_influence.trace import trace, write_trace

FIRST_QUERY = 4
LIMITS = {"vectors": 1e-4, "js": 1e-8}
HOSTILE = "</script><b>&$x^2$"
FOLDER = Path(tempfile.mkdtemp(prefix="head-influence-studies-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

# (id, language, number of tokens, first strings); the rest of the strings are letters
TEXTS = (
    ("first", HOSTILE, 12, ("The", " ", "$a$", "</script>", "\n", "雾", "雾", "")),
    ("second", "zh", 10, ("雾", "\U0001f642", "<b>", "\t")),
    ("third", "en", 11, ()),
    *((f"further{i}", "en", 6, ()) for i in range(6)),
)


def strings_of(count, first):
    """Strings of a text's tokens."""
    return [*first, *("letters of no meaning"[i % 21] for i in range(len(first), count))][:count]


def measured(checkpoint, name, texts=TEXTS, seed=31000):
    """Measure a study into FOLDER/results/`name`; return that folder."""
    folder = FOLDER / "results" / name
    cache = FOLDER / "cache" / name
    transitions = layer_count(Checkpoint(checkpoint)) - 1
    singles, joints = [], []
    for i, (text, language, count, first) in enumerate(texts):
        ids = tiny.token_ids(count, seed=i)
        records, last = trace(Checkpoint(checkpoint), ids)
        attributes = {
            "text": text, "language": language, "text_sha256": "0" * 64, "tokens": count, "model": "a <model>",
            "revision": "", "fingerprint": "f" * 16, "code": "tests",
        }  # fmt: skip
        write_trace(cache / text, records, last, ids, strings_of(count, first), attributes)
        for j in range(transitions):
            made = {part: cache / text / f"{part}{j}.nc" for part in ("baseline", "changes")}
            single, joint = (folder / kind / text / f"L{j:02d}.nc" for kind in ("single", "joint"))
            own = {"study": name, "code": "tests"}
            layers = (cache / text / f"L{layer:02d}.nc" for layer in (j, j + 1))
            measure_baseline(checkpoint, *layers, made["baseline"], {"code": "tests"})
            measure_single(checkpoint, made["baseline"], single, made["changes"], own)
            measure_joint(checkpoint, made["baseline"], single, made["changes"], joint, seed, i, own)
        singles.append([folder / "single" / text / f"L{j:02d}.nc" for j in range(transitions)])
        joints.append([folder / "joint" / text / f"L{j:02d}.nc" for j in range(transitions)])
    names = [text for text, *_ in texts]
    own = {"study": name, "code": "tests"}
    measure_concentration(singles, folder / "concentration.nc", names, LIMITS, own | {"small_total": LIMITS})
    measure_identity(singles, folder / "identity.nc", names, FIRST_QUERY, own)
    measure_findings(folder / "concentration.nc", folder / "identity.nc", joints, folder / "findings.nc", own)
    write_tables(load_run(FOLDER / "results", name), folder / "tables")
    return folder


@cache
def study(checkpoint="hybrid", controls=True, count=3):
    """A study of one of the tiny checkpoints with its findings: folder, and runs as (name, control)."""
    name = f"{checkpoint}-{count}{'' if controls else '-alone'}".replace("_", "-")
    folder = measured(tiny.checkpoint(checkpoint), name, TEXTS[:count])
    runs = [(name, "")]
    if controls:
        source = Checkpoint(tiny.checkpoint(checkpoint))
        for control, write in (("random", write_random), ("permuted", write_permuted)):
            weights = FOLDER / "checkpoints" / f"{name}-{control}"
            write(source, 0, weights)
            measured(weights, f"{name}-{control}0", TEXTS[:count])
            runs.append((f"{name}-{control}0", control))
    return folder, tuple(runs)


@cache
def reported(checkpoint="hybrid", controls=True, count=3):
    """The same with figures, explorer and report."""
    folder, runs = study(checkpoint, controls, count)
    draw_all(folder.parent, runs, folder / "figures", 80)
    write_explorer(folder.parent, folder.name, folder / "explorer.html")
    write_report(folder.parent, runs, folder / "report.html", {"study": HOSTILE})
    return folder, runs
