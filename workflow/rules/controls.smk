# Controls that need more than one transition: the whole model's own forward pass, and other weights.
FORWARD_CODE = STUDY.code("trace", "scripts.whole_forward")
WEIGHTS_CODE = STUDY.code("control_weights", "scripts.control_weights")


rule whole_forward:
    input:
        layers=trace_of(STUDY.variants[STUDY.name], TEXTS[0])[:-1],
        last=trace_of(STUDY.variants[STUDY.name], TEXTS[0])[-1],
    output:
        f"results/{STUDY.name}/whole_forward.json",
    log:
        f"logs/{STUDY.name}/whole_forward.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=9000,
    params:
        checkpoint=STUDY.folder,
        code=FORWARD_CODE,
    message:
        "Comparing the layer-by-layer pass of the first text with the whole model's own forward pass"
    shell:
        "{TORCH}/whole_forward.py --checkpoint {params.checkpoint:q} --layers {input.layers:q} --last {input.last:q}"
        " --log {log:q} {output:q}"


rule control_weights:
    output:
        f"{STUDY.cache}/checkpoints/{{fingerprint}}/model.safetensors",
    log:
        "logs/cache/{fingerprint}/weights.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=9000,
    params:
        checkpoint=STUDY.folder,
        control=lambda w: variant_of(w).control,
        seed=lambda w: variant_of(w).seed,
        code=WEIGHTS_CODE,
    message:
        "Writing the weights of control {wildcards.fingerprint}"
    shell:
        "{TORCH}/control_weights.py --checkpoint {params.checkpoint:q} --control {params.control}"
        " --seed {params.seed} --log {log:q} {output:q}"
