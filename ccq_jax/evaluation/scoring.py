"""Loss and hit of every next token, read in pieces with the state carried between them.

Nothing slides and nothing is cut off, so a document of a million tokens takes the memory of one
piece (softmax attention still keeps all its keys and values).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from ccq_jax.loss import token_losses
from ccq_jax.model import LanguageModel

PIECE = 1024
"""Tokens that are read at once."""


class Scores(NamedTuple):
    """What a model makes of each target.

    Attributes:
      loss: minus its log-probability, in nats.
      hit: whether it is the likeliest token.
    """

    loss: Float[np.ndarray, "B T"]
    hit: Bool[np.ndarray, "B T"]


def score(
    model: LanguageModel,
    inputs: Int[np.ndarray, "B T"],
    targets: Int[np.ndarray, "B T"],
    segment_ids: Int[np.ndarray, "B T"] | None = None,
) -> Scores:
    """Scores every target, given all inputs up to its position in its segment."""
    graph, params = nnx.split(model)
    batch, length = inputs.shape
    if segment_ids is None:
        segment_ids = np.zeros_like(inputs)
    # All pieces have one shape, and lengths share few, so that few programs are compiled. What
    # fills up the last piece comes after everything that counts.
    piece = min(PIECE, 1 << (length - 1).bit_length())
    filled = -(-length // piece) * piece
    rows = [np.pad(x, ((0, 0), (0, filled - length))) for x in (inputs, targets, segment_ids)]
    cache = model.init_cache(batch, filled)
    pieces = []
    for start in range(0, filled, piece):
        part = [x[:, start : start + piece] for x in rows]
        scores, cache = _read(graph, params, *part, cache)
        pieces.append(scores)
    loss, hit = (np.concatenate(x, axis=1) for x in zip(*jax.device_get(pieces), strict=True))
    return Scores(loss[:, :length], hit[:, :length])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=5)
def _read(
    graph: nnx.GraphDef,
    params: PyTree,
    inputs: Int[Array, "B n"],
    targets: Int[Array, "B n"],
    segment_ids: Int[Array, "B n"],
    cache: PyTree,
) -> tuple[tuple[Array, Array], PyTree]:
    model = nnx.merge(graph, params)
    features = model.features(inputs, segment_ids, cache)
    logits = model.logits(features.hidden)
    loss = token_losses(lambda x: x, logits, targets)
    return (loss, jnp.argmax(logits, axis=-1) == targets), features.cache
