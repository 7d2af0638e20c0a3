# Every observation's concentration in one file. Inputs are named one by one: results of removed texts never enter.
CONCENTRATION_CODE = STUDY.code("table", "scripts.concentration")


rule concentration_table:
    input:
        singles=lambda w: results("single", w.study),
    output:
        "results/{study}/concentration.nc",
    log:
        "logs/{study}/concentration.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        texts=TEXTS,
        transitions=len(LAYERS),
        vectors=STUDY.settings["measure"]["small_total"]["vectors"],
        js=STUDY.settings["measure"]["small_total"]["js"],
        code=CONCENTRATION_CODE,
    message:
        "Concentration of {wildcards.study}"
    shell:
        "{NUMPY}/concentration.py --study {wildcards.study:q} --texts {params.texts:q} --transitions {params.transitions}"
        " --small-total-vectors {params.vectors}"
        " --small-total-js {params.js} --code {params.code} --log {log:q} {output:q}"
