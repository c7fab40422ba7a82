"""Time against sequence length: gated_delta_rule alone, with ccq_query before it, and softmax attention.

    python -m kernels.curves --out=time_vs_length.png                1K to 256K tokens; takes a GPU
    python -m kernels.curves --lengths=64,128 --heads=2 --width=16   anywhere

Twice: one sequence, and as many of a length as make the longest one. One JSON object a line, then the
plot. Softmax attention is cuDNN's on a GPU, elsewhere XLA's. bfloat16, keys and values of one width.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import bench, ccq_query, gated_delta_rule

LENGTHS = tuple(2**n for n in range(10, 19, 2))
SAMPLES = 5
PARTS = {"forward": "forward", "forward_backward": "forward + backward"}
Inputs = dict[str, Float[Array, "B T ..."]]


def delta_rule(x: Inputs) -> Float[Array, "B T H K"]:
    """Gated DeltaNet's part of a layer that depends on the length."""
    return gated_delta_rule(x["q"], x["k"], x["v"], x["log_decay"], x["beta"])[0]


def with_ccq(x: Inputs) -> Float[Array, "B T H K"]:
    """The same, read with a query that CCQ has cleaned."""
    return delta_rule(x | {"q": ccq_query(x["q"], x["k"], x["beta"])[0]})


def softmax(x: Inputs) -> Float[Array, "B T H K"]:
    """Causal softmax attention."""
    kind: Literal["cudnn", "xla"] = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, implementation=kind)


MIXERS: dict[str, Callable[[Inputs], Array]] = {
    "gated_delta_rule": delta_rule,
    "ccq_query + gated_delta_rule": with_ccq,
    "softmax attention": softmax,
}


def make_inputs(batch: int, length: int, heads: int, width: int) -> Inputs:
    """Random arguments, made on the device: unit queries and keys, decays near 0."""
    keys = jax.random.split(jax.random.key(0), 5)
    shape = batch, length, heads, width

    def unit(key: Array) -> Array:
        x = jax.random.normal(key, shape, jnp.bfloat16)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    scalar = jax.random.normal(keys[3], shape[:3]), jax.random.normal(keys[4], shape[:3])
    return {
        "q": unit(keys[0]),
        "k": unit(keys[1]),
        "v": jax.random.normal(keys[2], shape, jnp.bfloat16),
        "log_decay": jax.nn.log_sigmoid(scalar[0]) / 16,
        "beta": jax.nn.sigmoid(scalar[1]),
    }


def measure(lengths: list[int], heads: int, width: int) -> list[dict[str, Any]]:
    """One record a mixer, length and batch: medians in milliseconds."""
    batches = {(1, n) for n in lengths} | {(max(lengths) // n, n) for n in lengths}
    records = []
    for batch, length in sorted(batches):
        inputs = jax.jit(lambda b=batch, n=length: make_inputs(b, n, heads, width))()
        programs = {}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for name, mixer in MIXERS.items():
                both = functools.partial(_both_ways, mixer)
                for part, function in (("forward", mixer), ("forward_backward", both)):
                    lowered = jax.jit(function).lower(inputs)
                    programs[name, part] = pool.submit(lowered.compile)
        for name in MIXERS:
            record = {"mixer": name, "batch": batch, "length": length}
            for part in PARTS:
                program = bench.Program(programs.pop((name, part)).result(), (inputs,))
                ms = statistics.median(program.sample() for _ in range(SAMPLES))
                record[f"{part}_ms"] = round(ms, 4)
            records.append(record)
            print(json.dumps(record), flush=True)
    return records


def _both_ways(mixer: Callable[[Inputs], Array], inputs: Inputs) -> Any:
    out, pullback = jax.vjp(mixer, inputs)
    return out, pullback(jnp.ones_like(out))


def regimes(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The records of one sequence, and those with as many sequences as make the longest."""
    tokens = max(x["length"] for x in records)
    return {
        "one sequence": [x for x in records if x["batch"] == 1],
        f"{tokens:,} tokens": [x for x in records if x["batch"] * x["length"] == tokens],
    }


def crossing(records: list[dict[str, Any]], mixer: str, part: str) -> int | None:
    """The length from which on `mixer` is faster than softmax attention, if there is one."""
    times = [
        {x["length"]: x[f"{part}_ms"] for x in records if x["mixer"] == name}
        for name in (mixer, "softmax attention")
    ]
    ratios = [(n, times[1][n] / times[0][n]) for n in sorted(times[0])]
    for (short, before), (long, after) in itertools.pairwise(ratios):
        if before < 1 <= after:  # a straight line between the two, both axes logarithmic
            return round(short * (long / short) ** (math.log(before) / math.log(before / after)))
    return None


def plot(records: list[dict[str, Any]], path: str) -> None:
    """Milliseconds against the length: a row a pass, a column a choice of the batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for i, (part, label) in enumerate(PARTS.items()):
        for j, (title, chosen) in enumerate(regimes(records).items()):
            axis = axes[i, j]
            for name in MIXERS:
                points = sorted(
                    (x["length"], x[f"{part}_ms"]) for x in chosen if x["mixer"] == name
                )
                axis.loglog(*zip(*points, strict=True), marker="o", markersize=4, label=name)
            at = crossing(chosen, "ccq_query + gated_delta_rule", part)
            if at is not None:
                axis.axvline(at, color="grey", linewidth=0.8, linestyle=":")
                axis.annotate(f" {at:,}", (at, axis.get_ylim()[0]), color="grey", fontsize=8)
            axis.set_title(title if i == 0 else "", fontsize=10)
            axis.set_xlabel("length, tokens" if i == 1 else "")
            axis.set_ylabel(f"{label}, ms" if j == 0 else "")
            axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    """Prints the records and draws the plot; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="of a sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128, help="of keys and values")
    parser.add_argument("--out", help="a file for the plot, such as curves.png")
    args = parser.parse_args(argv)
    try:
        lengths = sorted({int(n) for n in args.lengths.split(",")})
    except ValueError:
        parser.error(f"--lengths: {args.lengths!r}; expected numbers with commas between")
    longest = lengths[-1]
    if lengths[0] < 1 or any(longest % n for n in lengths):
        parser.error(f"--lengths: {args.lengths}; each must divide the longest, {longest}")
    records = measure(lengths, args.heads, args.width)
    for (title, chosen), part in itertools.product(regimes(records).items(), PARTS):
        found = {name: crossing(chosen, name, part) for name in list(MIXERS)[:2]}
        print(json.dumps({"faster_than_softmax_from": found, "part": part, "batch": title}))
    if args.out:
        plot(records, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
