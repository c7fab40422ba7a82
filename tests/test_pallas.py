"""The TPU kernels, interpreted: they compute the recurrences and their gradients.

KERNELS_PALLAS_INTERPRET=1 in the environment adds them to the tests of all implementations. Here are those
that reach what is theirs: steps of one and of two heads, masked tails, each way of the decays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operators import assert_close, run, tokens
from test_operators import CASES, assert_accurate

import kernels
from kernels import check, pallas_chunk, pallas_util, shapes
from kernels.shapes import SHAPES, Shape

# Keys and values of several registers, and not of whole ones; a chunk and a tail.
WIDE = Shape(1, 140, 2, 192, 320)

every = pytest.mark.parametrize("operator", shapes.OPERATORS)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if jax.default_backend() == "tpu":
        pytest.skip("on a TPU tests/test_operators.py runs the kernels, compiled")
    monkeypatch.setenv(pallas_util.INTERPRET, "1")


@every
@pytest.mark.parametrize("dtype", check.DTYPES)
def test_values_states_and_gradients_equal_the_float64_recurrence(operator, dtype):
    for case in CASES:
        arguments = case._asdict()
        del arguments["centered"]
        inputs = shapes.make_inputs(operator, SHAPES["tail"], dtype=dtype, **arguments)
        # One document is as none; so all cases are one program.
        inputs.setdefault("segment_ids", jnp.zeros(inputs["q"].shape[:2], jnp.int32))
        assert_accurate(operator, "pallas", inputs, dtype)


@pytest.mark.parametrize(
    "operator, shape, dtype, decay, options",
    [
        ("gated_delta_rule", SHAPES["grouped"], "bfloat16", "mixed", {}),
        ("gated_linear_attention", SHAPES["tail"], "float32", "mixed per head", {}),
        ("gated_linear_attention", SHAPES["odd"], "float32", "none", {}),
        ("ccq_query", SHAPES["tail"], "bfloat16", "mixed", {"centered": False}),
        ("ccq_query", SHAPES["odd"], "float32", "none", {}),
        ("gated_delta_rule", WIDE, "bfloat16", "mixed", {}),
        ("gated_linear_attention", WIDE, "float32", "mixed", {}),
        ("ccq_query", SHAPES["k512"], "bfloat16", "none", {}),
    ],
)
def test_every_form_of_the_arguments(operator, shape, dtype, decay, options):
    inputs = shapes.make_inputs(operator, shape, dtype=dtype, decay=decay, keys="crowded")
    assert_accurate(operator, "pallas", inputs, dtype, **options)


@every
def test_a_sequence_may_be_cut_anywhere(operator):
    inputs = shapes.make_inputs(operator, Shape(2, 40, 2, 8, 4), decay="mixed")
    chunks = (("chunk_size", 16),)
    whole = run(operator, "pallas", inputs, chunks)
    first = tokens(inputs, 0, 20) | {"initial_state": inputs["initial_state"]}
    out, state = run(operator, "pallas", first, chunks)
    rest = tokens(inputs, 20, None) | {"initial_state": state}
    more, state = run(operator, "pallas", rest, chunks)
    assert_close((jnp.concatenate([out, more], 1), state), whole)


@every
@pytest.mark.parametrize("shape", [Shape(1, 1, 3, 8, 4), Shape(1, 70, 1, 8, 4, value_heads=3)])
def test_heads_that_come_one_at_a_time(operator, shape):
    inputs = shapes.make_inputs(operator, shape, decay="mixed")
    found = run(operator, "pallas", inputs)
    assert_close(found, run(operator, "scan", inputs))


def kernels_in(jaxpr):
    """How many arrays each kernel of a jaxpr writes."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield len(equation.outvars)
            continue
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from kernels_in(inner)


@every
def test_states_of_the_chunks_are_kept_for_a_gradient_alone(operator):
    inputs = shapes.make_inputs(operator, SHAPES["short"])

    def loss(inputs):
        results = getattr(kernels, operator)(**inputs, implementation="pallas")
        return sum((x**2).sum() for x in jax.tree.leaves(results))

    def written(function):
        return list(kernels_in(jax.make_jaxpr(function)(inputs).jaxpr))

    (alone,) = written(loss)
    forward, backward = written(jax.grad(loss))
    assert forward > alone
    assert written(jax.grad(jax.checkpoint(loss))) == [alone, forward, backward]


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("crowded", [False, True])
def test_the_triangular_inverse(size, crowded):
    rng = np.random.default_rng(size)
    lower = 0.95 * np.ones((2, size, size)) if crowded else rng.uniform(-0.3, 0.3, (2, size, size))
    lower = np.tril(lower, -1).astype(np.float32)
    identity = np.eye(size)
    expected = np.linalg.inv(identity + lower.astype(np.float64)) - identity
    inverse = jax.jit(jax.vmap(pallas_chunk.inverse_of_unit_lower))
    assert_close(inverse(lower), expected, 1e-6)
