import ast
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from training import tiny_config

from ccq_jax import checkpoint, generate
from ccq_jax.config import default
from ccq_jax.evaluation import curvature, evaluate, length, recall, scoring
from ccq_jax.evaluation.benchmark_data import DataFolder
from ccq_jax.evaluation.context import Request
from ccq_jax.train import train
from ccq_jax.validation import validation_batches

VARIANTS = ("gdn_decay", "gla_ccq", "attention")


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_in_pieces_are_those_of_the_whole_pass(variant, monkeypatch):
    monkeypatch.setattr(scoring, "PIECE", 16)
    model = models.cached(variant)
    text = np.asarray(models.tokens(2, 40))
    inputs, targets = text[:, :-1], text[:, 1:]
    segment_ids = np.repeat([[1, 2]], [15, 24], axis=1).repeat(2, axis=0)
    scores = scoring.score(model, inputs, targets, segment_ids)
    logits = model.logits(models.features(model, inputs, segment_ids).hidden)
    expected = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], 2)[..., 0]
    assert models.error(scores.loss, expected) < 1e-5
    np.testing.assert_array_equal(scores.hit, np.argmax(logits, -1) == targets)


def scores(loss=None, hit=None):
    return lambda *_: scoring.Scores(loss, hit)


def test_perplexity_is_of_the_mean_loss_of_a_bucket(monkeypatch):
    loss = np.log(np.array([[2.0, 2, 4, 4, 16], [2, 2, 1, 1, 1]]))
    monkeypatch.setattr(length, "score", scores(loss=loss))
    result = length.perplexity_by_position(None, [np.zeros((2, 6), np.int32)], bucket=2)
    assert result["positions"] == [2, 4, 5]
    assert result["documents"] == 2
    np.testing.assert_allclose(result["perplexity"], [2, 2, 4])
    np.testing.assert_allclose(result["standard_error"], np.log([1, 2, 4]), atol=1e-12)


def test_accuracy_counts_answers_alone(monkeypatch):
    batch = {
        "inputs": np.zeros((3, 4), np.int32),
        "targets": np.zeros((3, 4), np.int32),
        "segment_ids": np.zeros((3, 4), np.int32),
        "loss_mask": np.array([[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]], bool),
    }
    hit = np.array([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0]], bool)
    monkeypatch.setattr(recall, "score", scores(hit=hit))
    result = recall.recall_accuracy(None, [batch, batch])
    assert result["examples"] == 6
    assert result["token_accuracy"] == pytest.approx(3 / 5)
    assert result["example_accuracy"] == pytest.approx(1 / 3)


@pytest.fixture(scope="module", autouse=True)
def short_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "PIECE", 32)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config(folder, steps=4)
    config.eval.update({"contexts": (32, 64), "recall_lengths": (128, 160), "recall_examples": 8})
    config.data.niah.num_needles = 1
    train(config, folder / "run")
    config.mesh.data = 1  # one device; what it needs to compile is less
    return config, folder / "run"


def test_a_trained_run_is_evaluated_part_by_part(run):
    config, workdir = run
    evaluate(config, workdir)
    found = {
        part: json.loads((workdir / "eval" / f"{part}.json").read_text())
        for part in ("language", "length", "recall")
    }
    for result in found.values():
        assert result["step"] == 4
        assert result["versions"]["jax"] == jax.__version__
    assert list(found["length"]["results"]["contexts"]) == ["32", "64"]
    niah = found["recall"]["results"]["tasks"]["niah"]
    assert [row["examples"] for row in niah.values()] == [8, 8]
    for picture in ("length.png", "recall.png"):
        assert (workdir / "eval" / picture).read_bytes().startswith(b"\x89PNG")


def test_the_reported_loss_is_that_of_the_validation_data(run):
    config, workdir = run
    result = evaluate(config, workdir, suite=["language"])["language"]["results"]
    model = checkpoint.load_model(workdir).model
    nats, targets, size = 0.0, 0, 0
    for batch in validation_batches(config):
        scored = scoring.score(model, batch["inputs"], batch["targets"], batch["segment_ids"])
        nats += scored.loss[batch["loss_mask"]].sum(dtype=np.float64)
        targets += batch["loss_mask"].sum()
        size += (batch["loss_mask"] & (batch["targets"] < 256)).sum()
    assert result["targets"] == targets
    assert result["loss"] == pytest.approx(nats / targets, rel=1e-5)
    assert result["perplexity"] == pytest.approx(np.exp(nats / targets), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(nats / np.log(2) / size, rel=1e-5)


def test_lambda_can_be_fixed_for_a_test(run):
    config, workdir = run
    with config.unlocked():
        plain, fixed = config.copy_and_resolve_references(), config.copy_and_resolve_references()
    fixed.model.ccq.fixed_lambda = 4.0
    learned, four = (
        evaluate(c, workdir, suite=["language"])["language"]["results"]["loss"]
        for c in (plain, fixed)
    )
    assert learned != four


def test_geometry_and_sweep_read_the_tasks_that_fit_the_length(run, capsys):
    config, workdir = run
    found = evaluate(config, workdir, suite=["geometry", "sweep"])
    assert "niah: train.seq_len is too short: data.niah.num_needles=1" in capsys.readouterr().err
    assert list(found["geometry"]["results"]["tasks"]) == ["mqar"]
    rows = found["sweep"]["results"]
    assert list(rows) == ["own", "0", "0.5", "1", "2", "4"]
    assert len({row["loss"] for row in rows.values()}) == 6
    for part in ("geometry", "sweep"):
        picture = workdir / "eval" / f"{part}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("source", "tasks"), [("mqar", ["mqar"]), ("stdlib", ["mqar", "niah"]), ("niah", ["niah"])]
)
def test_geometry_is_of_what_a_run_was_trained_on(source, tasks):
    config = default()
    config.data.source = source
    assert list(curvature.find_any(Request(config, DataFolder(None))).tasks) == tasks


def test_what_cannot_be_evaluated_is_refused(run):
    config, workdir = run
    with pytest.raises(ValueError, match="'lenght'"):
        evaluate(config, workdir, suite=["lenght"])
    other = config.copy_and_resolve_references()
    other.model.hidden_size = 64
    with pytest.raises(ValueError, match=r"model\.hidden_size.* 32.* 64|.* 64.* 32"):
        evaluate(other, workdir)
    with pytest.raises(ValueError, match="step"):
        evaluate(config, workdir, step=3)
    short = config.copy_and_resolve_references()
    short.eval.recall_lengths = (16,)
    with pytest.raises(ValueError, match=r"eval\.recall_lengths has 16"):
        evaluate(short, workdir)


def test_text_is_streamed_from_a_run(run, capsys):
    _, workdir = run
    generate.main([f"--workdir={workdir}", "--prompt=def é", "--max_tokens=30", "--seed=3"])
    printed = capsys.readouterr().out
    assert printed.startswith("def é")
    generate.main([f"--workdir={workdir}", "--prompt=def é", "--max_tokens=30", "--seed=3"])
    assert capsys.readouterr().out == printed


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    assert "--top_p" in capsys.readouterr().out
    script = Path(__file__).parents[1] / "eval.py"
    assert ast.get_docstring(ast.parse(script.read_text())).count("--workdir") >= 2
