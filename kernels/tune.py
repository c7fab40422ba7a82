"""Finds the fastest block sizes of the Triton kernels on this GPU and writes them into the table.

    python -m kernels.tune                               every operator, the shapes that are trained
    python -m kernels.tune --op=gated_delta_rule --shapes=d128 --dtype=bfloat16

Each kernel of an operator is varied in turn around what the table or the heuristic has now: block
sizes by a factor of two, warps and pipeline stages by one step. What is timed is the whole forward
and backward. Takes minutes an operator and shape, mostly compilation. A configuration whose results
differ from the first's is refused: a kernel that is wrong can be fast.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from kernels import shapes, triton_util

Config = dict[str, int]
TRAINED = ("d128", "gdn1.3B", "gla1.3B")


def neighbours(config: Config) -> Iterator[Config]:
    """Configurations around one, itself first."""
    choices = {
        name: (value, value // 2, value * 2) if name != "num_stages" else (1, 2, 3)
        for name, value in config.items()
    }
    yield config
    for values in itertools.product(*choices.values()):
        near = dict(zip(choices, values, strict=True))
        blocks = [value for name, value in near.items() if name.startswith("BLOCK")]
        if near != config and min(blocks, default=16) >= 16 and 2 <= near["num_warps"] <= 8:
            yield near


def milliseconds(function: Callable[[], Any], repeats: int = 10) -> float:
    """Median time of a call, after one to compile and one to warm up."""
    for _ in range(2):
        jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def problem(operator: str, shape: shapes.Shape, dtype: str) -> Callable[[], Callable[[], Any]]:
    """Makes fresh functions that run the operator forward and backward, traced anew each time."""
    inputs = shapes.make_inputs(operator, shape, dtype=dtype, initial_state=False)

    def run(inputs: Any) -> Any:
        function = lambda x: getattr(kernels, operator)(**x, implementation="triton")[0]
        out, pullback = jax.vjp(function, inputs)
        return out, pullback(out)

    def fresh() -> Callable[[], Any]:
        jitted = jax.jit(lambda inputs: run(inputs))
        return lambda: jitted(inputs)

    return fresh


def difference(left: Any, right: Any) -> float:
    """The largest relative difference of two results' arrays."""

    def relative(x: jax.Array, y: jax.Array) -> float:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return float(jnp.linalg.norm(x - y) / (jnp.linalg.norm(y) + 1e-30))

    return max(jax.tree.leaves(jax.tree.map(relative, left, right)))


def tune(operator: str, shape: shapes.Shape, dtype: str) -> None:
    """Writes the best configuration of each of the operator's kernels into the in-memory table."""
    fresh = problem(operator, shape, dtype)
    triton_util.CHOSEN.clear()
    expected = fresh()()
    table = triton_util.tuned_table().setdefault(triton_util.device_kind(), {})
    for (kernel, bucket), start in dict(triton_util.CHOSEN).items():
        entries = table.setdefault(kernel, {})
        timed: list[tuple[float, Config]] = []
        for config in neighbours(start):
            entries[bucket] = config
            function = fresh()
            try:
                # NaN compares false, so that it is refused too.
                if not difference(function(), expected) < 0.02:
                    print(f"{kernel} {bucket} {config}: differs", flush=True)
                    continue
                timed.append((milliseconds(function), config))
            except jax.errors.JaxRuntimeError:  # too much shared memory, or too many registers
                continue
            except ValueError:  # a tile that the compiler refuses
                continue
            print(f"{kernel} {bucket} {config}: {timed[-1][0]:.3f} ms", flush=True)
        entries[bucket] = min(timed, key=lambda x: x[0])[1] if timed else start


def main(argv: list[str] | None = None) -> None:
    """Tunes what the flags name, and rewrites the table after each shape."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--op", default=",".join(shapes.OPERATORS), help="operators")
    parser.add_argument("--shapes", default=",".join(TRAINED), help="names of shapes.py")
    parser.add_argument("--dtype", default="bfloat16", help="dtypes of q, k and v")
    args = parser.parse_args(argv)
    for flag, known in (("op", shapes.OPERATORS), ("shapes", tuple(shapes.SHAPES))):
        for name in getattr(args, flag).split(","):
            if name not in known:
                parser.error(f"--{flag}: {name!r} is unknown; expected some of {', '.join(known)}")
    reason = triton_util.unavailable()
    if reason is not None:
        parser.exit(1, f"nothing to tune: {reason}\n")
    for operator, name, dtype in itertools.product(
        args.op.split(","), args.shapes.split(","), args.dtype.split(",")
    ):
        tune(operator, shapes.SHAPES[name], dtype)
        text = json.dumps(triton_util.tuned_table(), indent=2, sort_keys=True)
        triton_util.TABLE.write_text(text + "\n")
        print(f"wrote {operator} {name} {dtype} to {triton_util.TABLE}", flush=True)


if __name__ == "__main__":
    main()
