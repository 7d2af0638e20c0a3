"""Compare the tried budgets with the uniform one: gains in sample and on held-out items."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.curve_budgets import compare
    from head_influence.curve_table import read_table
    from head_influence.json_files import read_json
    from head_influence.summary import write_table

    write_table(a.output, compare(read_table(a.table), read_json(a.plan), a.runs))


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--table", type=Path, required=True)
    p.add_argument("--plan", type=Path, required=True)
    p.add_argument("--runs", type=Path, nargs="+", required=True, help="one file per context")
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
