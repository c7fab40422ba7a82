"""The kernels for Hopper, emulated on a CPU, against the float64 recurrence."""

import gluon_emulator as emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import check, reference, shapes
from kernels.ccq_query import CCQState
from kernels.ccq_query import triton as ccq
from kernels.gated_delta_rule import triton as delta_rule

LENGTHS = [1, 64, 65, 127, 128, 129, 700]


@pytest.fixture
def emulated(monkeypatch):
    """Starts the emulator with so many multiprocessors."""
    with emulator.emulated(monkeypatch):
        yield lambda cores: monkeypatch.setattr(emulator.triton_util, "num_cores", lambda: cores)


def problem(width, length, dtype="bfloat16", segments=False, batch=1, heads=1):
    """Inputs by name, all of them, and which keys count alike."""
    shape = shapes.Shape(batch, length, heads, width, width)
    inputs = shapes.make_inputs(
        "ccq_query", shape, seed=length, dtype=dtype, decay="none", keys="crowded"
    )
    inputs["log_decay"] = None
    if segments:
        starts = np.random.default_rng(length).random((batch, length, 1)) < 4 / length
        log_decay = np.where(starts, -np.inf, np.zeros((batch, length, heads)))
        inputs["log_decay"] = jnp.asarray(log_decay, jnp.float32)
    return inputs, {"only_segments": segments}


def run(inputs, static, initial=True, centered=True):
    """(out, state), and the gradients of q, k and lam, with random cotangents."""
    static = static | {"centered": centered}
    out, state, residuals = ccq.forward(**inputs, **static, has_initial_state=initial)
    cotangents = shapes.make_cotangents(out, state)
    # The initial state's gradient has kernels of its own, not for Hopper.
    gradients = ccq.backward(residuals, *cotangents, **static, has_initial_state=False)
    return (out, state), dict(zip(("q", "k", "lam"), gradients, strict=False)), cotangents


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "dtype, segments, centered, initial",
    [
        ("bfloat16", False, True, True),
        ("bfloat16", True, True, False),
        ("float16", True, False, True),
        ("bfloat16", False, False, False),
    ],
)
def test_results_and_gradients_are_those_of_float64(
    width, length, dtype, segments, centered, initial, emulated
):
    emulated(2)
    inputs, static = problem(width, length, dtype, segments)
    if not initial:
        inputs["initial_state"] = CCQState(*map(jnp.zeros_like, inputs["initial_state"]))
    results, gradients, cotangents = run(inputs, static, initial, centered)
    expected = reference.forward("ccq_query", inputs, centered=centered)
    derived = reference.gradients("ccq_query", inputs, *cotangents, centered=centered)
    found = check.named(results, gradients)
    for name, x in check.named(expected, {name: derived[name] for name in gradients}).items():
        error = check.relative_error(found[name], x)
        assert error <= check.tolerance(name, dtype), f"{name}: {error}"


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("segments", [False, True])
def test_how_many_chunks_a_block_takes_changes_no_bit(width, segments, emulated):
    inputs, static = problem(width, 400, segments=segments, batch=2, heads=2)
    found = []
    for cores in (1, 3, 16):
        emulated(cores)
        results, gradients, _ = run(inputs, static)
        found.append(jax.tree.leaves((results, gradients)))
    for one, *others in zip(*found, strict=True):
        assert all(np.array_equal(one, other) for other in others)


def run_delta_rule(inputs):
    """(out, state), the gradients by name, and the cotangents."""
    names = ("q", "k", "v", "log_decay", "beta", "initial_state")
    out, state, residuals = delta_rule.forward(*(inputs[name] for name in names), scale=0.1)
    cotangents = shapes.make_cotangents(out, state)
    gradients = delta_rule.backward(residuals, *cotangents, scale=0.1)
    return (out, state), dict(zip(names, gradients, strict=True)), cotangents


@pytest.mark.parametrize("key_width, value_width", [(128, 128), (128, 256), (256, 256)])
@pytest.mark.parametrize("length", [1, 64, 65, 200])
@pytest.mark.parametrize("dtype, decay", [("bfloat16", "mild"), ("float16", "mixed")])
def test_the_delta_rule_is_that_of_float64(key_width, value_width, length, dtype, decay, emulated):
    emulated(3)
    shape = shapes.Shape(1, length, 2, key_width, value_width)
    inputs = shapes.make_inputs(
        "gated_delta_rule", shape, seed=length, dtype=dtype, decay=decay, keys="crowded"
    )
    results, gradients, cotangents = run_delta_rule(inputs)
    expected = reference.forward("gated_delta_rule", inputs, scale=0.1)
    derived = reference.gradients("gated_delta_rule", inputs, *cotangents, scale=0.1)
    found = check.named(results, gradients)
    for name, x in check.named(expected, derived).items():
        error = check.relative_error(found[name], x)
        assert error <= check.tolerance(name, dtype), f"{name}: {error}"


@pytest.mark.parametrize("width", [128, 256])
def test_where_the_delta_rules_walks_are_cut_changes_no_bit(width, emulated):
    shape = shapes.Shape(1, 300, 5, width, width)
    inputs = shapes.make_inputs("gated_delta_rule", shape, dtype="bfloat16", decay="mixed")
    found = []
    for cores in (2, 3, 16):
        emulated(cores)
        results, gradients, _ = run_delta_rule(inputs)
        found.append(jax.tree.leaves((results, gradients)))
    for one, *others in zip(*found, strict=True):
        assert all(np.array_equal(one, other) for other in others)


def test_a_group_that_waits_for_what_never_comes_fails(monkeypatch):
    monkeypatch.setattr(emulator, "SECONDS", 0.1)
    barrier = emulator.Barrier()
    barrier.init(1)
    barrier.wait(1)  # as before the first use of a buffer
    with pytest.raises(AssertionError, match="waits for ever"):
        barrier.wait(0)


def test_too_many_at_a_barrier_fail():
    barrier = emulator.Barrier()
    barrier.init(2)
    barrier.arrive(1, expected=8)
    barrier.arrive()
    with pytest.raises(AssertionError, match="more arrive"):
        barrier.arrive()
    barrier.come(8)
    barrier.arrive()


def test_an_address_outside_its_array_fails():
    pointer = emulator.Pointer(np.zeros(4, np.float32))
    assert emulator.load(pointer + np.arange(6), np.arange(6) < 4).shape == (6,)
    with pytest.raises(AssertionError, match="outside"):
        emulator.load(pointer + np.arange(6), np.arange(6) < 5)
