"""How the next token is drawn."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature, top-k and top-p.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: only the k likeliest tokens are candidates; 0 keeps all.
      top_p: only the fewest likeliest tokens that together have this probability; 1 keeps all.

    Raises:
      ValueError: a field is out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    def __call__(self, logits: Float[Array, "B N"], key: Array) -> Int[Array, " B"]:
        """Draws a token for each row."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            smallest = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        if self.top_p < 1:
            ordered = -jnp.sort(-logits, axis=-1)
            p = jax.nn.softmax(ordered, axis=-1)
            # A token stays while those likelier than it have less than top_p: so the first stays.
            kept = jnp.cumsum(p, axis=-1) - p < self.top_p
            smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        return jax.random.categorical(key, logits, axis=-1)


UNCHANGED = Sampling()
"""The model's own distribution."""
