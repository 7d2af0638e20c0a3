"""Measure the small model's quality on held-out text and write its metrics and model card."""

import json
import shutil
from contextlib import redirect_stderr
from dataclasses import asdict
from pathlib import Path

import torch
from head_influence import small_model, small_model_evaluation
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(snakemake) -> None:
    torch.set_num_threads(snakemake.threads)
    recipe = small_model.Recipe(**dict(snakemake.params.items()))
    corpus = {language: small_model.read_split(snakemake.input[language]) for language in ("english", "chinese")}
    folder = Path(snakemake.input.weights).parent

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    metrics = {"recipe": asdict(recipe)} | small_model_evaluation.evaluate(model, tokenizer, corpus, recipe)
    Path(snakemake.output.metrics).write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    Path(snakemake.output.card).write_text(small_model_evaluation.model_card(metrics), encoding="utf-8")
    shutil.copyfile(snakemake.input.notice, snakemake.output.notice)


with Path(snakemake.log[0]).open("w", buffering=1) as log, redirect_stderr(log):  # noqa: F821
    main(snakemake)  # noqa: F821
