"""Gated delta rule on GPUs: chunked Triton kernels, called through jax-triton.

Forward: `prepare` (what the tokens of a chunk do to each other, all chunks at once), then `forward`,
which walks the sequence. Backward: `states` walks it again and keeps the state that enters each chunk,
`reverse` walks back with the state's gradient, `gradient` finishes all chunks at once. Nothing of the
size of the chunks' states outlives a call.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kernels import triton_util

NAME = "gated_delta_rule"
GATE_ROWS = 5
Config = dict[str, int]

unavailable = triton_util.unavailable


def forward(q, k, v, log_decay, beta, initial_state, *, scale, chunk_size=None):
    """See `kernels.dispatch`; chunks of up to 64 tokens, 32 in float32."""
    from kernels.gated_delta_rule import triton_kernels

    batch, length, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    chunk = _chunk(q.dtype, key_dim, chunk_size)
    tiles = (batch, value_heads, -(-length // chunk))
    static = {
        "H": heads,
        "HV": value_heads,
        "K": key_dim,
        "C": chunk,
        "PRECISION": "ieee",
    }
    fine = jnp.float32 if q.dtype == jnp.float32 else jnp.float16
    gates, corrections, scores, *fine_terms = triton_util.call(
        triton_kernels.prepare_kernel,
        *(q, k, log_decay, beta),
        out=(
            jax.ShapeDtypeStruct((*tiles, GATE_ROWS, chunk), jnp.float32),
            *(jax.ShapeDtypeStruct((*tiles, chunk, chunk), dtype) for dtype in (q.dtype, q.dtype, fine, fine)),
        ),
        T=length,
        scale=scale,
        grid=(tiles[0] * tiles[1] * tiles[2],),
        INVERSE_PRECISION="ieee" if q.dtype == jnp.float32 else "tf32x3",
        **static,
        **_config("prepare", q.dtype, chunk, key_dim, value_dim),
    )
    config = _config("forward", q.dtype, chunk, key_dim, value_dim)
    out, state = triton_util.call(
        triton_kernels.forward_kernel,
        *(q, k, v, beta, gates, *fine_terms, initial_state),
        out=(
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(initial_state.shape, jnp.float32),
        ),
        T=length,
        scale=scale,
        grid=(_blocks(value_dim, config["BLOCK_V"]) * batch * value_heads,),
        V=value_dim,
        STATES=False,
        **static,
        **config,
    )
    inputs = (q, k, v, log_decay, beta, initial_state)
    return out, state, (inputs, gates, corrections, scores)


def backward(residuals, d_out, d_state, *, scale, chunk_size=None):
    """See `kernels.dispatch`."""
    from kernels.gated_delta_rule import triton_kernels

    inputs, gates, corrections, scores = residuals
    q, k, v, log_decay, beta, initial_state = inputs
    batch, length, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    tiles, chunk = gates.shape[:3], gates.shape[-1]
    static = {
        "H": heads,
        "HV": value_heads,
        "K": key_dim,
        "V": value_dim,
        "C": chunk,
        "PRECISION": "ieee",
    }
    # A state or its gradient before or after each chunk, transposed as the kernels hold it.
    chunk_states = jax.ShapeDtypeStruct((*tiles, value_dim, key_dim), q.dtype)
    config = _config("states", q.dtype, chunk, key_dim, value_dim)
    u, states = triton_util.call(
        triton_kernels.forward_kernel,
        *(q, k, v, beta, gates, corrections, scores, initial_state),
        out=(jax.ShapeDtypeStruct((*tiles, value_dim, chunk), q.dtype), chunk_states),
        T=length,
        scale=scale,
        grid=(_blocks(value_dim, config["BLOCK_V"]) * batch * value_heads,),
        STATES=True,
        **static,
        **config,
    )
    config = _config("reverse", q.dtype, chunk, key_dim, value_dim)
    d_v, d_states, d_initial = triton_util.call(
        triton_kernels.reverse_kernel,
        *(q, k, gates, corrections, scores, d_out, d_state),
        out=(
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            chunk_states,
            jax.ShapeDtypeStruct(initial_state.shape, jnp.float32),
        ),
        T=length,
        scale=scale,
        grid=(_blocks(value_dim, config["BLOCK_V"]) * batch * value_heads,),
        **static,
        **config,
    )
    config = _config("gradient", q.dtype, chunk, key_dim, value_dim)
    columns = _blocks(key_dim, config["BLOCK_K"])
    # Value heads that share a key head add up in float32.
    keys = jax.ShapeDtypeStruct(
        (batch, length, value_heads, key_dim), q.dtype if value_heads == heads else jnp.float32
    )
    gate_parts = jax.ShapeDtypeStruct((columns, batch, length, value_heads), jnp.float32)
    d_q, d_k, d_decay, d_beta = triton_util.call(
        triton_kernels.gradient_kernel,
        *(q, k, log_decay, beta, gates, d_out, d_v, u, states, d_states),
        out=(keys, keys, gate_parts, gate_parts),
        T=length,
        scale=scale,
        grid=(columns * tiles[0] * tiles[1] * tiles[2],),
        **static,
        **config,
    )
    if value_heads != heads:
        shape = (batch, length, heads, value_heads // heads, key_dim)
        d_q, d_k = (x.reshape(shape).sum(3).astype(q.dtype) for x in (d_q, d_k))
    d_decay = d_decay.sum(0).astype(log_decay.dtype)
    d_beta = d_beta.sum(0).astype(beta.dtype)
    return d_q, d_k, d_v, d_decay, d_beta, d_initial


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _chunk(dtype: Any, key_dim: int, chunk_size: int | None) -> int:
    """The chunk: what was asked for, up to 64, or less where shared memory is small."""
    chunk = min(chunk_size or (32 if dtype == jnp.float32 else 64), 64)
    limit = triton_util.shared_memory(triton_util.device_kind())
    while (
        chunk > 16
        and _shared(_candidates("forward", dtype, key_dim, 16)[-1], dtype, chunk, key_dim) > limit
    ):
        chunk //= 2
    return chunk


def _config(kernel: str, dtype: Any, chunk: int, key_dim: int, value_dim: int) -> Config:
    return triton_util.choose(
        f"{NAME}.{kernel}",
        triton_util.bucket(dtype, key_dim, value_dim),
        _candidates(kernel, dtype, key_dim, value_dim),
        lambda config: _shared(config, dtype, chunk, key_dim),
    )


def _candidates(kernel: str, dtype: Any, key_dim: int, value_dim: int) -> list[Config]:
    """Block sizes to try, best first, for a device that the tuned table does not know."""

    def config(block_k: int, block_v: int, num_warps: int, num_stages: int) -> Config:
        blocks = {"BLOCK_K": min(block_k, _round(key_dim)), "num_warps": num_warps}
        if kernel != "prepare":
            blocks["BLOCK_V"] = min(block_v, _round(value_dim))
        return {**blocks, "num_stages": num_stages}

    if dtype == jnp.float32:  # without tensor cores a matmul unrolls into one instruction a term
        return [config(32 if kernel == "prepare" else 64, 16, 4, 1)]
    if kernel == "prepare":
        return [config(64, 0, 4, 1), config(32, 0, 4, 1)]
    if kernel == "gradient":
        return [config(64, 64, 4, 2), config(64, 32, 4, 1), config(32, 32, 4, 1)]
    if key_dim > 256:
        return [config(64, 32, 4, 1), config(64, 16, 4, 1)]
    return [config(64, 64, 4, 2), config(64, 64, 4, 1), config(64, 32, 4, 1)]


def _shared(config: Mapping[str, int], dtype: Any, chunk: int, key_dim: int) -> int:
    """An upper estimate of a block's shared memory in bytes: its tiles, once a stage."""
    keys = 2 * chunk * -(-key_dim // config["BLOCK_K"]) * config["BLOCK_K"]
    values = 2 * chunk * config.get("BLOCK_V", 0)
    return config["num_stages"] * (keys + values + 2 * chunk * chunk) * jnp.dtype(dtype).itemsize


def _round(dim: int) -> int:
    """The smallest block that holds `dim`: a power of two, 16 at least."""
    return max(16, 1 << (dim - 1).bit_length())
