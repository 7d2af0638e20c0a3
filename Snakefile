# How unequal the influence of attention heads is: a study of every adjacent layer transition of a language model.
# Settings are in config.yaml; README.md says what the numbers mean and how to run and rerun parts.
import os
import shlex
import sys
from pathlib import Path

WORKFLOW = Path(workflow.basedir) / "workflow"
sys.path.insert(0, str(WORKFLOW))
# The one place that sets threads: a job uses one, and `-j N` runs N of them.
os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
os.environ.setdefault("HEAD_INFLUENCE_COMMAND", shlex.join(["snakemake", *sys.argv[1:]]))  # for provenance.json
os.environ |= {"PYTHONPATH": str(WORKFLOW), "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}

from head_influence import StudyError, hub
from head_influence.contexts import check_contexts
from head_influence.settings import check_file, check_settings
from head_influence.study import Study

try:
    check_file("config.yaml")
except StudyError as error:
    sys.exit(f"head-influence: {error}")


configfile: "config.yaml"


try:
    check_settings(config)
    if config["curves"] and "curves" in sys.argv:
        check_contexts(config["curves"])  # before a model is fetched for them
    PLACE = hub.locate(config)
    STUDY = None if PLACE.missing() else Study(config, PLACE)
except (StudyError, OSError) as error:
    sys.exit(f"head-influence: {error}")

TARGETS = ["all", "report", "trace", "baseline", "single", "joint", "concentration", "audit", "provenance", "curves"]

if STUDY is None:

    include: "workflow/rules/models.smk"

else:

    include: "workflow/rules/study.smk"


workflow.default_target = "all"  # one set in an included file does not stay
