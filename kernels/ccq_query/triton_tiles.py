"""Block sizes of the Triton kernels."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array

from kernels import triton_util

# Rows of 16-bit tiles: narrower ones are miscompiled, see `triton_kernels`.
NARROWEST = 64


def of(kernel: str, q: Array, chunk: int, mode: str) -> dict[str, int]:
    """Block sizes."""
    width = q.shape[-1]
    full = q.dtype == jnp.float32
    narrowest = 16 if full else NARROWEST
    widest = max(narrowest, 1 << (width - 1).bit_length())
    step = 16 if full else 64

    def config(num_warps: int, num_stages: int, **sizes: int) -> dict[str, int]:
        return sizes | {"num_warps": num_warps, "num_stages": num_stages}

    if kernel == "states":
        candidates = [config(4, stages, BT=32 if full else 64) for stages in (2, 1)]
        if widest == 128 and not full:
            candidates.insert(0, config(8, 2, BT=128))
    elif kernel in ("read", "read_backward"):
        # As much as stays in shared memory.
        whole = widest if widest <= 256 else step
        candidates = [config(4, stages, BK=whole, BN=64, R=64) for stages in (2, 1)]
        candidates.append(config(4, 2, BK=64, BN=64, R=64))
        if full:
            candidates = [config(4, 1, BK=32, BN=32, R=64)]
    elif kernel == "adjoint":
        candidates = [config(4, 3, BT=64, S=steps) for steps in (64, 32)]
        if widest == 128:
            candidates.insert(0, config(8, 3, BT=128, S=64))
        if full:
            candidates = [config(4, 1, BT=32, S=32)]
    elif kernel == "keys":
        sizes = [(64, 32, 2), (64, 32, 1), (32, 32, 1)] if not full else [(16, 16, 1)]
        warps = 8 if widest > 256 else 4
        candidates = [config(warps, stages, R=r, BT=t, BK=step) for r, t, stages in sizes]
    else:
        candidates = [config(8, stages, BT=step, BK=step) for stages in (3, 1)]

    def shared(config: Mapping[str, int]) -> int:
        stages = config["num_stages"]
        if kernel == "states":
            elements = stages * chunk * 2 * config["BT"]
        elif kernel == "adjoint":
            elements = stages * 4 * config["S"] * config["BT"]
        elif kernel in ("read", "read_backward"):
            a, b, rows = config["BK"], config["BN"], config["R"]
            kept = a if a >= width else 0
            tiles = stages * (rows + 2 * chunk) * min(a, 64)
            elements = max(rows * kept + stages * (a + 2 * chunk) * b, (rows + chunk) * kept, tiles)
        elif kernel == "keys":
            rows, tokens = config["R"], config["BT"]
            phi = stages * config["BK"] * (rows + widest)
            elements = max(phi, (rows + 2 * stages * tokens) * widest)
        else:
            elements = stages * (chunk + 2 * config["BT"]) * config["BK"]
        return q.dtype.itemsize * elements

    tokens = ["S", "R"] + ["BT"] * (kernel not in ("states", "adjoint"))

    def size(name: str, value: int) -> int:
        """Rows of tiles neither narrower than is safe nor wider than the head, steps that divide a chunk."""
        if name in tokens:
            return min(value, chunk)
        return min(max(value, narrowest), widest) if name.startswith("B") else value

    shape = triton_util.bucket(q.dtype, width) + (" decay" if mode == "decay" else "")
    return triton_util.choose(f"ccq_query.{kernel}", shape, candidates, shared, size)
