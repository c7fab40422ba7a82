"""Evaluation of a checkpoint: `evaluate(config, workdir)` writes results, tables and plots."""

from ccq_jax.evaluation.evaluate import evaluate
from ccq_jax.evaluation.parts import PARTS, SUITES

__all__ = ["PARTS", "SUITES", "evaluate"]
