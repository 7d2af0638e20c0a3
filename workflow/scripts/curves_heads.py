"""Pick the KV heads with the largest effect in the coarse pass, on one half of the items."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.curve_table import collect, pick_heads
    from head_influence.json_files import write_json

    layers = len(a.inputs) // len(a.contexts)
    rows = [a.inputs[i * layers : (i + 1) * layers] for i in range(len(a.contexts))]
    write_json(a.output, pick_heads(collect(rows, a.contexts), a.number))


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--contexts", nargs="+", required=True)
    p.add_argument("--inputs", type=Path, nargs="+", required=True, help="coarse files by context, then layer")
    p.add_argument("--number", type=int, required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
