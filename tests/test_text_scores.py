import pytest

from ccq_jax.evaluation import longbench, retrieval, text_scores
from ccq_jax.evaluation.longbench import TASKS, cut_middle


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The river, a stone!", "river stone", 1.0),
        ("a river and a house", "the river", 2 / 4),  # articles do not count
        ("nothing", "river", 0.0),
        ("", "river", 0.0),
    ],
)
def test_f1_is_of_normalised_words(text, answer, expected):
    assert text_scores.f1(text, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("a b c d", "a b c d", 1.0),
        # Common subsequence a c; 4 different words on one side, 3 on the other.
        ("a b c d", "a c e", 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)),
        # The union of the answer's sentences: {a, b} and {d}.
        ("a b x. d y", "a b. z d", 2 * (3 / 5) * (3 / 4) / (3 / 5 + 3 / 4)),
        ("b a", "a b", 0.5),  # order counts
        ("", "a", 0.0),
        ("...", "a", 0.0),
        ("x", "a", 0.0),
    ],
)
def test_rouge_l_of_known_texts(text, answer, expected):
    assert text_scores.rouge_l(text, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("return x", 1.0),
        ("\n\nreturn x\nmore", 1.0),
        ("# a comment\n```\nreturn x", 1.0),
        ("return y", 0.88),  # 14 of 16 characters, in whole hundredths
        ("// only comments", 0.0),
    ],
)
def test_edit_similarity_is_that_of_the_first_line_of_code(text, expected):
    assert text_scores.edit_similarity(text, "return x") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Type: Other location", 1.0),  # "location" is part of the right name
        ("Other location or Date", 1 / 2),
        ("Date", 0.0),
        ("nothing", 0.0),
    ],
)
def test_classes_that_are_named_share_the_score(text, expected):
    classes = ["location", "Other location", "Date"]
    assert text_scores.classification(text, "Other location", classes) == expected


def test_the_best_answer_counts_and_for_some_tasks_only_the_first_line():
    row = {"answers": ["a river", "stone"], "all_classes": None}
    assert longbench.score(TASKS["triviaqa"], "\nstone\nand much more", row) == 1.0
    assert longbench.score(TASKS["hotpotqa"], "stone\nand much more", row) < 1.0


def test_a_prompt_is_filled_even_if_the_example_has_braces():
    row = {"context": "{input} {0}", "input": "{context}?"}
    assert longbench.fill("A {context} B {input} C", row) == "A {input} {0} B {context}? C"


def test_the_middle_is_what_a_long_prompt_loses():
    assert cut_middle(list(range(10)), 6) == [0, 1, 2, 7, 8, 9]
    assert cut_middle(list(range(10)), 5) == [0, 1, 8, 9]
    assert cut_middle(list(range(10)), 10) == list(range(10))


def test_every_task_of_longbench_asks_for_its_context():
    assert len(TASKS) == 14
    assert all(task.prompt.count("{context}") == 1 for task in TASKS.values())
    few = {"gov_report", "multi_news", "lcc"}  # nothing but a context
    assert {name for name, task in TASKS.items() if "{input}" not in task.prompt} == few


@pytest.mark.parametrize(
    ("task", "row", "prompt"),
    [
        (
            "swde",
            {"text": "A page. Summary of information above... x", "key": "year", "value": "1"},
            "A page. Year:",
        ),
        ("fda", {"text": "A form. Name:", "key": "name", "value": "1"}, "A form. Name:"),
        ("squad", {"text": " A house is ", "value": "1"}, "A house is"),
        (
            "triviaqa",
            {"context": "[DOC] [TLE] Text. It is", "question": "It is", "answers": ["1"]},
            "Text. It is",
        ),
        ("drop", {"context": "Text", "question": "It is", "answers": ["1", "2"]}, "Text. It is"),
    ],
)
def test_recall_prompts_end_where_the_answer_belongs(task, row, prompt):
    example = retrieval.TASKS[task][2](row)
    assert example.prompt.strip() == prompt
    assert "1" in example.answers


def test_a_long_text_is_cut_around_its_answer():
    from ccq_jax.data import make_tokenizer

    tokenizer = make_tokenizer("bytes")
    text = "a" * 500 + " GOAL " + "b" * 500
    example = retrieval.Example(text, "It is", ["none", "goal"])
    short = retrieval.shorten(example, tokenizer, 150)
    assert len(short.text) == 100
    assert abs(short.text.index("GOAL") - 50) <= 1
    assert short.question == example.question
    absent = retrieval.shorten(example._replace(answers=["x"]), tokenizer, 150)
    assert absent.text == "b" * 100
    assert retrieval.shorten(example, tokenizer, 0) == example
    assert retrieval.shorten(example, tokenizer, 2000) == example
