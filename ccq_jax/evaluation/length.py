"""Perplexity by position in documents longer than those of training."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int

from ccq_jax.evaluation.scoring import score
from ccq_jax.model import LanguageModel


def perplexity_by_position(
    model: LanguageModel, batches: Iterable[Int[np.ndarray, "B T+1"]], bucket: int
) -> dict:
    """The mean loss of every bucket of positions, over documents cut to one length.

    Args:
      model: the model.
      batches: the documents' tokens; all batches have the same T.
      bucket: positions that are averaged together.

    Returns:
      "documents"; "positions", where each bucket ends; "loss" in nats a token, and "perplexity",
      of each; with two documents or more, "standard_error" of each loss over the documents.
    """
    rows = []
    for tokens in batches:
        loss = score(model, tokens[:, :-1], tokens[:, 1:]).loss
        starts = np.arange(0, loss.shape[1], bucket)
        ends = np.append(starts[1:], loss.shape[1])
        rows.append(np.add.reduceat(loss.astype(np.float64), starts, axis=1) / (ends - starts))
    means = np.concatenate(rows)
    mean = means.mean(axis=0)
    result = {
        "documents": len(means),
        "positions": ends.tolist(),
        "loss": mean.tolist(),
        "perplexity": np.exp(mean).tolist(),
    }
    if len(means) > 1:
        result["standard_error"] = (means.std(axis=0, ddof=1) / len(means) ** 0.5).tolist()
    return result
