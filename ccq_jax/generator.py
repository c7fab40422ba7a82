"""Generation as a library: batches of prompts, streaming, and states that are kept.

    generator = Generator(model, make_tokenizer("bytes"))
    generator.generate(["def ", "import "], max_tokens=64).texts

    prefix = generator.read([long_text])                       # a state of constant size
    generator.generate(["Q: ...", "Q: ..."], state=prefix, max_tokens=64)

Prompts of different lengths share a batch, and each continues as it would alone.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int, PyTree

from ccq_jax.continuation import Continuation, Stream, describe_speed
from ccq_jax.data import Tokenizer
from ccq_jax.model import LanguageModel
from ccq_jax.program import ModelProgram, Program, decode_step, draw, read_piece, read_rows
from ccq_jax.sampling import UNCHANGED, Sampling
from ccq_jax.state import State, copy_rows, fingerprint, load_state, save_state

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Generated:
    """What was generated for each prompt, and how fast.

    Attributes:
      texts: up to the end of the document, or the first stop string.
      tokens: the ids drawn, those of the end of document or of the stop string included.
      prompt_tokens, output_tokens: over all prompts.
      prompt_seconds, output_seconds: that they took; the first call for a number of prompts
        compiles its programs in that time.
    """

    texts: list[str]
    tokens: list[list[int]]
    prompt_tokens: int
    output_tokens: int
    prompt_seconds: float
    output_seconds: float

    def __str__(self) -> str:
        return describe_speed(
            self.prompt_tokens, self.prompt_seconds, self.output_tokens, self.output_seconds
        )


class Generator:
    """Continues texts.

    Args:
      model: a `LanguageModel`, or a program with its parameters (see `ccq_jax.formats`).
      tokenizer: the one that the model was trained with. Ids beyond its vocabulary, which the
        model's may exceed by rounding, are never drawn.
    """

    def __init__(self, model: LanguageModel | tuple[Program, PyTree], tokenizer: Tokenizer):
        self.program: Program
        if isinstance(model, LanguageModel):
            graph, self.params = nnx.split(model)
            self.program = ModelProgram(graph, model)
        else:
            self.program, self.params = model
        self.tokenizer = tokenizer

    def read(
        self, prompts: Sequence[Prompt], *, state: State | None = None, room: int = 0
    ) -> State:
        """Reads prompts of any lengths.

        Args:
          prompts: texts or token ids. An empty one is an end of document, which begins the next;
            after a state it is nothing.
          state: what was read before: one row for all prompts, or a row for each.
          room: tokens that are to follow. Only attention needs to know; it can follow a state only
            within the room that was made for it, and with prompts of one length.

        Raises:
          ValueError: no prompt, an id outside the vocabulary, or a state that does not fit.
        """
        if not prompts:
            raise ValueError("prompts is empty: there is nothing to continue")
        rows = [self._ids(prompt, state is None) for prompt in prompts]
        if state is None:
            return self._read_first(rows, room)
        return self._read_on(rows, copy_rows(state, len(rows)))

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        sampling: Sampling = UNCHANGED,
        seed: int = 0,
        state: State | None = None,
        stop: Sequence[str] = (),
        batch_size: int = 0,
    ) -> Generated:
        """Continues prompts to their ends.

        Args:
          prompts, state: as for `read`.
          max_tokens: of output, for each prompt.
          sampling, seed: how tokens are drawn; the same seed gives the same tokens.
          stop: a text ends before the first of these strings.
          batch_size: prompts worked on together, longest first, in batches of one shape; 0 is all
            of them. With it, `state` must have one row.
        """
        stream = functools.partial(
            self.stream, max_tokens=max_tokens, sampling=sampling, state=state, stop=stop
        )
        rows: dict[int, Continuation] = {}
        asked, seconds = 0, np.zeros(2)
        for number, chosen in enumerate(_batches(prompts, batch_size)):
            run = stream([prompts[i] for i in chosen], seed=seed + number)
            for _ in run:
                pass
            new = [place for place, i in enumerate(chosen) if i not in chosen[:place]]
            rows |= {chosen[place]: run.rows[place] for place in new}
            asked += sum(run.prompt_tokens[place] for place in new)
            seconds += run.prompt_seconds, run.output_seconds
        done = [rows[i] for i in range(len(prompts))]
        return Generated(
            texts=[row.text for row in done],
            tokens=[row.tokens for row in done],
            prompt_tokens=asked,
            output_tokens=sum(len(row.tokens) for row in done),
            prompt_seconds=float(seconds[0]),
            output_seconds=float(seconds[1]),
        )

    def stream(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        sampling: Sampling = UNCHANGED,
        seed: int = 0,
        state: State | None = None,
        stop: Sequence[str] = (),
    ) -> "Stream":
        """As `generate`, but an iterator: each step gives what became certain of every text."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be 1 or more")
        if not all(stop):
            raise ValueError("stop has an empty string: every text would end before it begins")
        began = time.monotonic()
        before = 0 if state is None else state.tokens
        state = self.read(prompts, state=state, room=max_tokens)
        jax.block_until_ready(state.logits)
        counts = (state.tokens - before).tolist()
        rows = [Continuation(self.tokenizer, stop) for _ in prompts]
        tokens = self._tokens(state, sampling, seed, max_tokens)
        return Stream(rows, tokens, counts, time.monotonic() - began)

    def save(self, state: State, path: str | Path) -> None:
        """Writes a state to a file, whose size does not depend on what was read (in a linear model)."""
        save_state(state, path, self.identity)

    def load(self, path: str | Path) -> State:
        """What `save` wrote; raises ValueError where it is no state, or another model's."""
        size = self.program.config["vocab_size"]
        return load_state(path, self.identity, self.program.init_cache, size)

    @functools.cached_property
    def identity(self) -> str:
        """Of the model, in state files."""
        return fingerprint(self.program.config, self.params)

    def _ids(self, prompt: Prompt, first: bool) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(map(int, prompt))
        size = self.program.config["vocab_size"]
        if outside := [i for i in ids if not 0 <= i < size]:
            raise ValueError(
                f"a prompt has the id {outside[0]}: the model has ids from 0 to {size - 1}"
            )
        return ids or ([self.tokenizer.eos_id] if first else [])

    def _read_first(self, rows: list[list[int]], room: int) -> State:
        """Prompts padded on the left. Padding is another segment, so it leaves no trace in a state."""
        smallest = self.program.pieces[-1]
        padded = -(-max(map(len, rows)) // smallest) * smallest
        tokens = np.zeros((len(rows), padded), np.int32)
        segment_ids = np.zeros_like(tokens)
        for i, row in enumerate(rows):
            tokens[i, padded - len(row) :] = row
            segment_ids[i, padded - len(row) :] = 1
        cache = self.program.init_cache(len(rows), padded + room)
        start = 0
        while start < padded:
            piece = next(n for n in self.program.pieces if n <= padded - start)
            part = np.s_[:, start : start + piece]
            logits, cache = read_piece(
                self.program, self.params, tokens[part], segment_ids[part], cache
            )
            start += piece
        return State(cache, logits, np.array([len(row) for row in rows], np.int32))

    def _read_on(self, rows: list[list[int]], state: State) -> State:
        """Prompts after a state: pieces that fill no row's end; a row that is read takes the new state."""
        if self.program.config["mixer"] == "attention" and len(set(map(len, rows))) > 1:
            raise ValueError(
                "the prompts have different lengths: attention's cache counts tokens for all rows "
                "at once, so that a state of it continues only with prompts of one length"
            )
        cache, logits, _ = state
        at = [0] * len(rows)
        for piece in (*self.program.pieces, 1):
            while any(active := [i + piece <= len(row) for i, row in zip(at, rows, strict=True)]):
                tokens = np.zeros((len(rows), piece), np.int32)
                for i in np.flatnonzero(active):
                    tokens[i] = rows[i][at[i] : at[i] + piece]
                    at[i] += piece
                inputs = tokens, np.array(active), logits, cache
                logits, cache = read_rows(self.program, self.params, *inputs)
        return State(cache, logits, (state.tokens + [len(row) for row in rows]).astype(np.int32))

    def _tokens(
        self, state: State, sampling: Sampling, seed: int, count: int
    ) -> Iterator[Int[np.ndarray, " B"]]:
        """One token of each row at a time. The next step runs while the caller handles the last."""
        step = functools.partial(
            decode_step, self.program, sampling, self.tokenizer.vocab_size, self.params
        )
        key = jax.random.key(seed)
        tokens, key = draw(sampling, self.tokenizer.vocab_size, state.logits, key)
        cache = jax.tree.map(jnp.copy, state.cache)  # the caller keeps its own
        for _ in range(count - 1):
            done = tokens
            tokens, cache, key = step(tokens, cache, key)
            yield np.asarray(done)
        yield np.asarray(tokens)


def _batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[int]]:
    """Indices of the prompts of each batch; the last batch repeats its first to be as large."""
    if not 0 < size < len(prompts):
        yield list(range(len(prompts)))
        return
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        yield chosen + chosen[:1] * (size - len(chosen))
