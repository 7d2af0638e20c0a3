# Curves: a context read once, every head at the baseline, then one layer after the other.
CURVE_SETTINGS = CURVES.settings
CONTEXTS = [context.id for context in CURVES.contexts]
CURVE_PROGRAMS = [f"scripts.curves_{stage}" for stage in ("answers", "prefill", "baseline", "layer")]
CURVE_CODE = STUDY.code("curves", *CURVE_PROGRAMS)
CURVE_RESULTS = f"results/{STUDY.name}"
READINGS = f"{STUDY.cache}/{STUDY.fingerprint[:16]}/curves-{CURVE_CODE[:8]}"
COARSE_RATIOS = sorted(
    {
        CURVE_SETTINGS["ratios"][0],
        CURVE_SETTINGS["baseline"],
        CURVE_SETTINGS["ratios"][-1],
    }
)
ONE_CONTEXT = (
    " --study {params.study:q} --checkpoint {params.checkpoint:q} --model {params.model:q}"
    " --revision={params.revision:q} --fingerprint {params.fingerprint} --context {wildcards.context:q}"
    " --context-sha256 {params.context_sha256} --reading {params.reading:q} {params.answers} --code {params.code}"
    " --log {log:q}"
)


wildcard_constraints:
    context="|".join(map(re.escape, CONTEXTS)),
    reading="[0-9a-f]{12}",
    asked="[0-9a-f]{12}",


def prefill_files(context):
    """What every layer keeps of a context."""
    return [f"{READINGS}/{CURVES.reading(context)}/{context}/L{layer:02d}.nc" for layer in range(STUDY.layers)]


def curve_baseline_file(context):
    return f"{READINGS}/{CURVES.reading(context)}/{context}/baseline-{CURVES.items_key(context)}.nc"


def answers_file(context):
    """The model's own answers, if they are what is scored."""
    if CURVE_SETTINGS["answers"] == "reference":
        return []
    key = short_hash(CURVES.by_id[context].sha256, CURVES.reading_options())
    return f"{READINGS}/{CURVES.reading(context)}/{context}/answers-{key}.json"


def coarse_file(context, layer):
    key = short_hash(CURVES.items_key(context), COARSE_RATIOS)
    return f"{READINGS}/{CURVES.reading(context)}/{context}/coarse-{key}/L{layer:02d}.nc"


def curve_heads(layer=None):
    """Names of the heads that have curves; after the coarse pass where that picks them."""
    heads = CURVES.heads
    if heads is None:
        names = json.loads(Path(checkpoints.curve_heads.get().output[0]).read_text(encoding="utf-8"))
    else:
        names = [head_name(i, h) for i, chosen in heads.items() for h in chosen]
    return [name for name in names if layer is None or name.startswith(f"L{int(layer)}H")]


def curve_layers():
    return sorted({int(name[1:].partition("H")[0]) for name in curve_heads()})


def curve_files(wildcards=None):
    return [f"{CURVE_RESULTS}/curves/{context}/L{layer:02d}.nc" for context in CONTEXTS for layer in curve_layers()]


def one_context(code=CURVE_CODE):
    """Parameters that every rule about one context has."""
    return {
        "study": STUDY.name,
        "checkpoint": STUDY.folder,
        "model": STUDY.settings["model"]["checkpoint"],
        "revision": STUDY.revision,
        "fingerprint": STUDY.fingerprint[:16],
        "context_sha256": lambda w: CURVES.by_id[w.context].sha256,
        "reading": lambda w: CURVES.reading_options(),
        "answers": lambda w: (f"--answers {answers_file(w.context)}" if answers_file(w.context) else ""),
        "code": code,
    }


FORECAST = f"{CURVE_RESULTS}/curve_forecast.json"


# First by its priority and not as the others' input: a new forecast makes nothing else anew. (As an `ancient` input it
# would also hide what a changed setting makes necessary further down, until the next call.)
rule curve_forecast:
    output:
        FORECAST,
    log:
        f"logs/{STUDY.name}/curve_forecast.log",
    priority: 1000
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=3000,
    params:
        checkpoint=STUDY.folder,
        settings=lambda w: json.dumps(STUDY.settings["curves"], sort_keys=True),
    message:
        "Timing the parts of the curves to forecast the whole"
    shell:
        "{TORCH}/curves_forecast.py --checkpoint {params.checkpoint:q} --settings {params.settings:q} --log {log:q} {output:q}"


rule curve_answers:
    output:
        f"{READINGS}/{{reading}}/{{context}}/answers-{{asked}}.json",
    log:
        "logs/cache/curves/{reading}/{context}/answers-{asked}.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=9000,
    params:
        **one_context() | {"answers": "", "most": CURVE_SETTINGS["answer_tokens"]},
    message:
        "Greedy answers about {wildcards.context}"
    shell:
        "{TORCH}/curves_answers.py" + ONE_CONTEXT + " --most {params.most} {output:q}"


rule curve_prefill:
    output:
        update(
            expand(
                f"{READINGS}/{{{{reading}}}}/{{{{context}}}}/L{{layer:02d}}.nc",
                layer=range(STUDY.layers),
            )
        ),
    log:
        "logs/cache/curves/{reading}/{context}/prefill.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=3000,
    params:
        **one_context() | {"answers": "", "tokens": lambda w: len(CURVES.tokens[w.context].ids)},
    message:
        "Reading context {wildcards.context} ({params.tokens} tokens)"
    shell:
        "{TORCH}/curves_prefill.py" + ONE_CONTEXT + " {output:q}"


rule curve_baseline:
    input:
        prefill=lambda w: prefill_files(w.context),
        answers=lambda w: answers_file(w.context),
    output:
        update(f"{READINGS}/{{reading}}/{{context}}/baseline-{{asked}}.nc"),
    log:
        "logs/cache/curves/{reading}/{context}/baseline-{asked}.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=3000,
    params:
        **one_context() | {"scoring": lambda w: CURVES.scoring()},
    message:
        "Baseline of context {wildcards.context}: every head at the baseline ratio"
    shell:
        "{TORCH}/curves_baseline.py"
        + ONE_CONTEXT
        + " --scoring {params.scoring:q} --prefill {input.prefill:q} -- {output:q}"


rule curve_layer:
    input:
        prefill=lambda w: prefill_files(w.context)[int(w.layer)],
        baseline=lambda w: curve_baseline_file(w.context),
        answers=lambda w: answers_file(w.context),
    output:
        f"{CURVE_RESULTS}/curves/{{context}}/L{{layer}}.nc",
    log:
        f"logs/{STUDY.name}/curves/{{context}}/L{{layer}}.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=3000,
    params:
        **one_context()
        | {
            "scoring": lambda w: CURVES.scoring(),
            "ratios": json.dumps(CURVE_SETTINGS["ratios"]),
            "heads": lambda w: curve_heads(w.layer),
        },
    message:
        "Curves of context {wildcards.context}, layer {wildcards.layer}"
    shell:
        "{TORCH}/curves_layer.py" + ONE_CONTEXT + " --scoring {params.scoring:q} --layer {wildcards.layer}"
        " --heads {params.heads} --ratios {params.ratios:q} --prefill {input.prefill:q} --baseline {input.baseline:q}"
        " {output:q}"


if CURVES.heads is None:

    use rule curve_layer as curve_coarse with:
        output:
            f"{READINGS}/{{reading}}/{{context}}/coarse-{{asked}}/L{{layer}}.nc",
        log:
            "logs/cache/curves/{reading}/{context}/coarse-{asked}-L{layer}.log",
        params:
            **one_context()
            | {
                "scoring": lambda w: CURVES.scoring(),
                "ratios": json.dumps(COARSE_RATIOS),
                "heads": lambda w: [head_name(int(w.layer), h) for h in range(CURVES.kv_heads[int(w.layer)])],
            },
        message:
            "Coarse pass over context {wildcards.context}, layer {wildcards.layer}"

    checkpoint curve_heads:
        input:
            [coarse_file(context, layer) for context in CONTEXTS for layer in CURVES.softmax],
        output:
            f"{CURVE_RESULTS}/curve_heads.json",
        log:
            f"logs/{STUDY.name}/curve_heads.log",
        conda:
            "../../envs/study.yaml"
        threads: 1
        resources:
            mem_mb=1000,
        params:
            contexts=CONTEXTS,
            number=CURVE_SETTINGS["heads"],
            code=STUDY.code("curve_table", "scripts.curves_heads"),
        message:
            "Picking the {params.number} heads with the largest effect"
        shell:
            "{NUMPY}/curves_heads.py --contexts {params.contexts:q} --inputs {input:q} --number {params.number}"
            " --log {log:q} {output:q}"


rule curve_table:
    input:
        curve_files,
    output:
        f"{CURVE_RESULTS}/curves.nc",
    log:
        f"logs/{STUDY.name}/curve_table.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        contexts=CONTEXTS,
        seed=CURVE_SETTINGS["seed"],
        code=STUDY.code("curve_table", "scripts.curves_table"),
    message:
        "Table of all curves of {STUDY.name}"
    shell:
        "{NUMPY}/curves_table.py --contexts {params.contexts:q} --inputs {input:q} --seed {params.seed}"
        " --code {params.code} --log {log:q} {output:q}"
