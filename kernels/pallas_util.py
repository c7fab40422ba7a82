"""What the Pallas TPU implementations share: availability, the arrays' layout, and the walk over chunks.

Arrays of tokens stay [B, T, H, D] in memory, seen as [B, T, H D]: a block is a chunk's rows of one head's
columns, so nothing is transposed. Numbers, one a token and head, go in as rows [B, H, N, R, C], R of them a
chunk. Widths are filled up with zeros to whole registers (128 lanes), and T to whole chunks.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels import dispatch

INTERPRET = "KERNELS_PALLAS_INTERPRET"
LANES = 128
# Of the cores' 64 MiB (v5p) or 128 MiB (v5e, v6e); the compiler's own limit is 16 MiB.
VMEM_LIMIT = 48 * 2**20


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


@dataclasses.dataclass(frozen=True)
class Walk:
    """A kernel's walk: for every row of the batch and every head, chunk after chunk.

    Scratch memory lives from chunk to chunk. Heads and rows of the batch may be shared among cores.

    Attributes:
      batch, heads, chunks: how many there are.
      length: tokens of a chunk.
      reverse: from the last chunk to the first.
    """

    batch: int
    heads: int
    chunks: int
    length: int
    reverse: bool = False

    def backwards(self) -> "Walk":
        """The same walk from the last chunk to the first."""
        return dataclasses.replace(self, reverse=True)

    def tokens(self, size: int, group: int = 1) -> pl.BlockSpec:
        """A chunk [C, size] of an array of tokens; `group` heads share one of the array's."""
        index = lambda b, h, c: (b, self._chunk(c), h // group)
        return pl.BlockSpec((None, self.length, size), index)

    def rows(self, count: int) -> pl.BlockSpec:
        """A chunk's `count` rows of numbers."""
        index = lambda b, h, c: (b, h, self._chunk(c), 0, 0)
        return pl.BlockSpec((None, None, None, count, self.length), index)

    def each(self, *shape: int) -> pl.BlockSpec:
        """A matrix of each chunk, from an array [B, H, N, ...]."""
        index = lambda b, h, c: (b, h, self._chunk(c), 0, 0)
        return pl.BlockSpec((None, None, None, *shape), index)

    def once(self, *shape: int) -> pl.BlockSpec:
        """A matrix of the whole sequence, from an array [B, H, ...]; it stays where it is."""
        return pl.BlockSpec((None, None, *shape), lambda b, h, c: (b, h, 0, 0))

    def _chunk(self, step: Any) -> Any:
        return self.chunks - 1 - step if self.reverse else step

    def __call__(
        self,
        kernel: Callable[..., None],
        inputs: Sequence[tuple[Array, pl.BlockSpec]],
        outputs: Sequence[tuple[tuple[int, ...], Any, pl.BlockSpec]],
        scratch: Sequence[tuple[int, ...]],
        *,
        name: str,
        flops: int,
        exps: int,
    ) -> list[Array]:
        """Runs `kernel(*inputs, *outputs, *scratch)`, all of them references, on every chunk.

        Args:
          kernel: writes every element of its outputs.
          inputs: arrays, and the block of them that the kernel sees.
          outputs: shape, dtype and block.
          scratch: shapes of float32 in vector memory.
          name: the kernel's name in profiles.
          flops: additions and multiplications in a chunk, for the compiler's schedule.
          exps: exponentials in a chunk.
        """
        arrays = [x for x, _ in inputs]
        axes = jax.typeof(arrays[0]).manual_axis_type
        out = [jax.ShapeDtypeStruct(s, d, manual_axis_type=axes) for s, d, _ in outputs]
        steps = self.batch * self.heads * self.chunks
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in [*arrays, *out])
        return pl.pallas_call(
            kernel,
            out_shape=out,
            grid=(self.batch, self.heads, self.chunks),
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for *_, spec in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=VMEM_LIMIT,
            ),
            cost_estimate=pl.CostEstimate(
                flops=steps * flops, transcendentals=steps * exps, bytes_accessed=moved
            ),
            interpret=dispatch.platform() != "tpu",
            name=name,
        )(*arrays)


def at_start(action: Callable[[], None]) -> None:
    """Runs `action` on the first chunk of a walk."""
    pl.when(pl.program_id(2) == 0)(action)


def at_end(action: Callable[[], None]) -> None:
    """Runs `action` on the last chunk of a walk."""
    pl.when(pl.program_id(2) == pl.num_programs(2) - 1)(action)
