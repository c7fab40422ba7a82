"""Curvature-Conditioned Query (CCQ, arXiv 2606.01294) for linear attention, in JAX and Flax NNX."""
