"""The loss on data that was not trained on."""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, PyTree
from ml_collections import ConfigDict

from ccq_jax.data import make_loader
from ccq_jax.loss import Batch, model_losses

LossSums = Callable[[PyTree[Array], Batch], Array]


def make_loss_sums(
    graphdef: nnx.GraphDef, bytes_per_token: Int[np.ndarray, " N"], chunk: int = 0
) -> LossSums:
    """A jitted function of parameters and a batch: its sums of nats, of targets, of their bytes."""
    sizes = jnp.asarray(bytes_per_token, jnp.float32)

    @jax.jit
    def loss_sums(params: PyTree[Array], batch: Batch) -> Array:
        losses, _ = model_losses(graphdef, params, batch, chunk)
        weights = batch["loss_mask"].astype(jnp.float32)
        sums = losses * weights, weights, sizes[batch["targets"]] * weights
        return jnp.stack([jnp.sum(x) for x in sums])

    return loss_sums


def validation_batches(
    config: ConfigDict, *, process_index: int = 0, process_count: int = 1
) -> list[dict[str, np.ndarray]]:
    """This process's part of `eval.batches` batches, spread evenly over the validation data."""
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.data.workers = 0  # a few batches are not worth other processes
        config.data.prefetch = 0
    loader = make_loader(
        config, split="validation", process_index=process_index, process_count=process_count
    )
    available = loader.num_batches or config.eval.batches
    count = min(config.eval.batches, available)
    batches = []
    for i in range(count):
        loader.set_state({"position": i * available // count})
        batches.append(next(loader))
    loader.close()
    return batches


def validation_loss(
    loss_sums: LossSums, params: PyTree[Array], batches: Iterable[Batch]
) -> dict[str, float]:
    """`loss` in nats a target and `bits_per_byte`, over all targets of all batches."""
    totals = [np.asarray(loss_sums(params, batch), np.float64) for batch in batches]
    nats, targets, size = np.sum(totals, axis=0)
    return {"loss": nats / targets, "bits_per_byte": nats / math.log(2) / max(size, 1.0)}


def unigram_loss(batches: Iterable[dict[str, np.ndarray]]) -> float:
    """Nats a target of the best model that ignores context: the entropy of the targets."""
    targets = np.concatenate([batch["targets"][batch["loss_mask"] > 0] for batch in batches])
    _, counts = np.unique(targets, return_counts=True)
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())
