"""What a query reads of a needle, the shares of keys in the crowd's directions, fixed lambdas."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx

from ccq_jax.cache import Segments
from ccq_jax.data import make_recall_batch, make_tokenizer
from ccq_jax.evaluation import geometry, sweep

BEFORE = jnp.array([29, 20])  # the reads of the two rows below


def first_layer(variant):
    model = models.cached(variant)
    graph, params = nnx.split(model.layers)
    return nnx.merge(graph, jax.tree.map(lambda x: x[0], params)).mixer


def written(mixer, seed=0):
    x = jax.random.normal(jax.random.key(seed), (2, 30, models.SMALL["hidden_size"]))
    return mixer.inputs(x, Segments())[0]


def needle():
    return (jnp.arange(30) >= 4)[None] & (jnp.arange(30) < jnp.array([[7], [5]]))


def test_the_needle_is_the_answer_and_the_token_before_it():
    inputs = np.array([9, 8, 3, 1, 2, 4, 1, 5, 9, 8])
    targets = np.array([8, 3, 1, 2, 4, 1, 5, 9, 1, 2])
    answers = np.arange(10) >= 8
    assert geometry.find_needle(inputs, targets, answers) == (8, 2, 5)
    with pytest.raises(ValueError, match="does not occur before"):
        geometry.find_needle(inputs, targets + 10, answers)


def test_the_last_of_several_questions_is_taken():
    tokenizer = make_tokenizer("bytes")
    batch = make_recall_batch("mqar", tokenizer=tokenizer, batch=4, length=64, seed=0)
    for row in zip(batch["inputs"], batch["targets"], batch["loss_mask"], strict=True):
        read, start, stop = geometry.find_needle(*row)
        assert row[2][read] and not row[2][read + 1 :].any()
        assert row[0][start] == row[0][read] and row[0][stop - 1] == row[1][read]


@pytest.mark.parametrize("variant", ["gdn_grouped_values", "gla", "attention"])
def test_reads_are_the_sum_of_the_needles_and_the_rests(variant):
    mixer = first_layer(variant)
    inputs = written(mixer)

    def read(where):
        values = jnp.where(where[..., None, None], inputs.v, 0)
        return mixer.recall(inputs._replace(v=values), Segments())[0]

    whole = mixer.recall(inputs, Segments())[0]
    assert models.error(read(needle()) + read(~needle()), whole) < 1e-5


def test_a_softmax_read_of_a_needle_is_its_weights_times_its_values():
    mixer = first_layer("attention")
    inputs = written(mixer)
    found = geometry._needle_to_rest(mixer, inputs, Segments(), needle(), BEFORE)
    q, k, v = (np.asarray(x, np.float64) for x in inputs[:3])
    for row, read in enumerate(np.asarray(BEFORE)):
        for head in range(q.shape[2]):
            scores = k[row, : read + 1, head] @ q[row, read, head] / np.sqrt(q.shape[-1])
            weighted = np.exp(scores)[:, None] * v[row, : read + 1, head]
            of_needle = np.asarray(needle())[row, : read + 1]
            parts = [np.sum(weighted[x].sum(0) ** 2) for x in (of_needle, ~of_needle)]
            expected = 10 * np.log10(parts[0] / parts[1])
            assert found[row, head] == pytest.approx(expected, abs=1e-3)


def test_shares_are_those_of_the_covariances_leading_eigenvectors():
    rng = np.random.default_rng(0)
    crowd = rng.standard_normal((2, 30, 2, 64)) * (np.arange(64) < 20) + 3 * (np.arange(64) == 1)
    crowd[:, 4:7] = rng.standard_normal((2, 3, 2, 64)) * (np.arange(64) >= 20)
    before = np.arange(30) <= np.asarray(BEFORE)[:, None]
    found = geometry._shares(jnp.asarray(crowd, jnp.float32), needle(), jnp.asarray(before))
    keys = crowd[1, :21, 0]
    values, vectors = np.linalg.eigh(np.cov(keys.T, bias=True))
    share = ((keys @ vectors[:, -16:]) ** 2).sum(1) / (keys**2).sum(1)
    of_needle = np.asarray(needle())[1, :21]
    np.testing.assert_allclose(found["spectrum"][1, 0], values[::-1], atol=1e-4)
    np.testing.assert_allclose(found["needle_share"][1, 0], share[of_needle].mean(), rtol=1e-3)
    np.testing.assert_allclose(found["other_share"][1, 0], share[~of_needle].mean(), rtol=1e-3)


def recall_batches():
    tokenizer = make_tokenizer("bytes")
    options = {"batch": 3, "length": 64, "seed": 0, "vocab_size": models.VOCAB}
    return [make_recall_batch("mqar", tokenizer=tokenizer, start=i, **options) for i in (0, 3)]


@pytest.mark.parametrize("variant", ["gdn_decay", "gdn", "attention"])
def test_geometry_describes_every_layer_and_head(variant):
    results, examples = geometry.measure(models.cached(variant), recall_batches())
    for name in ("snr", "plain_snr", "gain", "needle_share", "other_share"):
        assert np.shape(results[name]) == (2, 2) and np.isfinite(results[name]).all()
    assert np.shape(results["spectrum"]) == (2, 2, 8)
    assert results["examples"] == len(examples["mean_gain"].values) == 6
    assert results["mean_gain"] == pytest.approx(examples["mean_gain"].mean)
    assert ("lambda" in results) == (results["mean_gain"] != 0) == (variant == "gdn_decay")


def test_lambda_0_reads_as_the_backbone_and_others_do_not():
    model, tokens = models.cached("gdn"), models.tokens(1, 40)
    expected = models.features(model, tokens).hidden
    for value in (0.0, 1.0, 4.0):
        reader = sweep.with_fixed_lambda(model, value)
        error = models.error(models.features(reader, tokens).hidden, expected)
        assert (error == 0) == (value == 0)
    assert model.config.ccq.fixed_lambda == -1
    with pytest.raises(ValueError, match="lambda=-1 must be 0 or more"):
        sweep.with_fixed_lambda(model, -1)


def test_a_sweep_takes_the_place_of_the_learned_lambda():
    model, recall = models.cached("gdn_decay"), {"mqar": recall_batches()}
    own, none, other = (
        sweep.read_with(model, value, recall, recall["mqar"])["loss"] for value in (None, 0.0, 4.0)
    )
    assert len({own.mean, none.mean, other.mean}) == 3
    np.testing.assert_array_equal(own.weights, none.weights)
    plain = sweep.with_fixed_lambda(models.cached("gdn_decay"), 0.0)
    again = sweep.read_with(plain, None, recall, recall["mqar"])["loss"]
    np.testing.assert_array_equal(again.values, none.values)
