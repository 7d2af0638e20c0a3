"""Score one context with every chosen KV head of one layer at every ratio, all other heads at the baseline."""

import json
from pathlib import Path

from head_influence.console import run
from head_influence.curve_console import attributes, context_parser, opened


def main(a):
    from head_influence.curves import heads_of_layer, measure_layer

    names = json.loads(a.heads_file.read_text(encoding="utf-8")) if a.heads_file else a.heads
    measure_layer(
        a.checkpoint, opened(a), a.layer, heads_of_layer(names, a.layer), a.prefill, a.baseline, a.output, a.ratios,
        a.scoring, attributes(a) | {"ratios": a.ratios},
    )  # fmt: skip


if __name__ == "__main__":
    p = context_parser(__doc__)
    p.add_argument("--layer", type=int, required=True)
    p.add_argument("--heads", nargs="+", help="names like L15H2; those of other layers are passed over")
    p.add_argument("--heads-file", type=Path, help="JSON list of such names instead")
    p.add_argument("--ratios", type=json.loads, required=True, help="JSON list")
    p.add_argument("--prefill", type=Path, required=True, help="of this layer")
    p.add_argument("--baseline", type=Path, required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
