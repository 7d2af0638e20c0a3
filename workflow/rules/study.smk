# The study of a model that is there: what every rule shares, the stages, and the targets.
from contextlib import suppress

TEXTS = [text.id for text in STUDY.texts]
LAYERS = STUDY.transitions()
MODELLING = f"transformers.models.{STUDY.family}.modeling_{STUDY.family}"
# How rules start a program: with its imports loaded already, where the server of this run answers (see preload.py).
# Such a job is no child of its shell command, so `benchmark:` would not see it; each writes a table beside its log.
LAUNCH = f"{sys.executable} -I -S {WORKFLOW}/preload.py run"
NUMPY = f"{LAUNCH} numpy,netCDF4 {WORKFLOW}/scripts"
TORCH = f"{LAUNCH} numpy,netCDF4,torch,transformers,{MODELLING} {WORKFLOW}/scripts"


wildcard_constraints:
    study="|".join(map(re.escape, STUDY.variants)),
    text="|".join(map(re.escape, TEXTS)),
    layer=r"\d\d+",


def start_preload_server():
    """Start the server that forks this run's jobs; without it every job starts as an ordinary program."""
    import subprocess
    import tempfile

    global SERVER
    folder = tempfile.TemporaryDirectory(prefix="head-influence-")
    address = f"{folder.name}/socket"
    command = [sys.executable, "-I", "-S", str(WORKFLOW / "preload.py"), "serve", address]
    # It ends when this end of its standard input closes: with this process, however that ends.
    SERVER = folder, subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    os.environ["HEAD_INFLUENCE_SERVER"] = address


def stop_preload_server():
    """End the server and remove its folder."""
    folder, process = SERVER
    process.stdin.close()
    process.wait()
    with suppress(OSError):
        folder.cleanup()


def results(kind, study=STUDY.name):
    """The files of one kind, of every text and transition of a study or one of its controls."""
    return expand("results/{study}/{kind}/{text}/L{layer}.nc", study=study, kind=kind, text=TEXTS, layer=LAYERS)


rule all:
    default_target: True
    input:
        f"results/{STUDY.name}/report.html",


include: "trace.smk"
include: "effects.smk"
include: "concentration.smk"
include: "controls.smk"
include: "small_model.smk"


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


onstart:
    STUDY.claim()
    start_preload_server()


onsuccess:
    stop_preload_server()


onerror:
    stop_preload_server()
