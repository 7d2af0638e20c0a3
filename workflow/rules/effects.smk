# What removing heads does: one at a time, and input-adaptive sets together.
REMOVALS = ("trace", "texts", "scripts.trace", "scripts.baseline", "effects")
SINGLE_CODE = STUDY.code(*REMOVALS, "scripts.single")
JOINT_CODE = STUDY.code(*REMOVALS, "scripts.single", "scripts.joint")


def changes_cache(w):
    """Where the single removals leave their change vectors for the joint ones, which can make them anew."""
    variant, text, layer = STUDY.variants[w.study], w.text, w.layer
    return STUDY.cached(variant, "changes", SINGLE_CODE, text) + f"/L{layer}.nc"


rule single_removals:
    input:
        baseline=lambda w: baseline_cache(STUDY.variants[w.study], w.text, w.layer),
        weights=lambda w: weights(STUDY.variants[w.study]),
    output:
        single="results/{study}/single/{text}/L{layer}.nc",
    log:
        "logs/{study}/single/{text}/L{layer}.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=1500,
    params:
        changes=changes_cache,
        checkpoint=lambda w: STUDY.variants[w.study].folder,
        code=SINGLE_CODE,
    message:
        "Single removals of {wildcards.study}, text {wildcards.text}, transition {wildcards.layer}"
    shell:
        "{NUMPY}/single.py --study {wildcards.study:q} --checkpoint {params.checkpoint:q}"
        " --baseline {input.baseline:q} --changes {params.changes:q} --code {params.code} --log {log:q}"
        " {output.single:q}"


rule joint_removals:
    input:
        baseline=lambda w: baseline_cache(STUDY.variants[w.study], w.text, w.layer),
        weights=lambda w: weights(STUDY.variants[w.study]),
        single="results/{study}/single/{text}/L{layer}.nc",
    output:
        "results/{study}/joint/{text}/L{layer}.nc",
    log:
        "logs/{study}/joint/{text}/L{layer}.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=1500,
    params:
        changes=changes_cache,
        checkpoint=lambda w: STUDY.variants[w.study].folder,
        random_seed=STUDY.settings["measure"]["random_seed"],
        sample_index=lambda w: STUDY.by_id[w.text].index,
        code=JOINT_CODE,
    message:
        "Joint removals of {wildcards.study}, text {wildcards.text}, transition {wildcards.layer}"
    shell:
        "{NUMPY}/joint.py --study {wildcards.study:q} --checkpoint {params.checkpoint:q}"
        " --baseline {input.baseline:q} --single {input.single:q}"
        " --changes {params.changes:q} --random-seed {params.random_seed}"
        " --sample-index {params.sample_index} --code {params.code} --log {log:q} {output:q}"
