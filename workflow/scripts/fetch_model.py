"""Fetch a model with the hub's own client (HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE count)."""

import sys
from pathlib import Path

from head_influence.console import parser, progress, run


def main(a):
    from head_influence.fetch import fetch
    from head_influence.hub import Place

    def say(line):
        print(line, file=sys.stderr, flush=True)
        progress(a.log, line)

    fetch(Place("hub", a.output.parent, a.model, a.revision), say)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--model", required=True, help="owner/name")
    p.add_argument("--revision", help="branch, tag or commit; without it the hub's main branch")
    p.add_argument("output", type=Path, help="config.json of the study's folder of links")
    run(main, p.parse_args())
