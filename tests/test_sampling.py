import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccq_jax.sampling import Sampling

LOGITS = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]]))


def drawn(sampling: Sampling, count: int = 4000) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(jax.vmap(lambda key: sampling(LOGITS, key))(keys))


@pytest.mark.parametrize(
    ("sampling", "first", "second"),
    [
        (Sampling(), [0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]),
        (Sampling(temperature=0.5), np.array([1, 16, 4, 9]) / 30, np.array([49, 1, 1, 1]) / 52),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7], None),
        (Sampling(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9], None),
        (Sampling(top_p=0.6), None, [1, 0, 0, 0]),
        (Sampling(temperature=0), [0, 1, 0, 0], [1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_from_the_distribution_asked_for(sampling, first, second):
    tokens = drawn(sampling)
    for row, expected in ((0, first), (1, second)):
        if expected is not None:
            shares = np.bincount(tokens[:, row], minlength=4) / len(tokens)
            np.testing.assert_allclose(shares, expected, atol=0.03)
            assert (shares[np.equal(expected, 0)] == 0).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0)],
)
def test_sampling_that_cannot_be_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        Sampling(**{field: value})
