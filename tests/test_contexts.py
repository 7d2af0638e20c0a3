"""Contexts files of every form, what is refused and in which words, and how a context becomes tokens."""

import json

import pytest
from head_influence import StudyError
from head_influence.contexts import TokenItem, read_contexts, tokenise_context, with_answers

PROMPT = {"prefix": "<", "suffix": ">", "repeat": "again", "question": "{question}"}


class Letters:
    """A tokenizer whose tokens are characters."""

    class Encoding:
        def __init__(self, ids):
            self.ids = ids

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return self.Encoding([ord(c) for c in text])


def entry(**changes):
    return {"id": "a", "article": "text", "items": [{"id": "x", "question": "q?", "answer": "yes"}]} | changes


def patient(**changes):
    question = {"No": 3, "question": "Who?", "correct": "Ada", "answer_location": {}}
    question |= dict(zip((f"answer_{c}" for c in "abcde"), ("Bo", "Cy", "Ada", "Di", "Ed"), strict=True))
    return {"texts": {"text_10": "third", "text_2": "second", "text_0": "first"}, "questions": [question]} | changes


@pytest.fixture
def write(tmp_path):
    def inner(content, name="contexts.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return inner


def test_a_list(write):
    path = write([entry(), entry(id="b", items=[{"id": str(i), "question": "", "answer": "z"} for i in range(3)])])
    first, second = read_contexts(path, question="Q: {question}")
    assert (first.id, first.article, first.items[0].question, first.items[0].answer) == ("a", "text", "Q: q?", "yes")
    assert [item.question for item in second.items] == ["", "", ""]
    assert [c.id for c in read_contexts(path, 1)] == ["a"]
    assert [len(c.items) for c in read_contexts(path, None, 2)] == [1, 2]


def test_the_longhealth_shape(write):
    (context,) = read_contexts(write({"patient_01": patient()}), question="{question}\n{options}\n")
    assert context.id == "patient_01"
    assert context.article == "first\n\nsecond\n\nthird"
    (item,) = context.items
    assert item.question == "Who?\nA: Bo\nB: Cy\nC: Ada\nD: Di\nE: Ed\n"
    assert item.answer == "Ada"


def test_plain_text(write):
    (context,) = read_contexts(write("An article.\n---\n It goes on.\n---\n Or so.\n", "river.txt"))
    assert (context.id, context.article) == ("river", "An article.\n")
    assert [(i.question, i.answer) for i in context.items] == [("", " It goes on.\n"), ("", " Or so.\n")]


def wrong_question(**changes):
    question = patient()["questions"][0] | changes
    return {"p": patient(questions=[{k: v for k, v in question.items() if v is not None}])}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "holds no context"),
        ({}, "holds no context"),
        ("3", "expected a JSON list of contexts or a LongHealth-shaped object"),
        ("{", "not valid JSON"),
        ([entry(id="../a")], "not a plain file name"),
        ([entry(), entry(id="A")], "context 'A' occurs twice"),
        ([entry(article="")], "context 0: article: expected a non-empty string"),
        ([entry(article="\ud800")], "half of a surrogate pair"),
        ([entry(items=[])], "context 0: items: expected a non-empty list"),
        ([entry(more=1)], "unknown key 'more'"),
        ([entry(items=[{"id": "x", "question": "q"}])], "context 0: item 0: answer: expected a non-empty string"),
        ([entry(items=[3])], "context 0: item 0: question: expected a string"),
        (["text"], "context 0: id: expected a non-empty string"),
        ({"p": patient(texts={})}, 'p: texts: expected an object {"text_0"'),
        ({"p": patient(texts={"note": "x"})}, 'p: texts: expected an object {"text_0"'),
        ({"p": patient(questions=None)}, "p: questions: expected a non-empty list"),
        (wrong_question(answer_e=None), "p: question 0: answer_e: expected a non-empty string"),
        (
            wrong_question(correct="C"),
            "p: question 0: correct: expected the full text of the right answer, not its letter",
        ),
    ],
)
def test_refusals_name_the_place(write, content, words):
    path = write(content)
    with pytest.raises(StudyError, match=words) as error:
        read_contexts(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_plain_text_needs_a_continuation(write):
    with pytest.raises(StudyError, match="an article and at least one continuation"):
        read_contexts(write("Only an article.", "a.txt"))


def test_an_absent_file_is_one_line(tmp_path):
    with pytest.raises(StudyError, match=r"curves.contexts: .*benchmark_v5.json does not exist"):
        read_contexts(tmp_path / "benchmark_v5.json")


def test_tokens_are_those_of_every_part_alone(write):
    (context,) = read_contexts(write([entry()]))
    tokens = tokenise_context(Letters(), context, PROMPT)
    assert tokens.ids == tuple(map(ord, "<text>"))
    assert tokens.repeat == tuple(map(ord, "again"))
    (item,) = tokens.items
    assert item.live == tuple(map(ord, "q?ye"))
    assert item.targets == tuple(map(ord, "yes"))
    assert item.predicting == [1, 2, 3]


def test_without_a_question_the_first_answer_token_is_given():
    item = TokenItem("x", (), (5, 6, 7))
    assert (item.live, item.targets, item.predicting) == ((5, 6), (6, 7), [0, 1])


def test_an_answer_without_a_scored_token_is_refused(write):
    (context,) = read_contexts(write([entry(items=[{"id": "x", "question": "", "answer": "y"}])]))
    with pytest.raises(StudyError, match="context 'a', item 'x': its answer has no token to score"):
        tokenise_context(Letters(), context, PROMPT)


def test_own_answers_take_the_place_of_the_reference(write):
    (context,) = read_contexts(write([entry()]))
    tokens = with_answers(tokenise_context(Letters(), context, PROMPT), {"x": [9, 8]})
    assert tokens.items[0].answer == (9, 8)


def test_the_hash_covers_article_and_items(write):
    base = read_contexts(write([entry()]))[0].sha256
    for changed in (
        entry(article="other"),
        entry(items=[{"id": "x", "question": "q?", "answer": "no"}]),
        entry(id="b"),
    ):
        assert read_contexts(write([changed]))[0].sha256 != base


@pytest.mark.parametrize("name", ["example.json", "invented_patients.json"])
def test_the_bundled_contexts_are_usable(name):
    contexts = read_contexts(f"resources/contexts/{name}")
    assert sum(len(c.items) for c in contexts) >= 8
    for context in contexts:
        assert len({item.id for item in context.items}) == len(context.items)
        assert len({item.question for item in context.items}) == len(context.items)
