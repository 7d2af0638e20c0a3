# One pass of every text through the model's own modules, and what each transition's interventions start from.
TRACE_CODE = STUDY.code("trace", "texts", "scripts.trace")
MEASURED = ("trace", "texts", "scripts.trace", "baseline", "scripts.baseline")
BASELINE_CODE = STUDY.code(*MEASURED)
MEAN_CODE = STUDY.code(*MEASURED, "scripts.replace_by_mean")
TRACED = [*(f"L{layer:02d}" for layer in range(STUDY.layers)), "last"]
CACHE = f"{STUDY.cache}/{{fingerprint}}/{{window}}"


wildcard_constraints:
    fingerprint="|".join(map(re.escape, STUDY.by_fingerprint)),
    window=r"[0-9a-f]{12}-\d+",


def trace_of(variant, text):
    """Files of a traced text: of every layer, and of what follows them."""
    folder = STUDY.cached(variant, "trace", TRACE_CODE, text)
    return [f"{folder}/{part}.nc" for part in TRACED]


def baseline_cache(variant, text, layer):
    if variant.control == "mean":
        folder = f"{STUDY.cache}/{variant.fingerprint}/mean-{STUDY.all_windows}-{MEAN_CODE[:8]}"
        return f"{folder}/{text}/L{layer}.nc"
    return STUDY.cached(variant, "baseline", BASELINE_CODE, text) + f"/L{layer}.nc"


def variant_of(wildcards):
    return STUDY.by_fingerprint[wildcards.fingerprint]


def weights(variant):
    """A control's weights are made by a rule; the studied checkpoint is there before anything starts."""
    return f"{variant.folder}/model.safetensors" if variant.made else []


rule trace_text:
    input:
        weights=lambda w: weights(variant_of(w)),
    output:
        [update(f"{CACHE}/trace-{TRACE_CODE[:8]}/{{text}}/{part}.nc") for part in TRACED],
    log:
        f"logs/cache/{{fingerprint}}/{{window}}/{{text}}/trace-{TRACE_CODE[:8]}.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=3000,
    params:
        checkpoint=lambda w: variant_of(w).folder,
        texts=STUDY.texts_file,
        tokens=lambda w: STUDY.tokens[w.text],
        text_sha256=lambda w: STUDY.by_id[w.text].sha256,
        language=lambda w: STUDY.by_id[w.text].language,
        model=STUDY.settings["model"]["checkpoint"],
        revision=STUDY.revision,
        code=TRACE_CODE,
        folder=lambda w, output: str(Path(output[0]).parent),
    message:
        "Tracing text {wildcards.text} through the model's own modules"
    shell:
        "{TORCH}/trace.py --checkpoint {params.checkpoint:q} --texts {params.texts:q} --text {wildcards.text:q}"
        " --tokens {params.tokens} --text-sha256 {params.text_sha256} --fingerprint {wildcards.fingerprint}"
        " --model {params.model:q} --revision={params.revision:q} --code {params.code} --log {log:q} {params.folder:q}"


rule baseline_cache:
    input:
        source=lambda w: trace_of(variant_of(w), w.text)[int(w.layer)],
        recipient=lambda w: trace_of(variant_of(w), w.text)[int(w.layer) + 1],
        weights=lambda w: weights(variant_of(w)),
    output:
        update(f"{CACHE}/baseline-{BASELINE_CODE[:8]}/{{text}}/L{{layer}}.nc"),
    log:
        f"logs/cache/{{fingerprint}}/{{window}}/{{text}}/baseline-{BASELINE_CODE[:8]}-L{{layer}}.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=1500,
    params:
        checkpoint=lambda w: variant_of(w).folder,
        code=BASELINE_CODE,
    message:
        "Baseline of text {wildcards.text}, transition {wildcards.layer}"
    shell:
        "{NUMPY}/baseline.py --checkpoint {params.checkpoint:q} --source {input.source:q}"
        " --recipient {input.recipient:q} --code {params.code} --log {log:q} {output:q}"


rule replace_by_mean:
    input:
        baselines=lambda w: [baseline_cache(variant_of(w), text, w.layer) for text in TEXTS],
        own=lambda w: baseline_cache(variant_of(w), w.text, w.layer),
    output:
        update(f"{STUDY.cache}/{{fingerprint}}/mean-{STUDY.all_windows}-{MEAN_CODE[:8]}/{{text}}/L{{layer}}.nc"),
    log:
        f"logs/cache/{{fingerprint}}/mean-{STUDY.all_windows}/{{text}}/L{{layer}}.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=1500,
    params:
        code=MEAN_CODE,
    message:
        "Mean contributions in place of heads, text {wildcards.text}, transition {wildcards.layer}"
    shell:
        "{NUMPY}/replace_by_mean.py --baselines {input.baselines:q} --own {input.own:q} --code {params.code}"
        " --log {log:q} {output:q}"
