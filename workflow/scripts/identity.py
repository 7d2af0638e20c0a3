"""Which source heads dominate in a study, and how stable they are."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.identity import measure_identity

    folder = a.output.parent / "single"
    singles = [[folder / text / f"L{layer:02d}.nc" for layer in range(a.transitions)] for text in a.texts]
    measure_identity(singles, a.output, a.texts, a.first_query, {"study": a.study, "code": a.code})


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--study", required=True)
    p.add_argument("--texts", nargs="+", required=True, help="ids of the texts, in order")
    p.add_argument("--transitions", type=int, required=True)
    p.add_argument("--first-query", type=int, required=True, help="first query of the primary observations")
    p.add_argument("--code", required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
