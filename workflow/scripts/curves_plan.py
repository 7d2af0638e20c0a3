"""Share the keys of every target budget among the heads: by exchange on their curves, uniformly, and as a pyramid."""

import json
from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.curve_budgets import plan, shares
    from head_influence.curve_table import read_table
    from head_influence.json_files import write_json

    planned = plan(read_table(a.table), a.targets)
    for i, path in enumerate(a.shares):
        write_json(path, shares(planned, i))
    write_json(a.output, planned)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--table", type=Path, required=True)
    p.add_argument("--targets", type=json.loads, required=True, help="JSON list of mean ratios")
    p.add_argument("--shares", type=Path, nargs="+", required=True, help='one path per target, for {"L0H0": share}')
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
