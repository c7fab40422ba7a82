"""Packs documents into rows of a fixed length, each row reachable by its number.

The stream is document, end of document, document, end of document, ... Row r of `seq_len` T reads
tokens r T to (r + 1) T, both included, as T inputs and the T targets that follow them, so each
token of the stream is an input once and a target once.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32

from ccq_jax.data.documents import Documents

Row = dict[str, np.ndarray]


def make_row(
    tokens: Int[np.ndarray, " t"],
    segments: Int[np.ndarray, " t"],
    seq_len: int,
    pad_id: int,
    predicted: Bool[np.ndarray, " t"] | None = None,
) -> Row:
    """Shifts up to `seq_len` + 1 tokens into inputs and targets; fills up what is missing.

    Args:
      tokens: 0 to `seq_len` + 1 token ids.
      segments: which document each token belongs to, from 1.
      seq_len: T, length of the row.
      pad_id: fills a row that is too short, as a segment of its own that is never predicted.
      predicted: tokens that count as targets; None is all.

    Returns:
      `inputs`, `targets`, `segment_ids` (the inputs' documents) int32 [T], and `loss_mask` bool
      [T]: where the target belongs to the input's document and is predicted. So the first token of
      a document is never a target; its end is.
    """
    missing = seq_len + 1 - len(tokens)
    counts = np.ones(len(tokens), bool) if predicted is None else predicted
    tokens = np.pad(tokens.astype(np.int32), (0, missing), constant_values=pad_id)
    padding = int(segments[-1]) + 1 if len(segments) else 1
    segments = np.pad(segments.astype(np.int32), (0, missing), constant_values=padding)
    counts = np.pad(counts, (0, missing))
    return {
        "inputs": tokens[:-1],
        "targets": tokens[1:],
        "segment_ids": segments[:-1],
        "loss_mask": (segments[1:] == segments[:-1]) & counts[1:],
    }


class PackedRows(Sequence[Row]):
    """Rows of the documents `order`, in that order."""

    def __init__(
        self, documents: Documents, order: Int[np.ndarray, " n"], seq_len: int, eos_id: int
    ):
        self._documents = documents
        self._order = order
        self._seq_len = seq_len
        self._eos_id = eos_id
        # Where each document's end token stops in the stream.
        self._ends = np.cumsum(documents.lengths[order] + 1, dtype=np.int64)

    def __len__(self) -> int:
        return max(1, -(-(int(self._ends[-1]) - 1) // self._seq_len))

    def __getitem__(self, row):
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        start = row * self._seq_len
        tokens, segments = self._window(start, start + self._seq_len + 1)
        return make_row(tokens, segments, self._seq_len, self._eos_id)

    def _window(self, start: int, stop: int) -> tuple[Int32[np.ndarray, " t"], ...]:
        """Tokens start to stop of the stream, and which document of the window each is of."""
        tokens, sizes = [], []
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop and place < len(self._order):
            document = self._order[place]
            end = int(self._ends[place])
            length = int(self._documents.lengths[document])
            offset = length + 1 - (end - start)
            size = min(stop, end) - start
            piece = self._documents.read(document, offset, min(offset + size, length))
            tokens.append(piece.astype(np.int32))
            if len(piece) < size:
                tokens.append(np.array([self._eos_id], np.int32))
            sizes.append(size)
            start += size
            place += 1
        segments = np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)
        return np.concatenate(tokens), segments


class FilledRows(Sequence[Row]):
    """Several sequences of rows in turn, then rows without targets up to a multiple of `count`."""

    def __init__(self, parts: Sequence[Sequence[Row]], count: int, seq_len: int, eos_id: int):
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self._length = -(-int(self._ends[-1]) // count) * count
        none = np.zeros(0, np.int32)
        self._blank = make_row(none, none, seq_len, eos_id)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row):
        if not 0 <= row < self._length:
            raise IndexError(f"row {row} of {self._length}")
        part = int(np.searchsorted(self._ends, row, side="right"))
        if part == len(self._parts):
            return self._blank
        return self._parts[part][row - int(self._ends[part]) + len(self._parts[part])]
