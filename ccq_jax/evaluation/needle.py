"""Prompts of RULER's S-NIAH-1, -2 and -3 (arXiv 2404.06654): a needle in a haystack of tokens.

1  The same five sentences over and over, a line a time; a word's 7-digit number is the needle.
2  Essays; a word's 7-digit number.
3  Essays; a word's UUID.

A prompt with room for 128 tokens of answer has the length that is asked for, by the model's own
tokenizer, or falls short of it by less than a line or a word. Keys are an adjective and a noun of the
lists that RULER takes them from, the package wonderwords'. Depths are spread evenly, where RULER draws
them at random.
"""

import bisect
import functools
import re
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ccq_jax.data import Tokenizer

ANSWER = 128
"""Tokens that are generated; they count into a prompt's length."""
DEPTHS = tuple(int(x) for x in np.round(np.linspace(0, 100, 40)))
"""Places of the needle, in % of the haystack."""
TASKS = {"1": "number", "2": "number", "3": "uuid"}
"""What is asked for."""

_LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_QUESTION = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{text}\n"
    "What is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)


class Prompt(NamedTuple):
    """A question whose answer was in the text before it."""

    tokens: list[int]
    answer: str
    depth: int  # of the needle, in %


class Haystack:
    """Text of any length, in whole lines or words.

    Args:
      tokenizer: measures it.
      essays: text to take words from, again and again if it is short; "" is S-NIAH-1's lines.
    """

    def __init__(self, tokenizer: Tokenizer, essays: str = ""):
        self._tokenizer = tokenizer
        self._words = re.sub(r"\s+", " ", essays).strip().split(" ") if essays else []
        self._ends: list[int] = []  # tokens of the words up to each

    def text(self, units: int) -> list[str]:
        """So many lines, or the sentences of so many words."""
        if not self._words:
            return [_LINE] * units
        repeats = -(-units // len(self._words))
        return _sentences(" ".join((self._words * repeats)[:units]))

    @property
    def separator(self) -> str:
        """Between lines or sentences."""
        return " " if self._words else "\n"

    def guess(self, tokens: int) -> int:
        """About how many units make up so many tokens."""
        if not self._words:
            count = 16
            cost = len(self._tokenizer.encode("\n".join([_LINE] * count))) / count
            return int(tokens / cost)
        if not self._ends:
            ids = self._tokenizer.encode(" ".join(self._words))
            ends = np.cumsum(self._tokenizer.bytes_per_token[ids])
            sizes = np.cumsum([len(word.encode()) + 1 for word in self._words])
            self._ends = np.searchsorted(ends, sizes - 1).tolist()
        whole, rest = divmod(tokens, self._ends[-1] + 1)
        return whole * len(self._words) + bisect.bisect_right(self._ends, rest)


def make_prompts(
    task: str,
    tokenizer: Tokenizer,
    length: int,
    count: int,
    *,
    prefix: Sequence[int] = (),
    essays: str = "",
    seed: int = 42,
) -> list[Prompt]:
    """Prompts of one task.

    Args:
      task: "1", "2" or "3".
      tokenizer: the model's.
      length: tokens of a prompt and its answer.
      count: of prompts; number i of n has depth 40 i / n in `DEPTHS`.
      prefix: tokens in front, which count as well.
      essays: for 2 and 3.
      seed: of words and values.

    Raises:
      ValueError: an unknown task, no essays, or a length without room for the question.
    """
    if task not in TASKS:
        raise ValueError(f"task is {task!r}: it must be one of {', '.join(TASKS)}")
    if task != "1" and not essays.strip():
        raise ValueError(f"S-NIAH-{task} needs essays")
    haystack = Haystack(tokenizer, essays if task != "1" else "")
    rng = np.random.default_rng([seed, int(task), length])
    units = 0
    prompts = []
    for i in range(count):
        key = "-".join(words[rng.integers(len(words))] for words in key_words())
        value = str(rng.integers(10**6, 10**7))
        if TASKS[task] == "uuid":
            value = str(uuid.UUID(bytes=rng.bytes(16), version=4))
        needle = _Needle(TASKS[task], key, value, DEPTHS[i * len(DEPTHS) // count])
        tokens, units = _fill(haystack, needle, tokenizer, length - ANSWER - len(prefix), units)
        prompts.append(Prompt([*prefix, *tokens], value, needle.depth))
    return prompts


@functools.cache
def key_words() -> tuple[list[str], list[str]]:
    """The adjectives and the nouns that keys are made of."""
    from wonderwords import RandomWord  # reads its lists, which takes half a second

    words = RandomWord()
    adjectives, nouns = (words.filter(include_categories=[x]) for x in ("adjectives", "nouns"))
    return adjectives, nouns


class _Needle(NamedTuple):
    kind: str
    key: str
    value: str
    depth: int

    def hide(self, parts: list[str], separator: str) -> str:
        """The question about a text with the needle in it."""
        place = int(len(parts) * self.depth / 100)
        needle = _NEEDLE.format(kind=self.kind, key=self.key, value=self.value)
        text = separator.join([*parts[:place], needle, *parts[place:]])
        return _QUESTION.format(kind=self.kind, key=self.key, text=text)


def _fill(
    haystack: Haystack, needle: _Needle, tokenizer: Tokenizer, room: int, units: int
) -> tuple[list[int], int]:
    """The longest prompt of at most `room` tokens, and its units; `units` is where to begin."""

    def make(units: int) -> list[int]:
        return tokenizer.encode(needle.hide(haystack.text(units), haystack.separator))

    empty = len(make(0))
    if empty > room:
        raise ValueError(
            f"a length of {room + ANSWER} tokens has no room for the question: with the "
            f"tokenizer {tokenizer.name!r} it takes {empty + ANSWER}"
        )
    units = units or haystack.guess(room - empty)
    tokens = make(units)
    while len(tokens) > room:
        units = max(0, units - max(1, haystack.guess(len(tokens) - room)))
        tokens = make(units)
    while len(longer := make(units + 1)) <= room:
        units, tokens = units + 1, longer
    return tokens, units


def _sentences(text: str) -> list[str]:
    """Cut after full stops, question and exclamation marks that end a word."""
    return [part for part in re.split(r"(?<=[.!?])\s+", text) if part]
