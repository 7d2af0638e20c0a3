"""What a results folder belongs to, and what would mislead Snakemake about it without a word."""

import time
from base64 import urlsafe_b64encode
from pathlib import Path

from head_influence import StudyError
from head_influence.json_files import read_json, write_json

RECORDS = Path(".snakemake/metadata")  # Snakemake's own: by which parameters each file was made
CLOCKS_APART = 10.0  # seconds between machines that share a disk


def record_of(name):
    """File that says what the results of study `name` belong to."""
    return Path("results") / name / "study.json"


def read_claim(name):
    """Return what the results folder of a study belongs to, or {} where nothing has been run yet."""
    if not record_of(name).exists():
        return {}
    found = read_json(record_of(name))
    if not isinstance(found, dict):
        raise StudyError(f"{record_of(name)}: not what this workflow writes; delete the file")
    return found


def check_owner(name, folder, fingerprint):
    """Refuse results that were made from another checkpoint: of another name and with other content."""
    owner = read_claim(name)
    if owner and owner.get("checkpoint") != folder and owner.get("fingerprint") != fingerprint:
        raise StudyError(
            f"results/{name} was made from another checkpoint, {owner.get('checkpoint')}, not {folder}; "
            "give this study a name of its own (study: ...)"
        )


def check_records(name, made_from, outputs):
    """Refuse finished results that were made otherwise where Snakemake cannot notice, for lack of its records.

    Parameters
    ----------
    name : str
        Of the study.
    made_from : dict
        What numbers depend on that no path or date shows; JSON values.
    outputs : list of path
        Files whose records are looked for, as Snakemake knows them.
    """
    before = read_claim(name).get("made_from", made_from)
    changed = [key for key in made_from if before.get(key) != made_from[key]]
    for path in outputs:
        if changed and Path(path).exists() and not (RECORDS / urlsafe_b64encode(path.encode()).decode()).exists():
            raise StudyError(
                f"results/{name} was made with other {' and '.join(changed)}, and Snakemake's record of that "
                f"(.snakemake) is not here: give this study a name of its own (study: ...), or delete results/{name}"
            )


def claim(name, folder, fingerprint, made_from):
    """Write down what the results folder of a study belongs to, when a run starts."""
    write_json(record_of(name), {"checkpoint": folder, "fingerprint": fingerprint, "made_from": made_from})


def check_dates(paths):
    """Refuse files from the future: whatever is made from them would look older than they are."""
    now = time.time() + CLOCKS_APART
    late = [path for path in map(Path, paths) if path.exists() and path.stat().st_mtime > now]
    if late:
        more = f" and {len(late) - 1} more" if late[1:] else ""
        raise StudyError(
            f"{late[0]}{more}: dated in the future; if this machine's clock is right, type: "
            f"find {late[0].parents[-2]} -newermt now -exec touch {{}} +"
        )
