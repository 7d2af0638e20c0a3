"""Write the baseline cache of a transition whose removals put a head's mean contribution in its place."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.baseline import replace_by_mean

    replace_by_mean(a.baselines, a.own, a.output, {"code": a.code})


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--baselines", type=Path, nargs="+", required=True, help="of all texts, at this transition")
    p.add_argument("--own", type=Path, required=True, help="the one of the measured text")
    p.add_argument("--code", required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
