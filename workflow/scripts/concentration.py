"""Concentration of every observation of a study."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.table import measure_concentration

    folder = a.output.parent / "single"
    singles = [[folder / text / f"L{layer:02d}.nc" for layer in range(a.transitions)] for text in a.texts]
    limits = {"vectors": a.small_total_vectors, "js": a.small_total_js}
    attributes = {"study": a.study, "small_total": limits, "code": a.code}
    measure_concentration(singles, a.output, a.texts, limits, attributes)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--study", required=True)
    p.add_argument("--texts", nargs="+", required=True, help="ids of the texts, in order")
    p.add_argument("--transitions", type=int, required=True)
    p.add_argument("--small-total-vectors", type=float, required=True)
    p.add_argument("--small-total-js", type=float, required=True)
    p.add_argument("--code", required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
