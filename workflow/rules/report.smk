# Figures, the report and the explorer: the study beside its controls.
import json

from head_influence.catalogue import FIGURES, words_version

FIGURES_CODE = code_version("figures", "scripts.figures")
REPORT_CODE = code_version("report", "scripts.report")
EXPLORER_CODE = code_version("explorer", "scripts.explorer")
RUNS = [f"{variant.study}={variant.control}" for variant in STUDY.variants.values()]
FINDINGS = [
    f"results/{study}/{name}.nc" for study in STUDY.variants for name in ("findings", "identity", "concentration")
]
# Two jobs draw the figures, each about half of them.
BATCHES = {
    "concentration": [name for name, (module, *_) in FIGURES.items() if module == "concentration"],
    "heads": [name for name, (module, *_) in FIGURES.items() if module != "concentration"],
}


report: "../report/workflow.rst"


def drawn(names, ending):
    return [f"results/{STUDY.name}/figures/{name}.{ending}" for name in names]


def captioned(names):
    """The PNG files, with what `snakemake --report` shows beside them."""
    add = report
    return [
        add(
            path,
            caption=f"../report/{name}.rst",
            category=FIGURES[name][1],
            labels={"figure": FIGURES[name][2]},
        )
        for name, path in zip(names, drawn(names, "png"), strict=True)
    ]


rule figures_of_concentration:
    input:
        FINDINGS,
    output:
        captioned(BATCHES["concentration"]),
        drawn(BATCHES["concentration"], "svg"),
    log:
        f"logs/{STUDY.name}/figures_of_concentration.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        runs=RUNS,
        names=BATCHES["concentration"],
        dpi=STUDY.settings["figures"]["dpi"],
        code=FIGURES_CODE,
    message:
        "Drawing the figures of concentration"
    shell:
        "{NUMPY}/figures.py --results results --runs {params.runs:q} --dpi {params.dpi} --names {params.names}"
        " --log {log:q} results/{STUDY.name}/figures"


rule figures_of_heads:
    input:
        FINDINGS,
        results("single"),
    output:
        captioned(BATCHES["heads"]),
        drawn(BATCHES["heads"], "svg"),
    log:
        f"logs/{STUDY.name}/figures_of_heads.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        runs=RUNS,
        names=BATCHES["heads"],
        dpi=STUDY.settings["figures"]["dpi"],
        code=FIGURES_CODE,
    message:
        "Drawing the figures of dominant heads and joint removals"
    shell:
        "{NUMPY}/figures.py --results results --runs {params.runs:q} --dpi {params.dpi} --names {params.names}"
        " --log {log:q} results/{STUDY.name}/figures"


rule explorer_page:
    input:
        f"results/{STUDY.name}/findings.nc",
        results("single"),
        results("joint"),
    output:
        f"results/{STUDY.name}/explorer.html",
    log:
        f"logs/{STUDY.name}/explorer.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        study=STUDY.name,
        words=words_version(),
        code=EXPLORER_CODE,
    message:
        "Writing the explorer of {STUDY.name}"
    shell:
        "{NUMPY}/explorer.py --results results --study {params.study:q} --log {log:q} {output:q}"


# The second study's pages are linked, and kept up to date, once they have been made.
CURVE_PAGES_THERE = [page for page in CURVE_PAGES if Path(page).exists()]


rule report_page:
    input:
        CURVE_PAGES_THERE,
        FINDINGS,
        drawn(FIGURES, "svg"),
        f"results/{STUDY.name}/explorer.html",
        audit=rules.audit_study.output,
        forward=(f"results/{STUDY.name}/whole_forward.json" if STUDY.settings["controls"]["whole_forward"] else []),
    output:
        page=f"results/{STUDY.name}/report.html",
        tables=expand(
            f"results/{STUDY.name}/tables/{{table}}.csv",
            table=["summary", "comparison"],
        ),
    log:
        f"logs/{STUDY.name}/report.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        runs=RUNS,
        settings=lambda wildcards: json.dumps(STUDY.settings, sort_keys=True),
        words=words_version(),
        code=REPORT_CODE,
    message:
        "Writing the report of {STUDY.name}"
    shell:
        "{NUMPY}/report.py --results results --runs {params.runs:q} --settings {params.settings:q}"
        " --audit {input.audit:q} --whole-forward results/{STUDY.name}/whole_forward.json --log {log:q} {output.page:q}"
