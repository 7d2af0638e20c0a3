"""Write the baseline cache of one text and transition."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.baseline import measure_baseline

    measure_baseline(a.checkpoint, a.trace, a.layer, a.output, {"code": a.code})


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--trace", type=Path, required=True, help="trace of the text")
    p.add_argument("--layer", type=int, required=True, help="source layer")
    p.add_argument("--code", required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
