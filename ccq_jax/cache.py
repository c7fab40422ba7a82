"""What a model remembers between calls, and where each token of a call stands in its segment."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Cache(NamedTuple):
    """The state after the tokens seen so far.

    A linear mixer's share has a constant size; attention's holds the keys and values of `max_len`
    tokens.
    """

    layers: Any  # each mixer's cache, stacked over layers: [L, B, ...]
    segment: Int[Array, " B"]  # id of the last token's segment
    position: Int[Array, " B"]  # tokens of that segment seen so far
    length: Int[Array, ""]  # tokens seen so far, of any segment


def empty_cache(layers: Any, batch_size: int) -> Cache:
    """The cache before the first token."""
    # Buffers of their own, so that a cache can be donated.
    segment, position = jnp.zeros((2, batch_size), jnp.int32)
    return Cache(layers, segment, position, length=jnp.zeros((), jnp.int32))


class LayerCache(NamedTuple):
    """One layer's share of what is stacked over layers [L, B, ...], to be updated where it lies."""

    stacked: Any
    layer: Int[Array, ""]

    def read(self) -> Any:
        """The layer's arrays [B, ...]."""

        def take(x: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False)

        return jax.tree.map(take, self.stacked)

    def write(self, arrays: Any) -> Any:
        """All layers' arrays, with this layer's replaced."""

        def put(x: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), self.layer, axis=0)

        return jax.tree.map(put, self.stacked, arrays)


class Segments(NamedTuple):
    """Where each token stands. A segment is a run of tokens with one id; nothing crosses its ends.

    Without ids and without a cache all is None: one segment, from its first token.
    """

    ids: Int[Array, "B T"] | None = None
    position: Int[Array, "B T"] | None = None  # index of the token in its segment
    restart: Bool[Array, " B"] | None = (
        None  # the first token does not continue the cache's segment
    )
    length: Int[Array, ""] | None = None  # tokens in the cache

    def carry(self, state: Any) -> Any:
        """A cached state [B, ...] as the first token sees it: zeros if that begins a segment."""
        restart = self.restart
        if restart is None:
            return state

        def keep(x: Array) -> Array:
            return jnp.where(restart.reshape(-1, *[1] * (x.ndim - 1)), 0, x)

        return jax.tree.map(keep, state)

    def forget(self, log_decay: Array) -> Array:
        """The first token's log decays [B, ...]: -inf where it begins a segment."""
        if self.restart is None:
            return log_decay
        restart = self.restart.reshape(-1, *[1] * (log_decay.ndim - 1))
        return jnp.where(restart, -jnp.inf, log_decay)


def locate(ids: Int[Array, "B T"] | None, cache: Cache | None, num_tokens: int) -> Segments:
    """The segments of a call's tokens. Without ids they continue the cache's last segment."""
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    if ids is None:
        if cache is None:
            return Segments()
        return Segments(position=cache.position[:, None] + index, length=cache.length)
    before = ids[:, :1] if cache is None else cache.segment[:, None]
    changed = ids != jnp.concatenate([before.astype(ids.dtype), ids[:, :-1]], axis=1)
    seen = 0 if cache is None else cache.position[:, None]
    # Index of each token's segment start in this call; negative where it lies before the call.
    start = jax.lax.cummax(jnp.where(changed, index, -seen), axis=1)
    position = index - start
    if cache is None:
        return Segments(ids, position)
    return Segments(ids, position, changed[:, 0], cache.length)


def advance(cache: Cache, layers: Any, segments: Segments) -> Cache:
    """The cache after a call whose tokens lay in `segments`."""
    position = jnp.asarray(segments.position)
    segment = cache.segment if segments.ids is None else segments.ids[:, -1].astype(jnp.int32)
    return Cache(layers, segment, position[:, -1] + 1, cache.length + position.shape[1])
