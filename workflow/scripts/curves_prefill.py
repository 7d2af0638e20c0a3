"""Read one context through the model's own modules: one file per layer with keys, values and reference queries."""

from pathlib import Path

from head_influence.console import run
from head_influence.curve_console import attributes, context_parser, opened


def main(a):
    from head_influence.curves import write_prefill

    write_prefill(a.checkpoint, opened(a), a.output, attributes(a))


if __name__ == "__main__":
    p = context_parser(__doc__)
    p.add_argument("output", type=Path, nargs="+", help="one path per layer")
    run(main, p.parse_args())
