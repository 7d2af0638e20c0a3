# What a third party needs to make the study's numbers again, and the numbers' hashes to compare with.
import json

CODES = {
    "trace": TRACE_CODE,
    "baseline": BASELINE_CODE,
    "single": SINGLE_CODE,
    "joint": JOINT_CODE,
    "concentration": CONCENTRATION_CODE,
    "whole_forward": FORWARD_CODE,
    "control_weights": WEIGHTS_CODE,
    "audit": AUDIT_CODE,
}


rule provenance_record:
    input:
        f"results/{STUDY.name}/concentration.nc",
        results("joint"),
    output:
        f"results/{STUDY.name}/provenance.json",
    log:
        f"logs/{STUDY.name}/provenance.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        settings=lambda w: json.dumps(STUDY.settings, sort_keys=True),
        checkpoint=STUDY.folder,
        revision=STUDY.revision,
        fingerprint=STUDY.fingerprint,
        hashes=str(STUDY.cache),
        codes=[f"{stage}={code}" for stage, code in CODES.items()],
        code=STUDY.code("record", "texts", "scripts.provenance"),
    message:
        "Writing down what {STUDY.name} was made from"
    shell:
        "{NUMPY}/provenance.py --settings {params.settings:q} --checkpoint {params.checkpoint:q}"
        " --revision={params.revision:q} --fingerprint {params.fingerprint} --cache {params.hashes:q}"
        " --codes {params.codes} --log {log:q} {output:q}"


rule provenance:
    input:
        rules.provenance_record.output,
