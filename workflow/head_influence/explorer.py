"""The explorer: one self-contained page to look at the single removals' raw effects, token by token."""

import base64
import json
import zlib
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from head_influence import StudyError, files
from head_influence.ablation import SCENARIOS
from head_influence.concentration import COMPONENTS, shares
from head_influence.distributions import kind_name
from head_influence.identity import read_influence
from head_influence.ledger import shown
from head_influence.markup import table
from head_influence.report import middle, template
from head_influence.summary import load_run

LARGEST = 20 << 20  # bytes of the page; above it the page has the summary only
STEPS = 65535  # a share is stored in 16 bits
SETS = SCENARIOS[:3]  # the whole set needs no picture


def packed(influence, removed):
    """Pack one text and transition.

    Parameters
    ----------
    influence : array (C, H, T, R)
    removed : array of bool (sets, H, T, R)

    Returns
    -------
    bytes
        zlib stream of the shares (C, H, T, R) as 16-bit fractions, the totals (C, T, R) as 32-bit floats, NaN where the
        component does not exist, and the sets (sets, H, T, R) as bits, each from the least significant on; little
        endian. A share above zero is stored as at least one step, so that an exact zero can be told.
    """
    p = np.stack([shares(d) for d in influence])
    steps = np.where(p > 0, np.maximum(np.rint(p * STEPS), 1), 0)
    totals = influence.sum(axis=1)
    parts = [steps.astype("<u2"), totals.astype("<f4"), np.packbits(removed.astype(bool).ravel(), bitorder="little")]
    return zlib.compress(b"".join(part.tobytes() for part in parts), 6)


def gathered(folder, texts, transitions, limit):
    """Pack all texts and transitions, or return None as soon as they do not fit in `limit` bytes of base64."""
    listed, layers, blocks, size = [], [], {}, 0
    for x, text in enumerate(texts):
        for j in range(transitions):
            name = f"L{j:02d}.nc"
            influence, data, attributes = read_influence(folder / "single" / text / name, 0, ["token"])
            removed = files.read(folder / "joint" / text / name, ["removed"])[0]["removed"][: len(SETS)]
            block = base64.b64encode(packed(influence, removed)).decode()
            size += len(block)
            if size > limit:
                return None
            blocks[f"{x}/{j}"] = {"shape": list(influence.shape[1:]), "data": block}
            if x == 0:
                layers.append(kind_name(attributes["source_kind"], attributes["recipient_kind"]))
        listed.append({"id": text, "tokens": [str(token) for token in data["token"]]})
    return {"texts": listed, "kinds": layers, "blocks": blocks}


def script_json(content):
    """JSON that can stand inside a script element whatever the strings in it are."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def summary_table(run):
    """The primary summary of a study too large to embed."""
    rows = []
    for j, kind in enumerate(run.kinds):
        for c, component in enumerate(COMPONENTS):
            n = int(run.observations("transition", component)[j, 0])
            if n:
                values = [middle(run.distribution("transition", component, m)[j]) for m in ("n_eff_fraction", "top1")]
                modal = str(int(run.identity["modal_head"][j, c]))
                share = shown(float(run.identity["modal_share"][j, c]))
                rows.append([str(j), kind, component, f"{n:,}", *values, modal, share])
    columns = [
        "transition",
        "kind",
        "component",
        "n",
        "N<sub>eff</sub>/H",
        "largest share",
        "modal head",
        "its frequency",
    ]
    return table(columns, rows, "Medians with quartiles over observations.", "primary")


def write_explorer(folder, study, output, limit=LARGEST):
    """Write the explorer of a study.

    Parameters
    ----------
    folder : path
        The results folder.
    study : str
    output : path
    limit : int
        Largest size of the embedded data in bytes.
    """
    run = load_run(folder, study)
    data = gathered(Path(folder) / study, run.texts, len(run.kinds), limit)
    css, heading = template("report.css"), {"study": escape(study)}
    if data is None:
        note = (
            f"<p class='limit'>The raw effects of this study ({len(run.texts)} texts, {len(run.kinds)} transitions) "
            f"are larger than {limit / (1 << 20):.0f} MB and are not embedded. This is the primary summary; the raw "
            "files are in the folders single/ and joint/ beside this page.</p>"
        )
        page = Template(template("explorer_summary.html")).substitute(
            heading, css=css, script=template("report.js"), body=note + summary_table(run)
        )
    else:
        data |= {
            "components": list(COMPONENTS), "sets": list(SETS), "first_query": int(run.attributes["first_query"]),
            "steps": STEPS,
        }  # fmt: skip
        page = Template(template("explorer.html")).substitute(
            heading, css=css + template("explorer.css"), script=template("explorer.js"), data=script_json(data)
        )
    try:
        Path(output).write_text(page, encoding="utf-8")
    except OSError as error:
        raise StudyError(f"{output}: cannot be written ({error})") from error
