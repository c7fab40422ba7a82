"""GLA's chunked form on GPUs, through jax-triton; `triton_kernels` has the mathematics.

Forward: all chunks' scores and decayed queries and keys at once, the state at every chunk's start
in one pass over each sequence, then all outputs. Backward: the state's gradient at every chunk's
end in one pass from the last chunk to the first, then d_v, and d_q, d_k and the decays' gradients,
of all chunks at once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import triton_util

unavailable = triton_util.unavailable


class Residuals(NamedTuple):
    """What the backward needs.

    The inputs, the states at the chunks' starts, the scores, q decayed from the chunk's start and k
    to its end, and the chunks' decays.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H D"] | None
    states: Float[Array, "B H N K V"]
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
    from kernels.gated_linear_attention import triton_kernels as kernels

    chunk, levels = _chunk(chunk_size)
    batch, length, heads, width = k.shape
    chunks = -(-length // chunk)
    kind = _kind(log_decay, k)
    like_q = jax.ShapeDtypeStruct(q.shape if kind else (1,), q.dtype)
    gains = batch, heads, chunks, (1, 1, width)[kind]
    scores, decayed_q, decayed_k, gains = triton_util.call(
        kernels.scores_kernel,
        *(q, k, q if log_decay is None else log_decay, length),
        out=(
            jax.ShapeDtypeStruct((batch, heads, chunks, chunk, chunk), q.dtype),
            *(like_q, like_q, jax.ShapeDtypeStruct(gains, jnp.float32)),
        ),
        grid=(chunks * batch * heads,),
        scale=scale,
        LEVELS=levels,
        DECAY=kind,
        **{"H": heads, "K": width, "C": chunk},
        **_tiles("scores", q, v),
    )
    if log_decay is None:
        decayed_q, decayed_k = q, k
    states, state = _carry(decayed_k, v, gains, initial_state, 1.0, kind, chunk, reverse=False)
    out = _mix(decayed_q, v, scores, states, scale, reverse=False)
    inputs = (q, k, v, log_decay)
    return out, state, Residuals(*inputs, states, scores, decayed_q, decayed_k, gains)


def backward(
    residuals: Residuals,
    d_out: Float[Array, "B T H V"],
    d_state: Float[Array, "B H K V"],
    *,
    scale: float,
    chunk_size: int | None = None,
) -> tuple[Any, ...]:
    """Gradients of q, k, v, log_decay and initial_state."""
    from kernels.gated_linear_attention import triton_kernels as kernels

    q, k, v, log_decay, states, scores, decayed_q, decayed_k, gains = residuals
    chunk, levels = _chunk(chunk_size)
    kind = _kind(log_decay, k)
    d_out = d_out.astype(v.dtype)
    d_states, d_initial = _carry(decayed_q, d_out, gains, d_state, scale, kind, chunk, reverse=True)
    d_v = _mix(decayed_k, d_out, scores, d_states, 1.0, reverse=True)

    batch, heads, chunks, width = states.shape[:4]
    config = _tiles("gradients", q, v)
    tiles = -(-width // config["BK"])
    like_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    d_decay = {
        0: jax.ShapeDtypeStruct((1,), jnp.float32),
        1: jax.ShapeDtypeStruct((*q.shape[:3], tiles), jnp.float32),
        2: log_decay if log_decay is None else jax.ShapeDtypeStruct(q.shape, log_decay.dtype),
    }[kind]
    d_q, d_k, d_decay = triton_util.call(
        kernels.gradients_kernel,
        *(q, k, v, q if log_decay is None else log_decay, d_out, states, d_states, q.shape[1]),
        out=(like_q, like_q, d_decay),
        grid=(tiles * chunks * batch * heads,),
        scale=scale,
        LEVELS=levels,
        DECAY=kind,
        **{"H": heads, "K": width, "V": v.shape[-1], "C": chunk},
        **config,
    )
    if log_decay is None:
        return d_q, d_k, d_v, None, d_initial
    if kind == 1:
        d_decay = d_decay.sum(-1, keepdims=True).astype(log_decay.dtype)
    return d_q, d_k, d_v, d_decay, d_initial


def _carry(
    x: Float[Array, "B T H K"],
    y: Float[Array, "B T H V"],
    gains: Float[Array, "B H N D"],
    initial: Float[Array, "B H K V"],
    scale: float,
    kind: int,
    chunk: int,
    reverse: bool,
) -> tuple[Float[Array, "B H N K V"], Float[Array, "B H K V"]]:
    """The state that each chunk receives, and the one after the last; REVERSE: their gradients."""
    from kernels.gated_linear_attention import triton_kernels as kernels

    batch, length, heads, width = x.shape
    chunks = gains.shape[2]
    config = _tiles("carry", x, y)
    tiles = -(-width // config["BI"]) * -(-y.shape[-1] // config["BJ"])
    return triton_util.call(
        kernels.carry_kernel,
        *(x, y, gains, initial, length),
        out=(
            jax.ShapeDtypeStruct((batch, heads, chunks, width, y.shape[-1]), x.dtype),
            jax.ShapeDtypeStruct(initial.shape, jnp.float32),
        ),
        grid=(tiles * batch * heads,),
        scale=scale,
        DECAY=kind,
        REVERSE=reverse,
        **{"H": heads, "K": width, "V": y.shape[-1], "C": chunk},
        **config,
    )


def _mix(
    x: Float[Array, "B T H K"],
    y: Float[Array, "B T H V"],
    scores: Float[Array, "B H N C C"],
    states: Float[Array, "B H N K V"],
    scale: float,
    reverse: bool,
) -> Float[Array, "B T H V"]:
    """What the tokens get from their chunk's other tokens and from the state."""
    from kernels.gated_linear_attention import triton_kernels as kernels

    batch, heads, chunks, chunk, _ = scores.shape
    config = _tiles("mix", x, y)
    tiles = -(-y.shape[-1] // config["BV"])
    return triton_util.call(
        kernels.mix_kernel,
        *(x, y, scores, states, x.shape[1]),
        out=jax.ShapeDtypeStruct(y.shape, y.dtype),
        grid=(tiles * chunks * batch * heads,),
        scale=scale,
        REVERSE=reverse,
        **{"H": heads, "K": x.shape[-1], "V": y.shape[-1], "C": chunk},
        **config,
    )


def _kind(log_decay: Array | None, k: Array) -> int:
    """0 no decay, 1 one a head, 2 one a channel."""
    if log_decay is None:
        return 0
    return 1 if log_decay.shape[-1] == 1 and k.shape[-1] != 1 else 2


def _chunk(chunk_size: int | None) -> tuple[int, int]:
    """Tokens a chunk, and its logarithm. A chunk's scores live in registers: 64 tokens at most."""
    levels = min(chunk_size or 64, 64).bit_length() - 1
    return 1 << levels, levels


def _tiles(kernel: str, k: Array, v: Array) -> dict[str, int]:
    # Rows of 16-bit tiles: narrower ones are miscompiled, see `triton_kernels`.
    narrowest = 16 if k.dtype == jnp.float32 else 64
    key_width, value_width = (max(narrowest, 1 << (x.shape[-1] - 1).bit_length()) for x in (k, v))

    def candidate(first: int, second: int, num_warps: int, num_stages: int) -> dict[str, int]:
        sizes = {
            "carry": {"BI": min(first, key_width), "BJ": min(second, value_width)},
            "scores": {"BK": min(first, key_width)},
        }.get(kernel, {"BK": min(first, key_width), "BV": min(second, value_width)})
        return sizes | {"num_warps": num_warps, "num_stages": num_stages}

    if k.dtype == jnp.float32:
        candidates = [candidate(32, 32, 4, 1)]
    else:
        candidates = {
            "carry": [candidate(128, 128, 8, 3), candidate(64, 64, 4, 3)],
            "scores": [candidate(64, 64, 4, 2)],
            "mix": [candidate(64, 128, 4, 2), candidate(64, 64, 4, 2)],
            "gradients": [candidate(64, 64, 4, 2)],
        }[kernel]

    def shared(config: Mapping[str, int]) -> int:
        a, b = config.get("BI", config.get("BK", 0)), config.get("BJ", config.get("BV", 0))
        tile = 2 * a * b + 64 * (4 * a + 2 * b)
        return k.dtype.itemsize * config["num_stages"] * tile

    shape = triton_util.bucket(k.dtype, k.shape[-1], v.shape[-1])
    chosen = triton_util.choose(f"gated_linear_attention.{kernel}", shape, candidates, shared)
    return {
        name: max(size, narrowest) if name.startswith("B") else size
        for name, size in chosen.items()
    }
