"""Measure what the parts of a study of curves cost here, and print a forecast of the whole."""

import json
import sys
from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.checkpoint import Checkpoint
    from head_influence.curve_forecast import forecast, sentence
    from head_influence.curve_study import CurveStudy
    from head_influence.json_files import write_json

    study = CurveStudy(a.settings, a.checkpoint)
    contexts, coarse = list(study.tokens.values()), study.heads is None
    heads = study.kv_heads if coarse else {layer: len(chosen) for layer, chosen in study.heads.items()}
    found = forecast(Checkpoint(a.checkpoint), contexts, heads, study.settings)
    line = sentence(
        found, sum(heads.values()), len(study.settings["ratios"]), len(contexts), sum(len(c.items) for c in contexts)
    )
    line += "; the coarse pass will leave fewer heads" if coarse else ""
    print(f"head-influence: {line}", file=sys.stderr, flush=True)
    write_json(a.output, found | {"forecast": line})


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--settings", type=json.loads, required=True, help="JSON: the curves part of the settings")
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
