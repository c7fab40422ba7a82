"""Runs that begin from a trained model, train CCQ alone, or average their parameters."""

import importlib.util
import json
import shutil
from pathlib import Path

import jax
import models
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from training import assert_trees_equal, saved, tiny_config

from ccq_jax import curves, finetune, interop, metrics, step
from ccq_jax.checkpoint import load_model
from ccq_jax.config import default, resolve, validate
from ccq_jax.sharding import make_mesh
from ccq_jax.train import ConfigError, train
from ccq_jax.workdir import CHECKPOINTS


def flat(model):
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in leaves}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A run without CCQ, its model, and the same in Hugging Face form."""
    directory = tmp_path_factory.mktemp("backbone")
    config = tiny_config(directory, steps=4, learning_rate=1e-2)
    config.model.ccq.enabled = False
    config.model.implementation = "scan"
    config.eval.every = 0
    train(config, directory / "run")
    model = load_model(directory / "run").model
    interop.save_hf(model, directory / "hf", shard_bytes=50_000)
    return directory, model


def attached(directory: Path, source: str, **fields):
    """The config of a run that adds CCQ to the backbone; its own sizes do not count."""
    config = tiny_config(directory, steps=2, warmup_steps=0)
    config.model.implementation = "scan"
    config.model.update(hidden_size=999, num_layers=7)
    config.model.ccq.bias_init = -8.0
    config.init_from = source
    config.checkpoint.update(every=1, keep=9)
    config.eval.every = 0
    config.update_from_flattened_dict(fields)
    return config


@pytest.mark.parametrize("form", ["run", "hf"])
def test_a_run_begins_at_the_backbone(backbone, form, tmp_path):
    directory, model = backbone
    source = f"hf:{directory / 'hf'}" if form == "hf" else str(directory / "run")
    config = resolve(finetune.adopt(attached(directory, source), tmp_path), 257)
    mesh = make_mesh(2, 4)
    with jax.set_mesh(mesh):
        graph, abstract = step.abstract_state(config, mesh)
        params = step.init_state(config, abstract)["params"]
        loaded = finetune.load_parameters(config, params)
    assert_trees_equal(
        *(jax.tree.map(lambda x: x.sharding.spec, tree) for tree in (loaded, params))
    )
    found = nnx.merge(graph, jax.device_get(loaded))
    before, after = flat(model), flat(found)
    added = {name for name in after if "/ccq/" in name}
    assert added == {f"layers/mixer/ccq/lambda_proj/{x}" for x in ("kernel", "bias")}
    assert after.keys() - added == before.keys()
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x, err_msg=name)
    tokens = np.random.default_rng(0).integers(0, 257, (2, 40))
    moved = np.abs(found(tokens) - model(tokens)).max()
    assert moved < 1e-3
    assert finetune.change_of_logits(config, loaded, tokens) == pytest.approx(moved, rel=0.2)


def test_only_ccq_is_trained_where_that_is_asked(backbone, tmp_path, capsys):
    directory, model = backbone
    shutil.copytree(directory / "run", tmp_path / "backbone")
    config = attached(directory, str(tmp_path / "backbone"), **{"train.only_ccq": True})
    config.train.ccq_lr_scale = 10.0
    config.mesh.update(data=2, fsdp=4)
    train(config, tmp_path / "run")
    said = capsys.readouterr().out
    assert "begins from" in said and "CCQ changes logits by" in said
    start, *rest = metrics.read(tmp_path / "run")
    ended = metrics.read(directory / "run")[-1]["eval/loss"]
    assert start["step"] == 0 and start["eval/loss"] == pytest.approx(ended, rel=1e-4)
    assert [line["step"] for line in rest] == [1, 2]
    before, after = flat(model), flat(load_model(tmp_path / "run").model)
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x, err_msg=name)
    bias = after["layers/mixer/ccq/lambda_proj/bias"]
    # Adam's first steps are of the learning rate's size, here 10 times 3e-3 and less at the end.
    assert (np.abs(bias + 8) > 1e-2).all() and (np.abs(bias + 8) < 0.061).all()
    moments = [x for name, x in saved(tmp_path / "run").items() if "opt_state" in name]
    assert sum(x.size for x in moments) < 4 * sum(
        x.size for name, x in after.items() if "/ccq/" in name
    )
    other = default("gla").model  # a config file does not know the backbone's sizes
    other.ccq.fixed_lambda = 2.0
    evaluated = load_model(tmp_path / "run", model=other).config.model
    assert (evaluated.mixer, evaluated.ccq.fixed_lambda) == ("gated_deltanet", 2.0)
    shutil.rmtree(tmp_path / "backbone")  # the run goes on without it
    train(config, tmp_path / "run")
    assert "step 2 is reached" in capsys.readouterr().out


def test_backbones_that_cannot_be_are_refused(backbone, tmp_path):
    directory, _ = backbone
    for source in (str(tmp_path / "nothing"), f"hf:{tmp_path / 'nothing'}"):
        with pytest.raises(ConfigError, match="init_from is"):
            train(attached(directory, source), tmp_path / "run")
    interop.save_hf(models.make("gdn_grouped_values"), tmp_path / "ccq")
    for field, value in (("enabled", False), ("lambda_max", 4.0)):
        config = attached(directory, f"hf:{tmp_path / 'ccq'}", **{f"model.ccq.{field}": value})
        with pytest.raises(ConfigError, match=rf"model.ccq.{field} is {value}: there it is"):
            train(config, tmp_path / "run")
    config = attached(directory, str(directory / "run"), **{"model.ccq.enabled": False})
    config.train.only_ccq = True
    with pytest.raises(ConfigError, match=r"model.ccq.enabled must be True"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_config_file_says_what_it_needs(tmp_path):
    path = Path(__file__).parents[1] / "configs" / "ccq_finetune.py"
    spec = importlib.util.spec_from_file_location("ccq_finetune", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    validate(module.get_config())
    with pytest.raises(ConfigError, match="init_from is 'BACKBONE': it must be the workdir"):
        train(module.get_config(), tmp_path / "run")


def test_curves_of_runs_go_on_where_their_backbone_ended(backbone, tmp_path):
    directory, _ = backbone
    for seed, last in ((1, 1.5), (2, 1.0)):
        workdir = tmp_path / f"ccq-{seed}"
        workdir.mkdir()
        config = {"seed": seed, "model": {}, "data": {}, "train": {}}
        config["init_from"] = str(directory / "run")
        (workdir / "config.json").write_text(json.dumps(config))
        found = [{"step": 0, "eval/loss": 2.0}, {"step": 2, "eval/loss": last}]
        (workdir / "metrics.jsonl").write_text("\n".join(map(json.dumps, found)))
    found = curves.read_curve(tmp_path / "ccq-1")
    assert (found.label, found.start, found.steps.tolist()) == ("ccq", 4, [4, 6])
    assert found.losses.tolist() == [2.0, 1.5]
    runs = [directory / "run", tmp_path / "ccq-1", tmp_path / "ccq-2"]
    curves.main([*map(str, runs), f"--out={tmp_path / 'curves.png'}"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="holds no run"):
        curves.main([str(tmp_path), f"--out={tmp_path / 'curves.png'}"])


def averages(workdir: Path, number: int):
    """The parameters and their running average in a checkpoint."""
    path = workdir / CHECKPOINTS / str(number)
    with ocp.StandardCheckpointer() as reader:
        return tuple(reader.restore(path / name) for name in ("params", "ema"))


def test_the_running_average_is_kept_and_resumed_bit_for_bit(tmp_path):
    config = tiny_config(tmp_path, mixer="attention", steps=4, ema=0.75)
    config.checkpoint.update(every=1, keep=9)
    train(config, tmp_path / "run")
    _, before = averages(tmp_path / "run", 2)
    params, after = averages(tmp_path / "run", 3)
    expected = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, before, params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), after, expected
    )
    _, end = averages(tmp_path / "run", 4)
    for number in (3, 4):
        shutil.rmtree(tmp_path / "run" / CHECKPOINTS / str(number))
    train(config, tmp_path / "run")
    assert_trees_equal(averages(tmp_path / "run", 4)[1], end)
