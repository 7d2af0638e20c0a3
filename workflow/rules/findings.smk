# What a study, and each of its controls, found: dominant heads, distributions, tables.
from head_influence.provenance import code_version
from head_influence.tables import FILES as TABLES

IDENTITY_CODE = code_version("identity", "scripts.identity")
FINDINGS_CODE = code_version("findings", "tables", "scripts.findings")


rule identity_of_heads:
    input:
        singles=lambda w: results("single", w.study),
        baselines=lambda w: [baseline_cache(STUDY.variants[w.study], text, layer) for text in TEXTS for layer in LAYERS],
    output:
        "results/{study}/identity.nc",
    log:
        "logs/{study}/identity.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        texts=TEXTS,
        transitions=len(LAYERS),
        first_query=STUDY.settings["measure"]["first_query"],
        code=IDENTITY_CODE,
    message:
        "Dominant heads of {wildcards.study}"
    shell:
        "{NUMPY}/identity.py --study {wildcards.study:q} --texts {params.texts:q} --transitions {params.transitions}"
        " --first-query {params.first_query} --code {params.code} --log {log:q} {output:q}"


rule findings_of_study:
    input:
        concentration="results/{study}/concentration.nc",
        identity="results/{study}/identity.nc",
        joints=lambda w: results("joint", w.study),
    output:
        findings="results/{study}/findings.nc",
        tables=expand("results/{{study}}/tables/{table}.csv", table=TABLES),
    log:
        "logs/{study}/findings.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=4000,
    params:
        texts=TEXTS,
        transitions=len(LAYERS),
        code=FINDINGS_CODE,
    message:
        "Findings of {wildcards.study}"
    shell:
        "{NUMPY}/findings.py --study {wildcards.study:q} --texts {params.texts:q} --transitions {params.transitions}"
        " --code {params.code} --log {log:q} {output.findings:q}"
