"""Write the report of a study beside its controls."""

import json
from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.report import write_report

    runs = [tuple(pair.split("=")) for pair in a.runs]
    write_report(a.results, runs, a.output, a.settings, a.audit, a.whole_forward)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--results", type=Path, required=True, help="folder that holds the runs' folders")
    p.add_argument(
        "--runs", nargs="+", required=True, metavar="NAME=CONTROL", help="the study first, its control empty"
    )
    p.add_argument("--settings", type=json.loads, required=True, help="the merged settings as JSON")
    p.add_argument("--audit", type=Path, help="audit.json")
    p.add_argument("--whole-forward", type=Path, help="whole_forward.json")
    p.add_argument("output", type=Path, help="report.html; the folders figures/ and tables/ are beside it")
    run(main, p.parse_args())
