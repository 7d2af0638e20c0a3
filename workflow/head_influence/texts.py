"""The study's texts: reading the list, and cutting each to its window of tokens."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from head_influence import StudyError
from head_influence.json_files import read_json

KEYS = {"id", "language", "text", "tokens"}
LONGEST_ID = 100  # bytes: it becomes a folder's name
LOOKED_AT = 1 << 20  # characters: what comes later in a text is in no window
PLAIN_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class Text:
    """One sample of the study; `index` is its place in the list, `tokens` the largest number of tokens used."""

    index: int
    id: str
    language: str
    text: str
    tokens: int

    @property
    def sha256(self):
        """Hash of the text itself."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_texts(path, tokens):
    """Read the JSON list of texts.

    Parameters
    ----------
    path : path
        A UTF-8 JSON list of {id, language, text, tokens?}.
    tokens : int
        Window of every entry that names none of its own.

    Returns
    -------
    list of Text

    Raises
    ------
    StudyError
        For anything that is not such a list: the entry and its key are named.
    """
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise StudyError(f"{path}: expected a non-empty JSON list of texts")
    texts, seen = [], {}
    for i, entry in enumerate(entries):
        where = f"{path}: entry {i}"
        if not isinstance(entry, dict):
            raise StudyError(f"{where}: expected an object with id, language and text")
        if unknown := sorted(map(str, set(entry) - KEYS)):
            raise StudyError(f"{where}: unknown key {unknown[0]!r}; expected id, language, text and optionally tokens")
        for key in ("id", "language", "text"):
            if not isinstance(entry.get(key), str):
                raise StudyError(f"{where}: {key}: expected a string")
            try:
                entry[key].encode()
            except UnicodeEncodeError:
                raise StudyError(f"{where}: {key}: holds half of a surrogate pair, which is no character") from None
        name = plain_name(entry["id"], f"{where}: id")
        if name.casefold() in seen:
            raise StudyError(f"{where}: id {name!r} is already that of entry {seen[name.casefold()]}")
        seen[name.casefold()] = i
        own = entry.get("tokens", tokens)
        if isinstance(own, bool) or not isinstance(own, int) or own < 1:
            raise StudyError(f"{where}: tokens: expected a positive integer, found {own!r}")
        texts.append(Text(i, name, entry["language"], entry["text"], own))
    return texts


def plain_name(name, where):
    """Return `name` if it can be a file's name everywhere (letters, digits, underscore, dot, hyphen)."""
    if not PLAIN_NAME.fullmatch(name) or len(name.encode()) > LONGEST_ID:
        raise StudyError(
            f"{where} {name[:40]!r} is not a plain file name: expected letters, digits, '_', '.', '-', the first not "
            f"'.' or '-', at most {LONGEST_ID} bytes"
        )
    return name


def load_tokenizer(folder):
    """Return the checkpoint's own fast tokenizer (`tokenizer.json`)."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise StudyError(f"{path}: the file does not exist; a checkpoint needs its fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise StudyError(f"{path}: not a usable tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenise(tokenizer, text):
    """Cut one text to its window.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    text : Text

    Returns
    -------
    ids : list of int
        At most `text.tokens` ids; no special tokens are added.
    strings : list of str
        What each token covers, by character offsets: a token inside a character shows that character.
    """
    encoding = tokenizer.encode(text.text[:LOOKED_AT], add_special_tokens=False)
    ids = encoding.ids[: text.tokens]
    return ids, [text.text[a:b] for a, b in encoding.offsets[: len(ids)]]


def check_windows(tokenizer, texts, first_query, path):
    """Return each text's number of tokens; one too short to have a primary observation is a `StudyError`."""
    counts = [len(tokenise(tokenizer, text)[0]) for text in texts]
    for text, count in zip(texts, counts, strict=True):
        if count <= first_query:
            raise StudyError(
                f"{path}: text {text.id!r} has {count} tokens; measure.first_query {first_query} needs at least "
                f"{first_query + 1}"
            )
    return counts
