"""The training loop: its step, its files, and how it stops and goes on."""

import json
import math
import signal

import jax
import numpy as np
import pytest
from training import (
    assert_same_run,
    assert_trees_equal,
    checkpoint_names,
    lines,
    saved,
    tiny_config,
)

import ccq_jax.train
from ccq_jax import step
from ccq_jax.checkpoint import load_model
from ccq_jax.config import resolve
from ccq_jax.data import Loader
from ccq_jax.sharding import make_mesh
from ccq_jax.train import ConfigError, NonFiniteError, train
from ccq_jax.workdir import WorkdirError, checkpoint_steps

VOCAB = 320


def batches(count, rows=8, length=32):
    """Batches whose rows have very different numbers of targets."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        tokens = rng.integers(0, 257, (rows, length + 1), dtype=np.int32)
        targets = rng.integers(1, length, rows)
        yield {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "segment_ids": np.cumsum(rng.random((rows, length)) < 0.1, axis=1, dtype=np.int32),
            "loss_mask": np.arange(length) < targets[:, None],
        }


def run_steps(config, data, fsdp, count=4, devices=None):
    """Losses, gradient norms and the parameters after `count` steps on a mesh."""
    config = resolve(config, 257)
    mesh = make_mesh(data, fsdp, devices)
    with jax.set_mesh(mesh):
        graphdef, abstract = step.abstract_state(config, mesh)
        state = step.init_state(config, abstract)
        train_step = step.make_train_step(graphdef, config, abstract, mesh)
        found = []
        for batch in batches(count):
            batch["stop"] = np.zeros(mesh.size, np.int32)
            state, metrics = train_step(state, batch)
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(found), jax.device_get(state["params"]), state


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What one device makes of each mixer."""
    data, device = tmp_path_factory.mktemp("data"), jax.devices()[:1]
    return {
        mixer: run_steps(tiny_config(data, mixer=mixer), 1, 1, devices=device)
        for mixer in ("gated_deltanet", "attention")
    }


def assert_same_training(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
    # Adam divides by the gradient's size: where a gradient is rounding alone, so is its update.
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)
    jax.tree.map(compare, found[1], expected[1])


def test_a_mesh_trains_as_one_device_does(tmp_path, one_device):
    found = run_steps(tiny_config(tmp_path), data=2, fsdp=4)
    assert_same_training(found, one_device["gated_deltanet"])
    kernel = found[2]["params"]["layers"]["mlp"]["up_proj"]["kernel"]
    assert math.prod(kernel.sharding.shard_shape(kernel.shape)) == kernel.size // 4


@pytest.mark.parametrize(
    ("changes", "devices"),
    [({"accumulation": 4}, 1), ({"accumulation": 2}, 4), ({"loss_chunk": 8}, 1)],
)
def test_slices_train_as_the_whole_batch_does(tmp_path, one_device, changes, devices):
    config = tiny_config(tmp_path, mixer="attention", **changes)
    found = run_steps(config, devices // 2 or 1, -1, devices=jax.devices()[:devices])
    assert_same_training(found, one_device["attention"])


def test_gradients_that_are_not_finite_are_named():
    squares = {
        "embed": {"embedding": np.float32(1.0)},
        "layers": {"a": np.array([1.0, np.inf, np.nan]), "b": np.array([np.nan] * 3)},
        "norm": {"scale": np.float32(np.nan)},
    }
    assert step.nonfinite_gradients(squares) == [
        "layers/a (layers 1, 2)",
        "layers/b (all layers)",
        "norm/scale",
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run of eight steps, and its config."""
    directory = tmp_path_factory.mktemp("finished")
    config = tiny_config(directory)
    train(config, directory / "run", profile_steps=2)
    return config, directory / "run"


def test_a_run_leaves_its_files(finished):
    _, run = finished
    found = json.loads((run / "config.json").read_text())
    assert found["train"]["steps"] == 8 and found["model"]["vocab_size"] == VOCAB
    assert {p.name for p in (run / "plots").iterdir()} == {
        "loss.png",
        "learning_rate.png",
        "ccq.png",
    }
    assert list((run / "tensorboard").iterdir())
    assert list((run / "profile").rglob("*.xplane.pb"))
    assert checkpoint_names(run) == ["4", "8"]
    model = load_model(run).model
    assert model(np.zeros((1, 3), np.int32)).shape == (1, 3, VOCAB)


def test_metrics_have_a_line_a_step(finished):
    _, run = finished
    found = lines(run)
    assert [line["step"] for line in found] == list(range(1, 9))
    assert [line["tokens"] for line in found] == [256 * n for n in range(1, 9)]
    assert found[0]["loss"] == pytest.approx(math.log(VOCAB), rel=0.05)
    assert found[-1]["loss"] < found[0]["loss"]
    for line in found:
        assert line["grad_norm"] > 0 and line["learning_rate"] > 0
        for name in ("lambda_mean", "lambda_sigma_max", "effective_rank", "query_moved"):
            assert np.shape(line[f"ccq/{name}"]) == (2, 2)
        assert ("eval/loss" in line) == (line["step"] % 4 == 0)
    assert found[-1]["eval/loss"] < found[3]["eval/loss"]
    ratio = found[-1]["eval/bits_per_byte"] / (found[-1]["eval/loss"] / math.log(2))
    assert ratio == pytest.approx(1, abs=0.02)  # ends of documents have no bytes


def test_seeds_reproduce(finished, tmp_path):
    config, run = finished
    train(config, tmp_path / "again")
    assert_same_run(tmp_path / "again", run)


class Interrupting:
    """Stands in for `make_loader`: does something when batch number `at` is asked for."""

    def __init__(self, monkeypatch, at, action):
        self.make, self.at, self.action = ccq_jax.train.make_loader, at, action
        monkeypatch.setattr(ccq_jax.train, "make_loader", self)

    def __call__(self, *args, **kwargs) -> Loader:
        loader = self.make(*args, **kwargs)
        following = type(loader).__next__

        class Watched(type(loader)):
            def __next__(inner):
                batch = following(inner)
                return self.action(batch) if inner.position == self.at else batch

        loader.__class__ = Watched
        return loader


@pytest.mark.parametrize(
    ("number", "code", "at"),
    [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 4), (signal.SIGTERM, 143, 7)],
)
def test_a_signal_saves_and_exits_and_the_run_goes_on(
    finished, tmp_path, monkeypatch, number, code, at
):
    config, run = finished
    before = signal.getsignal(number)

    def interrupt(batch):
        signal.raise_signal(number)
        return batch

    with monkeypatch.context() as patch:
        Interrupting(patch, at, interrupt)
        with pytest.raises(SystemExit) as stopped:
            train(config, tmp_path)
    assert stopped.value.code == code
    assert checkpoint_steps(tmp_path)[-1] == at
    train(config, tmp_path)
    assert lines(tmp_path) == lines(run)
    assert_trees_equal(saved(tmp_path), saved(run))
    assert signal.getsignal(number) == before


def test_a_run_goes_on_on_another_mesh(finished, tmp_path, monkeypatch):
    config, run = finished
    with monkeypatch.context() as patch:
        Interrupting(patch, 5, lambda batch: [signal.raise_signal(signal.SIGTERM), batch][1])
        with pytest.raises(SystemExit):
            train(config, tmp_path)
    other = config.copy_and_resolve_references()
    other.mesh.data, other.mesh.fsdp = 2, 4
    train(other, tmp_path)
    for line, expected in zip(lines(tmp_path), lines(run), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=2e-5)


def test_more_steps_continue_a_finished_run(tmp_path, capsys):
    config = tiny_config(tmp_path, mixer="attention", steps=4)
    train(config, tmp_path / "run")
    train(config, tmp_path / "run")
    assert "step 4 is reached" in capsys.readouterr().out
    config.train.steps = 6
    train(config, tmp_path / "run")
    assert "documents" not in capsys.readouterr().out
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert found[3]["learning_rate"] == pytest.approx(3e-4)
    assert 3e-4 < found[4]["learning_rate"] < 3e-3  # on the longer cosine
    with pytest.raises(WorkdirError, match=r"train\.steps is 5"):
        train(tiny_config(tmp_path, mixer="attention", steps=5), tmp_path / "run")

    (tmp_path / "text" / "00.txt").write_text("other text, of the same name")
    config.train.steps = 7
    train(config, tmp_path / "run")
    assert "are not those that this run began with" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_stops_and_says_where(tmp_path, monkeypatch):
    def spoil(batch):
        return batch | {"inputs": np.full_like(batch["inputs"], 10**6)}  # embeds as NaN

    config = tiny_config(tmp_path, mixer="attention")
    with monkeypatch.context() as patch:
        Interrupting(patch, 6, spoil)
        with pytest.raises(NonFiniteError) as failure:
            train(config, tmp_path / "run")
    said = str(failure.value)
    assert "step 6 is not finite: loss nan" in said
    assert "number 5 of the training data, counted from 0: its rows 40 to 47" in said
    assert "layers/mixer/q_proj/kernel (all layers)" in said and "lm_head/kernel" in said
    assert "last good checkpoint is of step 4" in said
    assert checkpoint_steps(tmp_path / "run") == [4]
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.batch_size": 12}, "train.batch_size is 12: it must be a multiple of 8 devices"),
        ({"mesh.fsdp": 3, "mesh.data": -1}, "mesh.fsdp=3: 3 does not divide the 8 devices"),
        ({"data.source": "text:/nowhere/*.txt"}, "/nowhere"),
        ({"train.warmup_steps": 8}, "train.warmup_steps is 8"),
    ],
)
def test_a_config_that_cannot_run_here_is_refused_before_anything_is_written(
    tmp_path, changes, message
):
    config = tiny_config(tmp_path)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
