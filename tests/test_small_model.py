"""The bundled small model: its training code, and the quality that its card states."""

import ast
import json
import math
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from head_influence import small_model, small_model_evaluation
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_5.modeling_qwen3_5 import eager_attention_forward

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "resources/models/hybrid-small"
LANGUAGES = ("english", "chinese")
LIMITS = {"english": 1.85, "chinese": 2.55}
TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
FEW_STEPS = {
    "steps": 60,
    "warmup": 5,
    "batch_tokens": 256,
    "short_window": 32,
    "long_window": 128,
    "other_rate": 1e-2,
    "chunk": 16,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The machine's other cores belong to other jobs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus():
    return {
        language: small_model.read_split(sorted((ROOT / "resources/corpus").glob(f"{language}-*.txt.xz")))
        for language in LANGUAGES
    }


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def metrics():
    return json.loads((FOLDER / "metrics.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tiny_tokenizer(corpus):
    return small_model.train_tokenizer(corpus["english"][0][:3], vocabulary=TINY["vocab_size"])


def tiny_recipe() -> small_model.Recipe:
    """Return the rule's own recipe, cut to a few steps."""
    return replace(rule_recipe(), **FEW_STEPS)


def rule_recipe() -> small_model.Recipe:
    """Read the recipe from the rule's text."""
    text = (ROOT / "workflow/rules/small_model.smk").read_text(encoding="utf-8")
    call = ast.parse(re.search(r"^SMALL_MODEL_RECIPE = (dict\([^)]*\))", text, re.M)[1], mode="eval").body
    return small_model.Recipe(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})


def train_tiny(corpus, tokenizer, recipe):
    windows = [small_model.Windows(small_model.encode(tokenizer, corpus[name][0][:2])) for name in LANGUAGES]
    tiny = small_model.initial_model(small_model.model_config(**TINY), recipe.seed)
    lines = []
    losses = small_model.train(tiny, windows, recipe, report=lines.append, report_every=20)
    return tiny.state_dict(), losses, lines


def test_training_lowers_the_loss_and_repeats(corpus, tiny_tokenizer):
    recipe = tiny_recipe()
    weights, losses, lines = train_tiny(corpus, tiny_tokenizer, recipe)
    assert losses[0] == pytest.approx(math.log(TINY["vocab_size"]), abs=0.3)
    assert np.mean(losses[-5:]) < losses[0] - 0.7
    assert [line.split()[1] for line in lines] == ["20", "40", "60"]
    again, losses_again, _ = train_tiny(corpus, tiny_tokenizer, recipe)
    assert losses == losses_again
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    other, _, _ = train_tiny(corpus, tiny_tokenizer, replace(recipe, seed=recipe.seed + 1, steps=5))
    assert not torch.equal(weights["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_rates_warm_up_and_fall_to_zero():
    recipe = rule_recipe()
    rates = [small_model.rate_factor(recipe, step) for step in range(recipe.steps)]
    assert rates[0] < 0.01 and max(rates) > 0.95 and rates[-1] < 1e-5
    assert abs(int(np.argmax(rates)) - recipe.warmup) <= 1


def test_chunk_length_does_not_change_the_function():
    tiny = small_model.initial_model(small_model.model_config(**TINY), 1).eval()
    tokens = torch.arange(100)[None] % TINY["vocab_size"]
    with torch.no_grad():
        expected = tiny(input_ids=tokens).logits
        with small_model.delta_rule_chunk(16):
            found = tiny(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_initial_memories_differ_in_length():
    first = small_model.initial_model(small_model.model_config(), 3)
    deltas = [layer.linear_attn for layer in first.model.layers if hasattr(layer, "linear_attn")]
    steps = torch.cat([torch.nn.functional.softplus(delta.dt_bias) for delta in deltas])
    rates = torch.cat([delta.A_log.exp() for delta in deltas])
    assert len(deltas) == 6 and len(steps) == 96
    assert 1e-3 <= steps.min() * 1.001 < 3e-3 and 3e-2 < steps.max() <= 1e-1 * 1.001
    assert 1 <= rates.min() * 1.001 and rates.max() <= 16 * 1.001


def test_windows_stay_within_one_document():
    documents = [np.full(5, 0), np.arange(100, 140), np.arange(200, 221), np.arange(300, 320)]
    drawn = small_model.Windows(documents).draw(np.random.default_rng(0), 2000, 20)
    assert drawn.shape == (2000, 21)
    assert (np.diff(drawn, axis=1) == 1).all()
    assert set(drawn[:, 0]) == {*range(100, 120), 200}  # every start, and only the documents of 21 tokens and more
    with pytest.raises(ValueError, match="no document holds 51 tokens"):
        small_model.Windows(documents).draw(np.random.default_rng(0), 1, 50)


def test_cut_windows_predict_each_token_once():
    documents = [np.arange(10, 23), np.arange(40, 49)]
    cut = small_model_evaluation.cut_windows(documents, 4)
    assert [x for x in cut[:, 1:].ravel() if x != -100] == [*range(11, 23), *range(41, 49)]
    assert len(small_model_evaluation.cut_windows([np.arange(14)], 4, whole=True)) == 3


def test_bigram_agrees_with_a_slow_route():
    rng = np.random.default_rng(5)
    training, held_out = [rng.integers(6, size=40), rng.integers(5, size=9)], [rng.integers(7, size=30)]
    size = 7
    lengths = np.arange(1, size + 1)
    unigram = Counter(token for document in training for token in document)
    pairs = Counter(pair for document in training for pair in pairwise(document.tolist()))
    bits = 0.0
    for first, second in pairwise(held_out[0].tolist()):
        alone = (unigram[second] + 1) / (sum(unigram.values()) + size)
        followers = [count for (start, _), count in pairs.items() if start == first]
        weight = len(followers) / (len(followers) + sum(followers)) if followers else 1.0
        known = pairs[first, second] / sum(followers) if followers else 0.0
        bits -= math.log2((1 - weight) * known + weight * alone)
    found = small_model_evaluation.bigram_bits_per_byte(training, held_out, lengths)
    assert found == pytest.approx(bits / sum(int(lengths[token]) for token in held_out[0]))


def test_held_out_documents_are_not_trained_on(corpus):
    for training, held_out in corpus.values():
        assert 0.03 < sum(map(len, held_out)) / sum(map(len, training)) < 0.08
        assert not set(training) & set(held_out)
        assert "\f" not in "".join(training + held_out)


def test_tokenizer_round_trip_without_special_tokens(tokenizer):
    text = "Fellow citizens, 12 heads — café.\n\n注意力頭的影響，并不均匀。🙂\t"
    encoded = tokenizer(text)
    assert tokenizer.decode(encoded.input_ids) == text
    assert tokenizer.all_special_ids == [0] and 0 not in encoded.input_ids
    assert tokenizer(small_model.SEPARATOR).input_ids == [0]
    assert len(tokenizer) == 4096
    lengths = small_model.token_bytes(tokenizer)
    assert lengths[encoded.input_ids].sum() == len(text.encode()) and lengths[0] == 0


def test_tokenizer_is_the_one_that_the_corpus_gives(tokenizer, corpus):
    trained = small_model.train_tokenizer([text for training, _ in corpus.values() for text in training])
    assert trained.get_vocab() == tokenizer.get_vocab()


def table_rows(card: str, title: str) -> dict[str, list[float]]:
    """Numbers of each row of the table below a title, by the row's first cell."""
    section = card.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if re.match(r"\| \w+ \|.*\d", line)]
    number = re.compile(r"-?\d[\d,]*\.?\d*")
    return {
        cells[0].strip(): [float(found.replace(",", "")) for cell in cells[1:] for found in number.findall(cell)]
        for cells in rows
        if cells[0].strip() != "language"
    }


def test_card_agrees_with_metrics_rule_and_text(metrics, tokenizer, corpus, model):
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert card == small_model_evaluation.model_card(metrics)
    assert metrics["recipe"] == rule_recipe().__dict__
    assert metrics["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    quality = table_rows(card, "Quality on held-out text")
    assert list(quality) == list(LANGUAGES)
    for language, (_, held_out) in corpus.items():
        size = sum(len(text.encode()) for text in held_out)
        tokens = sum(len(tokenizer(text, verbose=False).input_ids) for text in held_out)
        entry = metrics["languages"][language]
        bits = [entry[f"bits_per_byte_{name}"] for name in ("short", "long", "bigram")]
        assert quality[language] == pytest.approx([size, size / tokens, *bits], abs=5.1e-3)
        assert max(bits[:2]) <= LIMITS[language] and max(bits[:2]) < bits[2]
    context = table_rows(card, "Use of the context")
    assert list(context) == [*LANGUAGES, "all"]
    for name, values in context.items():
        entry = metrics["context_use"][name]
        stated = [entry[c][part] for c in small_model_evaluation.CONTEXT_COLUMNS for part in ("mean", "standard_error")]
        assert values == pytest.approx([entry["windows"], *stated], abs=5.1e-5)
        whole, masked, without, masked_gain, gain, _, _ = values[1::2]
        assert masked - whole == pytest.approx(masked_gain, abs=2e-4)
        assert without - whole == pytest.approx(gain, abs=2e-4)
        assert gain > 2 * entry["without_minus_whole"]["standard_error"]


@torch.no_grad()
@pytest.mark.parametrize("language", LANGUAGES)
def test_bits_per_byte_of_held_out_text(model, tokenizer, corpus, metrics, language):
    training, held_out = corpus[language]
    sample = [text[len(text) // 2 :][: max(200, len(text) // 12)] for text in held_out]
    end = tokenizer.eos_token_id
    nats = 0.0
    for text in sample:
        tokens = torch.tensor([end, *tokenizer(text).input_ids])
        for window in tokens.unfold(0, 65, 64).split(64) if len(tokens) > 64 else []:
            nats += float(model(input_ids=window, labels=window).loss) * window[:, 1:].numel()
        if (rest := tokens[(len(tokens) - 1) // 64 * 64 :]).numel() > 1:
            nats += float(model(input_ids=rest[None], labels=rest[None]).loss) * (len(rest) - 1)
    bits = nats / math.log(2) / sum(len(text.encode()) for text in sample)
    documents = small_model.encode(tokenizer, sample)
    lengths = small_model.token_bytes(tokenizer)
    bigram = small_model_evaluation.bigram_bits_per_byte(small_model.encode(tokenizer, training), documents, lengths)
    assert bits <= LIMITS[language]
    assert bits < bigram
    assert bits == pytest.approx(metrics["languages"][language]["bits_per_byte_short"], rel=0.08)
    # the library also counts each closing separator, so it finds a little more
    found = small_model_evaluation.bits_per_byte(model, documents, lengths, 64)
    assert bits < found < bits * 1.05


def masked_first_half(module, query, key, value, attention_mask, **kwargs):
    """Attention in which queries of the second half see no key of the first."""
    length = query.shape[2]
    position = torch.arange(length)
    hidden = (position[:, None] < position) | ((position[:, None] >= length // 2) & (position < length // 2))
    return eager_attention_forward(module, query, key, value, torch.where(hidden, -torch.inf, 0.0), **kwargs)


def test_context_is_used(model, tokenizer, corpus):
    windows = np.concatenate(
        [
            small_model_evaluation.cut_windows(small_model.encode(tokenizer, corpus[name][1]), 512, whole=True)[::24]
            for name in LANGUAGES
        ]
    )
    found = small_model_evaluation.context_use(model, windows)
    gain = found["without"] - found["whole"]
    assert gain.mean() > 2 * gain.std(ddof=1) / math.sqrt(len(windows))
    stated = small_model_evaluation.summary(found["without_minus_whole"])
    assert stated == pytest.approx({"mean": gain.mean(), "standard_error": gain.std(ddof=1) / math.sqrt(len(gain))})

    losses = [small_model_evaluation.token_losses(model, part)[:, -128:] for part in (windows, windows[:, 256:])]
    np.testing.assert_allclose(found["without_minus_whole_far"], (losses[1] - losses[0]).mean(1), atol=1e-4)

    few = {name: losses[:3].mean() for name, losses in found.items()}
    tokens = torch.from_numpy(windows[:3])
    labels = tokens.masked_fill(torch.arange(513) <= 256, -100)
    ALL_ATTENTION_FUNCTIONS.register("masked_first_half", masked_first_half)
    with torch.no_grad():
        assert few["whole"] == pytest.approx(float(model(input_ids=tokens, labels=labels).loss), abs=1e-4)
        half = tokens[:, 256:]
        assert few["without"] == pytest.approx(float(model(input_ids=half, labels=half).loss), abs=1e-4)
        before = model.config._attn_implementation
        model.config._attn_implementation = "masked_first_half"
        try:
            masked = float(model(input_ids=tokens, labels=labels).loss)
        finally:
            model.config._attn_implementation = before
    assert few["softmax_masked"] == pytest.approx(masked, abs=1e-4)
    assert few["softmax_masked"] != pytest.approx(few["whole"], abs=1e-4)
