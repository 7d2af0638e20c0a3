"""Write the report's section on head influence curves as a page of its own."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.curve_report import page, read_section

    fragment = read_section(a.output.parent, a.model, a.budgets, seed=a.seed)
    a.output.write_text(page(fragment, f"Head influence curves: {a.study}"), encoding="utf-8")


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--study", required=True)
    p.add_argument("--model", required=True)
    p.add_argument("--budgets", action="store_true", help="the study has budgets")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("output", type=Path, help="in the results folder, beside what the page is made from")
    run(main, p.parse_args())
