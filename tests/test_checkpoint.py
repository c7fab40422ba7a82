"""Checkpoints: what comes back, what is kept, onto which mesh."""

import functools
import operator

import jax
import numpy as np
import pytest
from flax import nnx
from training import assert_trees_equal, checkpoint_names, tiny_config

from ccq_jax import step
from ccq_jax.checkpoint import (
    Checkpoints,
    load_model,
    version_changes,
    versions,
    with_shardings,
)
from ccq_jax.config import default, resolve
from ccq_jax.model import LanguageModel
from ccq_jax.optimizer import make_optimizer
from ccq_jax.sharding import make_mesh, parameter_shardings
from ccq_jax.workdir import CHECKPOINTS, WorkdirError, open_run

META = {"position": 7, "tokenizer": "bytes"}


KERNEL = ("params", "layers", "mlp", "up_proj", "kernel")


def make_state(data=1, fsdp=8):
    """A state of few parameters on a mesh, and its ShapeDtypeStructs."""
    rng = np.random.default_rng(0)
    params = {
        "layers": {"mlp": {"up_proj": {"kernel": rng.normal(size=(2, 8, 16))}}},
        "norm": {"scale": rng.normal(size=8)},
    }
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    state = {"params": params, "opt_state": make_optimizer(default().train).init(params)}
    shardings = parameter_shardings(state, make_mesh(data, fsdp))
    return with_shardings(state, shardings), jax.device_put(state, shardings)


def kernel(state):
    return functools.reduce(operator.getitem, KERNEL, state)


def test_state_and_meta_come_back(tmp_path):
    abstract, state = make_state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, META)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3]
        found, meta = checkpoints.restore(3, abstract)
    assert_trees_equal(found, state)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, abstract)
    assert meta == META | {"step": 3, "versions": versions()}


def test_a_state_goes_onto_another_mesh(tmp_path):
    _, state = make_state(data=2, fsdp=4)
    other, _ = make_state(data=8, fsdp=1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, META)
        found, _ = checkpoints.restore(1, other)
    assert_trees_equal(found, state)
    assert kernel(found).sharding.is_fully_replicated
    assert not kernel(state).sharding.is_fully_replicated


def test_a_state_may_be_donated_once_it_is_saved(tmp_path):
    abstract, state = make_state()
    before = jax.tree.map(np.array, state)
    spoil = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, META)
        spoil(state)
        checkpoints.wait()
        found, _ = checkpoints.restore(1, abstract)
    assert_trees_equal(found, before)


def test_the_newest_and_the_best_are_kept(tmp_path):
    _, state = make_state()
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5, 5: 4.0}
    with Checkpoints(tmp_path, keep=2, keep_best=1) as checkpoints:
        for number, loss in losses.items():
            checkpoints.save(number, state, META, loss)
        checkpoints.save(6, state, META)  # not evaluated
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5, 6]
        assert (checkpoints.best(), checkpoints.latest()) == (2, 6)
    with Checkpoints(tmp_path, keep=2, keep_best=1) as checkpoints:
        assert (checkpoints.best(), checkpoints.latest()) == (2, 6)
        assert checkpoint_names(tmp_path) == ["2", "5", "6"]


def test_the_best_need_not_be_kept(tmp_path):
    _, state = make_state()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, META, 1.0)
        checkpoints.save(2, state, META)
        checkpoints.wait()
        assert checkpoints.steps() == [2]
        assert checkpoints.best() is None


def test_what_a_killed_save_leaves_is_no_checkpoint_and_is_cleaned_up(tmp_path):
    _, state = make_state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, META)
    directory = tmp_path / CHECKPOINTS
    (directory / "1").rename(directory / "2.orbax-checkpoint-tmp")
    (directory / "deleted" / "1").mkdir(parents=True)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.best() is None
        checkpoints.save(2, state, META)
    assert checkpoint_names(tmp_path) == ["2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints of steps 1 (the best) and 2, and their parameters by step."""
    directory = tmp_path_factory.mktemp("run")
    config = resolve(tiny_config(directory / "data"), 257)
    _, abstract = step.abstract_state(config, make_mesh())
    params = {}
    with open_run(directory / "run", config) as path, Checkpoints(path, keep=2) as checkpoints:
        for number in (1, 2):
            config.seed = number
            state = step.init_state(config, abstract)
            params[number] = state["params"]
            checkpoints.save(number, state, META | {"config": config.to_dict()}, float(number))
    return directory / "run", params


@pytest.mark.parametrize(("which", "found"), [("latest", 2), ("best", 1), (1, 1), (2, 2)])
def test_load_model_finds_the_step(run, which, found):
    path, params = run
    config, model, number = load_model(path, step=which)
    assert number == config.seed == found
    assert isinstance(model, LanguageModel)
    assert_trees_equal(nnx.to_pure_dict(nnx.state(model)), params[found])


def test_load_model_puts_parameters_on_a_mesh(run):
    model = load_model(run[0], mesh=make_mesh(1, 8)).model
    assert not model.layers.mixer.q_proj.kernel[...].sharding.is_fully_replicated


@pytest.mark.parametrize("which", [3, "newest"])
def test_load_model_names_the_steps_that_there_are(run, which):
    with pytest.raises(WorkdirError, match=rf"{which!r}.*'best' or one of 1, 2"):
        load_model(run[0], step=which)


def test_load_model_refuses_what_is_not_a_run(tmp_path):
    with pytest.raises(WorkdirError, match="holds no run"):
        load_model(tmp_path)
    with open_run(tmp_path, resolve(default(), 257)):
        pass
    with pytest.raises(WorkdirError, match="no checkpoint yet"):
        load_model(tmp_path)


def test_other_versions_are_named():
    assert version_changes(versions()) == []
    (change,) = version_changes(versions() | {"jax": "0.0.1"})
    assert change.startswith("jax is ") and change.endswith("made with 0.0.1")
