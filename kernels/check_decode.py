"""The accuracy of `decode_step`, token by token over whole sequences, for `python -m kernels.check`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from kernels import check, dispatch, reference, shapes, triton_util

NAME = "decode_step"
BACKBONES = ("gated_delta_rule", "gated_linear_attention")
CASES = (
    check.Case(),
    check.Case("strong"),
    check.Case("mixed", "crowded"),
    check.Case("mild", "crowded", initial_state=False),
    check.Case("none", centered=False),
)
TOKENS = ("q", "k", "v", "log_decay", "beta", "lam", "ccq_log_decay")


def make_inputs(backbone: str, shape: shapes.Shape, dtype: str, case: check.Case) -> dict[str, Any]:
    """Arguments for `decode`: `decode_step`'s, with tokens [B, T, ...].

    "mixed" decays the statistics too. The delta rule's keys are of unit length.
    """
    options: dict[str, Any] = {"dtype": dtype, "decay": case.decay, "keys": case.keys}
    inputs = shapes.make_inputs(backbone, shape, **options)
    other = shapes.make_inputs("ccq_query", shape, **options)
    state, moments = inputs.pop("initial_state"), other["initial_state"].moments(case.centered)
    if backbone == "gated_delta_rule":
        size = jnp.linalg.norm(other["k"].astype(jnp.float32), axis=-1).mean()
        moments = moments._replace(
            mean=moments.mean / size, covariance=moments.covariance / size**2
        )
    if not case.initial_state:
        state, moments = jax.tree.map(jnp.zeros_like, (state, moments))
    inputs |= {"lam": other["lam"], "state": state, "moments": moments}
    if case.decay == "mixed":
        inputs["ccq_log_decay"] = other["log_decay"]
    return inputs


def _decode(inputs: dict[str, Any], *, implementation: str | None, centered: bool = True) -> Any:
    """(out [B, T, HV, V], state, moments) of one `decode_step` after the other."""
    tokens = {name: jnp.moveaxis(inputs[name], 1, 0) for name in TOKENS if name in inputs}

    def step(carry: Any, token: dict[str, Any]) -> Any:
        state, moments = carry
        out, state, moments = kernels.decode_step(
            **{"log_decay": None, **token},
            state=state,
            moments=moments,
            centered=centered,
            implementation=implementation,
        )
        return (state, moments), out

    carry, out = jax.lax.scan(step, (inputs["state"], inputs["moments"]), tokens)
    return jnp.moveaxis(out, 0, 1), *carry


decode = jax.jit(_decode, static_argnames=("implementation", "centered"))


def expected(backbone: str, inputs: dict[str, Any], centered: bool = True) -> dict[str, np.ndarray]:
    """The same from the operators' float64 recurrences."""
    moments = inputs["moments"]
    n, mean, outer = (np.asarray(x, np.float64) for x in moments)
    if centered:
        outer = outer + mean[..., :, None] * mean[..., None, :]
    sums = n, n[..., None] * mean, n[..., None, None] * outer
    arguments = {"q": inputs["q"], "k": inputs["k"], "lam": inputs["lam"]}
    arguments |= {"log_decay": inputs.get("ccq_log_decay"), "initial_state": sums}
    q, (count, total, outer) = reference.forward("ccq_query", arguments, centered=centered)
    arguments = {name: inputs[name] for name in ("k", "v", "log_decay", "beta") if name in inputs}
    arguments |= {"q": q, "initial_state": inputs["state"]}
    out, state = reference.forward(backbone, arguments)
    mean, outer = total / count[..., None], outer / count[..., None, None]
    if centered:
        outer = outer - mean[..., :, None] * mean[..., None, :]
    return {"out": out, "state": state, "count": count, "mean": mean, "covariance": outer}


def errors(
    implementation: str,
    inputs: dict[str, Any],
    wanted: dict[str, np.ndarray],
    centered: bool = True,
) -> dict[str, float]:
    """Relative error of each tensor after all tokens; `out` is that of all of them."""
    out, state, moments = decode(inputs, implementation=implementation, centered=centered)
    found = {"out": out, "state": state, **moments._asdict()}
    return {name: check.relative_error(found[name], x) for name, x in wanted.items()}


def repeats(implementation: str, inputs: dict[str, Any]) -> dict[str, float]:
    """Largest difference of a second run, of the first row on its own and over NaN: 0 means the same bits."""
    whole = decode(inputs, implementation=implementation)
    again = decode(inputs, implementation=implementation)
    differences = {"bits again": check.largest_difference(whole, again)}
    if implementation in check.KERNELS:
        first = decode(check.first_row(inputs), implementation=implementation)
        differences["bits of a row"] = check.largest_difference(check.first_row(whole), first)
    if implementation == "triton":
        with triton_util.poisoned_outputs():
            fresh = jax.jit(functools.partial(_decode, implementation=implementation))
            differences["bits over NaN"] = check.largest_difference(whole, fresh(inputs))
    return differences


def built(implementations: list[str]) -> list[str]:
    """Those that this operator has, on some machine."""
    return [x for x in implementations if dispatch.is_built(NAME, x)]


def measure(
    implementations: list[str], dtypes: list[str], names: list[str]
) -> Iterator[dict[str, Any]]:
    """Records as `check.measure` yields them; the case also names the backbone."""
    for dtype in dtypes:
        worst: check.Worst = {}
        for name, backbone, case in _problems(names):
            inputs = make_inputs(backbone, shapes.SHAPES[name], dtype, case)
            wanted = expected(backbone, inputs, case.centered)
            where = {"shape": name, "case": case._asdict() | {"backbone": backbone}}
            for implementation in implementations:
                found = errors(implementation, inputs, wanted, case.centered)
                if case == CASES[0]:
                    found |= repeats(implementation, inputs)
                check.keep_worst(worst, implementation, found, where)
        yield from check.records(NAME, dtype, worst)


def _problems(names: list[str]) -> Iterator[tuple[str, str, check.Case]]:
    for name in names:
        for backbone, case in itertools.product(BACKBONES, CASES):
            # Over many tokens rounding adds up where keys are crowded.
            if name not in shapes.LONG or case.keys == "crowded":
                yield name, backbone, case
