"""What generation needs of a model: pure functions, and the compiled loops' bodies over them."""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from ccq_jax.cache import Cache
from ccq_jax.model import LanguageModel
from ccq_jax.sampling import Sampling
from ccq_jax.state import map_rows

PIECES: tuple[int, ...] = (1024, 128, 16)
"""A prompt is read in pieces of these lengths: few programs are compiled, in memory that does not
grow with the prompt."""


class Program(Protocol):
    """A model's functions, with the parameters as an argument; hashable."""

    pieces: tuple[int, ...]  # what `prefill` may be given; each divides the one before
    config: dict[str, Any]  # the complete `config.model`

    def prefill(self, params: PyTree, tokens: Array, cache: Cache, segment_ids: Array) -> Any:
        """As `LanguageModel.prefill`."""

    def step(self, params: PyTree, tokens: Array, cache: Cache) -> Any:
        """As `LanguageModel.step`."""

    def init_cache(self, batch_size: int, max_len: int) -> Cache:
        """As `LanguageModel.init_cache`."""


class ModelProgram:
    """The functions of a `LanguageModel`."""

    def __init__(self, graph: nnx.GraphDef, model: LanguageModel):
        self.graph = graph
        self.pieces = PIECES
        self.config = model.config.to_dict()
        self._model, self._hash = model, hash(graph)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelProgram) and self.graph == other.graph

    def init_cache(self, batch_size: int, max_len: int) -> Cache:
        """As `LanguageModel.init_cache`."""
        return self._model.init_cache(batch_size, max_len)

    def prefill(self, params: PyTree, tokens: Array, cache: Cache, segment_ids: Array) -> Any:
        """As `LanguageModel.prefill`."""
        return nnx.merge(self.graph, params).prefill(tokens, cache, segment_ids)

    def step(self, params: PyTree, tokens: Array, cache: Cache) -> Any:
        """As `LanguageModel.step`."""
        return nnx.merge(self.graph, params).step(tokens, cache)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def read_piece(program: Program, params, tokens, segment_ids, cache):
    """Reads a piece of every row's prompt: the last token's logits, and the cache. Donates the cache."""
    return program.prefill(params, tokens, cache, segment_ids)


@functools.partial(jax.jit, static_argnums=0)
def read_rows(
    program: Program,
    params: PyTree,
    tokens: Int[Array, "B n"],
    active: Bool[Array, " B"],
    logits: Float[Array, "B N"],
    cache: Cache,
) -> tuple[Float[Array, "B N"], Cache]:
    """Reads on in the rows that are active, and leaves the others as they were."""
    if tokens.shape[1] == 1:
        new_logits, new = program.step(params, tokens[:, 0], cache)
    else:
        segment_ids = jnp.broadcast_to(cache.segment[:, None], tokens.shape)
        new_logits, new = program.prefill(params, tokens, cache, segment_ids)

    def choose(axis: int, new: Array, old: Array) -> Array:
        return jnp.where(active.reshape(-1, *[1] * (new.ndim - axis - 1)), new, old)

    return choose(0, new_logits, logits), map_rows(choose, new, cache)


@functools.partial(jax.jit, static_argnums=(0, 1))
def draw(sampling: Sampling, vocab_size: int, logits, key):
    """A token below `vocab_size` for each row, and the next key."""
    key, now = jax.random.split(key)
    return sampling(logits[:, :vocab_size], now).astype(jnp.int32), key


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def decode_step(program: Program, sampling: Sampling, vocab_size: int, params, tokens, cache, key):
    """Reads a token of each row and draws the next. Donates the cache."""
    logits, cache = program.step(params, tokens, cache)
    tokens, key = draw(sampling, vocab_size, logits, key)
    return tokens, cache, key
