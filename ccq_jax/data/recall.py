"""Generated recall tasks. Each example is made from (seed, index) alone.

mqar  Multi-query associative recall (Arora et al., "Zoology", arXiv 2312.04927): key-value pairs,
      then each key once more, its value to be recalled; the gaps follow a power law, so that most
      queries come soon and some late. Slots between the queries hold keys without a value.
niah  A needle in a haystack in the manner of the pass-key task (Mohtashami and Jaggi, arXiv
      2305.16300): the same few sentences over and over, somewhere in them a word with its
      7-digit number, and a question for the number at the end.
"""

import sys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32

from ccq_jax.data.packing import Row, make_row
from ccq_jax.data.tokenizer import Tokenizer

Example = tuple[Int32[np.ndarray, " t"], Bool[np.ndarray, " t"]]  # tokens; which are answers

_NOISE = (
    " The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
)
_VOCABULARY = (
    "amber anchor apple arrow autumn badge bamboo basil beacon birch bishop bottle branch brass "
    "bridge bronze butter button cabin cactus camel candle canyon carbon castle cedar cherry "
    "circus clover cobalt comet copper coral cotton cradle crystal dagger desert dolphin dragon "
    "eagle ember engine falcon feather fiddle forest fossil garden garlic ginger glacier granite "
    "hammer harbor hazel helmet honey island ivory jacket jasmine jungle kettle ladder lantern "
    "lemon lily linen magnet maple marble meadow mirror monkey needle nickel oasis ocean olive "
    "onyx orchid otter oyster paddle palace panther pebble pepper pigeon pillow planet plum "
    "pocket poppy prairie puzzle quartz rabbit raven ribbon river rocket saddle saffron salmon "
    "satin shadow silver spider spruce summit sunset temple thistle thunder tiger timber tulip "
    "tunnel turtle valley velvet violet walnut whistle willow window winter wizard zebra zephyr"
)
_WORDS = tuple(_VOCABULARY.split())
_DIGITS = 7


class Mqar:
    """Examples of multi-query associative recall.

    Args:
      length: tokens of an example, seq_len + 1.
      vocab_size: ids used; the lower half are keys, the upper half values.
      num_pairs: pairs; each is asked for once.
      power: exponent a of the gaps' law, p(gap) ~ gap^(a - 1).

    Raises:
      ValueError: pairs that don't fit the length or outnumber the keys.
    """

    def __init__(self, length: int, vocab_size: int, num_pairs: int, power: float):
        keys = vocab_size // 2
        if vocab_size % 2 or vocab_size < 4:
            raise ValueError(
                f"data.mqar.vocab_size={vocab_size} must be even and at least 4: keys and values"
            )
        if not 1 <= num_pairs < keys:
            raise ValueError(
                f"data.mqar.num_pairs={num_pairs} must be at least 1 and below {keys}, the number "
                f"of keys in data.mqar.vocab_size={vocab_size}, which leaves keys for the gaps"
            )
        if 4 * num_pairs > length:
            raise ValueError(
                f"data.mqar.num_pairs={num_pairs} needs seq_len at least {4 * num_pairs - 1} (a "
                f"pair is 2 tokens, and 2 more when asked for); it is {length - 1}"
            )
        if not power > 0:
            raise ValueError(f"data.mqar.power={power} must be above 0; zoology takes 0.01")
        self._length = length
        self._keys = keys
        self._num_pairs = num_pairs
        slots = (length - 2 * num_pairs) // 2
        law = np.arange(1, slots + 1, dtype=np.float64) ** (power - 1)
        self._slot_law = law / law.sum()

    def example(self, rng: np.random.Generator) -> Example:
        """Tokens and which of them are answers."""
        pairs = self._num_pairs
        keys = rng.permutation(self._keys)
        keys, unused = keys[:pairs], keys[pairs:]
        values = self._keys + rng.choice(self._keys, pairs, replace=False)
        slots = rng.choice(len(self._slot_law), pairs, replace=False, p=self._slot_law)
        at = 2 * pairs + 2 * slots

        tokens = rng.choice(unused, self._length).astype(np.int32)
        tokens[0 : 2 * pairs : 2] = keys
        tokens[1 : 2 * pairs : 2] = values
        tokens[at] = keys
        tokens[at + 1] = values
        answers = np.zeros(self._length, bool)
        answers[at + 1] = True
        return tokens, answers


class Niah:
    """Examples of the needle in repeated noise.

    Args:
      length: tokens of an example, seq_len + 1. The noise is cut at its start to fill it exactly.
      tokenizer: spells them.
      num_needles: needles, one of which is asked for.

    Raises:
      ValueError: needles and question that don't fit the length.
    """

    def __init__(self, length: int, tokenizer: Tokenizer, num_needles: int):
        if not 1 <= num_needles <= len(_WORDS):
            raise ValueError(f"data.niah.num_needles={num_needles} must be from 1 to {len(_WORDS)}")
        self._tokenizer = tokenizer
        self._length = length
        self._num_needles = num_needles
        self._noise = [self._encode(sentence) for sentence in _NOISE]
        widest = 0
        for word in _WORDS:
            parts = self._parts(word, 8 * 10 ** (_DIGITS - 1))
            needle, question, answer = (len(part) for part in parts)
            # Other numbers may take more tokens, up to the space and one a digit.
            slack = (num_needles + 1) * max(0, _DIGITS + 1 - answer)
            widest = max(widest, num_needles * needle + question + answer + slack)
        if widest > length:
            raise ValueError(
                f"data.niah.num_needles={num_needles} needs seq_len at least {widest - 1} with "
                f"data.tokenizer={tokenizer.name!r}; it is {length - 1}"
            )

    def _encode(self, text: str) -> np.ndarray:
        """Ids of text that begins with a space and continues other text."""
        # The tokeniser may bring the space itself; a second one would be another token.
        text = text[1:] if self._tokenizer.prefixes_space else text
        return self._tokenizer.encode_batch([text])[0]

    def _parts(self, word: str, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        needle = self._encode(f" Remember that the secret number of {word} is {number}.")
        question = self._encode(f" Now tell me: the secret number of {word} is")
        return needle, question, self._encode(f" {number}")

    def example(self, rng: np.random.Generator) -> Example:
        """Tokens and which of them are the answer's."""
        words = rng.choice(_WORDS, self._num_needles, replace=False)
        numbers = rng.integers(10 ** (_DIGITS - 1), 10**_DIGITS, self._num_needles)
        parts = [self._parts(str(w), int(n)) for w, n in zip(words, numbers, strict=True)]
        needles = [needle for needle, _, _ in parts]
        _, question, answer = parts[rng.integers(len(parts))]

        free = self._length - sum(map(len, needles)) - len(question) - len(answer)
        tokens = np.concatenate([*self._haystack(rng, needles, free), question, answer])
        answers = np.zeros(self._length, bool)
        answers[self._length - len(answer) :] = True
        # A space that is a token of its own is no part of the answer.
        if self._tokenizer.bytes_per_token[answer[0]] == 1:
            answers[self._length - len(answer)] = False
        return tokens.astype(np.int32), answers

    def _haystack(self, rng, needles, free: int) -> list[np.ndarray]:
        """Needles at random places between sentences that together have `free` tokens."""
        sentences: list[np.ndarray] = []
        while free > 0:  # from the last sentence back, so that the first one is what is cut
            sentence = self._noise[-1 - len(sentences) % len(self._noise)][-free:]
            sentences.append(sentence)
            free -= len(sentence)
        sentences.reverse()
        first = min(1, len(sentences))  # never in front of a sentence that was cut
        for needle in needles:
            sentences.insert(rng.integers(first, len(sentences) + 1), needle)
        return sentences


class RecallRows(Sequence[Row]):
    """Examples of a task as rows; `count` None is as many as there are integers."""

    def __init__(
        self,
        task: Mqar | Niah,
        length: int,
        pad_id: int,
        seed: Sequence[int],
        count: int | None = None,
    ):
        self._task = task
        self._length = length
        self._pad_id = pad_id
        self._seed = tuple(seed)
        self._count = sys.maxsize if count is None else count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):
        if not 0 <= index < self._count:
            raise IndexError(f"example {index} of {self._count}")
        rng = np.random.default_rng([*self._seed, int(index)])
        tokens, answers = self._task.example(rng)
        segments = np.ones(len(tokens), np.int32)
        return make_row(tokens, segments, self._length - 1, self._pad_id, answers)


def make_task(
    name: str,
    tokenizer: Tokenizer,
    length: int,
    *,
    vocab_size: int = 0,
    num_pairs: int = 0,
    power: float = 0.01,
    num_needles: int = 1,
) -> Mqar | Niah:
    """The recall task `name`, "mqar" or "niah", with examples of `length` tokens.

    Args:
      name: the task.
      tokenizer: spells niah; gives mqar's ids where `vocab_size` is 0.
      length: tokens of an example, one more than the row's.
      vocab_size: see `mqar_vocab_size`.
      num_pairs: of mqar; 0 is length // 16, at least 1, as far as there are keys.
      power: of mqar's gaps.
      num_needles: of niah.

    Raises:
      ValueError: an unknown task, or sizes that don't fit.
    """
    if name == "niah":
        return Niah(length, tokenizer, num_needles)
    if name == "mqar":
        vocab_size = mqar_vocab_size(vocab_size, tokenizer)
        num_pairs = num_pairs or max(1, min(length // 16, vocab_size // 4))
        return Mqar(length, vocab_size, num_pairs, power)
    raise ValueError(f"task={name!r} must be 'mqar' or 'niah'")


def mqar_vocab_size(vocab_size: int, tokenizer: Tokenizer) -> int:
    """The ids that mqar uses: `vocab_size`, or the tokeniser's up to zoology's 8192."""
    return vocab_size or min(8192, tokenizer.vocab_size // 2 * 2)


def make_recall_batch(
    task: str,
    *,
    tokenizer: Tokenizer,
    batch: int,
    length: int,
    seed: int,
    start: int = 0,
    **options,
) -> Row:
    """Examples of a recall task for evaluation, never those of training.

    Args:
      task: "mqar" or "niah".
      tokenizer: see `make_task`.
      batch: number of examples B.
      length: T, tokens of a row.
      seed: of the examples.
      start: number of the first example; batches with other numbers hold other examples.
      **options: `vocab_size`, `num_pairs`, `power`, `num_needles` of `make_task`.

    Returns:
      `inputs`, `targets`, `segment_ids` int32 [B, T] and `loss_mask` bool [B, T], which is True on
      the tokens of the answers alone.
    """
    made = make_task(task, tokenizer, length + 1, **options)
    rows = RecallRows(made, length + 1, tokenizer.eos_id, recall_seed(seed, "validation"))
    chosen = [rows[start + i] for i in range(batch)]
    return {name: np.stack([row[name] for row in chosen]) for name in chosen[0]}


def recall_seed(seed: int, split: str) -> tuple[int, int]:
    """Keeps the examples of the splits apart."""
    return (seed, ("train", "validation").index(split))
