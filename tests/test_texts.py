"""The list of texts, and the window of tokens that is used of each."""

import hashlib
import json

import models_tiny as tiny
import pytest
from head_influence import StudyError
from head_influence.texts import Text, check_windows, load_tokenizer, plain_name, read_texts, tokenise

GOOD = {"id": "a", "language": "en", "text": "some words"}


def written(tmp_path, content):
    path = tmp_path / "texts.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def assert_refused(path, match):
    with pytest.raises(StudyError, match=match) as caught:
        read_texts(path, 5)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_is_read(tmp_path):
    entries = [GOOD, {"id": "ü_2", "language": "zh", "text": "天地玄黃", "tokens": 3}]
    one, two = read_texts(written(tmp_path, entries), 5)
    assert one == Text(0, "a", "en", "some words", 5)
    assert two == Text(1, "ü_2", "zh", "天地玄黃", 3)
    assert two.sha256 == hashlib.sha256("天地玄黃".encode()).hexdigest()


def test_identical_texts_are_two_texts(tmp_path):
    one, two = read_texts(written(tmp_path, [GOOD, GOOD | {"id": "b"}]), 5)
    assert one.sha256 == two.sha256
    assert (one.index, two.index) == (0, 1)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({}, "expected a non-empty JSON list"),
        ([], "expected a non-empty JSON list"),
        ("text", "expected a non-empty JSON list"),
        ([1], "entry 0: expected an object"),
        ([GOOD, None], "entry 1: expected an object"),
        ([{**GOOD, "Text": "x"}], "entry 0: unknown key 'Text'; expected id, language, text"),
        ([{"id": "a", "language": "en"}], "entry 0: text: expected a string"),
        ([GOOD | {"id": 3}], "entry 0: id: expected a string"),
        ([GOOD | {"text": None}], "entry 0: text: expected a string"),
        ([GOOD | {"tokens": 0}], "entry 0: tokens: expected a positive integer, found 0"),
        ([GOOD | {"tokens": True}], "entry 0: tokens: expected a positive integer, found True"),
        ([GOOD | {"tokens": 3.0}], "entry 0: tokens: expected a positive integer, found 3.0"),
        ([GOOD, GOOD], "entry 1: id 'a' is already that of entry 0"),
        ([GOOD, GOOD | {"id": "A"}], "entry 1: id 'A' is already that of entry 0"),
        (b"\xff\xfe[]", "UTF-8"),
        ('[{"id": "caf\xe9"}]'.encode("latin-1"), "UTF-8"),
        (b"[{]", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'[{"id": "a", "id": "b"}]', "appears twice"),
        (b'[{"id": "a", "language": "en", "text": "\\ud800"}]', "text: holds half of a surrogate pair"),
        (b'[{"id": "\\udcff", "language": "en", "text": "x"}]', "id: holds half of a surrogate pair"),
    ],
)
def test_anything_else_is_refused(tmp_path, content, match):
    assert_refused(written(tmp_path, content), match)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../up",
        "a/b",
        "/abs",
        "-rf",
        ".hidden",
        "a b",
        "a\0",
        "a\n",
        "a\\b",
        "{x}",
        "a*",
        "~",
        "x" * 101,
        "ü" * 51,
    ],
)
def test_ids_that_are_no_file_names(tmp_path, name):
    assert_refused(written(tmp_path, [GOOD | {"id": name}]), "is not a plain file name")


@pytest.mark.parametrize("name", ["a", "0", "_a.b-c", "Überschrift", "文本", "x" * 100])
def test_ids_that_are(name):
    assert plain_name(name, "id") == name


def test_absent_file_and_folder(tmp_path):
    assert_refused(tmp_path / "nothing.json", "does not exist")
    assert_refused(tmp_path, "not a regular file")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(tiny.checkpoint("llama"))


def test_the_window_is_the_first_tokens(tokenizer):
    """The tiny tokenizer has a token for each byte."""
    ids, strings = tokenise(tokenizer, Text(0, "a", "en", "abc def", 4))
    assert strings == ["a", "b", "c", " "]
    assert [tokenizer.id_to_token(i) for i in ids] == ["a", "b", "c", "Ġ"]
    assert tokenise(tokenizer, Text(0, "a", "en", "abc", 100))[1] == ["a", "b", "c"]


def test_a_token_inside_a_character_shows_the_character(tokenizer):
    ids, strings = tokenise(tokenizer, Text(0, "a", "zh", "天a😀", 8))
    assert strings == ["天", "天", "天", "a", "😀", "😀", "😀", "😀"]
    assert len(ids) == 8


def test_control_characters_and_emoji_are_texts(tokenizer):
    texts = [Text(0, "a", "en", "\0\x1b[31m\u202e\r\n\t" * 3, 9), Text(1, "b", "en", "😀🏴‍☠️", 9)]
    assert check_windows(tokenizer, texts, 7, "texts.json") == [9, 9]


def test_a_long_text_is_cut(tokenizer):
    assert check_windows(tokenizer, [Text(0, "a", "en", "word " * 2_000_000, 12)], 7, "texts.json") == [12]


def test_a_text_without_an_observation_is_refused(tokenizer):
    text = Text(0, "a", "en", "abcdefg", 50)
    assert check_windows(tokenizer, [text], 6, "texts.json") == [7]
    with pytest.raises(StudyError, match=r"t.json: text 'a' has 7 tokens; measure.first_query 7 needs at least 8"):
        check_windows(tokenizer, [text], 7, "t.json")


def test_no_special_tokens_and_no_truncation_of_the_tokenizers_own(tmp_path):
    from tokenizers.processors import TemplateProcessing

    own = tiny.byte_tokenizer()
    own.post_processor = TemplateProcessing(single="a $A a", special_tokens=[("a", own.token_to_id("a"))])
    own.enable_truncation(3)
    own.save(str(tmp_path / "tokenizer.json"))
    assert tokenise(load_tokenizer(tmp_path), Text(0, "a", "en", "bcdef", 50))[1] == list("bcdef")


def test_an_unusable_tokenizer(tmp_path):
    with pytest.raises(StudyError, match="does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StudyError, match="not a usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
