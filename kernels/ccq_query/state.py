"""The running statistics of the keys: as sums, and as moments."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class CCQState(NamedTuple):
    """Sums over the keys seen so far, float32. With `decay`, each older token's weight has decayed.

    The keys' mean is key_sum / count and their covariance key_outer / count - mean mean^T.
    """

    count: Float[Array, "B H"]  # type: ignore[assignment]  # it hides tuple.count
    key_sum: Float[Array, "B H K"]
    key_outer: Float[Array, "B H K K"]

    def moments(self, centered: bool = True) -> "CCQMoments":
        """The same statistics, normalised; zeros where no key was seen."""
        count, total, outer = self
        n = jnp.where(count > 0, count, 1)
        mean, covariance = total / n[..., None], outer / n[..., None, None]
        if centered:
            covariance = covariance - _outer(mean)
        return CCQMoments(count, mean, covariance)


class CCQMoments(NamedTuple):
    """Of the keys seen so far, float32: what a token-by-token update carries.

    Of sums, key_outer / count - mean mean^T loses its digits when keys share a large component, and
    each token's rounding adds to it.
    """

    count: Float[Array, "B H"]  # type: ignore[assignment]  # it hides tuple.count
    mean: Float[Array, "B H K"]
    covariance: Float[Array, "B H K K"]  # Sigma; the second moment about 0 if not centred

    def sums(self, centered: bool = True) -> CCQState:
        """The same statistics, as the operators pass them on."""
        count, mean, outer = self
        if centered:
            outer = outer + _outer(mean)
        return CCQState(count, count[..., None] * mean, count[..., None, None] * outer)


def _outer(x: Float[Array, "*N K"]) -> Float[Array, "*N K K"]:
    return x[..., :, None] * x[..., None, :]
