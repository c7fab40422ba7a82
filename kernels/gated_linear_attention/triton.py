"""GLA's chunked form on GPUs, through jax-triton; `triton_kernels` has the mathematics.

Forward: all chunks' scores and decayed queries and keys at once, then one walk over each sequence
that carries the state and writes the outputs. Backward: the walk again, for the state that enters
each chunk; a walk from the last chunk to the first, for the gradient of the state that leaves each
chunk and d_v; then d_q, d_k and the decays' gradients, of all chunks at once. Chunks with strong
decays of channels are left out by the kernels that take all chunks at once, and done by others that
write into the same arrays.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import triton_util

unavailable = triton_util.unavailable

# Chunks that a block of the kernels for strong decays looks at.
GROUP = 8


class Residuals(NamedTuple):
    """What the backward needs: the inputs, and what `_scores` returns."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H D"] | None
    initial_state: Float[Array, "B H K V"]
    scores: Float[Array, "B H N C C"]
    decayed_q: Float[Array, "B T H K"]
    decayed_k: Float[Array, "B T H K"]
    gains: Float[Array, "B H N D"]


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H D"] | None,
    initial_state: Float[Array, "B H K V"],
    *,
    scale: float,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"], Residuals]:
    """Outputs and the final state; see `kernels.gated_linear_attention`."""
    scores, decayed_q, decayed_k, gains = _scores(q, k, v, log_decay, scale, chunk_size)
    kind = _kind(log_decay, k)
    terms = (scores, gains, kind, 1.0 if kind else scale)
    _, out, state = _walk(decayed_q, decayed_k, v, initial_state, *terms, output=True)
    inputs = (q, k, v, log_decay, initial_state)
    return out, state, Residuals(*inputs, scores, decayed_q, decayed_k, gains)


def backward(
    residuals: Residuals,
    d_out: Float[Array, "B T H V"],
    d_state: Float[Array, "B H K V"],
    *,
    scale: float,
    chunk_size: int | None = None,
) -> tuple[Any, ...]:
    """Gradients of q, k, v, log_decay and initial_state."""
    del chunk_size  # the residuals have it
    _, k, v, log_decay, initial_state, scores, decayed_q, decayed_k, gains = residuals
    d_out = d_out.astype(v.dtype)
    kind = _kind(log_decay, k)
    terms = (scores, gains, kind, 1.0 if kind else scale)
    states, _, _ = _walk(decayed_q, decayed_k, v, initial_state, *terms, states=True)
    d_states, d_v, d_initial = _walk(
        decayed_k, decayed_q, d_out, d_state, *terms, reverse=True, output=True, states=True
    )
    gradients = _channel_gradients if kind == 2 else _gradients
    d_q, d_k, d_decay = gradients(residuals, d_out, states, d_states, scale)
    return d_q, d_k, d_v, d_decay, d_initial


def _scores(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H D"] | None,
    scale: float,
    chunk_size: int | None,
) -> tuple[Array, Array, Array, Array]:
    """The chunks' scores, q decayed from the chunk's start and k to its end, the chunks' decays.

    Where there are decays the scale is in the decayed q.
    """
    from kernels.gated_linear_attention import triton_kernels, triton_levels

    chunk, levels = _chunk(chunk_size, q)
    batch, length, heads, width = k.shape
    chunks = -(-length // chunk)
    kind = _kind(log_decay, k)
    like_q = jax.ShapeDtypeStruct(q.shape if kind else (1,), q.dtype)
    gains = batch, heads, chunks, (1, 1, width)[kind]
    sizes: dict[str, Any] = {"scale": scale, "H": heads, "K": width, "C": chunk}
    scores, decayed_q, decayed_k, gains = triton_util.call(
        triton_kernels.scores_kernel,
        *(q, k, q if log_decay is None else log_decay, length),
        out=(
            jax.ShapeDtypeStruct((batch, heads, chunks, chunk, chunk), q.dtype),
            *(like_q, like_q, jax.ShapeDtypeStruct(gains, jnp.float32)),
        ),
        grid=(chunks * batch * heads,),
        DECAY=kind,
        **sizes,
        **_tiles("scores", q, v),
    )
    if log_decay is None:
        return scores, q, k, gains
    if kind == 2:
        entries = chunks * batch * heads
        scores, decayed_q, decayed_k = _in_place(
            triton_levels.scores_kernel,
            *(q, k, log_decay, gains),
            into=(scores, decayed_q, decayed_k),
            numbers=(length, entries),
            grid=(-(-entries // GROUP),),
            WIDTH=1 << (width - 1).bit_length(),
            LEVELS=levels,
            GROUP=GROUP,
            **sizes,
            **_tiles("strong_scores", q, v),
        )
    return scores, decayed_q, decayed_k, gains


def _in_place(kernel: Any, *operands: Array, into: Any, numbers: Any, **options: Any) -> Any:
    """The arrays `into` after a kernel has written into them."""
    refs = tuple(map(triton_util.in_place, into))
    triton_util.call(kernel, *operands, *refs, *numbers, out=(), **options)
    return tuple(map(triton_util.after, refs))


def _walk(
    reads: Float[Array, "B T H K"],
    writes: Float[Array, "B T H K"],
    y: Float[Array, "B T H V"],
    initial: Float[Array, "B H K V"],
    scores: Float[Array, "B H N C C"],
    gains: Float[Array, "B H N D"],
    kind: int,
    scale: float,
    *,
    reverse: bool = False,
    output: bool = False,
    states: bool = False,
) -> tuple[Float[Array, "B H N K V"], Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """What enters each chunk and what the tokens read, as asked for, and the last state."""
    from kernels.gated_linear_attention import triton_kernels as kernels

    batch, length, heads, width = reads.shape
    _, _, chunks, chunk, _ = scores.shape
    value_width = y.shape[-1]
    config = _tiles("reverse" if reverse else "walk" if output else "states", reads, y)
    tiles = -(-value_width // config["BV"])
    unwritten = jax.ShapeDtypeStruct((1,), y.dtype)
    every_state = jax.ShapeDtypeStruct((batch, heads, chunks, width, value_width), y.dtype)
    return triton_util.call(
        kernels.walk_kernel,
        *(reads, writes, y, scores, gains, initial, length),
        out=(
            every_state if states else unwritten,
            jax.ShapeDtypeStruct(y.shape, y.dtype) if output else unwritten,
            jax.ShapeDtypeStruct(initial.shape, jnp.float32),
        ),
        grid=(tiles * batch * heads,),
        scale=scale,
        DECAY=kind,
        REVERSE=reverse,
        OUTPUT=output,
        STATES=states,
        **{"H": heads, "K": width, "V": value_width, "C": chunk},
        **config,
    )


def _channel_gradients(
    residuals: Residuals,
    d_out: Float[Array, "B T H V"],
    states: Float[Array, "B H N K V"],
    d_states: Float[Array, "B H N K V"],
    scale: float,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and the log decays of channels."""
    from kernels.gated_linear_attention import triton_kernels, triton_levels

    q, k, v, _, _, _, decayed_q, decayed_k, gains = residuals
    log_decay: Any = residuals.log_decay
    batch, heads, chunks, width, value_width = states.shape
    chunk = residuals.scores.shape[-1]
    entries = batch * heads * chunks
    sizes: dict[str, Any] = {"scale": scale, "H": heads, "K": width, "V": value_width, "C": chunk}
    config = _tiles("gradients", q, v)
    terms = (v, log_decay, gains, d_out, states, d_states)
    gradients = triton_util.call(
        triton_kernels.channel_gradients_kernel,
        *(decayed_q, decayed_k, *terms, q.shape[1]),
        out=tuple(jax.ShapeDtypeStruct(q.shape, x.dtype) for x in (q, k, log_decay)),
        grid=(-(-width // config["BK"]) * entries,),
        **sizes,
        **config,
    )
    config = _tiles("strong_gradients", q, v)
    return _in_place(
        triton_levels.gradients_kernel,
        *(q, k, *terms),
        into=gradients,
        numbers=(q.shape[1], entries),
        grid=(-(-width // config["BK"]) * -(-entries // GROUP),),
        LEVELS=chunk.bit_length() - 1,
        GROUP=GROUP,
        **sizes,
        **config,
    )


def _gradients(
    residuals: Residuals,
    d_out: Float[Array, "B T H V"],
    states: Float[Array, "B H N K V"],
    d_states: Float[Array, "B H N K V"],
    scale: float,
) -> tuple[Array, Array, Array | None]:
    """Gradients of q, k and the log decays of heads, or None."""
    from kernels.gated_linear_attention import triton_kernels as kernels

    q, k, v, log_decay = residuals[:4]
    batch, heads, chunks, width, value_width = states.shape
    config = _tiles("gradients", q, v)
    tiles = -(-width // config["BK"])
    like_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    d_decay = (1,) if log_decay is None else (*q.shape[:3], tiles)
    d_q, d_k, d_decay = triton_util.call(
        kernels.gradients_kernel,
        *(q, k, v, q if log_decay is None else log_decay, d_out, states, d_states, q.shape[1]),
        out=(like_q, like_q, jax.ShapeDtypeStruct(d_decay, jnp.float32)),
        grid=(tiles * chunks * batch * heads,),
        scale=scale,
        DECAY=int(log_decay is not None),
        **{"H": heads, "K": width, "V": value_width, "C": residuals.scores.shape[-1]},
        **config,
    )
    if log_decay is None:
        return d_q, d_k, None
    return d_q, d_k, d_decay.sum(-1, keepdims=True).astype(log_decay.dtype)


def _kind(log_decay: Array | None, k: Array) -> int:
    """0 no decay, 1 one a head, 2 one a channel."""
    if log_decay is None:
        return 0
    return 1 if log_decay.shape[-1] == 1 and k.shape[-1] != 1 else 2


def _chunk(chunk_size: int | None, q: Array) -> tuple[int, int]:
    """Tokens a chunk, and its logarithm. A chunk's scores live in registers: 64 tokens at most."""
    usual = 32 if q.dtype == jnp.float32 else 64
    levels = min(chunk_size or usual, 64).bit_length() - 1
    return 1 << levels, levels


def _tiles(kernel: str, k: Array, v: Array) -> dict[str, int]:
    # Rows of 16-bit tiles: narrower ones are miscompiled, see `triton_kernels`.
    narrowest = 16 if k.dtype == jnp.float32 else 64
    key_width, value_width = (max(narrowest, 1 << (x.shape[-1] - 1).bit_length()) for x in (k, v))

    def candidate(first: int, second: int, num_warps: int, num_stages: int) -> dict[str, int]:
        sizes = {"BK": min(first, key_width)}
        if not kernel.endswith("scores"):
            sizes["BV"] = min(second, value_width)
        return sizes | {"num_warps": num_warps, "num_stages": num_stages}

    walks = kernel in ("walk", "states", "reverse")
    if k.dtype == jnp.float32:
        warps = 8 if walks and key_width > 256 else 4
        candidates = [candidate(64 if walks else 32, 16, warps, 1)]
    elif walks:
        candidates = [candidate(64, 64, 4, 2), candidate(128, 64, 8, 1)]
        if key_width > 128:
            candidates.insert(0, candidate(64, 128, 8, 2))
    else:
        candidates = [candidate(64, 64, 4, 2)]

    def shared(config: Mapping[str, int]) -> int:
        a, b = config["BK"], config.get("BV", 0)
        if walks:
            tile = 64 * (2 * key_width + b + 64) * config["num_stages"] + a * b
        else:
            tile = (2 * a * b + 64 * (4 * a + 2 * b)) * config["num_stages"]
        return k.dtype.itemsize * tile

    shape = triton_util.bucket(k.dtype, k.shape[-1], v.shape[-1])
    size = lambda name, value: max(value, narrowest) if name.startswith("B") else value
    return triton_util.choose(f"gated_linear_attention.{kernel}", shape, candidates, shared, size)
