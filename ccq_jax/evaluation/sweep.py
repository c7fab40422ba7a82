"""The same examples under other contractions: lambda fixed at test time, on any checkpoint.

Only the read changes, so all values of lambda see the same weights, the same prompts and the same text:
differences are paired. It answers whether CCQ would help a model that was never trained with it, and
whether one trained with it leans on it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from ccq_jax.evaluation.geometry import Batch
from ccq_jax.evaluation.scoring import score
from ccq_jax.evaluation.statistics import Examples
from ccq_jax.model import LanguageModel

LAMBDAS = (0.0, 0.5, 1.0, 2.0, 4.0)


def with_fixed_lambda(model: LanguageModel, value: float) -> LanguageModel:
    """The same parameters, read with one lambda everywhere; 0 reads as the plain backbone does.

    Raises:
      ValueError: a mixer that CCQ does not attach to, or a negative value.
    """
    if value < 0:
        raise ValueError(f"lambda={value} must be 0 or more")
    config = ConfigDict(model.config.to_dict())
    config.ccq.fixed_lambda = float(value)
    graph, _ = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, nnx.state(model))


def read_with(
    model: LanguageModel,
    value: float | None,
    recall: Mapping[str, Sequence[Batch]],
    text: Sequence[Batch],
) -> dict[str, Examples]:
    """How a model reads with a fixed lambda, sequence by sequence.

    Args:
      model: any with a linear mixer.
      value: lambda, 0 or more; None: as the model itself reads.
      recall: batches of each recall task by name, the same at every lambda.
      text: batches of text.

    Returns:
      The share of answer tokens that are right, by task, and under "loss" the text's nats a target.
    """
    reader = model if value is None else with_fixed_lambda(model, value)
    found = {task: _rows(reader, batches, "hit") for task, batches in recall.items()}
    return found | {"loss": _rows(reader, text, "loss")}


def _rows(model: LanguageModel, batches: Sequence[Batch], what: str) -> Examples:
    """Means over each row's targets of a field of `Scores`."""
    found = []
    for batch in batches:
        scores = score(model, batch["inputs"], batch["targets"], batch["segment_ids"])
        found.append(_by_row(getattr(scores, what), batch["loss_mask"].astype(bool)))
    return Examples(*map(np.concatenate, zip(*found, strict=True)))


def _by_row(x: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of the rows that have targets, and their numbers of targets."""
    counts = mask.sum(axis=1).astype(np.float64)
    sums = np.where(mask, x, 0).sum(axis=1, dtype=np.float64)
    return sums[counts > 0] / counts[counts > 0], counts[counts > 0]
