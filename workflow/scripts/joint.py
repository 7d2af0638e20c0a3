"""Remove input-adaptive sets of source heads of one text and transition together."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.effects import measure_joint

    attributes = {"study": a.study, "code": a.code}
    measure_joint(a.checkpoint, a.baseline, a.single, a.changes, a.output, a.random_seed, a.sample_index, attributes)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--study", required=True)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--baseline", type=Path, required=True, help="baseline cache")
    p.add_argument("--single", type=Path, required=True, help="effects of the single removals")
    p.add_argument("--changes", type=Path, required=True, help="cached change vectors of the single removals")
    p.add_argument("--random-seed", type=int, required=True)
    p.add_argument("--sample-index", type=int, required=True)
    p.add_argument("--code", required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
