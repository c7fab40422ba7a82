"""Recall by length: multi-query associative recall, and a needle in repeated noise.

Answers are read off the model's likeliest next tokens at the answer's positions, given the true
tokens before each: one pass, no generation.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Shaped

from ccq_jax.evaluation.scoring import score
from ccq_jax.model import LanguageModel


def recall_accuracy(
    model: LanguageModel, batches: Iterable[dict[str, Shaped[np.ndarray, "B T"]]]
) -> dict[str, float]:
    """The share of answer tokens that the model has right, and of examples with all of them right.

    Args:
      model: the model.
      batches: "inputs", "targets", "segment_ids", and "loss_mask", true at the answers.
    """
    asked, right, solved = [], [], []
    for batch in batches:
        hit = score(model, batch["inputs"], batch["targets"], batch["segment_ids"]).hit
        mask = batch["loss_mask"].astype(bool)
        asked.append(mask.sum(axis=1))
        right.append((hit & mask).sum(axis=1))
        solved.append((hit | ~mask).all(axis=1))
    return {
        "examples": sum(map(len, solved)),
        "token_accuracy": float(np.concatenate(right).sum() / np.concatenate(asked).sum()),
        "example_accuracy": float(np.concatenate(solved).mean()),
    }
