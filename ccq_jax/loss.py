"""Cross-entropy, token by token, without ever holding the logits of a whole batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

Batch = dict[str, Array]
Diagnostics = dict[str, Float[Array, "L H"]]


def token_losses(
    logits: Callable[[Float[Array, "B C D"]], Float[Array, "B C N"]],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    chunk: int = 0,
) -> Float[Array, "B T"]:
    """Minus the log-probability of every target, in nats.

    Args:
      logits: the model's head, from the final hidden state to float32 logits.
      hidden: the final hidden state.
      targets: the token to predict at every position.
      chunk: positions whose logits exist at a time, in the backward too: B * chunk * N numbers
        are held instead of B * T * N, and the head runs twice. 0 means all positions at once.
    """
    length = targets.shape[1]
    if chunk == 0 or chunk >= length:
        return _cross_entropy(logits(hidden), targets)
    count = -(-length // chunk)

    def cut(x: Array) -> Array:
        padding = [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, padding).reshape(x.shape[0], count, chunk, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    @jax.checkpoint
    def losses(_, piece):
        return None, _cross_entropy(logits(piece[0]), piece[1])

    _, pieces = jax.lax.scan(losses, None, (cut(hidden), cut(targets)))
    return jnp.moveaxis(pieces, 0, 1).reshape(-1, count * chunk)[:, :length]


def _cross_entropy(
    logits: Float[Array, "B T N"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def model_losses(
    graphdef: nnx.GraphDef,
    params: PyTree[Array],
    batch: Batch,
    chunk: int = 0,
    *,
    diagnostics: bool = False,
) -> tuple[Float[Array, "B T"], Diagnostics]:
    """The losses of a batch's targets, in nats, and the model's diagnostics if asked for.

    Positions whose `loss_mask` is 0 are computed like the others: the caller weights them.
    """
    model = nnx.merge(graphdef, params)
    features = model.features(batch["inputs"], batch["segment_ids"], diagnostics=diagnostics)
    losses = token_losses(model.logits, features.hidden, batch["targets"], chunk)
    return losses, features.diagnostics
