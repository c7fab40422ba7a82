"""Memory of the chunked operators, and operators under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from operators import PAIRS, assert_close

import kernels
from kernels import shapes
from kernels.gated_delta_rule.xla import inverse_of_unit_lower
from kernels.shapes import Shape

PLAIN = [pair for pair in PAIRS if pair[1] in ("scan", "xla")]
plain = pytest.mark.parametrize("operator, implementation", PLAIN)


def loss_of(operator, implementation, **options):
    def loss(inputs):
        results = getattr(kernels, operator)(**inputs, implementation=implementation, **options)
        return sum((x**2).sum() for x in jax.tree.leaves(results))

    return loss


def shapes_in(jaxpr):
    """Shapes of everything that a jaxpr computes, in its inner jaxprs as well."""
    for equation in jaxpr.eqns:
        yield from (x.aval.shape for x in equation.outvars)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


@pytest.mark.parametrize("operator", shapes.OPERATORS)
def test_nothing_has_the_size_of_all_pairs_or_of_a_state_a_token(operator):
    length, width, chunk = 1024, 32, 16
    inputs = shapes.make_inputs(operator, Shape(1, length, 1, width, width))
    gradient = jax.grad(loss_of(operator, "xla", chunk_size=chunk))
    sizes = [int(np.prod(shape)) for shape in shapes_in(jax.make_jaxpr(gradient)(inputs).jaxpr)]
    states = length // chunk * width * width
    assert max(sizes) <= max(states, 2 * length * width)
    assert max(sizes) >= states


@pytest.mark.skipif(
    jax.default_backend() != "cpu",
    reason="elsewhere products take workspaces larger than the states",
)
@pytest.mark.parametrize("operator", shapes.OPERATORS)
def test_peak_memory_grows_as_the_states_of_the_chunks(operator):
    def peak(length, implementation="xla"):
        inputs = shapes.make_inputs(operator, Shape(1, length, 1, 64, 64))
        program = jax.jit(jax.grad(loss_of(operator, implementation))).lower(inputs).compile()
        return program.memory_analysis().temp_size_in_bytes

    short, long = peak(2048), peak(4096)
    states = 4096 // 32 * 64 * 64 * 4
    # A few arrays of all tokens, as large as half of the states here, and a fixed group's work.
    assert long - short < 4 * states
    assert long < peak(4096, "scan") / 4


@pytest.mark.parametrize("size", [1, 2, 16, 64])
@pytest.mark.parametrize("crowded", [False, True])
def test_the_triangular_inverse(size, crowded):
    rng = np.random.default_rng(size)
    lower = 0.95 * np.ones((3, size, size)) if crowded else rng.uniform(-0.3, 0.3, (3, size, size))
    lower = np.tril(lower, -1).astype(np.float32)
    expected = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    assert_close(inverse_of_unit_lower(jnp.asarray(lower)), expected, 1e-6)


def test_the_triangular_inverse_has_no_loop_over_rows():
    jaxpr = jax.make_jaxpr(inverse_of_unit_lower)(jnp.zeros((64, 64)))
    primitives = [equation.primitive.name for equation in jaxpr.jaxpr.eqns]
    assert not {"scan", "while", "triangular_solve"} & set(primitives)
    assert primitives.count("dot_general") <= 2 * 6


@plain
def test_batched_by_vmap(operator, implementation):
    rows = [shapes.make_inputs(operator, Shape(1, 20, 2, 8, 4), seed=i) for i in range(2)]
    gradient = jax.jit(jax.value_and_grad(loss_of(operator, implementation)))
    batched = jax.jit(jax.vmap(jax.value_and_grad(loss_of(operator, implementation))))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    expected = jax.tree.map(lambda *x: jnp.stack(x), *map(gradient, rows))
    assert_close(batched(stacked), expected, 1e-4)


@plain
@pytest.mark.parametrize("case", ["plain", "no decay", "not centered"])
def test_sharded_over_the_batch(operator, implementation, case):
    if case == "not centered" and operator != "ccq_query":
        pytest.skip("centered is an argument of ccq_query alone")
    if jax.device_count() < 2:
        pytest.skip("sharding needs two devices; this machine has one")
    decay = "none" if case == "no decay" else "mild"
    inputs = shapes.make_inputs(
        operator, Shape(2, 40, 2, 8, 4), decay=decay, segments=True, initial_state=False
    )
    options = {"centered": False} if case == "not centered" else {}
    options["implementation"] = implementation

    def gradients(inputs):
        ids = inputs.pop("segment_ids")

        def loss(inputs):
            out, state = getattr(kernels, operator)(**inputs, segment_ids=ids, **options)
            return sum((x**2).sum() for x in jax.tree.leaves((out, state)))

        return jax.grad(loss)(inputs)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(spec,), out_specs=spec)
    assert_close(jax.jit(sharded)(inputs), jax.jit(gradients)(inputs), 1e-4)


@plain
def test_rematerialised(operator, implementation):
    inputs = shapes.make_inputs(operator, Shape(1, 20, 2, 8, 4))
    loss = loss_of(operator, implementation)
    remade = jax.jit(jax.grad(jax.checkpoint(loss)))(inputs)
    assert_close(remade, jax.jit(jax.grad(loss))(inputs), 1e-5)


@pytest.mark.parametrize("operator", shapes.OPERATORS)
def test_one_token_after_another_equals_the_whole(operator):
    inputs = shapes.make_inputs(operator, Shape(2, 12, 2, 8, 4), keys="crowded")
    function = getattr(kernels, operator)
    expected = jax.jit(function)(**inputs)

    def step(state, token):
        out, state = function(**jax.tree.map(lambda x: x[:, None], token), initial_state=state)
        return state, out[:, 0]

    tokens = {n: jnp.moveaxis(x, 1, 0) for n, x in inputs.items() if n != "initial_state"}
    state, outs = jax.jit(lambda s, x: jax.lax.scan(step, s, x))(inputs["initial_state"], tokens)
    assert_close((jnp.moveaxis(outs, 0, 1), state), expected)
