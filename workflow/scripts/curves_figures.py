"""Draw the figures of the head influence curves."""

import json
from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.curve_budgets import read_comparison
    from head_influence.curve_figures import draw_curves
    from head_influence.curve_table import read_table

    budgets = read_comparison(a.budgets) if a.budgets else None
    draw_curves(read_table(a.table), a.model, a.output, a.dpi, a.heads, a.published, budgets, a.seed)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--table", type=Path, required=True)
    p.add_argument("--budgets", type=Path, help="comparison of the budgets (CSV)")
    p.add_argument("--model", required=True)
    p.add_argument("--heads", nargs="*", help="heads of the line chart; chosen by their effect otherwise")
    p.add_argument("--published", type=json.loads, help="JSON: head to readings of a published figure")
    p.add_argument("--dpi", type=int, default=150)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("output", type=Path, help="folder")
    run(main, p.parse_args())
