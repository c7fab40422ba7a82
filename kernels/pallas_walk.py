"""How the TPU kernels go through a sequence: chunk after chunk, a few heads at a time.

A kernel is a function of one head's matrices of one chunk. What it carries to the next chunk stays in vector
memory; the heads of a step are one batch (`vmap`), so that their chains of products fill each other's waits.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels import dispatch

# Heads of one step, where their number is even.
HEADS = 2
# Of the cores' 64 MiB (v5p) or 128 MiB (v5e, v6e); the compiler's own limit is 16 MiB.
VMEM_LIMIT = 48 * 2**20


class Block(NamedTuple):
    """What a step sees of an array, and how the matrices of its heads are read and written there."""

    spec: pl.BlockSpec
    load: Callable[[Any], Float[Array, "heads R L"]]
    store: Callable[[Any, Float[Array, "heads R L"]], None]


@dataclasses.dataclass(frozen=True)
class Walk:
    """A walk over all chunks of every row of the batch and every head, chunks innermost.

    Rows and heads may be shared among cores.

    Attributes:
      batch, heads, chunks: how many there are.
      length: tokens of a chunk.
      group: heads that share a key head.
      reverse: from the last chunk to the first.
    """

    batch: int
    heads: int
    chunks: int
    length: int
    group: int = 1
    reverse: bool = False

    @property
    def together(self) -> int:
        """Heads of one step."""
        alike = self.group if self.group > 1 else self.heads
        return HEADS if alike % HEADS == 0 else 1

    def backwards(self) -> "Walk":
        """The same walk from the last chunk to the first."""
        return dataclasses.replace(self, reverse=True)

    def tokens(self, size: int) -> Block:
        """A chunk [C, size] of an array of tokens [B, T, H size]."""
        spec = pl.BlockSpec(
            (None, self.length, self.together * size), lambda b, h, c: (b, self._chunk(c), h)
        )
        columns = [slice(i * size, (i + 1) * size) for i in range(self.together)]

        def store(ref: Any, x: Array) -> None:
            for i, column in enumerate(columns):
                ref[:, column] = x[i].astype(ref.dtype)

        return Block(spec, lambda ref: jnp.stack([ref[:, column] for column in columns]), store)

    def keys(self, size: int) -> Block:
        """As `tokens`, of an array that has the key heads alone; to be read."""
        if self.group == 1:
            return self.tokens(size)
        head = lambda h: h * self.together // self.group
        spec = pl.BlockSpec((None, self.length, size), lambda b, h, c: (b, self._chunk(c), head(h)))
        return Block(spec, lambda ref: jnp.stack([ref[...]] * self.together), _store)

    def rows(self, count: int) -> Block:
        """A chunk's rows [count, C] of numbers, from an array [B, H, N, count, C]."""
        return self.each(count, self.length)

    def each(self, *shape: int) -> Block:
        """A matrix of each chunk, from an array [B, H, N, ...]."""
        index = lambda b, h, c: (b, h, self._chunk(c), 0, 0)
        return Block(pl.BlockSpec((None, self.together, None, *shape), index), _load, _store)

    def once(self, *shape: int) -> Block:
        """A matrix of the whole sequence, from an array [B, H, ...]; it stays where it is."""
        index = lambda b, h, c: (b, h, 0, 0)
        return Block(pl.BlockSpec((None, self.together, *shape), index), _load, _store)

    def _chunk(self, step: Any) -> Any:
        return self.chunks - 1 - step if self.reverse else step

    def __call__(
        self,
        kernel: Callable[..., tuple[Sequence[Array], Sequence[Array]]],
        inputs: Sequence[tuple[Array, Block]],
        outputs: Sequence[tuple[tuple[int, ...], Any, Block]],
        carried: Sequence[Float[Array, "B H R L"]],
        *,
        name: str,
        flops: int,
        exps: int,
    ) -> tuple[list[Array], list[Array]]:
        """Runs `kernel(chunk, *inputs, *carried) -> (outputs, carried)` on every chunk of every head.

        Args:
          kernel: of the chunk's index and of matrices, without references.
          inputs: arrays, and the block of them that a step sees.
          outputs: shape, dtype and block, of the first of the kernel's outputs; the others are dropped.
          carried: what the first chunk finds, float32.
          name: the kernel's name in profiles.
          flops: additions and multiplications in a chunk, for the compiler's schedule.
          exps: exponentials in a chunk.

        Returns:
          The outputs, and what the last chunk leaves.
        """
        sources, targets = [block for _, block in inputs], [block for *_, block in outputs]
        once = [self.once(*x.shape[2:]) for x in carried]
        arrays = [*(x for x, _ in inputs), *carried]
        shapes = [*((s, d) for s, d, _ in outputs), *((x.shape, x.dtype) for x in carried)]
        # Inside shard_map the results vary over the mesh axes that the inputs vary over.
        axes = jax.typeof(arrays[0]).manual_axis_type
        out = [jax.ShapeDtypeStruct(*shape, manual_axis_type=axes) for shape in shapes]
        steps = self.batch * self.heads * self.chunks
        found = pl.pallas_call(
            functools.partial(_body, kernel, self._chunk, sources, targets, len(carried)),
            out_shape=out,
            grid=(self.batch, self.heads // self.together, self.chunks),
            in_specs=[block.spec for block in [*sources, *once]],
            out_specs=[block.spec for block in [*targets, *once]],
            scratch_shapes=[
                pltpu.VMEM((self.together, *x.shape[2:]), jnp.float32) for x in carried
            ],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=VMEM_LIMIT,
            ),
            cost_estimate=pl.CostEstimate(
                flops=steps * flops,
                transcendentals=steps * exps,
                bytes_accessed=sum(map(_bytes, [*arrays, *out])),
            ),
            interpret=dispatch.platform() != "tpu",
            name=name,
        )(*arrays)
        return found[: len(outputs)], found[len(outputs) :]


def _body(
    kernel: Callable[..., Any],
    chunk_of: Callable[[Any], Any],
    sources: Sequence[Block],
    targets: Sequence[Block],
    num_carried: int,
    *refs: Any,
) -> None:
    """One step: the kernel on its heads, and what is carried in at the first chunk and out at the last."""
    counts = (len(sources), num_carried, len(targets), num_carried, num_carried)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    inputs, first, outputs, last, scratch = (
        refs[end - count : end] for end, count in zip(ends, counts, strict=True)
    )
    step = pl.program_id(2)
    pl.when(step == 0)(lambda: _copy(first, scratch))
    seen = [block.load(ref) for block, ref in zip(sources, inputs, strict=True)]
    on_heads = jax.vmap(functools.partial(kernel, chunk_of(step)))
    found, carried = on_heads(*seen, *map(_load, scratch))
    for block, ref, x in zip(targets, outputs, found, strict=False):
        block.store(ref, x)
    for ref, x in zip(scratch, carried, strict=True):
        _store(ref, x)
    pl.when(step == pl.num_programs(2) - 1)(lambda: _copy(scratch, last))


def least_of_heads(x: Float[Array, "R L"]) -> Float[Array, "R L"]:
    """In a kernel: the least over the heads of the step, so that one decision serves them all."""
    least = jax.custom_batching.custom_vmap(lambda x: x)
    least.def_vmap(lambda axis_size, in_batched, x: (jnp.min(x, axis=0), False))
    return least(x)


def _copy(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[...] = source[...]


def _load(ref: Any) -> Array:
    return ref[...]


def _store(ref: Any, x: Array) -> None:
    ref[...] = x


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
