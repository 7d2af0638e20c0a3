"""Write down what a study was made from."""

import json
from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.json_files import write_json
    from head_influence.record import record

    codes = dict(code.split("=") for code in a.codes)
    found = record(json.loads(a.settings), a.checkpoint, a.revision, a.fingerprint, a.cache, codes, a.output.parent)
    write_json(a.output, found)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--settings", required=True, help="all of them, as JSON")
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--revision", default="")
    p.add_argument("--fingerprint", required=True)
    p.add_argument("--cache", type=Path, required=True, help="where hashes of files are remembered")
    p.add_argument("--codes", nargs="+", required=True, help="stage=version")
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
