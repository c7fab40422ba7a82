"""Packing: every token is an input once and a target once, and no document sees another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ccq_jax.data.documents import TokenArray
from ccq_jax.data.packing import FilledRows, PackedRows

EOS = 99


def documents_of(lengths):
    """Documents whose tokens are all different."""
    ends = np.cumsum(lengths)
    return TokenArray(1000 + np.arange(ends[-1]), ends, np.zeros(len(lengths), np.uint64))


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@st.composite
def packings(draw):
    lengths = draw(LENGTHS)
    order = draw(st.permutations(range(len(lengths))))
    order = np.array(order[: draw(st.integers(1, len(lengths)))])
    return documents_of(lengths), order, draw(st.integers(1, 15))


def stream_of(documents, order):
    """The whole stream and the document of each of its tokens, the plain way."""
    tokens, owners = [], []
    for document in order:
        length = int(documents.lengths[document])
        tokens += [*documents.read(document, 0, length).tolist(), EOS]
        owners += [int(document)] * (length + 1)
    return np.array(tokens), np.array(owners)


@given(packings())
@settings(max_examples=80, deadline=None)
def test_no_token_is_lost_or_read_twice(packing):
    documents, order, seq_len = packing
    rows = PackedRows(documents, order, seq_len, EOS)
    tokens, _ = stream_of(documents, order)
    inputs = np.concatenate([row["inputs"] for row in rows])
    targets = np.concatenate([row["targets"] for row in rows])
    assert inputs[: len(tokens) - 1].tolist() == tokens[:-1].tolist()
    assert targets[: len(tokens) - 1].tolist() == tokens[1:].tolist()
    assert len(inputs) - (len(tokens) - 1) < max(seq_len, 2)


@given(packings())
@settings(max_examples=80, deadline=None)
def test_exactly_the_tokens_that_follow_in_their_own_document_are_predicted(packing):
    documents, order, seq_len = packing
    rows = PackedRows(documents, order, seq_len, EOS)
    _, owners = stream_of(documents, order)
    mask = np.concatenate([row["loss_mask"] for row in rows])
    expected = owners[1:] == owners[:-1]
    assert mask[: len(expected)].tolist() == expected.tolist()
    assert not mask[len(expected) :].any()
    # All but the first token of each document, its end included.
    assert mask.sum() == documents.lengths[order].sum()


@given(packings())
@settings(max_examples=80, deadline=None)
def test_segments_change_where_documents_do_and_nowhere_else(packing):
    documents, order, seq_len = packing
    rows = PackedRows(documents, order, seq_len, EOS)
    _, owners = stream_of(documents, order)
    owners = np.concatenate([owners, np.full(seq_len, -1)])
    for number, row in enumerate(rows):
        segments = row["segment_ids"]
        window = owners[number * seq_len : (number + 1) * seq_len]
        assert segments[0] == 1
        assert (np.diff(segments) == (np.diff(window) != 0)).all()


@given(packings())
@settings(max_examples=30, deadline=None)
def test_shapes_and_types_are_the_same_in_every_row(packing):
    documents, order, seq_len = packing
    for row in PackedRows(documents, order, seq_len, EOS):
        assert {name: (x.shape, x.dtype.name) for name, x in row.items()} == {
            "inputs": ((seq_len,), "int32"),
            "targets": ((seq_len,), "int32"),
            "segment_ids": ((seq_len,), "int32"),
            "loss_mask": ((seq_len,), "bool"),
        }


def test_a_row_written_out():
    documents = documents_of([2, 3])
    first, second = PackedRows(documents, np.array([1, 0]), 4, EOS)
    assert first["inputs"].tolist() == [1002, 1003, 1004, EOS]
    assert first["targets"].tolist() == [1003, 1004, EOS, 1000]
    assert first["segment_ids"].tolist() == [1, 1, 1, 1]
    assert first["loss_mask"].tolist() == [True, True, True, False]
    assert second["inputs"].tolist() == [1000, 1001, EOS, EOS]
    assert second["targets"].tolist() == [1001, EOS, EOS, EOS]
    assert second["segment_ids"].tolist() == [1, 1, 1, 2]
    assert second["loss_mask"].tolist() == [True, True, False, False]


@given(packings(), st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_filling_up_adds_rows_that_predict_nothing(packing, count):
    documents, order, seq_len = packing
    rows = PackedRows(documents, order, seq_len, EOS)
    filled = FilledRows([rows, rows], count, seq_len, EOS)
    assert len(filled) % count == 0
    assert 0 <= len(filled) - 2 * len(rows) < count
    for number, row in enumerate(filled):
        if number < 2 * len(rows):
            assert (row["inputs"] == rows[number % len(rows)]["inputs"]).all()
        else:
            assert not row["loss_mask"].any()


def test_a_row_that_does_not_exist_is_refused():
    rows = PackedRows(documents_of([3]), np.array([0]), 4, EOS)
    for number in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"row {number} of"):
            rows[number]
