"""Finds the fastest block sizes of the Triton kernels on this GPU and writes them into the table.

    python -m kernels.tune                               every operator, the shapes that are trained
    python -m kernels.tune --op=gated_delta_rule --shapes=d128 --dtype=bfloat16

Each kernel of an operator is varied in turn around the best of what the table and the heuristic have: one
block size by a factor of two, or the warps, the pipeline stages or the limit of registers, where there is
one, on from the fastest until no step gains 1 %. What is timed is the whole forward and backward. Takes
minutes an operator and shape, mostly compilation; the table is written after each kernel, so that another
run goes on from there. A configuration whose results differ from the first's is refused: a kernel that
is wrong can be fast.
"""

import argparse
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from kernels import bench, shapes, triton_util

Config = dict[str, int]
TRAINED = ("d128", "gdn1.3B", "gla1.3B")
# Whose kernels differ: those of decays have entries, or leave at once, where there are none.
DECAYS = {
    "ccq_query": ("none", "mild"),
    "gated_delta_rule": ("mild",),
    "gated_linear_attention": ("mild", "strong"),
}
GAIN = 0.99
SAMPLES = 7


def neighbours(config: Config) -> Iterator[Config]:
    """Configurations that differ from one in one number."""
    steps = {"num_stages": 1, "maxnreg": 40}
    limits = {"num_stages": (1, 4), "num_warps": (2, 8), "maxnreg": (128, 255)}
    for name, value in config.items():
        step = steps.get(name)
        for near in (value - step, value + step) if step else (value // 2, value * 2):
            least, most = limits.get(name, (16, 512))
            if least <= near <= most:
                yield {**config, name: near}


def climb(starts: list[Config], time: Callable[[Config], float]) -> Config:
    """The fastest configuration that steps to ever faster neighbours lead to from the best of `starts`.

    Args:
      starts: where to begin; the first stays, if no other gains enough.
      time: of a configuration, inf where it is refused.
    """
    times = [(time(start), start) for n, start in enumerate(starts) if start not in starts[:n]]
    best = min(times, key=lambda x: x[0] * (1 if x is times[0] else 1 / GAIN))
    while True:
        known = [config for _, config in times]
        times += [(time(near), near) for near in neighbours(best[1]) if near not in known]
        fastest = min(times, key=lambda x: x[0])
        if not fastest[0] < GAIN * best[0]:
            return best[1]
        best = fastest


def problem(
    operator: str, shape: shapes.Shape, dtype: str, decay: str
) -> Callable[[], bench.Program]:
    """Makes programs of the operator's forward and backward, traced and compiled anew each time."""
    inputs = shapes.make_inputs(operator, shape, dtype=dtype, decay=decay, initial_state=False)

    def run(inputs: Any) -> Any:
        function = lambda x: getattr(kernels, operator)(**x, implementation="triton")[0]
        out, pullback = jax.vjp(function, inputs)
        return out, pullback(out)

    def fresh() -> bench.Program:
        compiled = jax.jit(lambda inputs: run(inputs)).lower(inputs).compile()
        return bench.Program(compiled, (inputs,))

    return fresh


def difference(left: Any, right: Any) -> float:
    """The largest relative difference of two results' arrays."""

    def relative(x: jax.Array, y: jax.Array) -> float:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return float(jnp.linalg.norm(x - y) / (jnp.linalg.norm(y) + 1e-30))

    return max(jax.tree.leaves(jax.tree.map(relative, left, right)))


def tune(operator: str, shape: shapes.Shape, dtype: str, decay: str) -> None:
    """Finds the best configuration of each of the operator's kernels, and writes the table after each."""
    fresh = problem(operator, shape, dtype, decay)
    triton_util.CHOSEN.clear()
    first = fresh()
    expected = first()
    if not triton_util.CHOSEN:
        print(f"{operator} {dtype} {shape}: the kernels that run here have one size")
    table = triton_util.tuned_table().setdefault(triton_util.device_kind(), {})

    def time_with(entries: dict[str, Config], kernel: str, bucket: str, config: Config) -> float:
        """Time in terms of the first program's, whose runs alternate with this one's: clocks drift."""
        entries[bucket] = config
        try:
            program = fresh()
            if triton_util.CHOSEN[kernel, bucket][0] != config:
                return math.inf  # the same as another, for this shape
            # NaN compares false, so that it is refused too.
            right = difference(program(), expected) < 0.02
            pairs = [(program.sample(), first.sample()) for _ in range(SAMPLES if right else 0)]
        except (jax.errors.JaxRuntimeError, ValueError):  # too large, or refused by the compiler
            return math.inf
        taken = statistics.median(one / other for one, other in pairs) if right else math.inf
        said = f"{statistics.median(ms for ms, _ in pairs):.3f} ms" if right else "differs"
        print(f"{kernel} {bucket} {config}: {said}", flush=True)
        return taken

    for (kernel, bucket), starts in dict(triton_util.CHOSEN).items():
        entries = table.setdefault(kernel, {})
        entries[bucket] = climb(starts, functools.partial(time_with, entries, kernel, bucket))
        text = json.dumps(triton_util.tuned_table(), indent=2, sort_keys=True)
        triton_util.TABLE.write_text(text + "\n")
        print(f"wrote {kernel} {bucket}: {entries[bucket]}", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Tunes what the flags name."""
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
    done = set()
    for operator, name, dtype in itertools.product(
        args.op.split(","), args.shapes.split(","), args.dtype.split(",")
    ):
        shape = shapes.SHAPES[name]
        entry = operator, triton_util.bucket(dtype, shape.key_width, shape.value_width)
        if entry in done:
            continue
        done.add(entry)
        for decay in DECAYS[operator]:
            tune(operator, shape, dtype, decay)


if __name__ == "__main__":
    main()
