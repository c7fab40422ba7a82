import re

import benchmark_files
import pytest

from ccq_jax.data import make_tokenizer
from ccq_jax.evaluation import needle
from ccq_jax.evaluation.s_niah import contains

ESSAYS = benchmark_files.text(0, 3000)
PATTERN = {"1": r"\d{7}", "2": r"\d{7}", "3": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}


@pytest.mark.parametrize("task", ["1", "2", "3"])
@pytest.mark.parametrize(("tokenizer", "length"), [("bytes", 2048), ("mistral", 1024)])
def test_prompts_have_the_length_and_the_depth_that_are_asked_for(task, tokenizer, length):
    tokenizer = make_tokenizer(tokenizer)
    prompts = needle.make_prompts(task, tokenizer, length, 40, prefix=[7], essays=ESSAYS)
    assert [prompt.depth for prompt in prompts] == list(needle.DEPTHS)
    unit = len(tokenizer.encode(needle._LINE)) + 2 if task == "1" else 16
    for prompt in prompts:
        assert prompt.tokens[0] == 7
        assert length - unit < len(prompt.tokens) + needle.ANSWER <= length
        text = tokenizer.decode(prompt.tokens[1:])
        assert text.count(prompt.answer) == 1
        assert re.fullmatch(PATTERN[task], prompt.answer)
        haystack = text[text.index("\n") : text.rindex("\n")]
        start = haystack.index("One of the special")
        stop = haystack.index(prompt.answer) + len(prompt.answer) + 1
        depth = 100 * start / (len(haystack) - (stop - start))
        assert abs(depth - prompt.depth) < 10  # a line or a sentence is not divided


def test_a_question_reads_as_in_ruler():
    tokenizer = make_tokenizer("bytes")
    (prompt,) = needle.make_prompts("1", tokenizer, 800, 1)
    lines = tokenizer.decode(prompt.tokens).split("\n")
    start = "A special magic number is hidden within the following text. Make sure to memorize it."
    assert lines[0] == f"{start} I will quiz you about the number afterwards."
    found = re.fullmatch(r"One of the special magic numbers for (.+) is: (\d+)\.", lines[1])
    key, value = found.groups()
    assert value == prompt.answer
    assert lines[2] == (
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )
    assert lines[-1] == (
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is"
    )


def test_few_essays_are_repeated():
    tokenizer = make_tokenizer("bytes")
    (prompt,) = needle.make_prompts("2", tokenizer, 2000, 1, essays="One. Two is here.")
    assert tokenizer.decode(prompt.tokens).count("Two is here.") > 50
    assert 1984 < len(prompt.tokens) + needle.ANSWER <= 2000


def test_keys_are_drawn_from_as_many_words_as_in_ruler():
    adjectives, nouns = needle.key_words()
    assert len(set(adjectives)) > 900 and len(set(nouns)) > 6700
    tokenizer = make_tokenizer("bytes")
    prompts = needle.make_prompts("1", tokenizer, 600, 40)
    found = [
        re.search(r"numbers for (.+) is: \d", tokenizer.decode(prompt.tokens)).group(1)
        for prompt in prompts
    ]
    assert len(set(found)) == 40
    assert all(
        any(key == f"{first}-{key[len(first) + 1 :]}" for first in adjectives) for key in found
    )
    assert all(any(key.endswith("-" + noun) for noun in nouns) for key in found)


def test_depths_are_spread_evenly_and_prompts_differ():
    tokenizer = make_tokenizer("bytes")
    prompts = needle.make_prompts("1", tokenizer, 1024, 80)
    assert [prompt.depth for prompt in prompts] == [d for d in needle.DEPTHS for _ in range(2)]
    assert len({prompt.answer for prompt in prompts}) == 80
    again = needle.make_prompts("1", tokenizer, 1024, 80)
    assert prompts == again


def test_what_cannot_be_asked_is_refused():
    tokenizer = make_tokenizer("bytes")
    with pytest.raises(ValueError, match="300 tokens has no room"):
        needle.make_prompts("1", tokenizer, 300, 1)
    with pytest.raises(ValueError, match="S-NIAH-2 needs essays"):
        needle.make_prompts("2", tokenizer, 2048, 1)
    with pytest.raises(ValueError, match="'4'"):
        needle.make_prompts("4", tokenizer, 2048, 1)


def test_an_answer_is_found_anywhere_in_whatever_case():
    assert contains(" is 12ABC.", "12abc")
    assert not contains("12AB", "12abc")
