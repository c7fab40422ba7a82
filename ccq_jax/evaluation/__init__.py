"""Evaluation of a trained run: `evaluate(config, workdir)` writes results, a table and plots."""

from ccq_jax.evaluation.evaluate import PARTS, evaluate

__all__ = ["PARTS", "evaluate"]
