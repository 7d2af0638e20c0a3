"""Remove each source head of one text and transition alone."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.effects import measure_single

    measure_single(a.checkpoint, a.baseline, a.output, a.changes, {"study": a.study, "code": a.code})


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--study", required=True)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--baseline", type=Path, required=True, help="baseline cache")
    p.add_argument("--changes", type=Path, required=True, help="cache file for the change vectors")
    p.add_argument("--code", required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
