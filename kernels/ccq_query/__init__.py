"""Curvature-Conditioned Query: contracts a query along the running covariance of the keys, before it reads."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import dispatch, validation
from kernels.ccq_query.state import CCQMoments, CCQState

NAME = "ccq_query"


def ccq_query(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    lam: Float[Array, "B T H"],
    *,
    log_decay: Float[Array, "B T H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: CCQState | None = None,
    centered: bool = True,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T H K"], CCQState]:
    """The cleaned query of CCQ (arXiv 2606.01294), token by token and head by head:

        n = exp(log_decay_t) n + 1;   s = exp(log_decay_t) s + k_t;   C = exp(log_decay_t) C + k_t k_t^T
        Sigma_t = C / n - (s / n) (s / n)^T;   q_clean_t = q_t - lam_t Sigma_t q_t

    Where it holds one key, Sigma_t is 0 and q_clean_t = q_t.

    Args:
      q: queries.
      k: keys.
      lam: strength of the contraction; lam_t times Sigma_t's largest eigenvalue should stay below 2.
      log_decay: natural log of the statistics' decay, <= 0; -inf forgets everything exactly. None, the paper's form,
        is no decay. A positive value is not checked, as it is unknown under jit.
      segment_ids: the statistics start afresh at a token whose id differs from the token before in this call. The
        first token continues `initial_state`.
      initial_state: the statistics before the first token, zeros by default.
      centered: False drops the mean: Sigma_t = C / n.
      implementation: "scan", "xla", "triton" or "pallas"; None is the best that this platform has.
      chunk_size: tokens processed at once, a power of two from 16 to 256; None is the implementation's choice.

    Returns:
      q_clean in q's dtype, and the statistics after the last token in float32.

    Raises:
      TypeError: an argument of a wrong type or dtype. ValueError: a wrong shape, name or chunk size.
      RuntimeError: the named implementation cannot run here.
    """
    sizes: dict[str, int] = {}
    for name, value, dims in (("q", q, "B T H K"), ("k", k, "B T H K"), ("lam", lam, "B T H")):
        validation.check_array(NAME, sizes, name, value, dims)
    if log_decay is not None:
        validation.check_array(NAME, sizes, "log_decay", log_decay, "B T H")
    validation.check_chunk_size(NAME, chunk_size)
    if not isinstance(centered, bool):
        raise TypeError(f"{NAME}: centered is {centered!r}; expected True or False")
    only_segments = log_decay is None
    if segment_ids is not None:
        validation.check_segments(NAME, sizes, segment_ids)
        if log_decay is None:
            log_decay = jnp.zeros(lam.shape, jnp.float32)
        starts = validation.segment_starts(segment_ids)[..., None]
        log_decay = jnp.where(starts, -jnp.inf, log_decay)
    hints = {"only_segments": only_segments, "has_initial_state": initial_state is not None}
    initial_state = _checked_state(initial_state, sizes)
    inputs = (*dispatch.promote(q, k), lam, log_decay, initial_state)
    out, state = dispatch.call(
        NAME,
        implementation,
        inputs,
        hints,
        centered=centered,
        chunk_size=chunk_size,
    )
    return out.astype(q.dtype), state


def _checked_state(state: CCQState | None, sizes: dict[str, int]) -> CCQState:
    if state is None:
        batch, heads, width = (sizes[x] for x in ("B", "H", "K"))
        shape = batch, heads
        shapes = shape, (*shape, width), (*shape, width, width)
        return CCQState(*(jnp.zeros(x, jnp.float32) for x in shapes))
    if not isinstance(state, tuple) or len(state) != 3:
        raise TypeError(f"{NAME}: initial_state is {type(state).__name__}; expected a CCQState")
    for name, value, dims in zip(CCQState._fields, state, ("B H", "B H K", "B H K K"), strict=True):
        validation.check_array(NAME, sizes, f"initial_state.{name}", value, dims)
    return CCQState(*(x.astype(jnp.float32) for x in state))


__all__ = ["CCQMoments", "CCQState", "ccq_query"]
