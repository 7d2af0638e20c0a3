"""Train the small model's tokenizer and weights and save them."""

from contextlib import redirect_stderr
from pathlib import Path

import torch
from head_influence import small_model


def main(snakemake, log) -> None:
    torch.set_num_threads(snakemake.threads)
    recipe = small_model.Recipe(**dict(snakemake.params.items()))
    corpus = [small_model.read_split(snakemake.input[language])[0] for language in ("english", "chinese")]
    folder = Path(snakemake.output.weights).parent

    tokenizer = small_model.train_tokenizer([text for training in corpus for text in training])
    tokenizer.save_pretrained(folder)
    languages = [small_model.Windows(small_model.encode(tokenizer, training)) for training in corpus]
    model = small_model.initial_model(small_model.model_config(), recipe.seed)
    small_model.train(model, languages, recipe, report=lambda line: print(line, file=log))
    model.bfloat16().save_pretrained(folder)


with Path(snakemake.log[0]).open("w", buffering=1) as log, redirect_stderr(log):  # noqa: F821
    main(snakemake, log)  # noqa: F821
