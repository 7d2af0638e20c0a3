"""What the stages of the concentration study share: controls, inherited attributes, token coordinates."""

import numpy as np

from head_influence import StudyError

INHERITED = (
    "text", "language", "text_sha256", "tokens", "model", "revision", "fingerprint", "replacement",
    "source_layer", "recipient_layer", "source_kind", "recipient_kind", "baseline",
)  # fmt: skip
ONE = "1"  # units of a number without any


def control(where, name, value, limit):
    """Return a control as an attribute; one that fails stops the study with a line that says all about it."""
    if not value <= limit:
        raise StudyError(f"{where}: control failed: {name} is {value:.3g}, limit {limit:.3g}")
    return {f"control_{name.replace(' ', '_')}": [float(value), float(limit)]}


def inherited(attributes):
    """Pick the attributes that a later stage repeats."""
    return {key: attributes[key] for key in INHERITED if key in attributes}


def controls_of(attributes):
    """Pick the controls of a file: name to [value, limit]."""
    return {key.removeprefix("control_"): value for key, value in attributes.items() if key.startswith("control_")}


def exceeds(found, expected):
    """Largest absolute difference over the largest absolute expected value; 0 where both are all zero."""
    error, size = float(np.abs(found - expected).max()), float(np.abs(expected).max())
    return 0.0 if error == 0 else error / size if size else np.inf


def token_coordinates(ids, strings):
    """Return the variables that say which tokens the queries are."""
    return {
        "token_id": (("query",), np.asarray(ids, np.int64), {"long_name": "token id", "units": ONE}),
        "token": (("query",), np.asarray(strings, object), {"long_name": "characters that the token covers"}),
    }
