"""Streams text from a trained model, token by token, out of a state of constant size.

python -m ccq_jax.generate --workdir=runs/ccq_gdn --prompt='def ' --temperature=0.8 --top_p=0.95
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from ccq_jax import checkpoint
from ccq_jax.data import make_tokenizer
from ccq_jax.model import LanguageModel

PREFILL_TOKENS = 1024
"""A prompt is read in pieces of at most this many tokens, so that memory does not grow with it."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: only the k likeliest tokens are candidates; 0 keeps all.
      top_p: only the fewest likeliest tokens that together have this probability; 1 keeps all.

    Raises:
      ValueError: a field is out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    def __call__(self, logits: Float[Array, "B N"], key: Array) -> Int[Array, " B"]:
        """Draws a token for each row."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            smallest = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        if self.top_p < 1:
            ordered = -jnp.sort(-logits, axis=-1)
            p = jax.nn.softmax(ordered, axis=-1)
            # A token stays while those likelier than it have less than top_p: so the first stays.
            kept = jnp.cumsum(p, axis=-1) - p < self.top_p
            smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        return jax.random.categorical(key, logits, axis=-1)


def prefill(
    model: LanguageModel, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[Float[Array, "B N"], PyTree]:
    """Reads prompts of any lengths; returns the logits of the next token and the cache.

    Prompts are padded on the left. The padding is a segment of its own, so it leaves no trace in a
    state. `max_tokens` is how many more tokens the cache must have room for (attention only).

    Raises:
      ValueError: there is no prompt, or one is empty.
    """
    if not prompts or not all(prompts):
        raise ValueError("a prompt is empty: there is nothing to continue")
    longest = max(map(len, prompts))
    piece = min(PREFILL_TOKENS, 1 << (longest - 1).bit_length())
    padded = -(-longest // piece) * piece
    tokens = np.zeros((len(prompts), padded), np.int32)
    segment_ids = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, padded - len(prompt) :] = prompt
        segment_ids[row, padded - len(prompt) :] = 1
    graph, params = nnx.split(model)
    cache = model.init_cache(len(prompts), padded + max_tokens)
    for start in range(0, padded, piece):
        part = np.s_[:, start : start + piece]
        logits, cache = _read(graph, params, tokens[part], segment_ids[part], cache)
    return logits, cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _read(graph, params, tokens, segment_ids, cache):
    return nnx.merge(graph, params).prefill(tokens, cache, segment_ids)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def _step(graph, sampling, vocab_size, params, logits, cache, key):
    key, now = jax.random.split(key)
    tokens = sampling(logits[:, :vocab_size], now).astype(jnp.int32)
    logits, cache = nnx.merge(graph, params).step(tokens, cache)
    return tokens, logits, cache, key


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    vocab_size: int | None = None,
) -> Iterator[np.ndarray]:
    """Continues a batch of prompts, yielding one token of each, [B] int32, at a time.

    The next step runs on the device while the caller handles the last one's tokens.

    Args:
      model: the model.
      prompts: token ids; their lengths may differ.
      max_tokens: how many tokens to yield.
      sampling: how they are drawn.
      seed: the same seed gives the same tokens.
      vocab_size: ids from here on are never drawn: a model's vocabulary may be rounded up from its
        tokenizer's. None: all may be.

    Raises:
      ValueError: there is no prompt, one is empty, or max_tokens is not positive.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be 1 or more")
    logits, cache = prefill(model, prompts, max_tokens)
    graph, params = nnx.split(model)
    key = jax.random.key(seed)
    step = functools.partial(_step, graph, sampling, vocab_size, params)
    tokens, logits, cache, key = step(logits, cache, key)
    for _ in range(max_tokens - 1):
        done = tokens
        tokens, logits, cache, key = step(logits, cache, key)
        yield np.asarray(done)
    yield np.asarray(tokens)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: see --help."""
    flags = _flags().parse_args(argv)
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p)
    trained = checkpoint.load_model(flags.workdir, step=flags.step)
    tokenizer = make_tokenizer(trained.config.data.tokenizer)
    stream = tokenizer.stream()
    sys.stdout.write(flags.prompt)
    prompt = tokenizer.encode(flags.prompt) or [tokenizer.eos_id]
    for (token,) in generate(
        trained.model,
        [prompt],
        max_tokens=flags.max_tokens,
        sampling=sampling,
        seed=flags.seed,
        vocab_size=tokenizer.vocab_size,
    ):
        if token == tokenizer.eos_id:
            break
        sys.stdout.write(stream.push(int(token)))
        sys.stdout.flush()
    sys.stdout.write(stream.flush() + "\n")


def _step_name(text: str) -> str | int:
    return text if text in ("latest", "best") else int(text)


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ccq_jax.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workdir", type=Path, required=True, help="the folder that train.py wrote")
    add("--step", type=_step_name, default="latest", help="latest (default), best, or a step")
    add("--prompt", default="", help="the text to continue; empty starts a document")
    add("--max_tokens", type=int, default=256, help="stop after this many tokens (default 256)")
    add("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    add("--top_k", type=int, default=0, help="draw from the k likeliest tokens; 0: from all")
    add("--top_p", type=float, default=0.95, help="draw from the likeliest with this probability")
    add("--seed", type=int, default=0, help="the same seed gives the same text")
    return parser


if __name__ == "__main__":
    main()
