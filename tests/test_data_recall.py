"""Recall tasks: every answer can be looked up in its example, and the mask is on answers alone."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ccq_jax.data import make_recall_batch, make_tokenizer

BYTES = make_tokenizer("bytes")
MISTRAL = make_tokenizer("mistral")


@given(pairs=st.integers(1, 20), extra=st.integers(0, 60), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_mqar_answers_are_the_values_of_the_keys_before_them(pairs, extra, seed):
    batch = make_recall_batch(
        "mqar",
        tokenizer=BYTES,
        batch=3,
        length=4 * pairs + extra,
        seed=seed,
        vocab_size=64,
        num_pairs=pairs,
    )
    for inputs, targets, mask in zip(
        batch["inputs"], batch["targets"], batch["loss_mask"], strict=True
    ):
        value_of = dict(zip(inputs[: 2 * pairs : 2], inputs[1 : 2 * pairs : 2], strict=True))
        assert len(value_of) == pairs
        assert len(set(value_of.values())) == pairs
        asked = np.flatnonzero(mask)
        assert sorted(inputs[asked]) == sorted(value_of)  # each key once
        assert [value_of[key] for key in inputs[asked]] == targets[asked].tolist()
        # No key of a pair comes again but where it is asked for.
        later = np.flatnonzero(np.isin(inputs[2 * pairs :], list(value_of))) + 2 * pairs
        assert later.tolist() == asked.tolist()
        assert set(inputs) <= set(range(64))


def test_mqar_queries_come_soon_more_often_than_late():
    batch = make_recall_batch(
        "mqar", tokenizer=BYTES, batch=200, length=256, seed=0, num_pairs=4, vocab_size=256
    )
    places = np.nonzero(batch["loss_mask"])[1] - 8
    first, last = (places < 124).mean(), (places >= 124).mean()
    assert first > 0.7
    assert last > 0.05


@pytest.mark.parametrize("tokenizer", [BYTES, MISTRAL], ids=["bytes", "mistral"])
@given(length=st.integers(120, 600), needles=st.integers(1, 2), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_niah_answers_with_the_number_of_the_word(tokenizer, length, needles, seed):
    length += 60 * (needles - 1)
    batch = make_recall_batch(
        "niah", tokenizer=tokenizer, batch=2, length=length, seed=seed, num_needles=needles
    )
    for inputs, targets, mask in zip(
        batch["inputs"], batch["targets"], batch["loss_mask"], strict=True
    ):
        text = tokenizer.decode([*inputs.tolist(), int(targets[-1])])
        numbers = dict(re.findall(r"secret number of (\w+) is (\d{7})\.", text))
        question = re.search(r"Now tell me: the secret number of (\w+) is (\d{7})$", text)
        assert question, text
        assert len(numbers) == needles
        assert numbers[question[1]] == question[2]
        answer = tokenizer.decode(targets[mask].tolist())
        assert answer == question[2]
        assert mask[-len(np.flatnonzero(mask)) :].all()


def test_the_needle_is_found_at_any_depth():
    batch = make_recall_batch("niah", tokenizer=BYTES, batch=100, length=1000, seed=1)
    texts = [BYTES.decode(row.tolist()) for row in batch["inputs"]]
    depths = np.array([text.index(" Remember") / len(text) for text in texts])
    assert depths.min() < 0.1
    assert depths.max() > 0.75
    assert 0.3 < depths.mean() < 0.6


@pytest.mark.parametrize("task", ["mqar", "niah"])
def test_an_example_depends_on_seed_and_number_alone(task):
    def make(batch, **options):
        return make_recall_batch(task, tokenizer=BYTES, batch=batch, length=200, **options)

    whole, tail = make(5, seed=3), make(2, seed=3, start=3)
    for name in whole:
        np.testing.assert_array_equal(whole[name][3:], tail[name])
    assert (make(5, seed=4)["inputs"] != whole["inputs"]).any()
    assert len({row.tobytes() for row in whole["inputs"]}) == 5


@pytest.mark.parametrize(
    ("task", "options", "problem"),
    [
        ("mqar", {"length": 30, "num_pairs": 8}, r"data\.mqar\.num_pairs=8 needs seq_len"),
        ("mqar", {"length": 99, "vocab_size": 33}, r"data\.mqar\.vocab_size=33 must be even"),
        ("mqar", {"length": 99, "vocab_size": 8, "num_pairs": 4}, r"num_pairs=4 .* below 4"),
        ("mqar", {"length": 99, "power": 0.0}, r"data\.mqar\.power=0\.0 must be above 0"),
        ("niah", {"length": 40}, r"data\.niah\.num_needles=1 needs seq_len at least 1\d\d"),
        ("niah", {"length": 400, "num_needles": 0}, r"data\.niah\.num_needles=0 must be"),
        ("maze", {"length": 400}, "task='maze' must be 'mqar' or 'niah'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_field_and_value(task, options, problem):
    with pytest.raises(ValueError, match=problem):
        make_recall_batch(task, tokenizer=BYTES, batch=1, seed=0, **options)


@given(tokenizer=st.sampled_from([BYTES, MISTRAL]), length=st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_whatever_length_is_accepted_is_filled_exactly(tokenizer, length):
    for task in ("mqar", "niah"):
        try:
            batch = make_recall_batch(task, tokenizer=tokenizer, batch=1, length=length, seed=0)
        except ValueError as error:
            assert "needs seq_len" in str(error)
            continue
        assert batch["inputs"].shape == (1, length)
        assert batch["loss_mask"].any()
        assert (batch["segment_ids"] == 1).all()
