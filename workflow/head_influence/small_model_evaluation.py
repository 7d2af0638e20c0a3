"""How good the bundled small model is: held-out bits per byte, a bigram to compare with, and its use of context."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from head_influence.small_model import Recipe, encode, token_bytes

IGNORED = -100
CONTEXT_COLUMNS = (
    "whole",
    "softmax_masked",
    "without",
    "softmax_masked_minus_whole",
    "without_minus_whole",
    "softmax_masked_minus_whole_far",
    "without_minus_whole_far",
)
CARD = """\
# hybrid-small

A language model of {parameters:,} parameters for English and Chinese, so that the study runs at once and offline on
trained weights. Its architecture is that of Qwen3.5 (`Qwen3_5ForCausalLM`): 8 layers, three with linear attention
(gated delta rule, 16 heads of 16) before each with softmax attention (8 query and 2 key/value heads of 32, gated
output), hidden size 128, tied embedding of 4,096 byte-level BPE tokens. It knows the style of its texts and their local
syntax; beyond a clause it makes no sense. It is meant for measurements, not for use as a language model.

Rule `train_small_model` made these files and this card; the numbers are in full in `metrics.json`.

## Quality on held-out text

Documents 10, 30, 50, … of each corpus file (counted from zero) were held out. Bits per byte, read in
windows of {short_window} and of {long_window} tokens; the bigram is one of the same tokens, counted in the language's
training text, with Witten-Bell smoothing.

| language | held-out bytes | bytes per token | bits, {short_window} | bits, {long_window} | bits, bigram |
|---|---|---|---|---|---|
{quality}

## Use of the context

Loss in nats per token on the second half of all whole held-out windows of {long_window} tokens, mean ± standard error
over windows: (a) with the whole window; (b) with the first half's keys masked in the softmax layers only, the state of
the linear layers kept; (c) without the first half. Much of a difference can come from the first few tokens, which miss
their nearest neighbours; "far" is the difference on the window's last quarter alone, and only it tells of a use of
distant text.

| language | windows | (a) whole | (b) masked | (c) without | (b) - (a) | (c) - (a) | (b) - (a), far | (c) - (a), far |
|---|---|---|---|---|---|---|---|---|
{context}

## Training

- Corpus: `resources/corpus`; half of each batch is English, half Chinese, each window within one document.
- {steps:,} steps of {batch_tokens:,} tokens, in windows of {short_window} tokens or, with a chance that rises from
  {long_share_first} to {long_share_last}, of {long_window}.
- Muon on the layers' matrices (peak rate {matrix_rate}), AdamW on everything else ({other_rate}); weight decay
  {weight_decay} on matrices, gradient norm at most {clip}, {warmup} warm-up steps, then a cosine to zero.
- Linear layers start with time steps log-uniform in [0.001, 0.1] and decay rates uniform in [1, 16].
- Seed {seed}; one thread; matrix products in bfloat16 while training; weights saved in bfloat16.

## Licences of the data

US federal works and other text in the public domain, two collections under the MIT License, and LibreOffice's Chinese
help under the Mozilla Public License 2.0: see `NOTICE`.
"""


def cut_windows(documents: Sequence[NDArray[np.int64]], length: int, whole: bool = False) -> NDArray[np.int64]:
    """Cut documents one after another into windows of ``length`` predicted tokens, shape (windows, length + 1).

    The windows overlap by one token, so each token but a document's first is predicted once. A document's last window
    is filled up with -100, or left out if only ``whole`` windows are asked for.
    """
    rows = []
    for document in documents:
        for start in range(0, len(document) - 1, length):
            row = document[start : start + length + 1]
            if len(row) == length + 1 or not whole:
                rows.append(np.pad(row, (0, length + 1 - len(row)), constant_values=IGNORED))
    return np.array(rows, dtype=np.int64).reshape(-1, length + 1)


@torch.no_grad()
def token_losses(
    model: Qwen3_5ForCausalLM, windows: NDArray[np.int64], mask: torch.Tensor | None = None, batch_tokens: int = 1024
) -> NDArray[np.float64]:
    """Loss of every predicted token in nats, shape (windows, length); zero where the window is filled up.

    ``mask``, of shape (length, length) and added to the scores of the softmax layers, replaces their causal mask.
    """
    model.eval()
    masks = None if mask is None else {"full_attention": mask[None, None], "linear_attention": None}
    found = []
    for part in torch.from_numpy(windows).split(max(1, batch_tokens // windows.shape[1])):
        logits = model(input_ids=part[:, :-1].clamp(min=0), attention_mask=masks, use_cache=False).logits
        loss = functional.cross_entropy(
            logits.float().transpose(1, 2), part[:, 1:], ignore_index=IGNORED, reduction="none"
        )
        found.append(loss.double().numpy())
    return np.concatenate(found)


def bits_per_byte(
    model: Qwen3_5ForCausalLM, documents: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64], window: int
) -> float:
    """Bits the model needs per byte of the documents' text, read in windows of ``window`` tokens.

    ``lengths`` are the bytes of each token. The closing separator counts as no bytes, but its bits count.
    """
    nats = token_losses(model, cut_windows(documents, window)).sum()
    return float(nats / math.log(2) / sum(lengths[document].sum() for document in documents))


def bigram_bits_per_byte(
    training: Sequence[NDArray[np.int64]], held_out: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64]
) -> float:
    """Bits per byte of a token bigram with Witten-Bell smoothing over a unigram with one added to each count."""
    size = len(lengths)
    unigram = np.bincount(np.concatenate(training), minlength=size) + 1.0
    unigram /= unigram.sum()
    pairs = np.concatenate([document[:-1] * size + document[1:] for document in training])
    kinds, counts = np.unique(pairs, return_counts=True)
    seen = np.bincount(kinds // size, weights=counts, minlength=size)
    followers = np.bincount(kinds // size, minlength=size)
    bits = 0.0
    for document in held_out:
        first, second = document[:-1], document[1:]
        place = np.searchsorted(kinds, first * size + second).clip(max=len(kinds) - 1)
        count = np.where(kinds[place] == first * size + second, counts[place], 0)
        total = seen[first] + followers[first]
        smoothed = (count + followers[first] * unigram[second]) / np.maximum(total, 1)
        bits -= np.log2(np.where(total > 0, smoothed, unigram[second])).sum()
    return float(bits / sum(lengths[document].sum() for document in held_out))


def context_use(model: Qwen3_5ForCausalLM, windows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Loss on the second half of windows with the first half known, hidden from the softmax layers, and left out.

    Parameters
    ----------
    model : Qwen3_5ForCausalLM
    windows : int array of shape (windows, length + 1)
        Whole windows, of an even length.

    Returns
    -------
    dict of float array of shape (windows,)
        ``whole``, ``softmax_masked`` (the linear layers' state is kept), ``without``, and the differences of the
        latter two to ``whole``, over the second half and, ``_far``, over the last quarter: nats per token, mean of
        each window.
    """
    length = windows.shape[1] - 1
    half = length // 2
    causal = torch.full((length, length), -torch.inf).triu(1)
    masked = causal.clone()
    masked[half:, :half] = -torch.inf
    losses = {
        "whole": token_losses(model, windows, causal)[:, half:],
        "softmax_masked": token_losses(model, windows, masked)[:, half:],
        "without": token_losses(model, windows[:, half:]),
    }
    means = {name: loss.mean(1) for name, loss in losses.items()}
    for name in ("softmax_masked", "without"):
        difference = losses[name] - losses["whole"]
        means[f"{name}_minus_whole"] = difference.mean(1)
        means[f"{name}_minus_whole_far"] = difference[:, half // 2 :].mean(1)
    return means


def summary(values: NDArray[np.float64]) -> dict[str, float]:
    """Mean and its standard error over windows."""
    return {"mean": float(values.mean()), "standard_error": float(values.std(ddof=1) / math.sqrt(len(values)))}


def evaluate(
    model: Qwen3_5ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    corpus: dict[str, tuple[list[str], list[str]]],
    recipe: Recipe,
) -> dict:
    """Everything the model card states, as plain numbers.

    Parameters
    ----------
    model : Qwen3_5ForCausalLM
    tokenizer : PreTrainedTokenizerFast
    corpus : dict
        Training and held-out documents of each language.
    recipe : Recipe
        Its two window lengths are those the model is judged at.

    Returns
    -------
    dict
        ``parameters``; for each of ``languages`` sizes, bytes per token and bits per byte of the held-out text;
        ``context_use`` for each language and, as ``all``, for the windows of all together.
    """
    lengths = token_bytes(tokenizer)
    metrics = {"parameters": model.num_parameters(), "languages": {}, "context_use": {}}
    use = {}
    for language, (training, held_out) in corpus.items():
        known, new = encode(tokenizer, training), encode(tokenizer, held_out)
        size = int(sum(lengths[document].sum() for document in new))
        metrics["languages"][language] = {
            "training_bytes": int(sum(lengths[document].sum() for document in known)),
            "held_out_bytes": size,
            "held_out_documents": len(new),
            "bytes_per_token": size / sum(len(document) - 2 for document in new),
            "bits_per_byte_short": bits_per_byte(model, new, lengths, recipe.short_window),
            "bits_per_byte_long": bits_per_byte(model, new, lengths, recipe.long_window),
            "bits_per_byte_bigram": bigram_bits_per_byte(known, new, lengths),
        }
        use[language] = context_use(model, cut_windows(new, recipe.long_window, whole=True))
    use["all"] = {name: np.concatenate([use[language][name] for language in corpus]) for name in CONTEXT_COLUMNS}
    for language, losses in use.items():
        summaries = {name: summary(values) for name, values in losses.items()}
        metrics["context_use"][language] = {"windows": len(losses["whole"]), **summaries}
    return metrics


def model_card(metrics: dict) -> str:
    """Write the model card in Markdown; its numbers are those of the metrics that ``evaluate`` and the rule return."""
    recipe = metrics["recipe"]
    quality = "\n".join(
        f"| {language} | {entry['held_out_bytes']:,} | {entry['bytes_per_token']:.2f} "
        f"| {entry['bits_per_byte_short']:.3f} | {entry['bits_per_byte_long']:.3f} "
        f"| {entry['bits_per_byte_bigram']:.3f} |"
        for language, entry in metrics["languages"].items()
    )
    context = "\n".join(
        f"| {name} | {entry['windows']} | "
        + " | ".join(f"{entry[k]['mean']:.4f} ± {entry[k]['standard_error']:.4f}" for k in CONTEXT_COLUMNS)
        + " |"
        for name, entry in metrics["context_use"].items()
    )
    return CARD.format(parameters=metrics["parameters"], quality=quality, context=context, **recipe)
