"""Compact every head of one context to the baseline ratio and score the full, the baseline and the empty cache."""

from pathlib import Path

from head_influence.console import run
from head_influence.curve_console import attributes, context_parser, opened


def main(a):
    from head_influence.curves import measure_baseline

    measure_baseline(a.checkpoint, opened(a), a.prefill, a.output, a.scoring, attributes(a))


if __name__ == "__main__":
    p = context_parser(__doc__)
    p.add_argument("--prefill", type=Path, nargs="+", required=True, help="one path per layer")
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
