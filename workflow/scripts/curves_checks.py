"""Run the nine checks of the head influence curves on a study's model, files and on a planted model."""

import json
from dataclasses import asdict
from pathlib import Path

from head_influence.console import run
from head_influence.curve_console import context_parser, opened


def main(a):
    from head_influence.curve_checks import check_study, open_bench
    from head_influence.curve_table import read_table
    from head_influence.json_files import write_json

    bench = open_bench(a.checkpoint, opened(a), a.layer, a.prefill, a.baseline, a.scoring)
    checks = check_study(bench, read_table(a.table), a.tokens, a.curve, a.ratios, a.budgets, a.whole_forward)
    write_json(a.output, [asdict(check) for check in checks])


if __name__ == "__main__":
    p = context_parser(__doc__)
    p.add_argument("--layer", type=int, required=True)
    p.add_argument("--prefill", type=Path, required=True, help="of this layer")
    p.add_argument("--baseline", type=Path, required=True)
    p.add_argument("--curve", type=Path, required=True, help="curves of this layer")
    p.add_argument("--table", type=Path, required=True)
    p.add_argument("--tokens", type=int, nargs="+", required=True, help="lengths of the articles, by context")
    p.add_argument("--ratios", type=json.loads, required=True, help="JSON list")
    p.add_argument("--budgets", type=Path, nargs="*", default=[], help="files of the tried budgets, by context")
    p.add_argument("--whole-forward", action="store_true", help="compare with the whole model in memory")
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
