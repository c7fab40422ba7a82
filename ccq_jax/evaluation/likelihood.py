"""Log-likelihoods of token sequences, many at a time in few shapes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ccq_jax.evaluation.scoring import PIECE, score
from ccq_jax.model import LanguageModel

Pair = tuple[Sequence[int], Sequence[int]]


class Likelihood(NamedTuple):
    """Of a continuation.

    Attributes:
      logprob: natural log of its probability.
      greedy: whether each of its tokens is the likeliest.
    """

    logprob: float
    greedy: bool


def likelihoods(
    model: LanguageModel,
    pairs: Sequence[Pair],
    rows: Callable[[int], int],
    track: Callable[[list], Iterable] = iter,
) -> list[Likelihood]:
    """The likelihood of each continuation after its context.

    Sequences are read in batches of one length, a power of two or a multiple of `scoring.PIECE`, so
    that few programs are compiled however many lengths there are. What fills up a row comes after
    everything that counts.

    Args:
      model: the model.
      pairs: token ids of a context, which is not empty, and of its continuation.
      rows: how many rows of so many tokens make a batch.
      track: shows the progress over the batches.

    Raises:
      ValueError: a context is empty.
    """
    if any(not context for context, _ in pairs):
        raise ValueError("a context is empty: the first token's likelihood has no condition")
    lengths = [len(context) + len(continuation) - 1 for context, continuation in pairs]
    found: list[Likelihood | None] = [None] * len(pairs)
    for length, batch in track(list(_batches(lengths, rows))):
        inputs, targets = np.zeros((2, rows(length), length), np.int32)
        for row, i in enumerate(batch):
            text = [*pairs[i][0], *pairs[i][1]]
            inputs[row, : len(text) - 1] = text[:-1]
            targets[row, : len(text) - 1] = text[1:]
        scores = score(model, inputs, targets)
        for row, i in enumerate(batch):
            part = slice(len(pairs[i][0]) - 1, lengths[i])
            logprob = -scores.loss[row, part].sum(dtype=np.float64)
            found[i] = Likelihood(float(logprob), bool(scores.hit[row, part].all()))
    return [x for x in found if x is not None]


def _batches(lengths: Sequence[int], rows: Callable[[int], int]) -> Iterator[tuple[int, list[int]]]:
    """A length and the sequences that are read at that length together, the longest first."""
    by_length: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        by_length.setdefault(bucket(length), []).append(i)
    for length in sorted(by_length, reverse=True):
        members, size = by_length[length], rows(length)
        for start in range(0, len(members), size):
            yield length, members[start : start + size]


def bucket(length: int) -> int:
    """The length at which a sequence is read: a power of two, beyond a piece whole pieces."""
    if length > PIECE:
        return -(-length // PIECE) * PIECE
    return max(16, 1 << (length - 1).bit_length()) if length > 1 else 16


def windows(tokens: Sequence[int], prefix: Sequence[int], length: int) -> Iterator[Pair]:
    """Cuts a text so that each of its tokens is scored once, as lm-evaluation-harness does.

    All windows but the first have one token of context; the last is filled up with what comes before
    it. So a token depends on at most `length` tokens before it, and on as few as one.

    Args:
      tokens: of the text.
      prefix: what the first token depends on; not empty.
      length: tokens that a window reads; 0 is one window for all of them.
    """
    tokens = list(tokens)
    first = length or max(1, len(tokens))
    if tokens:
        yield list(prefix), tokens[:first]
    for start in range(first, len(tokens), first):
        end = min(start + first, len(tokens))
        yield tokens[max(0, end - first - 1) : start], tokens[start:end]


def cut(context: Sequence[int], continuation: Sequence[int], length: int) -> Pair:
    """Leaves out the beginning of a pair whose continuation is predicted from over `length` tokens."""
    if not length or len(context) + len(continuation) - 1 <= length:
        return context, continuation
    continuation = continuation[-length:]
    return list(context)[-(length + 1 - len(continuation)) :], continuation
