"""Score one context with all heads compacted together to every planned budget."""

from pathlib import Path

from head_influence.console import run
from head_influence.curve_console import attributes, context_parser, opened


def main(a):
    from head_influence.curve_budgets import try_budgets
    from head_influence.json_files import read_json

    try_budgets(a.checkpoint, opened(a), a.prefill, read_json(a.plan), a.output, a.scoring, attributes(a))


if __name__ == "__main__":
    p = context_parser(__doc__)
    p.add_argument("--prefill", type=Path, nargs="+", required=True, help="one path per layer")
    p.add_argument("--plan", type=Path, required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
