"""The second study as the workflow sees it: its settings with their defaults, contexts, heads and cache paths."""

import hashlib
import json
import re

from head_influence import StudyError
from head_influence.budgets import keys_at
from head_influence.checkpoint import Checkpoint
from head_influence.contexts import read_contexts, tokenise_context, with_answers
from head_influence.families import layer_count, layer_of
from head_influence.json_files import read_json
from head_influence.texts import load_tokenizer

DEFAULTS = {
    "number": None,
    "items": None,
    "baseline": 0.05,
    "ratios": [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5],
    "heads": "all",
    "figure_heads": None,
    "published": None,
    "prompt": {"prefix": "", "suffix": "", "repeat": "\n\nRepeat the text above.\n\n", "question": "{question}"},
    "answers": "reference",
    "answer_tokens": 64,
    "fit": {"keys": "rms", "bias": "nnls", "values": "ridge"},
    "minimum_keys": 0,
    "max_queries": None,
    "seed": 0,
    "budgets": None,
}
BUDGETS = [0.01, 0.02, 0.05, 0.1]
HEAD = re.compile(r"L(\d+)H(\d+)")


def cache_kinds(checkpoint):
    """What each layer keeps of a context.

    Returns
    -------
    list of str
        "softmax": keys and values of the whole text; "sliding": those of a window; "linear": a state.
    """
    layers = [layer_of(checkpoint, i) for i in range(layer_count(checkpoint))]
    return ["linear" if x.kind == "linear" else "sliding" if x.window else "softmax" for x in layers]


def with_defaults(given):
    """Return the `curves` settings with everything that was left out."""
    settings = DEFAULTS | given
    if settings["budgets"] is None:
        settings["budgets"] = [target for target in BUDGETS if target <= settings["ratios"][-1]]
    for key in ("prompt", "fit"):
        settings[key] = DEFAULTS[key] | given.get(key, {})
    return settings


def parse_head(name):
    """Turn "L15H2" into (15, 2)."""
    found = HEAD.fullmatch(str(name))
    if not found:
        raise StudyError(f"curves.heads: {name!r}: expected a layer and a KV head like L15H2")
    return int(found[1]), int(found[2])


def head_name(layer, head):
    """Name of a KV head as budgets write it."""
    return f"L{layer}H{head}"


def short_hash(*parts):
    """Twelve hexadecimal digits that stand for `parts` in a path."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


class CurveStudy:
    """The checked settings of the curves and what follows from them.

    Parameters
    ----------
    given : dict
        The `curves` part of the settings, valid by the schema.
    folder : path
        The checkpoint.

    Attributes
    ----------
    contexts : list of Context
    tokens : dict
        Context id to `TokenContext`.
    kinds : list of str
        Per layer "softmax", "sliding" or "linear".
    softmax : list of int
        Layers whose heads have curves.
    kv_heads : dict
        Softmax layer to its number of KV heads.
    heads : dict
        Softmax layer to its list of KV heads with a curve; None if a coarse pass picks them.

    Raises
    ------
    StudyError
        If anything would stop the study later: it names the key or the context.
    """

    def __init__(self, given, folder):
        self.settings = with_defaults(given)
        checkpoint = Checkpoint(folder)
        self.kinds = cache_kinds(checkpoint)
        self.softmax = [i for i, kind in enumerate(self.kinds) if kind == "softmax"]
        if not self.softmax:
            raise StudyError(
                f"{folder}: no layer with softmax attention over the whole text; there is no KV cache to compact"
            )
        self.kv_heads = {i: layer_of(checkpoint, i).key_heads for i in self.softmax}
        self._check_ratios()
        self.heads = self._heads()
        for name in self.settings["figure_heads"] or []:
            self._check_head(name)
        s = self.settings
        self.contexts = read_contexts(s["contexts"], s["number"], s["items"], s["prompt"]["question"])
        self.by_id = {context.id: context for context in self.contexts}
        tokenizer = load_tokenizer(folder)
        self.tokens = {c.id: tokenise_context(tokenizer, c, s["prompt"]) for c in self.contexts}
        for name, context in self.tokens.items():
            if self.baseline_keys(name) == len(context.article) and s["baseline"] < 1:
                raise StudyError(
                    f"context {name!r}: minimum_keys leaves nothing to compact in {len(context.article)} tokens"
                )

    def _check_ratios(self):
        ratios, baseline = self.settings["ratios"], self.settings["baseline"]
        if sorted(set(ratios)) != ratios:
            raise StudyError("settings: curves.ratios: expected numbers in rising order, none of them twice")
        if baseline not in ratios:
            raise StudyError(f"settings: curves.ratios: the baseline {baseline} must be one of them")
        for target in self.settings["budgets"]:
            if target > ratios[-1]:
                raise StudyError(f"settings: curves.budgets: {target} is beyond the largest ratio {ratios[-1]}")

    def _check_head(self, name):
        layer, head = parse_head(name)
        if layer not in self.kv_heads or head >= self.kv_heads[layer]:
            raise StudyError(
                f"curves.heads: {name}: the model has KV heads 0 to {max(self.kv_heads.values()) - 1} in its softmax "
                f"layers {', '.join(map(str, self.softmax))}"
            )
        return layer, head

    def _heads(self):
        wanted = self.settings["heads"]
        everything = {layer: list(range(count)) for layer, count in self.kv_heads.items()}
        if wanted == "all":
            return everything
        if isinstance(wanted, int):
            if wanted > sum(self.kv_heads.values()):
                raise StudyError(f"curves.heads: {wanted}: the model has {sum(self.kv_heads.values())} KV heads")
            return None
        chosen = {self._check_head(name) for name in wanted}
        return {layer: sorted(h for i, h in chosen if i == layer) for layer in sorted({i for i, _ in chosen})}

    def baseline_keys(self, context):
        """Keys per head at the baseline."""
        s = self.settings
        return keys_at(s["baseline"], len(self.tokens[context].article), s["minimum_keys"])

    def reading(self, context):
        """Part of a cache path that says what the model reads: article and prompt."""
        c = self.tokens[context]
        return short_hash(c.prefix, c.article, c.suffix, c.repeat)

    def items_key(self, context):
        """Part of a cache path that says what is asked and how the baseline is compacted."""
        s = self.settings
        keys = ("fit", "baseline", "minimum_keys", "max_queries", "seed", "answers", "answer_tokens")
        items = [(i.id, i.question, i.answer) for i in self.tokens[context].items]
        return short_hash(items, {key: s[key] for key in keys})

    def scoring(self):
        """Return the settings that the numbers of a curve depend on, as a JSON string."""
        keys = ("fit", "baseline", "minimum_keys", "max_queries", "seed")
        return json.dumps({key: self.settings[key] for key in keys}, sort_keys=True)

    def reading_options(self):
        """Return the settings that say how a context becomes tokens, as a JSON string."""
        keys = ("contexts", "number", "items", "prompt", "answers", "answer_tokens")
        return json.dumps({key: self.settings[key] for key in keys}, sort_keys=True)


def open_context(options, name, sha256, folder, answers=None):
    """Read one context again in a job of its own.

    Parameters
    ----------
    options : dict
        From `CurveStudy.reading_options`.
    name, sha256 : str
        The context and what it has to be.
    folder : path
        The checkpoint, for its tokenizer.
    answers : path, optional
        JSON of item id to {"ids": token ids} that replace the reference answers.

    Returns
    -------
    TokenContext
    """
    found = read_contexts(options["contexts"], options["number"], options["items"], options["prompt"]["question"])
    context = next((c for c in found if c.id == name), None)
    if context is None or context.sha256 != sha256:
        raise StudyError(
            f"{options['contexts']}: context {name!r} changed since the study was planned; run the same command again"
        )
    tokens = tokenise_context(load_tokenizer(folder), context, options["prompt"])
    if answers is None:
        return tokens
    return with_answers(tokens, {name: answer["ids"] for name, answer in read_json(answers).items()})
