"""Times `decode_step` against the memory's bandwidth, for `python -m kernels.bench --op=decode_step`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from kernels import check_decode, shapes

NAME = check_decode.NAME
BATCHES = (1, 4, 16, 64, 256)
# The shapes of GLA models; the others are gated DeltaNet's.
GLA = ("gla1.3B",)
# Bytes of all layers' states together, so that no cache holds them, and of the array that is copied.
WORKING_SET, WORKING_SET_ON_CPU = 2**29, 2**25
MOST_LAYERS = 64
ROUNDS = 8
SAMPLE_SECONDS = 0.03


class _Program:
    """`ROUNDS` applications of a function to a state that is updated in place."""

    def __init__(self, function: Callable[[Any], Any], state: Any):
        def rounds(state: Any) -> Any:
            return jax.lax.fori_loop(0, ROUNDS, lambda _, x: function(x), state)

        self.compiled = jax.jit(rounds, donate_argnums=0).lower(state).compile()
        self.state = state
        self.calls = 1
        self.sample()
        self.calls = max(1, math.ceil(SAMPLE_SECONDS / ROUNDS / self.sample()))

    def sample(self) -> float:
        """Seconds an application."""
        started = time.perf_counter()
        for _ in range(self.calls):
            self.state = self.compiled(self.state)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - started) / self.calls / ROUNDS


def _layers(backbone: str, implementation: str, tokens: dict[str, Any], states: Any) -> _Program:
    """One token through layers that each have a state of their own."""

    def function(carry: Any) -> Any:
        states, _ = carry
        results = [
            kernels.decode_step(**tokens, state=s, moments=m, implementation=implementation)
            for s, m in states
        ]
        return [(s, m) for _, s, m in results], [out for out, _, _ in results]

    outs = [jnp.zeros(tokens["v"].shape, tokens["v"].dtype) for _ in states]
    return _Program(function, (states, outs))


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measure(
    implementations: list[str],
    name: str,
    *,
    dtype: str,
    repeats: int = 15,
) -> Iterator[dict[str, Any]]:
    """One record a batch and implementation; see `kernels.bench` for the figures."""
    on_cpu = jax.default_backend() == "cpu"
    working_set = WORKING_SET_ON_CPU if on_cpu else WORKING_SET
    backbone = check_decode.BACKBONES[name in GLA]
    for batch in BATCHES:
        shape = shapes.SHAPES[name]._replace(batch=batch, length=1)
        inputs = check_decode.make_inputs(backbone, shape, dtype, check_decode.CASES[0])
        state = inputs.pop("state"), inputs.pop("moments")
        tokens = {key: x[:, 0] for key, x in inputs.items()}
        layers = min(MOST_LAYERS, math.ceil(working_set / _bytes(state)))
        programs = {"copy": _Program(lambda x: x + 1, jnp.zeros(working_set // 4))}
        for implementation in implementations:
            states = [jax.tree.map(jnp.copy, state) for _ in range(layers)]
            programs[implementation] = _layers(backbone, implementation, tokens, states)
        samples: dict[str, list[float]] = {x: [] for x in programs}
        for _ in range(repeats):
            for key, program in programs.items():
                samples[key].append(program.sample())
        seconds = {key: statistics.median(x) for key, x in samples.items()}
        copied = 2 * working_set / seconds["copy"]
        for implementation in implementations:
            a_step = seconds[implementation] / layers
            moved = 2 * _bytes(state) / a_step
            yield {
                "op": NAME,
                "backbone": backbone,
                "implementation": implementation,
                "shape": name,
                "sizes": shape._asdict(),
                "dtype": dtype,
                "layers": layers,
                "step_ms": round(1e3 * a_step, 5),
                "state_gbytes": round(moved / 1e9, 1),
                "copy_gbytes": round(copied / 1e9, 1),
                "fraction": round(moved / copied, 3),
            }
