"""Compare the layer-by-layer trace of a text with the whole model's own forward pass."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence import files
    from head_influence.checkpoint import Checkpoint
    from head_influence.controls import control
    from head_influence.json_files import write_json
    from head_influence.trace import whole_forward_error

    traced = files.read_groups(a.trace, [None, *(f"L{i:02d}" for i in range(a.layers))])
    (data, attributes), residuals = traced[0], [layer["residual_in"] for layer, _ in traced[1:]]
    errors = whole_forward_error(Checkpoint(a.checkpoint), data["token_id"], residuals, data["last"])
    checks = {}
    for name, value in errors.items():
        checks |= control(f"text {attributes['text']}", f"whole forward {name}", value, 1e-4)
    write_json(a.output, {"text": attributes["text"], "controls": checks})


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--trace", type=Path, required=True)
    p.add_argument("--layers", type=int, required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
