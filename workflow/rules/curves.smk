# The second study: how the log perplexity of answers changes with one KV head's share of a compacted cache.
import json

from head_influence.curve_study import CurveStudy, head_name, short_hash

CURVE_PAGES = []  # what the report links to
CURVES = None
CURVES_ABSENT = "the settings have no curves part (curves: null)"

if STUDY.settings["curves"] is not None:
    try:
        CURVES = CurveStudy(STUDY.settings["curves"], STUDY.folder)
    except StudyError as error:
        if "curves" in sys.argv:
            sys.exit(f"head-influence: {error}")
        CURVES_ABSENT = str(error)  # the other study does not need them
        print(f"head-influence: without head influence curves: {error}", file=sys.stderr)

if CURVES is None:

    rule curves:
        message:
            "Nothing to do: {CURVES_ABSENT}"
        shell:
            "true"

else:

    include: "curve_stages.smk"
    include: "curve_results.smk"
