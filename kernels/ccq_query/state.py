"""The running statistics of the keys."""

from typing import NamedTuple

from jaxtyping import Array, Float


class CCQState(NamedTuple):
    """Sums over the keys seen so far, float32. With `decay`, each older token's weight has decayed.

    The keys' mean is key_sum / count and their covariance key_outer / count - mean mean^T.
    """

    count: Float[Array, "B H"]  # type: ignore[assignment]  # it hides tuple.count
    key_sum: Float[Array, "B H K"]
    key_outer: Float[Array, "B H K K"]
