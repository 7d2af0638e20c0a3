"""Compare each KV head's curve with its influence on the next layer, which the other study measured."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.curve_figures import upstream_chart
    from head_influence.curve_report import figure, page
    from head_influence.curve_table import read_table
    from head_influence.drawing import save, start
    from head_influence.json_files import write_json
    from head_influence.upstream import beside_upstream, upstream_words

    each = len(a.singles) // len(a.layers)
    singles = {layer: a.singles[i * each : (i + 1) * each] for i, layer in enumerate(a.layers)}
    found = beside_upstream(read_table(a.table), singles, a.first_query)
    write_json(a.output, found)
    start()
    save(upstream_chart(found, a.model), a.figure, a.dpi)
    fragment = upstream_words(found) + figure(a.figure.parent, a.figure.name)
    a.page.write_text(page(fragment, f"Cache and upstream influence: {a.study}"), encoding="utf-8")


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--study", required=True)
    p.add_argument("--table", type=Path, required=True)
    p.add_argument("--layers", type=int, nargs="+", required=True, help="source layers")
    p.add_argument("--singles", type=Path, nargs="+", required=True, help="single removals by layer, then text")
    p.add_argument("--first-query", type=int, required=True)
    p.add_argument("--model", required=True)
    p.add_argument("--figure", type=Path, required=True, help="path without its ending")
    p.add_argument("--dpi", type=int, default=150)
    p.add_argument("output", type=Path)
    p.add_argument("page", type=Path)
    run(main, p.parse_args())
