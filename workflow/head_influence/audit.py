"""The audit of a finished study: every file looked at again, and a seeded sample of its numbers made anew.

The sample goes through the whole real model with hooks (`recompute`), which shares no arithmetic with the stages.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from head_influence import PROTOCOL, StudyError, files
from head_influence.audit_sample import check_sample, choose
from head_influence.invariants import FLOOR, VECTORS, check_concentration, check_joint, check_single
from head_influence.json_files import read_json
from head_influence.layout import checkpoint_files
from head_influence.recompute import WholeModel

FORWARD = 1e-4  # limit of the whole forward pass's comparison, of the largest value


class Items:
    """The audit's checks: of each the worst value, its limit, where it was found, and how often it was made."""

    def __init__(self):
        self.rows = {}
        self.group = ""

    def add(self, name, value, limit, where):
        """Make a check; anything but value <= limit fails it."""
        value = math.inf if math.isnan(value) else float(value)
        row = self.rows.setdefault((self.group, name), {"group": self.group, "name": name, "value": -math.inf})
        row["limit"], row["checks"] = limit, row.get("checks", 0) + 1
        if value > row["value"]:
            row |= {"value": value, "where": where}

    def failed(self):
        """Checks that failed."""
        return [row for row in self.rows.values() if row["value"] > row["limit"]]


@dataclass
class Expected:
    """What the files of a study must say they were made from.

    Attributes
    ----------
    study, fingerprint : str
    results : Path
        Folder with single/, joint/ and concentration.nc.
    checkpoint : path
    texts : list of (Text, list of int, list of str)
        Each with its token ids and what they cover.
    codes : dict
        Stage (trace, baseline, single, joint, concentration) to code version.
    random_seed : int
    small_total : dict
    whole_forward : bool
        Whether the whole model may be in memory.
    """

    study: str
    fingerprint: str
    results: Path
    checkpoint: Path
    texts: list
    codes: dict
    random_seed: int
    small_total: dict
    whole_forward: bool

    def path(self, kind, text, layer):
        """File of a text and transition."""
        return Path(self.results) / kind / text / f"L{layer:02d}.nc"


def check_attributes(items, path, attributes, expected):
    """Provenance and controls that a file states."""
    items.group = "provenance"
    for key, value in expected.items():
        found = attributes.get(key, "nothing")
        if isinstance(value, dict) and isinstance(found, str):
            value = json.dumps(value, sort_keys=True)
        wrong = bool(found != value)
        where = f"{path}: {key} is {found!s}, expected {value!s}" if wrong else str(path)
        items.add(f"attribute {key}", wrong, 0, where)
    items.group = "control"
    for key, stated in attributes.items():
        if key.startswith("control_"):
            value, limit = json.loads(stated) if isinstance(stated, str) else stated
            items.add(key.removeprefix("control_").replace("_", " "), value, limit, str(path))


def check_files(items, expected, transitions, progress):
    """Look at every file of the study; return its baseline caches, (text, layer) to path."""
    caches = {}
    table, attributes = files.read(expected.results / "concentration.nc")
    common = {"protocol": PROTOCOL, "study": expected.study}
    own = {"code": expected.codes["concentration"], "stage": "concentration", "small_total": expected.small_total}
    check_attributes(items, expected.results / "concentration.nc", attributes, common | own)
    items.group = "invariant"
    names = [text.id for text, _, _ in expected.texts]
    labels = table["text"].tolist() == names and table["transition"].tolist() == list(range(transitions))
    labels &= table["component"].tolist() == [*VECTORS, "qkv", "js"]
    items.add("concentration: labels", not labels, 0, "concentration.nc")
    for i, (text, ids, strings) in enumerate(expected.texts):
        progress(f"looking at the files of text {text.id}")
        for layer in range(transitions):
            single_path, joint_path = (expected.path(kind, text.id, layer) for kind in ("single", "joint"))
            single, of_single = files.read(single_path)
            joint, of_joint = files.read(joint_path)
            cache = Path(str(of_single.get("baseline")))
            caches[text.id, layer] = cache
            baseline, of_cache = files.read(cache)
            made_from = {
                "text": text.id, "text_sha256": text.sha256, "tokens": len(ids), "fingerprint": expected.fingerprint,
                "source_layer": layer, "recipient_layer": layer + 1, "protocol": PROTOCOL,
                "source_kind": of_cache.get("source_kind"), "recipient_kind": of_cache.get("recipient_kind"),
            }  # fmt: skip
            under_floor = int((single["baseline_norm"] < FLOOR).sum())
            for path, found, stage, further in (
                (cache, of_cache, "baseline", {}),
                (single_path, of_single, "single", common | {"baseline_norms_under_floor": under_floor}),
                (joint_path, of_joint, "joint", common | {"baseline": str(cache), "sample_index": i,
                                                          "random_seed": expected.random_seed}),
            ):  # fmt: skip
                check_attributes(
                    items, path, found, made_from | {"stage": stage, "code": expected.codes[stage]} | further
                )
            softmax = of_single["recipient_kind"] == "softmax"
            items.group = "invariant"
            for path, data in ((cache, baseline), (single_path, single), (joint_path, joint)):
                same = data["token_id"].tolist() == list(ids) and data["token"].tolist() == list(strings)
                items.add("tokens as the text gives", not same, 0, str(path))
            check_single(items, str(single_path), single, softmax)
            seed = expected.random_seed + 100 * i + layer
            check_joint(items, str(joint_path), joint, single, softmax, seed)
            where = f"concentration.nc, text {text.id}, transition {layer}"
            row = {name: values[i, layer] for name, values in table.items() if values.ndim == 5}
            check_concentration(items, where, row, single, expected.small_total)
            stated = [table[n][layer] for n in ("source_heads", "source_kind", "recipient_kind")]
            right = [len(single["js"]), of_single["source_kind"], of_single["recipient_kind"]]
            items.add("concentration: heads and kinds", stated != right, 0, where)
            same = table["baseline_norms_under_floor"][i, layer] == under_floor
            items.add("concentration: norms under the floor", not same, 0, where)
    return caches


def check_trace(items, expected, model, trace):
    """First text: where the trace is from, and, if the model is in memory, its pass against the model's own."""
    text, ids, _ = expected.texts[0]
    top, attributes = files.read(trace / "last.nc", ["last"])
    made_from = {"code": expected.codes["trace"], "fingerprint": expected.fingerprint, "text_sha256": text.sha256}
    check_attributes(items, trace / "last.nc", attributes, made_from)
    if not expected.whole_forward:
        return
    items.group = "whole forward pass"
    baseline, _, logits = model.observe(ids)
    for layer, whole in enumerate(baseline):
        found = files.read(trace / f"L{layer:02d}.nc", ["residual_in"])[0]["residual_in"]
        error = scaled(found, whole["residual_in"])
        items.add("residual stream of the streaming pass", error, FORWARD, f"text {text.id}, layer {layer}")
    error = scaled(model.logits(top["last"]), logits)
    items.add("logits of the streaming pass", error, FORWARD, f"text {text.id}")


def scaled(found, expected):
    """Largest difference over the largest expected value."""
    return float(np.abs(found - expected).max()) / (float(np.abs(expected).max()) or 1.0)


def content_fingerprint(folder):
    """Identity of a checkpoint, every byte of it read anew."""
    digest = hashlib.sha256()
    for path in checkpoint_files(folder):
        with Path(path).open("rb") as file:
            digest.update(f"{Path(path).name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def examine(expected, trace, singles, joints, seed, progress):
    """Make all checks of `audit`; return the items and the sample."""
    items = Items()
    progress("reading the checkpoint")
    if expected.whole_forward:
        forward = read_json(expected.results / "whole_forward.json")
        check_attributes(items, expected.results / "whole_forward.json", forward["controls"], {})
    own = content_fingerprint(expected.checkpoint)
    where = f"{expected.checkpoint}: sha256 {own[:16]}, expected {expected.fingerprint}"
    items.group = "provenance"
    items.add("content of the checkpoint", not own.startswith(expected.fingerprint), 0, where)
    model = WholeModel(expected.checkpoint, expected.whole_forward)
    transitions = len(model.model.model.layers) - 1
    caches = check_files(items, expected, transitions, progress)
    first = expected.texts[0][0].id
    attributes = [files.read(caches[first, layer], [])[1] for layer in range(transitions)]
    kinds = [attributes[0]["source_kind"], *(a["recipient_kind"] for a in attributes)]
    shapes = [files.read(expected.path("single", first, layer), ["js"])[0]["js"].shape for layer in range(transitions)]
    heads = [*(shape[0] for shape in shapes), shapes[-1][2]]
    chosen = choose(expected, kinds, heads, singles, joints, seed)
    check_sample(items, expected, caches, model, chosen, progress)
    check_trace(items, expected, model, trace)
    return items, chosen


def audit(expected, trace, singles, joints, seed, progress=lambda line: None):
    """Audit a study.

    Parameters
    ----------
    expected : Expected
    trace : Path
        Folder with the trace of the first text.
    singles, joints : int
        Size of the recomputed sample.
    seed : int
        Of its choice.
    progress : function of str

    Returns
    -------
    dict
        study; items: list of {group, name, value, limit, where, checks}, value the worst of so many checks; sample:
        list of {text, transition, removal, head}; seed; whole_forward.

    Raises
    ------
    StudyError
        For a file that is not as it was written, and naming the first check that failed.
    """
    items, chosen = examine(expected, trace, singles, joints, seed, progress)
    for row in items.rows.values():
        progress(f"{row['group']}: {row['name']}: {row['value']:.3g}, limit {row['limit']:.3g} ({row['where']})")
    if failed := items.failed():
        row, more = failed[0], f"; {len(failed) - 1} more checks failed" if len(failed) > 1 else ""
        raise StudyError(
            f"audit of {expected.study} failed: {row['group']}: {row['name']}: {row['value']:.3g}, limit "
            f"{row['limit']:.3g} ({row['where']}){more}"
        )
    names = ("text", "transition", "removal", "head")
    return {
        "study": expected.study,
        "items": list(items.rows.values()),
        "sample": [dict(zip(names, c, strict=True)) for c in chosen],
        "seed": seed,
        "whole_forward": expected.whole_forward,
    }
