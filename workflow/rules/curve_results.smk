# Curves: budgets, checks, figures and pages.
from head_influence.curve_titles import TITLES as CURVE_TITLES

# Budgets share the keys of all heads, so they need every head's curve.
TARGETS_OF_BUDGETS = CURVE_SETTINGS["budgets"] if CURVE_SETTINGS["heads"] == "all" else []
BUDGET_SHARES = [f"{CURVE_RESULTS}/budgets/R{target}.json" for target in TARGETS_OF_BUDGETS]
if TARGETS_OF_BUDGETS:

    rule curve_plan:
        input:
            f"{CURVE_RESULTS}/curves.nc",
        output:
            plan=f"{CURVE_RESULTS}/budgets/plan.json",
            shares=BUDGET_SHARES,
        log:
            f"logs/{STUDY.name}/curve_plan.log",
        conda:
            "../../envs/study.yaml"
        threads: 1
        resources:
            mem_mb=1000,
        params:
            targets=json.dumps(TARGETS_OF_BUDGETS),
            code=STUDY.code("curve_budgets", "curve_table", "scripts.curves_plan"),
        message:
            "Sharing {STUDY.name}'s budgets among heads"
        shell:
            "{NUMPY}/curves_plan.py --table {input:q} --targets {params.targets:q} --shares {output.shares:q}"
            " --log {log:q} {output.plan:q}"

    rule curve_budget:
        input:
            plan=f"{CURVE_RESULTS}/budgets/plan.json",
            prefill=lambda w: prefill_files(w.context),
            answers=lambda w: answers_file(w.context),
        output:
            f"{CURVE_RESULTS}/budgets/{{context}}.nc",
        log:
            f"logs/{STUDY.name}/budgets/{{context}}.log",
        conda:
            "../../envs/study.yaml"
        threads: 1
        resources:
            mem_mb=3000,
        params:
            **one_context(STUDY.code("curve_budgets", "curves", "scripts.curves_budget"))
            | {"scoring": lambda w: CURVES.scoring()},
        message:
            "Trying the budgets on context {wildcards.context}"
        shell:
            "{TORCH}/curves_budget.py" + ONE_CONTEXT + " --scoring {params.scoring:q} --plan {input.plan:q}"
            " --prefill {input.prefill:q} -- {output:q}"

    rule curve_compare:
        input:
            table=f"{CURVE_RESULTS}/curves.nc",
            plan=f"{CURVE_RESULTS}/budgets/plan.json",
            shares=BUDGET_SHARES,  # asked for, or a new target among the settings would not be noticed
            runs=[f"{CURVE_RESULTS}/budgets/{context}.nc" for context in CONTEXTS],
        output:
            f"{CURVE_RESULTS}/budgets.csv",
        log:
            f"logs/{STUDY.name}/curve_compare.log",
        conda:
            "../../envs/study.yaml"
        threads: 1
        resources:
            mem_mb=1000,
        params:
            code=STUDY.code("curve_budgets", "curve_table", "summary", "scripts.curves_compare"),
        message:
            "Comparing {STUDY.name}'s budgets"
        shell:
            "{NUMPY}/curves_compare.py --table {input.table:q} --plan {input.plan:q} --runs {input.runs:q}"
            " --log {log:q} {output:q}"


# The checks look at one layer of the first context.
CHECKED_CONTEXT = CONTEXTS[0]


def checked_layer(wildcards=None):
    layers = curve_layers()
    return layers[len(layers) // 2]


BUDGET_RUNS = [f"{CURVE_RESULTS}/budgets/{context}.nc" for context in CONTEXTS] if TARGETS_OF_BUDGETS else []
BUDGET_TABLE = f"{CURVE_RESULTS}/budgets.csv" if TARGETS_OF_BUDGETS else []
CURVE_FIGURES = ["curves", "curve_map", "curve_ranking"] + (["curve_budgets"] if TARGETS_OF_BUDGETS else [])
WITH_BUDGETS = f"--budgets {BUDGET_TABLE}" if TARGETS_OF_BUDGETS else ""
MODEL_TITLE = Path(STUDY.settings["model"]["checkpoint"]).name


def captioned_curves(names):
    """The PNG files, with what `snakemake --report` shows beside them."""
    add = report
    return [
        add(
            f"{CURVE_RESULTS}/figures/{name}.png",
            caption=f"../report/{name}.rst",
            category="Head influence curves",
            labels={"figure": CURVE_TITLES[name]},
        )
        for name in names
    ]


rule curve_checks:
    input:
        table=f"{CURVE_RESULTS}/curves.nc",
        prefill=lambda w: prefill_files(CHECKED_CONTEXT)[checked_layer()],
        baseline=curve_baseline_file(CHECKED_CONTEXT),
        curve=lambda w: f"{CURVE_RESULTS}/curves/{CHECKED_CONTEXT}/L{checked_layer():02d}.nc",
        budgets=BUDGET_RUNS,
        answers=answers_file(CHECKED_CONTEXT),
    output:
        f"{CURVE_RESULTS}/curve_checks.json",
    log:
        f"logs/{STUDY.name}/curve_checks.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=6000,
    params:
        **one_context(STUDY.code("curve_checks", "scripts.curves_checks"))
        | {
            "context": CHECKED_CONTEXT,
            "context_sha256": CURVES.by_id[CHECKED_CONTEXT].sha256,
            "answers": (f"--answers {answers_file(CHECKED_CONTEXT)}" if answers_file(CHECKED_CONTEXT) else ""),
            "scoring": lambda w: CURVES.scoring(),
            "ratios": json.dumps(CURVE_SETTINGS["ratios"]),
            "tokens": [len(CURVES.tokens[context].article) for context in CONTEXTS],
            "layer": checked_layer,
            "whole": ("--whole-forward" if STUDY.settings["controls"]["whole_forward"] else ""),
        },
    message:
        "Checking the curves of {STUDY.name}"
    shell:
        "{TORCH}/curves_checks.py"
        + ONE_CONTEXT.replace("wildcards.context", "params.context")
        + " --scoring {params.scoring:q} --layer {params.layer}"
        " --prefill {input.prefill:q} --baseline {input.baseline:q} --curve {input.curve:q} --table {input.table:q}"
        " --tokens {params.tokens} --ratios {params.ratios:q} {params.whole} {output:q} --budgets {input.budgets:q}"


rule curve_figures:
    input:
        table=f"{CURVE_RESULTS}/curves.nc",
        budgets=BUDGET_TABLE,
    output:
        captioned_curves(CURVE_FIGURES),
        expand(f"{CURVE_RESULTS}/figures/{{name}}.svg", name=CURVE_FIGURES),
    log:
        f"logs/{STUDY.name}/curve_figures.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        folder=f"{CURVE_RESULTS}/figures",
        budgets=WITH_BUDGETS,
        model=MODEL_TITLE,
        heads=(
            f"--heads {' '.join(CURVE_SETTINGS['figure_heads'] or CURVE_SETTINGS['heads'])}"
            if CURVE_SETTINGS["figure_heads"] or isinstance(CURVE_SETTINGS["heads"], list)
            else ""
        ),
        published=lambda w: json.dumps(CURVE_SETTINGS["published"]),
        dpi=STUDY.settings["figures"]["dpi"],
        seed=CURVE_SETTINGS["seed"],
        code=STUDY.code("curve_figures", "curve_budgets", "scripts.curves_figures"),
    message:
        "Drawing the curves of {STUDY.name}"
    shell:
        "{NUMPY}/curves_figures.py --table {input.table:q} {params.budgets} --model {params.model:q}"
        " --published {params.published:q} --dpi {params.dpi} --seed {params.seed} --log {log:q} {params.folder:q}"
        " {params.heads}"


rule curve_report:
    input:
        table=f"{CURVE_RESULTS}/curves.nc",
        budgets=BUDGET_TABLE,
        checks=f"{CURVE_RESULTS}/curve_checks.json",
        figures=expand(f"{CURVE_RESULTS}/figures/{{name}}.png", name=CURVE_FIGURES),
    output:
        f"{CURVE_RESULTS}/curves.html",
    log:
        f"logs/{STUDY.name}/curve_report.log",
    conda:
        "../../envs/study.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        study=STUDY.name,
        budgets="--budgets" if TARGETS_OF_BUDGETS else "",
        model=MODEL_TITLE,
        seed=CURVE_SETTINGS["seed"],
        code=STUDY.code("curve_report", "scripts.curves_report"),
    message:
        "Writing the page on the curves of {STUDY.name}"
    shell:
        "{NUMPY}/curves_report.py --study {params.study:q} --model {params.model:q} {params.budgets}"
        " --seed {params.seed} --log {log:q} {output:q}"


# Both studies of one model side by side: softmax layers that are the source of a transition, all heads with curves.
UPSTREAM_LAYERS = [layer for layer in CURVES.softmax if layer + 1 < STUDY.layers]
UPSTREAM = f"{CURVE_RESULTS}/curve_upstream.json" if CURVE_SETTINGS["heads"] == "all" and UPSTREAM_LAYERS else []
if UPSTREAM:

    rule curve_upstream:
        input:
            table=f"{CURVE_RESULTS}/curves.nc",
            singles=[f"{CURVE_RESULTS}/single/{text}/L{layer:02d}.nc" for layer in UPSTREAM_LAYERS for text in TEXTS],
        output:
            UPSTREAM,
            f"{CURVE_RESULTS}/curve_upstream.html",
            captioned_curves(["curve_upstream"]),
            f"{CURVE_RESULTS}/figures/curve_upstream.svg",
        log:
            f"logs/{STUDY.name}/curve_upstream.log",
        conda:
            "../../envs/study.yaml"
        threads: 1
        resources:
            mem_mb=1000,
        params:
            study=STUDY.name,
            layers=UPSTREAM_LAYERS,
            first_query=STUDY.settings["measure"]["first_query"],
            model=MODEL_TITLE,
            dpi=STUDY.settings["figures"]["dpi"],
            figure=f"{CURVE_RESULTS}/figures/curve_upstream",
            code=STUDY.code("upstream", "curve_figures", "scripts.curves_upstream"),
        message:
            "Curves of {STUDY.name} beside the influence on the next layer"
        shell:
            "{NUMPY}/curves_upstream.py --study {params.study:q} --table {input.table:q} --layers {params.layers} --singles {input.singles:q}"
            " --first-query {params.first_query} --model {params.model:q} --figure {params.figure:q}"
            " --dpi {params.dpi} --log {log:q} {output[0]:q} {output[1]:q}"


# The report takes these as inputs and links to them; `curves` alone makes the first only.
CURVE_PAGES = [f"{CURVE_RESULTS}/curves.html"] + ([f"{CURVE_RESULTS}/curve_upstream.html"] if UPSTREAM else [])


rule curves:
    input:
        FORECAST,
        curve_files,
        f"{CURVE_RESULTS}/curves.html",
