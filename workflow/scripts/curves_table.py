"""Put every curve of a study in one table, with means, standard errors and the ranking's stability."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.curve_table import collect, stability, write_table

    layers = len(a.inputs) // len(a.contexts)
    rows = [a.inputs[i * layers : (i + 1) * layers] for i in range(len(a.contexts))]
    table = collect(rows, a.contexts)
    write_table(table, a.output, {"stability": stability(table, a.seed), "code": a.code})


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--contexts", nargs="+", required=True)
    p.add_argument("--inputs", type=Path, nargs="+", required=True, help="curve files by context, then layer")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--code", required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
