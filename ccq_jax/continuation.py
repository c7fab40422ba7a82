"""Text as it is generated: where it ends, and what of it is certain so far."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from ccq_jax.data import Tokenizer


class Continuation:
    """One row's text as it grows; `done` once it has ended."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._decoder, self._eos = tokenizer.stream(), tokenizer.eos_id
        self._stop = tuple(stop)
        self._held = max(map(len, self._stop), default=1) - 1  # may be the beginning of a stop
        self._given = 0
        self.text, self.done = "", False
        self.tokens: list[int] = []

    def push(self, token: int) -> str:
        """Takes the next token; returns the text that became certain with it."""
        if self.done:
            return ""
        self.tokens.append(token)
        self.done = token == self._eos
        new = self._decoder.flush() if self.done else self._decoder.push(token)
        return self._grow(new)

    def end(self) -> str:
        """There is no more: what was kept back."""
        if self.done:
            return ""
        self.done = True
        return self._grow(self._decoder.flush())

    def _grow(self, new: str) -> str:
        self.text += new
        found = [i for i in map(self.text.find, self._stop) if i >= 0]
        if found:
            self.text, self.done = self.text[: min(found)], True
        certain = len(self.text) if self.done else max(len(self.text) - self._held, self._given)
        piece, self._given = self.text[self._given : certain], certain
        return piece


class Stream:
    """An iterator over lists of text, one string for each row; it ends when all rows have.

    Attributes:
      rows: what was generated so far.
      prompt_tokens: read, in each row; prompt_seconds, output_seconds: time taken so far.
    """

    def __init__(
        self,
        rows: list[Continuation],
        tokens: Iterator[Int[np.ndarray, " B"]],
        prompt_tokens: list[int],
        prompt_seconds: float,
    ):
        self.rows, self.prompt_tokens = rows, prompt_tokens
        self.prompt_seconds, self.output_seconds = prompt_seconds, 0.0
        self._tokens = tokens
        self._began = time.monotonic()

    @property
    def output_tokens(self) -> int:
        """Drawn so far, in all rows, up to each one's end."""
        return sum(len(row.tokens) for row in self.rows)

    def speed(self) -> str:
        """Tokens a second, of prompt and output."""
        return describe_speed(
            sum(self.prompt_tokens), self.prompt_seconds, self.output_tokens, self.output_seconds
        )

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> list[str]:
        if all(row.done for row in self.rows):
            raise StopIteration
        tokens = next(self._tokens, None)
        self.output_seconds = time.monotonic() - self._began
        if tokens is None:
            return [row.end() for row in self.rows]
        return [row.push(int(token)) for row, token in zip(self.rows, tokens, strict=True)]


def describe_speed(prompt: int, prompt_seconds: float, output: int, output_seconds: float) -> str:
    """Tokens and tokens a second, in words."""
    return "; ".join(
        f"{name}: {count} tokens in {seconds:.2f} s, {count / max(seconds, 1e-9):.0f} tokens/s"
        for name, count, seconds in (
            ("prompt", prompt, prompt_seconds),
            ("output", output, output_seconds),
        )
    )
