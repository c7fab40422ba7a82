"""Recall by length: multi-query associative recall, and a needle in repeated noise.

Answers are read off the model's likeliest next tokens at the answer's positions, given the true
tokens before each: one pass, no generation.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from ccq_jax.evaluation.scoring import score
from ccq_jax.model import LanguageModel

Batches = Iterable[dict[str, Shaped[np.ndarray, "B T"]]]


class Answers(NamedTuple):
    """Of each example: tokens of answers that were asked for, and those that the model has right."""

    asked: Int[np.ndarray, " n"]
    right: Int[np.ndarray, " n"]


def read_answers(model: LanguageModel, batches: Batches) -> Answers:
    """Counts right answers.

    Args:
      model: the model.
      batches: "inputs", "targets", "segment_ids", and "loss_mask", true at the answers.
    """
    asked, right = [], []
    for batch in batches:
        hit = score(model, batch["inputs"], batch["targets"], batch["segment_ids"]).hit
        mask = batch["loss_mask"].astype(bool)
        asked.append(mask.sum(axis=1))
        right.append((hit & mask).sum(axis=1))
    return Answers(np.concatenate(asked), np.concatenate(right))


def recall_accuracy(model: LanguageModel, batches: Batches) -> dict[str, float]:
    """The share of answer tokens that the model has right, and of examples with all of them right."""
    return accuracy(read_answers(model, batches))


def accuracy(answers: Answers) -> dict[str, float]:
    """As `recall_accuracy`, from the counts."""
    asked, right = answers
    return {
        "examples": len(asked),
        "token_accuracy": float(right.sum() / asked.sum()),
        "example_accuracy": float((right == asked).mean()),
    }
