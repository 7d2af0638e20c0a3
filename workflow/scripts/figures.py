"""Draw figures of a study beside its controls."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.figures import draw_all

    draw_all(a.results, [tuple(pair.split("=")) for pair in a.runs], a.output, a.dpi, a.names)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--results", type=Path, required=True, help="folder that holds the runs' folders")
    p.add_argument(
        "--runs", nargs="+", required=True, metavar="NAME=CONTROL", help="the study first, its control empty"
    )
    p.add_argument("--dpi", type=int, required=True, help="of the PNG files")
    p.add_argument("--names", nargs="+", required=True, help="which figures")
    p.add_argument("output", type=Path, help="folder of the figures")
    run(main, p.parse_args())
