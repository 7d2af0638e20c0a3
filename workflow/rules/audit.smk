# The audit: every file looked at again, and a sample of the numbers recomputed through the whole model.
from head_influence.layout import weight_files

AUDIT_CODE = STUDY.code("audit", "texts", "scripts.audit")
AUDITED = STUDY.variants[STUDY.name]
# Megabytes of the weights in float32, where the whole model is in memory; stored ones have at least half of that.
WHOLE_MODEL = sum(path.stat().st_size for path in weight_files(STUDY.folder)[0]) >> 19


rule audit_study:
    input:
        results("single"),
        results("joint"),
        f"results/{STUDY.name}/concentration.nc",
        [baseline_cache(AUDITED, text, layer) for text in TEXTS for layer in LAYERS],
        [f"results/{STUDY.name}/whole_forward.json"] if STUDY.settings["controls"]["whole_forward"] else [],
        trace=trace_of(AUDITED, TEXTS[0]),
    output:
        f"results/{STUDY.name}/audit.json",
    log:
        f"logs/{STUDY.name}/audit.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=3000 + (WHOLE_MODEL if STUDY.settings["controls"]["whole_forward"] else 0),
    params:
        study=STUDY.name,
        checkpoint=STUDY.folder,
        fingerprint=AUDITED.fingerprint,
        texts=STUDY.texts_file,
        tokens=STUDY.settings["texts"]["tokens"],
        codes=[
            f"trace={TRACE_CODE}",
            f"baseline={BASELINE_CODE}",
            f"single={SINGLE_CODE}",
            f"joint={JOINT_CODE}",
            f"concentration={CONCENTRATION_CODE}",
        ],
        random_seed=STUDY.settings["measure"]["random_seed"],
        vectors=STUDY.settings["measure"]["small_total"]["vectors"],
        js=STUDY.settings["measure"]["small_total"]["js"],
        whole="--whole-forward" if STUDY.settings["controls"]["whole_forward"] else "",
        singles=STUDY.settings["audit"]["singles"],
        joints=STUDY.settings["audit"]["joints"],
        seed=STUDY.settings["audit"]["seed"],
        code=AUDIT_CODE,
        trace=lambda w, input: str(Path(input.trace[0]).parent),
    message:
        "Auditing {STUDY.name}"
    shell:
        "{TORCH}/audit.py --study {params.study:q} --checkpoint {params.checkpoint:q}"
        " --fingerprint {params.fingerprint} --texts {params.texts:q}"
        " --tokens {params.tokens} --trace {params.trace:q} --codes {params.codes}"
        " --random-seed {params.random_seed} --small-total-vectors {params.vectors} --small-total-js {params.js}"
        " {params.whole} --singles {params.singles} --joints {params.joints} --seed {params.seed}"
        " --log {log:q} {output:q}"


rule audit:
    input:
        rules.audit_study.output,
