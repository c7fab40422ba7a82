"""Meshes, the rules that place parameters, and functions that run device by device."""

import math
import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ccq_jax import sharding
from ccq_jax.config import SIZES, default, resolve
from ccq_jax.model import LanguageModel
from ccq_jax.optimizer import make_optimizer
from ccq_jax.sharding import AXES, BATCH, batch_parallel, make_mesh, shard_batch


def abstract_params(mixer, size="tiny", **fields):
    config = default(mixer, size)
    config.model.ccq.enabled = mixer != "attention"
    config.model.update(fields)
    config = resolve(config, 32000)
    model = nnx.eval_shape(lambda: LanguageModel(config.model, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.split(model)[1])


@pytest.mark.parametrize(
    ("data", "fsdp", "shape"),
    [(-1, 1, (8, 1)), (-1, 4, (2, 4)), (1, -1, (1, 8)), (2, 4, (2, 4))],
)
def test_mesh_takes_all_devices(data, fsdp, shape):
    mesh = make_mesh(data, fsdp)
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == shape


@pytest.mark.parametrize(
    ("data", "fsdp", "message"),
    [
        (-1, 3, "mesh.fsdp=3: 3 does not divide the 8 devices"),
        (2, 2, "mesh.data=2, mesh.fsdp=2 need 4 devices; here are 8"),
        (-1, -1, "or -1 for one of them"),
        (0, 8, "mesh.data=0"),
    ],
)
def test_mesh_that_does_not_fit_is_refused(data, fsdp, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(data, fsdp)


@pytest.mark.parametrize("mixer", SIZES)
def test_fsdp_cuts_every_matrix(mixer):
    mesh = make_mesh(2, 4)
    params = abstract_params(mixer)
    shardings = sharding.parameter_shardings(params, mesh)
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = sharding.path_name(path)
        place = shardings
        for key in path:
            place = place[key.key]
        local = math.prod(place.shard_shape(x.shape))
        is_matrix = name.endswith(("kernel", "embedding")) and "lambda_proj" not in name
        assert local == math.prod(x.shape) // (4 if is_matrix else 1), name


def test_every_rule_is_needed():
    names = {
        sharding.path_name(path)
        for mixer in SIZES
        for path, _ in jax.tree_util.tree_leaves_with_path(abstract_params(mixer))
    }
    patterns = [pattern for pattern, _ in sharding.RULES]
    used = {next(p for p in patterns if re.search(p, name)) for name in names}
    assert used == set(patterns)


def test_moments_lie_where_their_parameters_lie():
    mesh = make_mesh(1, 8)
    params = abstract_params("gated_deltanet")
    moments = jax.eval_shape(make_optimizer(default().train).init, params)
    placed = sharding.parameter_shardings({"params": params, "moments": moments}, mesh)
    specs = {
        sharding.path_name(path): x.spec for path, x in jax.tree_util.tree_leaves_with_path(placed)
    }
    for moment in ("mu", "nu"):
        found = {n.split(f"/{moment}/")[1]: s for n, s in specs.items() if f"/{moment}/" in n}
        assert found == {
            n.removeprefix("params/"): s for n, s in specs.items() if n.startswith("params/")
        }


def test_a_dimension_that_fsdp_does_not_divide_stays_whole():
    params = abstract_params("gla", hidden_size=100)
    shardings = sharding.parameter_shardings(params, make_mesh(1, 8))
    assert shardings["layers"]["mixer"]["q_proj"]["kernel"].spec == P(None, None, None)


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(ValueError, match=r"'layers/mixer/surprise'.*sharding\.RULES"):
        sharding.parameter_shardings(
            {"layers": {"mixer": {"surprise": jnp.ones(3)}}}, make_mesh(1, 8)
        )


def product(x, y, scale):
    assert scale is None
    return jnp.einsum("bi,bj->bij", x, y), {"sum": jnp.sum(x, axis=1)}


@pytest.mark.parametrize("batch", [8, 16, 3])
def test_batch_parallel_changes_nothing(batch):
    x, y = (jax.random.normal(jax.random.key(i), (batch, 5)) for i in (0, 1))

    def loss(x, y):
        out, sums = batch_parallel(product)(x, y, None)
        return jnp.sum(jnp.sin(out)) + jnp.sum(sums["sum"] ** 2)

    expected = jax.value_and_grad(loss, (0, 1))(x, y)
    with jax.set_mesh(make_mesh(2, 4)):
        found = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


@pytest.mark.parametrize("batch", [8, 3])
def test_batch_parallel_finds_the_batch_on_the_axes_that_are_named(batch):
    seen = []

    def scale(x, layers, index, nothing):
        seen.append((x.shape[0], layers["a"].shape[1]))
        return x * layers["a"][index], {"a": layers["a"] + 1}, nothing

    args = jnp.ones((batch, 3)), {"a": jnp.arange(2.0 * batch).reshape(2, batch, 1)}, 1, None
    expected = scale(*args)
    parallel = batch_parallel(scale, in_axes=(0, 1, None, None), out_axes=(0, 1, 0))
    with jax.set_mesh(make_mesh(2, 4)):
        found = jax.jit(parallel)(*args[:2], jnp.int32(1), None)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert set(seen[1:]) == {(1, 1) if batch == 8 else (3, 3)}


def test_batch_parallel_gives_each_device_its_share():
    shapes = []

    def kernel(x):
        shapes.append(x.shape)
        return batch_parallel(lambda x: x + 1)(x)  # inside, it is the plain function

    with jax.set_mesh(make_mesh(2, 4)):
        out = jax.jit(batch_parallel(kernel))(jnp.zeros((16, 3)))
    assert shapes == [(2, 3)]
    assert out.sharding.spec == BATCH


def test_generation_is_the_same_over_the_mesh():
    model, x = models.cached("gdn_decay"), models.tokens(8, 6)
    graph, params = nnx.split(model)

    def logits_and_cache():
        call = jax.jit(lambda params, *args: nnx.merge(graph, params).prefill(*args))
        step = jax.jit(lambda params, *args: nnx.merge(graph, params).step(*args))
        logits, cache = call(params, x[:, :4], model.init_cache(8, 6))
        for t in (4, 5):
            logits, cache = step(params, x[:, t], cache)
        return logits, cache.layers.state

    expected = logits_and_cache()
    with jax.set_mesh(make_mesh(2, 4)):
        found = logits_and_cache()
    for y, want in zip(found, expected, strict=True):
        assert models.error(y, want) < 1e-5


def test_shard_batch_cuts_activations():
    x = jnp.zeros((8, 3))
    assert shard_batch(x) is x
    mesh = make_mesh(2, 4)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: shard_batch(x * 2))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, BATCH), 2)
