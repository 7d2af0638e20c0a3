"""Compare the layer-by-layer trace of a text with the whole model's own forward pass."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence import files
    from head_influence.checkpoint import Checkpoint
    from head_influence.controls import control
    from head_influence.json_files import write_json
    from head_influence.trace import whole_forward_error

    data, attributes = files.read(a.last)
    residuals = [files.read(layer, ["residual_in"])[0]["residual_in"] for layer in a.layers]
    errors = whole_forward_error(Checkpoint(a.checkpoint), data["token_id"], residuals, data["last"])
    checks = {}
    for name, value in errors.items():
        checks |= control(f"text {attributes['text']}", f"whole forward {name}", value, 1e-4)
    write_json(a.output, {"text": attributes["text"], "controls": checks})


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--layers", type=Path, nargs="+", required=True, help="traces of all layers, in their order")
    p.add_argument("--last", type=Path, required=True, help="trace of what follows them")
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
