"""Write the page to look at a study's raw effects."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.explorer import write_explorer

    write_explorer(a.results, a.study, a.output)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--results", type=Path, required=True, help="folder that holds the study's folder")
    p.add_argument("--study", required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
