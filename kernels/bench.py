"""Times the operators: one JSON object a line.

    python -m kernels.bench                                       what this machine trains best, all that runs here
    python -m kernels.bench --shape=cpu --implementation=scan,xla --dtype=float32
    python -m kernels.bench --op=ccq_query --shape=gdn1.3B,d128 --peers
    python -m kernels.bench --op=decode_step                      one token, batch 1 to 256

forward_ms and forward_backward_ms are medians, of samples that the implementations take in turns, so that
a machine's other work disturbs all of them alike. *_gflops counts the operations of the recurrence itself
and *_gbytes the inputs, results, cotangents and gradients, each once a pass: what must be done and moved,
however an implementation does it. *_peak_mib is what the compiled program holds at once, with arguments
and results. --peers adds flash-linear-attention's figures where it and a CUDA build of PyTorch are
installed. Shapes are named in kernels/shapes.py: {shapes}.

decode_step, which runs only where it is named, has mild decays and figures of its own. step_ms is a call's
time in a program of many: layers whose states no cache holds together, and several tokens. state_gbytes is
the traffic of the states, read and written once a token, copy_gbytes that of x + 1 over a large array on
the same device in turns with it, and fraction the one over the other.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from kernels import bench_decode, check, dispatch, shapes

# Operations of a token and head, as multiples of K V (of K K for ccq_query): decay, write, read.
OPERATIONS = {"ccq_query": 5, "gated_linear_attention": 5, "gated_delta_rule": 7}
PACKAGES = ("jax", "jaxlib", "jax-triton", "triton")
SAMPLE_SECONDS = 0.05


def programs(
    operator: str, implementation: str, inputs: dict[str, Any], chunk_size: int | None
) -> dict[str, Program]:
    """The compiled forward, and forward with backward, by name; each holds its arguments."""
    function = getattr(kernels, operator)

    def forward(inputs: dict[str, Any]) -> Any:
        return function(**inputs, implementation=implementation, chunk_size=chunk_size)

    def forward_backward(inputs: dict[str, Any], d_out: Any) -> Any:
        out, pullback, state = jax.vjp(forward, inputs, has_aux=True)
        return out, state, pullback(d_out)

    out, _ = jax.eval_shape(forward, inputs)
    d_out = jnp.ones(out.shape, out.dtype)
    compiled = {
        "forward": (jax.jit(forward).lower(inputs).compile(), (inputs,)),
        "forward_backward": (
            jax.jit(forward_backward).lower(inputs, d_out).compile(),
            (inputs, d_out),
        ),
    }
    return {name: Program(*program) for name, program in compiled.items()}


class Program:
    """A compiled program with its arguments, run a few times to warm up."""

    def __init__(self, compiled: Any, arguments: tuple[Any, ...]):
        self.compiled, self.arguments = compiled, arguments
        self.calls = 1
        seconds = min(self.sample() for _ in range(4)) / 1e3
        # Short calls are queued one after the other, so that their launches overlap the work.
        self.calls = max(1, math.ceil(SAMPLE_SECONDS / seconds))

    def __call__(self) -> Any:
        """Queues a call."""
        return self.compiled(*self.arguments)

    def sample(self) -> float:
        """Milliseconds a call."""
        started = time.perf_counter()
        results = None
        for _ in range(self.calls):
            results = self()
        jax.block_until_ready(results)
        return (time.perf_counter() - started) / self.calls * 1e3

    def peak_bytes(self) -> int | None:
        """What the program holds at once, if the platform's compiler says."""
        analysis = self.compiled.memory_analysis()
        if analysis is None:
            return None
        held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
        return held + analysis.temp_size_in_bytes - analysis.alias_size_in_bytes


def work(operator: str, shape: shapes.Shape, inputs: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(operations, bytes) of the forward and of forward with backward."""
    width = shape.key_width if operator == "ccq_query" else shape.value_width
    per_head = OPERATIONS[operator] * shape.key_width * width
    operations = shape.batch * shape.length * shape.heads_of(operator) * per_head
    outputs = jax.eval_shape(lambda x: getattr(kernels, operator)(**x), inputs)
    read, written = _bytes(inputs), _bytes(outputs)
    # The backward reads the inputs and the output's cotangent, and writes the inputs' gradients.
    both = read + written + read + _bytes(outputs[0]) + read
    return {"forward": (operations, read + written), "forward_backward": (3 * operations, both)}


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measure(
    operator: str,
    implementations: list[str],
    name: str,
    *,
    dtype: str,
    decay: str = "mild",
    segments: bool = False,
    chunk_size: int | None = None,
    repeats: int = 15,
) -> Iterator[dict[str, Any]]:
    """One record an implementation."""
    shape = shapes.SHAPES[name]
    inputs = shapes.make_inputs(
        operator, shape, dtype=dtype, decay=decay, segments=segments, initial_state=False
    )
    compiled = {x: programs(operator, x, inputs, chunk_size) for x in implementations}
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for implementation, parts in compiled.items():
            for part, program in parts.items():
                samples.setdefault((implementation, part), []).append(program.sample())
    for implementation in implementations:
        record: dict[str, Any] = {
            "op": operator,
            "implementation": implementation,
            "shape": name,
            "sizes": shape._asdict(),
            "dtype": dtype,
            "decay": decay,
            "segments": segments,
            "chunk_size": chunk_size,
        }
        for part, (operations, moved) in work(operator, shape, inputs).items():
            ms = statistics.median(samples[implementation, part])
            peak = compiled[implementation][part].peak_bytes()
            record |= {
                f"{part}_ms": round(ms, 4),
                f"{part}_gflops": round(operations / ms / 1e6, 1),
                f"{part}_gbytes": round(moved / ms / 1e6, 2),
                f"{part}_peak_mib": None if peak is None else round(peak / 2**20, 1),
            }
        yield record


def _machine() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"device": jax.devices()[0].device_kind, "versions": versions}


def main(argv: list[str] | None = None) -> int:
    """Prints the records; returns the process's exit status."""
    accelerated = jax.default_backend() != "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench",
        description=(__doc__ or "").format(shapes=", ".join(shapes.SHAPES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_choice(parser, "op", (*shapes.OPERATORS, bench_decode.NAME))
    # On accelerators not scan: its gradient keeps a state a token, and its loop is no contest.
    everything = [x for x in dispatch.IMPLEMENTATIONS if not (accelerated and x == "scan")]
    check.add_choice(
        parser,
        "implementation",
        dispatch.IMPLEMENTATIONS,
        f"those of {','.join(everything)} that run here",
    )
    parser.add_argument(
        "--shape",
        default="gdn1.3B,d128,gla1.3B" if accelerated else "cpu",
        help="names of shapes (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16" if accelerated else "float32",
        help="of q, k, v and lam: float32, bfloat16 or both (default: %(default)s)",
    )
    parser.add_argument(
        "--decay", default="mild", choices=shapes.DECAYS, help="see shapes.make_inputs"
    )
    parser.add_argument("--segments", action="store_true", help="a few documents a row")
    parser.add_argument("--chunk_size", type=int, help="default: the implementation's")
    parser.add_argument("--repeats", type=int, default=15, help="samples (default: %(default)s)")
    parser.add_argument("--peers", action="store_true", help="flash-linear-attention beside ours")
    args = parser.parse_args(argv)

    operators = list(shapes.OPERATORS)
    if args.op != "all":
        operators = check.chosen(parser, "op", args.op, (*operators, bench_decode.NAME))
    wanted = everything
    if args.implementation != "all":
        wanted = check.chosen(
            parser, "implementation", args.implementation, dispatch.IMPLEMENTATIONS
        )
    names = check.chosen(parser, "shape", args.shape, tuple(shapes.SHAPES))
    dtypes = check.chosen(parser, "dtype", args.dtype, check.DTYPES)
    for name, dtype, operator in itertools.product(names, dtypes, operators):
        implementations = check.able(operator, wanted, args.implementation != "all")
        if operator == bench_decode.NAME:
            found = bench_decode.measure(implementations, name, dtype=dtype, repeats=args.repeats)
        else:
            found = measure(
                operator,
                implementations,
                name,
                dtype=dtype,
                decay=args.decay,
                segments=args.segments,
                chunk_size=args.chunk_size,
                repeats=args.repeats,
            )
        for record in found:
            print(json.dumps(record | _machine()), flush=True)
        if args.peers and operator in shapes.OPERATORS:
            # A process of its own: PyTorch's memory goes back when it ends.
            command = [sys.executable, "-m", "kernels.peers", operator, name, dtype]
            subprocess.run(command, check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
