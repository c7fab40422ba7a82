"""What the Pallas TPU implementations share: availability, and the arrays' layout.

Arrays of tokens stay [B, T, H, D] in memory, seen as [B, T, H D]: a block is a chunk's rows of one head's
columns, so nothing is transposed. Numbers, one a token and head, go in as rows [B, H, N, R, C], R of them a
chunk. Widths are filled up with zeros to whole registers (128 lanes), and T to whole chunks.
"""

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import dispatch

INTERPRET = "KERNELS_PALLAS_INTERPRET"
LANES = 128


def unavailable() -> str | None:
    """Says why the TPU kernels cannot run in this process, or None when they can.

    With KERNELS_PALLAS_INTERPRET=1 in the environment they run on any machine, interpreted: for tests.
    """
    platform = dispatch.platform()
    if platform == "tpu" or os.environ.get(INTERPRET) == "1":
        return None
    return f"it needs a TPU, and this is for a {platform} ({INTERPRET}=1 interprets it, for tests)"


def chunk_length(tokens: int, chunk_size: int | None, default: int) -> int:
    """Tokens of a chunk: no more than the power of two that holds them all, and at least 16."""
    return max(16, min(chunk_size or default, 1 << (tokens - 1).bit_length()))


def width(size: int) -> int:
    """`size` filled up to whole registers."""
    return -(-size // LANES) * LANES


def compute_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that kernels read: TPUs have no float16, so that is computed in float32."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else jnp.dtype(dtype)


def fill(x: Array, shape: Sequence[int]) -> Array:
    """Zeros after the end of each axis, up to `shape`."""
    return jnp.pad(x, [(0, new - old) for old, new in zip(x.shape, shape, strict=True)])


def cut(x: Array, shape: Sequence[int]) -> Array:
    """Undoes `fill`."""
    return jax.lax.slice(x, (0,) * x.ndim, shape)


def token_blocks(x: Float[Array, "B T H D"], length: int) -> Float[Array, "B T HD"]:
    """Whole chunks of whole registers, heads side by side."""
    batch, tokens, heads, size = x.shape
    tokens = -(-tokens // length) * length
    x = fill(x, (batch, tokens, heads, width(size)))
    return x.astype(compute_dtype(x.dtype)).reshape(batch, tokens, -1)


def from_token_blocks(
    x: Float[Array, "B T HD"], shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "B T H D"]:
    """Undoes `token_blocks`."""
    x = x.reshape(*x.shape[:2], shape[2], -1)
    return cut(x, shape).astype(dtype)


def rows(length: int, *numbers: Float[Array, "B T H"]) -> Float[Array, "B H N R C"]:
    """Numbers of each token and head in float32, as rows of a chunk; 0 after the last token."""
    x = jnp.stack([y.astype(jnp.float32) for y in numbers])
    count, batch, tokens, heads = x.shape
    x = fill(x, (count, batch, -(-tokens // length) * length, heads))
    return x.reshape(count, batch, -1, length, heads).transpose(1, 4, 2, 0, 3)


def from_rows(x: Float[Array, "B H N R C"], tokens: int) -> list[Float[Array, "B T H"]]:
    """Undoes `rows`."""
    batch, heads, _, count, _ = x.shape
    x = x.transpose(3, 0, 2, 4, 1).reshape(count, batch, -1, heads)
    return list(x[:, :, :tokens])
