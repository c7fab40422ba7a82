"""Softmax attention with rotary positions: the mixer of the Transformer++ baseline."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from ml_collections import FrozenConfigDict

from ccq_jax.cache import LayerCache, Segments
from ccq_jax.layers import Linear
from ccq_jax.mixers.linear import MemoryInputs


class AttentionCache(NamedTuple):
    """One layer's keys and values; it grows with the context."""

    key: Float[Array, "B S H K"]
    value: Float[Array, "B S H K"]


class Attention(nnx.Module):
    """o_t = sum_s softmax_s(K^-0.5 q_t . k_s) v_s over the tokens s <= t of t's segment."""

    def __init__(self, config: FrozenConfigDict, *, rngs: nnx.Rngs):
        self.config = config
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        self.q_proj = Linear(config, hidden, width, rngs=rngs)
        self.k_proj = Linear(config, hidden, width, rngs=rngs)
        self.v_proj = Linear(config, hidden, width, rngs=rngs)
        self.o_proj = Linear(config, width, hidden, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segments: Segments,
        cache: AttentionCache | None = None,
        diagnostics: bool = False,
    ) -> tuple[Float[Array, "B T D"], AttentionCache | None, dict]:
        """See `ccq_jax.mixers`. Past `max_len` tokens, in one call or in all, ValueError or NaN."""
        del diagnostics
        inputs, _ = self.inputs(x, segments)
        if cache is None:
            o, _ = self.recall(inputs, segments)
        else:
            o, cache = self._recall_from(inputs, segments, cache)
        return self.o_proj(o.reshape(*x.shape[:2], -1)), cache, {}

    def step(
        self, x: Float[Array, "B 1 D"], segments: Segments, cache: LayerCache
    ) -> tuple[Float[Array, "B 1 D"], AttentionCache]:
        """See `ccq_jax.mixers`."""
        y, new, _ = self(x, segments, cache.read())
        return y, cache.write(new)

    def inputs(
        self, x: Float[Array, "B T D"], segments: Segments
    ) -> tuple[MemoryInputs, tuple[Array, ...]]:
        """Rotated queries and keys, and values; nothing else is kept."""
        shape = (*x.shape[:2], self.config.num_heads, self.config.head_dim)
        q, k, v = (f(x).reshape(shape) for f in (self.q_proj, self.k_proj, self.v_proj))
        position = segments.position
        if position is None:
            position = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        q, k = (rotate(y, position, self.config.rope_theta) for y in (q, k))
        return MemoryInputs(q, k, v, gates=()), ()

    def recall(
        self, inputs: MemoryInputs, segments: Segments
    ) -> tuple[Float[Array, "B T H K"], None]:
        """What each query reads from this call's tokens. Linear in `inputs.v`."""
        q, k, v, _ = inputs
        if segments.position is None:
            return _attend(q, k, v, is_causal=True), None
        return _attend(q, k, v, mask=_visible(segments.position, 0, q.shape[1])), None

    def _recall_from(
        self, inputs: MemoryInputs, segments: Segments, cache: AttentionCache
    ) -> tuple[Float[Array, "B T H K"], AttentionCache]:
        q, k, v, _ = inputs
        start, length = jnp.asarray(segments.length), q.shape[1]
        max_len = cache.key.shape[1]
        if length > max_len:
            raise ValueError(f"{length} tokens do not fit a cache of max_len {max_len}")
        cache = AttentionCache(
            jax.lax.dynamic_update_slice(cache.key, k, (0, start, 0, 0)),
            jax.lax.dynamic_update_slice(cache.value, v, (0, start, 0, 0)),
        )
        visible = _visible(jnp.asarray(segments.position), start, max_len)
        o = _attend(q, cache.key, cache.value, mask=visible)
        return jnp.where(start + length > max_len, jnp.nan, o), cache

    def init_cache(self, batch_size: int, max_len: int) -> AttentionCache:
        """Room for `max_len` tokens."""
        shape = (batch_size, max_len, self.config.num_heads, self.config.head_dim)
        return AttentionCache(*(jnp.zeros(shape, self.config.dtype) for _ in range(2)))


def rotate(
    x: Float[Array, "B T H K"], position: Int[Array, "#B T"], theta: float
) -> Float[Array, "B T H K"]:
    """Rotary embedding: turns each pair (i, i + K/2) of channels by position * theta^(-2i/K)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _visible(
    position: Int[Array, "B T"], before: Int[Array, ""] | int, num_keys: int
) -> Bool[Array, "B 1 T S"]:
    """Which keys a token sees, after `before` tokens: those of its segment, up to itself."""
    index = before + jnp.arange(position.shape[1])
    start = index - position
    key = jnp.arange(num_keys)
    return ((start[..., None] <= key) & (key <= index[:, None]))[:, None]


def _attend(q, k, v, **options) -> Float[Array, "B T H K"]:
    """JAX's attention, by cuDNN's flash kernel where that takes such inputs."""
    flash = (
        jax.default_backend() == "gpu"
        and q.dtype == jnp.bfloat16
        and q.shape[-1] <= 128
        and q.shape[-1] % 8 == 0
        and q.shape[1] > 1
        and q.shape[1] % 2 == k.shape[1] % 2 == 0  # asked for by its backward with a mask
    )
    return jax.nn.dot_product_attention(
        q, k, v, implementation="cudnn" if flash else "xla", **options
    )
