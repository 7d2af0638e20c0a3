"""The bundled small model: its tokenizer, corpus windows, initial weights and training.

The model is transformers' ``Qwen3_5ForCausalLM`` at a size that one CPU thread trains within the hour. Batches hold as
many English as Chinese windows; a part of them are long windows, so that the model learns to use a longer context.
"""

import lzma
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

SEPARATOR = "<|endoftext|>"
DOCUMENT_BREAK = "\n\f\n"
HELD_OUT_EVERY, HELD_OUT_FIRST = 20, 10


@dataclass(frozen=True)
class Recipe:
    """What fixes a training, besides corpus and code.

    Attributes
    ----------
    seed : int
        Seeds the initial weights and, separately, the order of the windows.
    steps, warmup : int
        Optimiser steps; the first ``warmup`` of them raise the learning rate linearly, a cosine lowers it to zero.
    batch_tokens : int
        Predicted tokens per step, whatever the window's length.
    short_window, long_window : int
        Window lengths in tokens.
    long_share_first, long_share_last : float
        Chance that a batch is of long windows, at the first and at the last step, linear between.
    matrix_rate, other_rate : float
        Peak learning rates: Muon's for the layers' matrices, AdamW's for all other parameters.
    weight_decay : float
        On matrices, the embedding included.
    clip : float
        Largest norm of the whole gradient.
    chunk : int
        Chunk length of the delta rule in training; it changes speed, not the function.
    """

    seed: int
    steps: int
    warmup: int
    batch_tokens: int
    short_window: int
    long_window: int
    long_share_first: float
    long_share_last: float
    matrix_rate: float
    other_rate: float
    weight_decay: float
    clip: float
    chunk: int


def read_split(paths: Sequence[Path | str]) -> tuple[list[str], list[str]]:
    """Read corpus files and split their documents into training and held-out ones.

    Parameters
    ----------
    paths : sequence of path
        xz-compressed UTF-8 files; a line that holds a form feed only parts two documents.

    Returns
    -------
    training, held_out : list of str
        Documents 10, 30, 50, … of each file (counted from zero) are held out.
    """
    training, held_out = [], []
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
            documents = file.read().removesuffix("\n").split(DOCUMENT_BREAK)
        for number, document in enumerate(documents):
            (held_out if number % HELD_OUT_EVERY == HELD_OUT_FIRST else training).append(document)
    return training, held_out


def train_tokenizer(documents: Sequence[str], vocabulary: int = 4096) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE whose only special token, id 0, is the document separator; encoding never adds it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SEPARATOR, model_max_length=4096)


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> NDArray[np.int64]:
    """Length in bytes of every token's text, shape (vocabulary,); the separator stands for no text."""
    lengths = [len(token) for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    lengths[tokenizer.eos_token_id] = 0
    return np.array(lengths)


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> list[NDArray[np.int64]]:
    """Token ids of each document, with a separator before and after."""
    end = tokenizer.eos_token_id
    return [
        np.array([end, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids, end]) for text in documents
    ]


def model_config(**changes) -> Qwen3_5TextConfig:
    """Architecture of the bundled model, optionally with fields changed."""
    fields = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 8,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    return Qwen3_5TextConfig(**(fields | changes))


def initial_model(config: Qwen3_5TextConfig, seed: int) -> Qwen3_5ForCausalLM:
    """Seeded initial model in float32.

    With transformers' own ``dt_bias`` of one most linear heads forget within a token. Here the time step softplus(dt)
    is log-uniform in [1e-3, 1e-1] and A uniform in [1, 16], so memories of a few to a thousand tokens occur.
    """
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            if delta := getattr(layer, "linear_attn", None):
                step = torch.empty_like(delta.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
                delta.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
                delta.A_log.uniform_(1, 16).log_()
    return model


@contextmanager
def delta_rule_chunk(chunk: int) -> Iterator[None]:
    """Let the modelling file's delta rule work in chunks of this many tokens (its default of 64 is slower here)."""
    original = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = partial(original, chunk_size=chunk)
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = original


class Windows:
    """Random windows of contiguous text, each within one document.

    Parameters
    ----------
    documents : sequence of int array
        Token ids of one language's documents.
    """

    def __init__(self, documents: Sequence[NDArray[np.int64]]):
        self.tokens = np.concatenate(documents)
        self.lengths = np.array([len(document) for document in documents])

    def draw(self, rng: np.random.Generator, count: int, length: int) -> NDArray[np.int64]:
        """Draw windows of ``length`` predicted tokens, shape (count, length + 1), all possible starts alike."""
        begins = np.cumsum(self.lengths) - self.lengths
        room = np.maximum(self.lengths - length, 0)
        if not room.any():
            raise ValueError(f"no document holds {length + 1} tokens")
        places = rng.integers(room.sum(), size=count)
        document = np.searchsorted(np.cumsum(room), places, side="right")
        starts = begins[document] + places - (np.cumsum(room) - room)[document]
        return self.tokens[starts[:, None] + np.arange(length + 1)]


def optimisers(model: Qwen3_5ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding, convolutions, norms and decay parameters."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    embedding = [model.model.embed_tokens.weight]
    taken = {id(p) for p in matrices + embedding}
    others = [p for p in model.parameters() if id(p) not in taken]
    decays = [{"params": embedding, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(
            matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(decays, lr=recipe.other_rate, betas=(0.9, 0.98)),
    ]


def train(
    model: Qwen3_5ForCausalLM,
    languages: Sequence[Windows],
    recipe: Recipe,
    report: Callable[[str], None] = print,
    report_every: int = 50,
) -> list[float]:
    """Train the model in place; the order of windows follows from the recipe's seed alone, never from the clock.

    Parameters
    ----------
    model : Qwen3_5ForCausalLM
        In float32; matrix products run in bfloat16.
    languages : sequence of Windows
        Each fills an equal part of every batch.
    recipe : Recipe
    report : callable
        Takes one line of text every ``report_every`` steps.
    report_every : int

    Returns
    -------
    list of float
        Each step's loss in nats per token, before the step.
    """
    rng = np.random.default_rng(recipe.seed)
    steppers = optimisers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(stepper, partial(rate_factor, recipe)) for stepper in steppers]
    losses = []
    model.train()
    with delta_rule_chunk(recipe.chunk):
        for step in range(recipe.steps):
            progress = step / recipe.steps
            share = recipe.long_share_first + (recipe.long_share_last - recipe.long_share_first) * progress
            length = recipe.long_window if rng.random() < share else recipe.short_window
            count = recipe.batch_tokens // (length * len(languages))
            batch = torch.from_numpy(np.concatenate([language.draw(rng, count, length) for language in languages]))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            for stepper, schedule in zip(steppers, schedules, strict=True):
                stepper.step()
                stepper.zero_grad()
                schedule.step()
            losses.append(loss.item())
            if len(losses) % report_every == 0:
                report(f"step {len(losses)} loss {np.mean(losses[-report_every:]):.4f}")
    return losses


def rate_factor(recipe: Recipe, step: int) -> float:
    """Part of the peak learning rate at a step, counted from zero: linear warm-up, then a cosine down to zero."""
    return min(1.0, (step + 1) / recipe.warmup) * (1 + math.cos(math.pi * step / recipe.steps)) / 2
