"""Measures the accuracy of the operators against float64 recurrences.

    python -m kernels.check                                  every implementation that runs here, small shapes
    python -m kernels.check --implementation=triton --shapes=small,wide,long
    python -m kernels.check --op=gated_delta_rule --dtype=bfloat16 --shapes=tail,k128 --json

Prints the worst error of each tensor, ||x - ref|| / ||ref|| over all cases, and where it occurred.
The cases cross the
shapes with decays from 0 to -inf, keys that share a large component, segments and initial states.
Exits with 1 if an error exceeds its tolerance, or if a second run gives other bits. Of the kernels it
also asks that a row of a batch on its own gives the same bits, which XLA may compile differently, and
of Triton's that nothing changes where their outputs hold NaN before they run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from kernels import dispatch, reference, shapes, triton_util

DTYPES = ("float32", "bfloat16")
KERNELS = ("triton", "pallas")
# By implementation and tensor: the largest error, and the shape and case it occurred in.
Worst = dict[tuple[str, str], dict[str, Any]]


class Case(NamedTuple):
    """What the random inputs of one comparison look like; see `shapes.make_inputs`."""

    decay: str = "mild"
    keys: str = "random"
    segments: bool = False
    initial_state: bool = True
    centered: bool = True


CASES = (
    Case(),
    Case("strong"),
    Case("mixed", "crowded"),
    Case("mild", "crowded", initial_state=False),
    Case("none", segments=True),
)
ONLY = {
    "gated_linear_attention": (Case("mixed per head", "crowded"), Case("none", "crowded")),
    "ccq_query": (Case("none", "crowded"), Case("mixed", centered=False)),
    "gated_delta_rule": (),
}


def tolerance(tensor: str, dtype: str) -> float:
    """The largest accepted relative error of a result, or of a gradient, whose name begins with d."""
    is_gradient = tensor.startswith("d")
    if dtype == "float32":
        return 1e-4 if is_gradient else 1e-5
    if tensor in ("dlog_decay", "dbeta"):
        return 2e-2
    return 8e-3 if is_gradient else 5e-3


def relative_error(x: Any, expected: Any) -> float:
    """||x - expected|| / ||expected||, or ||x|| where zero is expected; inf where x is not finite."""
    x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    if not np.isfinite(x).all():
        return float("inf")
    norm = np.linalg.norm(expected)
    # A sum that is zero may come out of float64 as its rounding error.
    return float(np.linalg.norm(x - expected) / (norm if norm > 1e-10 else 1))


def _evaluate(
    operator: str, implementation: str, inputs: Any, cotangents: Any, options: Any = ()
) -> tuple[Any, dict[str, Any]]:
    """((out, state), gradients by name) of an operator; `options` are pairs of keyword and value."""
    fixed = {name: x for name, x in inputs.items() if name == "segment_ids"}
    moving = {name: x for name, x in inputs.items() if name != "segment_ids"}

    def run(moving: dict[str, Any]) -> Any:
        function = getattr(kernels, operator)
        return function(**moving, **fixed, implementation=implementation, **dict(options))

    results, pullback = jax.vjp(run, moving)
    return results, pullback(cotangents)[0]


evaluate = jax.jit(_evaluate, static_argnames=("operator", "implementation", "options"))


def named(results: tuple[Any, Any], gradients: dict[str, Any]) -> dict[str, Any]:
    """Every tensor by its name in the table: out, state, dq, ..., and the parts of a CCQState."""
    out, state = results
    tensors = {"out": out, "state": state} | {f"d{name}": x for name, x in gradients.items()}
    flat: dict[str, Any] = {}
    for name, x in tensors.items():
        if isinstance(x, tuple):
            flat |= {
                f"{name}.{part}": y for part, y in zip(kernels.CCQState._fields, x, strict=True)
            }
        else:
            flat[name] = x
    return flat


def compare(
    operator: str,
    implementation: str,
    inputs: dict[str, Any],
    *,
    expected: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Relative error of each tensor, and the float64 tensors, to be passed on as `expected`."""
    shape = jax.eval_shape(
        lambda x: getattr(kernels, operator)(**x, implementation="scan", **options), inputs
    )
    cotangents = shapes.make_cotangents(*shape)
    tensors = named(*evaluate(operator, implementation, inputs, cotangents, tuple(options.items())))
    if expected is None:
        results = reference.forward(operator, inputs, **options)
        gradients = reference.gradients(operator, inputs, *cotangents, **options)
        expected = named(results, gradients)
    return {name: relative_error(tensors[name], x) for name, x in expected.items()}, expected


def repeats(operator: str, implementation: str, inputs: dict[str, Any]) -> dict[str, float]:
    """Largest difference of a second run, of the first row on its own and over NaN: 0 means the same bits."""
    shape = jax.eval_shape(lambda x: getattr(kernels, operator)(**x, implementation="scan"), inputs)
    cotangents = shapes.make_cotangents(*shape)
    whole = evaluate(operator, implementation, inputs, cotangents)
    again = evaluate(operator, implementation, inputs, cotangents)
    differences = {"bits again": largest_difference(whole, again)}
    if implementation in KERNELS and dispatch.platform() != "cpu":  # there XLA interprets them
        first = evaluate(operator, implementation, *first_row((inputs, cotangents)))
        differences["bits of a row"] = largest_difference(first_row(whole), first)
    if implementation == "triton":
        poisoned = evaluate_over_nan(operator, inputs, cotangents)
        differences["bits over NaN"] = largest_difference(whole, poisoned)
    return differences


def evaluate_over_nan(operator: str, inputs: Any, cotangents: Any) -> tuple[Any, dict[str, Any]]:
    """As `evaluate` of Triton kernels whose outputs are full of NaN before they run."""
    fresh = jax.jit(functools.partial(_evaluate, operator, "triton"))
    with triton_util.poisoned_outputs():
        return fresh(inputs, cotangents)


def first_row(tree: Any) -> Any:
    """The batch's first row of every array."""
    return jax.tree.map(lambda x: x[:1], tree)


def largest_difference(left: Any, right: Any) -> float:
    """Of any element of two trees."""
    differences = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), left, right)
    largest = float(np.max(jax.tree.leaves(differences)))
    return largest if np.isfinite(largest) else float("inf")


def measure(
    implementations: dict[str, list[str]], dtypes: list[str], names: list[str]
) -> Iterator[dict[str, Any]]:
    """One record an operator, implementation, dtype and tensor: the worst error and its case."""
    for operator, able_here in implementations.items():
        for dtype in dtypes:
            worst: Worst = {}
            for name, case, inputs, options in _problems(operator, dtype, names):
                expected = None
                for implementation in able_here:
                    errors, expected = compare(
                        operator, implementation, inputs, expected=expected, **options
                    )
                    again = case == Case() or (implementation in KERNELS and case.decay == "none")
                    if again and not options and shapes.SHAPES[name].batch > 1:
                        errors |= repeats(operator, implementation, inputs)
                    where = {"shape": name, "case": case._asdict()}
                    keep_worst(worst, implementation, errors, where)
            yield from records(operator, dtype, worst)


def keep_worst(worst: Worst, implementation: str, errors: dict[str, float], where: Any) -> None:
    """Keeps the largest error of each tensor, and where it occurred."""
    for tensor, error in errors.items():
        record = worst.setdefault((implementation, tensor), {"error": -1.0})
        if error > record["error"]:
            record |= {"error": error, **where}


def records(operator: str, dtype: str, worst: Worst) -> Iterator[dict[str, Any]]:
    """The worst errors beside their tolerances."""
    for (implementation, tensor), record in sorted(worst.items()):
        allowed = 0.0 if tensor.startswith("bits") else tolerance(tensor, dtype)
        yield {
            "operator": operator,
            "implementation": implementation,
            "dtype": dtype,
            "tensor": tensor,
            "tolerance": allowed,
            "ok": record["error"] <= allowed,
            **record,
        }


def _problems(operator: str, dtype: str, names: list[str]) -> Iterator[Any]:
    for name in names:
        for case in CASES + ONLY[operator]:
            arguments = case._asdict()
            centered = arguments.pop("centered")
            inputs = shapes.make_inputs(operator, shapes.SHAPES[name], dtype=dtype, **arguments)
            options = {} if centered else {"centered": False}
            yield name, case, inputs, options


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns the process's exit status."""
    from kernels import check_decode  # which measures with this module's functions

    accelerated = jax.default_backend() != "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m kernels.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_choice(parser, "op", (*shapes.OPERATORS, check_decode.NAME))
    add_choice(parser, "implementation", dispatch.IMPLEMENTATIONS, "all that run here")
    add_choice(parser, "dtype", DTYPES)
    parser.add_argument(
        "--shapes",
        default="small,wide,long" if accelerated else "small",
        help="names of shapes.py, or the groups small, wide and long",
    )
    parser.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    args = parser.parse_args(argv)

    operators = chosen(parser, "op", args.op, (*shapes.OPERATORS, check_decode.NAME))
    wanted = chosen(parser, "implementation", args.implementation, dispatch.IMPLEMENTATIONS)
    dtypes = chosen(parser, "dtype", args.dtype, DTYPES)
    groups = {"small": shapes.SMALL, "wide": shapes.WIDE, "long": shapes.LONG}
    names: list[str] = []
    for name in chosen(parser, "shapes", args.shapes, (*groups, *shapes.SHAPES)):
        names += groups.get(name, (name,))

    wrong = 0
    named_ones = args.implementation != "all"
    found: list[Iterator[dict[str, Any]]] = []
    if check_decode.NAME in operators:
        operators.remove(check_decode.NAME)
        known = wanted if operators == [] else check_decode.built(wanted)
        steps = able(check_decode.NAME, known, named_ones)
        found = [check_decode.measure(steps, dtypes, names)]
    implementations = {operator: able(operator, wanted, named_ones) for operator in operators}
    for record in itertools.chain(measure(implementations, dtypes, names), *found):
        wrong += not record["ok"]
        print(json.dumps(record) if args.json else _line(record), flush=True)
    if wrong:
        print(f"{wrong} of the errors above exceed their tolerance", file=sys.stderr)
    return int(wrong > 0)


def add_choice(
    parser: argparse.ArgumentParser, flag: str, known: tuple[str, ...], everything: str = "all"
) -> None:
    """Adds --flag, which takes names with commas between, or all."""
    known_names = ",".join(known)
    parser.add_argument(f"--{flag}", default="all", help=f"{everything}, or some of {known_names}")


def chosen(
    parser: argparse.ArgumentParser, flag: str, value: str, known: tuple[str, ...]
) -> list[str]:
    """The names in a flag's value; exits with a message where one is unknown."""
    if value == "all":
        return list(known)
    names = value.split(",")
    for name in names:
        if name not in known:
            parser.error(f"--{flag}: {name!r} is unknown; expected some of {', '.join(known)}")
    return names


def able(operator: str, implementations: list[str], asked_for: bool) -> list[str]:
    """Those that run here; where they were asked for by name, all, or RuntimeError says why not."""
    if asked_for:
        for implementation in implementations:
            dispatch.select(operator, implementation)
    return [x for x in implementations if dispatch.unavailable(operator, x) is None]


def _line(record: dict[str, Any]) -> str:
    case = record["case"]
    where = [record["shape"], case["decay"], case["keys"]]
    where += [case["backbone"]] if "backbone" in case else []
    where += ["segments"] * case["segments"] + ["not centered"] * (not case["centered"])
    verdict = "" if record["ok"] else f"  EXCEEDS {record['tolerance']:.0e}"
    return (
        f"{record['operator']:23}{record['implementation']:7}{record['dtype']:9} "
        f"{record['tensor']:25}{record['error']:9.1e}  {', '.join(where)}{verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
