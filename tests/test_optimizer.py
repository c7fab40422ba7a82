"""The learning rate, and what weight decay and clipping touch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ccq_jax.config import default, resolve
from ccq_jax.model import LanguageModel
from ccq_jax.optimizer import is_matrix, learning_rate, make_optimizer
from ccq_jax.sharding import path_name


def train_config(**fields):
    train = default().train
    train.update({"learning_rate": 1e-2, "steps": 100, "warmup_steps": 20} | fields)
    return train


@pytest.mark.parametrize(
    ("step", "rate"),
    [(1, 5e-4), (10, 5e-3), (20, 1e-2), (60, 5.5e-3), (100, 1e-3), (1000, 1e-3)],
)
def test_learning_rate_rises_linearly_and_falls_along_a_cosine(step, rate):
    assert learning_rate(step, train_config()) == pytest.approx(rate, rel=1e-5)


def test_without_warm_up_the_first_step_is_at_the_peak():
    rate = learning_rate(1, train_config(warmup_steps=0, steps=10000))
    assert rate == pytest.approx(1e-2, rel=1e-3)


def test_the_optimizer_follows_the_learning_rate():
    train = train_config(weight_decay=0.0, clip_norm=0.0)
    optimizer = make_optimizer(train)
    params = {"norm": {"scale": jnp.zeros(1)}}
    state = optimizer.init(params)
    for step in (1, 2, 3):  # a constant gradient moves Adam by the learning rate
        updates, state = optimizer.update({"norm": {"scale": jnp.ones(1)}}, state, params)
        rate = learning_rate(step, train)
        np.testing.assert_allclose(updates["norm"]["scale"][0], -rate, rtol=1e-4)


@pytest.mark.parametrize("mixer", ["gated_deltanet", "gla", "attention"])
def test_matrices_alone_are_decayed(mixer):
    config = default(mixer)
    config.model.ccq.enabled = mixer != "attention"
    config = resolve(config, 257)
    model = nnx.eval_shape(lambda: LanguageModel(config.model, rngs=nnx.Rngs(0)))
    params = jax.tree.map(
        lambda x: jnp.ones(x.shape, x.dtype), nnx.to_pure_dict(nnx.split(model)[1])
    )
    optimizer = make_optimizer(train_config())
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    moved = optax.apply_updates(params, updates)
    for path, x in jax.tree_util.tree_leaves_with_path(moved):
        name = path_name(path)
        decays = name.endswith(("kernel", "embedding"))
        assert bool(jnp.all(x < 1)) == decays, name
        assert bool(jnp.all(x == 1)) != decays, name
    assert not is_matrix(params)["norm"]["scale"]


def test_clipping_bounds_the_gradient_that_adam_sees():
    grads = {"norm": {"scale": jnp.array([3.0, 4.0])}}
    clipped = make_optimizer(train_config(clip_norm=1.0))
    _, state = clipped.update(grads, clipped.init(grads), grads)
    mu = optax.tree.get(state, "mu")["norm"]["scale"]
    np.testing.assert_allclose(mu, 0.1 * np.array([0.6, 0.8]), rtol=1e-5)
