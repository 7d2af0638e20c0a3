"""Write the baseline cache of one text and transition."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.baseline import measure_baseline

    measure_baseline(a.checkpoint, a.source, a.recipient, a.output, {"code": a.code})


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--source", type=Path, required=True, help="trace of the source layer")
    p.add_argument("--recipient", type=Path, required=True, help="trace of the layer after it")
    p.add_argument("--code", required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
