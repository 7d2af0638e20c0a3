"""Contexts of the head influence curves: articles with questions and answers, read, checked and turned into tokens.

Three forms: a JSON list of {id, article, items: [{id, question, answer}]}; a LongHealth-shaped JSON object of patients;
a plain text whose sections are separated by lines of `---`: the article, then continuations of it.
"""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from head_influence import StudyError
from head_influence.json_files import read_json
from head_influence.texts import plain_name

LETTERS = "abcde"


@dataclass(frozen=True)
class Item:
    """What is asked about an article, and the answer that is scored."""

    id: str
    question: str
    answer: str


@dataclass(frozen=True)
class Context:
    """An article and its items."""

    id: str
    article: str
    items: tuple

    @property
    def sha256(self):
        """Hash of the article and all its items."""
        fields = [self.id, self.article, [[i.id, i.question, i.answer] for i in self.items]]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


@dataclass(frozen=True)
class TokenItem:
    """An item as token ids."""

    id: str
    question: tuple
    answer: tuple

    @property
    def live(self):
        """New tokens that the model reads: question and answer but for the last token, which predicts nothing."""
        return (*self.question, *self.answer)[:-1]

    @property
    def _given(self):
        return max(1, len(self.question))  # without a question the first answer token is given

    @property
    def targets(self):
        """The scored answer tokens."""
        return (*self.question, *self.answer)[self._given :]

    @property
    def predicting(self):
        """Index among the live tokens of the one that predicts each target."""
        return list(range(self._given - 1, len(self.live)))


@dataclass(frozen=True)
class TokenContext:
    """A context as token ids; `ids` is prefix, article and suffix."""

    id: str
    prefix: tuple
    article: tuple
    suffix: tuple
    repeat: tuple
    items: tuple

    @cached_property
    def ids(self):
        """Ids of the whole context."""
        return (*self.prefix, *self.article, *self.suffix)


def read_contexts(path, contexts=None, items=None, question="{question}"):
    """Read the contexts file.

    Parameters
    ----------
    path : path
    contexts, items : int, optional
        Take the first so many contexts, and items of each.
    question : str
        What is asked, with {question} for an item's own and {options} for a LongHealth question's lettered answers.

    Returns
    -------
    list of Context

    Raises
    ------
    StudyError
        If the file is absent or of none of the three forms: the entry and key at fault are named.
    """
    path = Path(path)
    if not path.is_file():
        raise StudyError(f"curves.contexts: {path} does not exist; expected a contexts file (see resources/contexts)")
    if path.suffix == ".txt":
        found = _plain_text(path, question)
    else:
        data = read_json(path)
        if isinstance(data, list):
            found = _listed(path, data, question)
        elif isinstance(data, dict):
            found = _longhealth(path, data, question)
        else:
            raise StudyError(f"{path}: expected a JSON list of contexts or a LongHealth-shaped object of patients")
    if not found:
        raise StudyError(f"{path}: holds no context")
    seen = {}
    for context in found:
        plain_name(context.id, f"{path}: id")
        if context.id.casefold() in seen:
            raise StudyError(f"{path}: context {context.id!r} occurs twice")
        seen[context.id.casefold()] = context
    return [replace(c, items=c.items[:items]) for c in found[:contexts]]


def check_contexts(settings):
    """Raise a `StudyError` unless the contexts file of the `curves` settings is usable; no model is needed."""
    question = settings.get("prompt", {}).get("question", "{question}")
    read_contexts(settings["contexts"], settings.get("number"), settings.get("items"), question)


def _ask(template, question, options=""):
    return template.replace("{question}", question).replace("{options}", options)


def _string(where, entry, key, empty=False):
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not (value or empty):
        raise StudyError(f"{where}: {key}: expected a {'' if empty else 'non-empty '}string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise StudyError(f"{where}: {key}: holds half of a surrogate pair, which is no character") from None
    return value


def _only(where, entry, allowed):
    if unknown := sorted(set(entry) - set(allowed)):
        raise StudyError(f"{where}: unknown key {unknown[0]!r}; expected {', '.join(allowed)}")


def _several(where, entry, key):
    value = entry.get(key)
    if not isinstance(value, list) or not value:
        raise StudyError(f"{where}: {key}: expected a non-empty list")
    return value


def _listed(path, data, template):
    found = []
    for i, entry in enumerate(data):
        where = f"{path}: context {i}"
        name, article = _string(where, entry, "id"), _string(where, entry, "article")
        _only(where, entry, ("id", "article", "items"))
        items = []
        for j, item in enumerate(_several(where, entry, "items")):
            inner = f"{where}: item {j}"
            asked = _string(inner, item, "question", empty=True)
            _only(inner, item, ("id", "question", "answer"))
            asked = _ask(template, asked) if asked else ""
            items.append(Item(_string(inner, item, "id"), asked, _string(inner, item, "answer")))
        found.append(Context(name, article, tuple(items)))
    return found


def _longhealth(path, data, template):
    found = []
    for name, patient in data.items():
        where = f"{path}: {name}"
        texts = patient.get("texts") if isinstance(patient, dict) else None
        if not isinstance(texts, dict) or not texts or not all(re.fullmatch(r"text_\d+", k) for k in texts):
            raise StudyError(f'{where}: texts: expected an object {{"text_0": "...", ...}} as in LongHealth')
        ordered = sorted(texts, key=lambda key: int(key.removeprefix("text_")))
        article = "\n\n".join(_string(f"{where}: texts", texts, key) for key in ordered)
        items = []
        for j, entry in enumerate(_several(where, patient, "questions")):
            inner = f"{where}: question {j}"
            asked, answer = _string(inner, entry, "question"), _string(inner, entry, "correct")
            answers = [_string(inner, entry, f"answer_{letter}") for letter in LETTERS]
            if answer not in answers and len(answer.strip()) == 1:
                raise StudyError(f"{inner}: correct: expected the full text of the right answer, not its letter")
            options = "\n".join(f"{letter.upper()}: {text}" for letter, text in zip(LETTERS, answers, strict=True))
            items.append(Item(f"question_{j:02d}", _ask(template, asked, options), answer))
        found.append(Context(name, article, tuple(items)))
    return found


def _plain_text(path, template):
    try:
        sections = re.split(r"^---\s*$\n?", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    if len(sections) < 2 or not all(s.strip() for s in sections):
        raise StudyError(f"{path}: expected an article and at least one continuation, separated by lines of ---")
    items = tuple(Item(f"continuation_{i}", "", text) for i, text in enumerate(sections[1:]))
    return [Context(path.stem, sections[0], items)]


def with_answers(context, answers):
    """Return a `TokenContext` whose items have the token ids `answers` (item id to list of int) as their answers."""
    return replace(context, items=tuple(replace(i, answer=tuple(answers[i.id])) for i in context.items))


def tokenise_context(tokenizer, context, prompt):
    """Turn a context into token ids: every part on its own, without added special tokens, ids concatenated.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    context : Context
    prompt : dict
        Strings prefix, suffix and repeat.

    Returns
    -------
    TokenContext
    """

    def ids(text):
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids) if text else ()

    items = []
    for item in context.items:
        tokens = TokenItem(item.id, ids(item.question), ids(item.answer))
        if not tokens.answer or not tokens.targets:
            raise StudyError(
                f"context {context.id!r}, item {item.id!r}: its answer has no token to score; an answer needs one "
                "token, two if there is no question"
            )
        items.append(tokens)
    result = TokenContext(
        context.id,
        ids(prompt["prefix"]),
        ids(context.article),
        ids(prompt["suffix"]),
        ids(prompt["repeat"]),
        tuple(items),
    )
    if not result.article:
        raise StudyError(f"context {context.id!r}: its article has no token")
    return result
