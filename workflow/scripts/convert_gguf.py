"""Convert a .gguf file to a checkpoint folder with float32 safetensors."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.gguf import convert

    convert(a.source, a.output.parent)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--source", type=Path, required=True, help="the .gguf file")
    p.add_argument("output", type=Path, help="config.json of the checkpoint")
    run(main, p.parse_args())
