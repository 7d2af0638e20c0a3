"""What the command-line programs of the curves have in common: the options that say which context of which model."""

import json
from pathlib import Path

from head_influence.console import parser


def context_parser(description):
    """Return an argument parser with the options of a program that works on one context."""
    p = parser(description)
    p.add_argument("--study", required=True)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--model", required=True, help="the model's name in the settings")
    p.add_argument("--revision", default="")
    p.add_argument("--fingerprint", required=True)
    p.add_argument("--context", required=True, help="id of the context")
    p.add_argument("--context-sha256", required=True)
    p.add_argument("--reading", type=json.loads, required=True, help="JSON: contexts file and prompt")
    p.add_argument("--answers", type=Path, help="JSON with token ids that replace the reference answers")
    p.add_argument(
        "--scoring", type=json.loads, default={}, help="JSON: fit, baseline, minimum_keys, max_queries, seed"
    )
    p.add_argument("--code", required=True)
    return p


def opened(a):
    """Return the context as tokens."""
    from head_influence.curve_study import open_context

    return open_context(a.reading, a.context, a.context_sha256, a.checkpoint, a.answers)


def attributes(a):
    """Return the attributes that say what a file is made from."""
    from head_influence.provenance import environment

    return {
        "study": a.study,
        "context": a.context,
        "context_sha256": a.context_sha256,
        "model": a.model,
        "revision": a.revision,
        "fingerprint": a.fingerprint,
        "code": a.code,
        "settings": {"reading": a.reading, "scoring": a.scoring},
        "packages": environment(),
    }
