# The bundled model, trained anew into results/small-model; resources/models/hybrid-small holds the files of such a run.

SMALL_MODEL_CORPUS = {
    "english": expand(
        "resources/corpus/english-{source}.txt.xz",
        source=["addresses", "devil", "jargon"],
    ),
    "chinese": expand(
        "resources/corpus/chinese-{source}.txt.xz",
        source=["ci", "drama", "help", "primers"],
    ),
}
SMALL_MODEL_RECIPE = dict(
    seed=31000,
    steps=3200,
    warmup=200,
    batch_tokens=1024,
    short_window=64,
    long_window=512,
    long_share_first=0.25,
    long_share_last=0.5,
    matrix_rate=5e-3,
    other_rate=2e-3,
    weight_decay=0.1,
    clip=1.0,
    chunk=32,
)


rule train_small_model:
    input:
        "results/small-model/model.safetensors",
        "results/small-model/README.md",


rule fit_small_model:
    input:
        **SMALL_MODEL_CORPUS,
        library="workflow/head_influence/small_model.py",
    output:
        weights="results/small-model/model.safetensors",
        config="results/small-model/config.json",
        generation="results/small-model/generation_config.json",
        tokenizer="results/small-model/tokenizer.json",
        tokenizer_config="results/small-model/tokenizer_config.json",
    log:
        "logs/small-model/fit.log",
    benchmark:
        "benchmarks/small-model/fit.tsv"
    conda:
        "../../envs/study.yaml"
    threads: 1
    params:
        **SMALL_MODEL_RECIPE,
    message:
        "Training the small model: {params.steps} steps, about half an hour on one thread"
    script:
        "../scripts/train_small_model.py"


rule evaluate_small_model:
    input:
        **SMALL_MODEL_CORPUS,
        **rules.fit_small_model.output,
        notice="resources/corpus/NOTICE",
        library=expand(
            "workflow/head_influence/{module}.py",
            module=["small_model", "small_model_evaluation"],
        ),
    output:
        metrics="results/small-model/metrics.json",
        card="results/small-model/README.md",
        notice="results/small-model/NOTICE",
    log:
        "logs/small-model/evaluate.log",
    benchmark:
        "benchmarks/small-model/evaluate.tsv"
    conda:
        "../../envs/study.yaml"
    threads: 1
    params:
        **SMALL_MODEL_RECIPE,
    message:
        "Measuring the small model on held-out text"
    script:
        "../scripts/evaluate_small_model.py"
