# The study of a model that is there: what every rule shares, the stages, and the targets.
import shlex

import preload
from head_influence import claims

TEXTS = [text.id for text in STUDY.texts]
LAYERS = STUDY.transitions()
# How rules start a program: with its imports loaded already, where a server of this run answers (see launch.py).
# Such a job is no child of its shell command, so `benchmark:` would not see it; each writes a table beside its log.
OWN = f"head_influence.console,head_influence.effects,head_influence.table,head_influence.families.{STUDY.family}"
SERVERS = {
    "numpy": f"numpy,netCDF4,{OWN}",
    "torch": f"numpy,netCDF4,torch,transformers,transformers.models.{STUDY.family}.modeling_{STUDY.family}",
}
LAUNCH = shlex.join([sys.executable, "-I", "-S", str(WORKFLOW / "launch.py")])
SCRIPTS = shlex.quote(str(WORKFLOW / "scripts"))
NUMPY, TORCH = (f"{LAUNCH} {server} {SCRIPTS}" for server in ("numpy", "torch"))


wildcard_constraints:
    study="|".join(map(re.escape, STUDY.variants)),
    text="|".join(map(re.escape, TEXTS)),
    layer=r"\d\d+",


def results(kind, study=STUDY.name):
    """The files of one kind, of every text and transition of a study or one of its controls."""
    return expand("results/{study}/{kind}/{text}/L{layer}.nc", study=study, kind=kind, text=TEXTS, layer=LAYERS)


rule all:
    default_target: True
    input:
        f"results/{STUDY.name}/report.html",
        f"results/{STUDY.name}/provenance.json",


include: "trace.smk"
include: "effects.smk"
include: "concentration.smk"
include: "controls.smk"
include: "audit.smk"
include: "provenance.smk"
include: "small_model.smk"
include: "curves.smk"
include: "findings.smk"
include: "report.smk"


# Targets by stage: `snakemake -j N joint` stops after the joint removals.
rule report:
    input:
        rules.all.input,


rule trace:
    input:
        [trace_of(STUDY.variants[STUDY.name], text) for text in TEXTS],


rule baseline:
    input:
        [baseline_cache(STUDY.variants[STUDY.name], text, layer) for text in TEXTS for layer in LAYERS],


rule single:
    input:
        results("single"),


rule joint:
    input:
        results("joint"),


rule concentration:
    input:
        f"results/{STUDY.name}/concentration.nc",
        results("joint"),
        [rules.whole_forward.output[0]] if STUDY.settings["controls"]["whole_forward"] else [],


MADE_FROM = STUDY.made_from(CODES)
try:
    claims.check_records(STUDY.name, MADE_FROM, [f"results/{STUDY.name}/concentration.nc", results("joint")[0]])
except StudyError as error:
    sys.exit(f"head-influence: {error}")


onstart:
    try:
        claims.claim(STUDY.name, STUDY.folder, STUDY.fingerprint, MADE_FROM)
        claims.check_dates(
            [*rules.trace.input, *rules.baseline.input, *rules.single.input, *rules.concentration.input]
        )
    except StudyError as error:
        sys.exit(f"head-influence: {error}")
    if workflow.local_exec:  # on a cluster a job runs elsewhere, where no server of this process can be
        preload.start(SERVERS)
        # Snakemake's limit of job starts is for clusters. Under it every job that ends adds, for the rest of the run, one
        # more weighing of all ready jobs a second.
        workflow.scheduler.job_rate_limiter = None
