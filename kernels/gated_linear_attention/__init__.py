"""Gated linear attention: a decaying sum of key-value outer products, with a decay per key channel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import dispatch, validation

NAME = "gated_linear_attention"


def gated_linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"] | Float[Array, "B T H 1"] | None = None,
    *,
    scale: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """GLA's recurrence (arXiv 2312.06635), token by token and head by head:

        S = diag(exp(log_decay_t)) S + k_t v_t^T;   o_t = scale S^T q_t

    Args:
      q: queries.
      k: keys.
      v: values.
      log_decay: natural log of the decay, <= 0; -inf forgets everything exactly. [B, T, H, 1] is one decay for all
        channels of a head, which costs less; None is no decay. A positive value grows the state without bound; its
        sign is not checked, as it is unknown under jit.
      scale: factor of the output, K ** -0.5 by default.
      segment_ids: the state starts afresh at a token whose id differs from the token before in this call. The first
        token continues `initial_state`.
      initial_state: the state before the first token, zeros by default.
      implementation: "scan", "xla", "triton" or "pallas"; None is the best that this platform has.
      chunk_size: tokens processed at once, a power of two from 16 to 256; None is the implementation's choice.

    Returns:
      The outputs in v's dtype, and the state after the last token in float32.

    Raises:
      TypeError: an argument of a wrong dtype. ValueError: a wrong shape, name or chunk size.
      RuntimeError: the named implementation cannot run here.
    """
    sizes: dict[str, int] = {}
    for name, value, dims in (("q", q, "B T H K"), ("k", k, "B T H K"), ("v", v, "B T H V")):
        validation.check_array(NAME, sizes, name, value, dims)
    if log_decay is not None:
        scalar = getattr(log_decay, "shape", ())[-1:] == (1,)
        dims = "B T H 1" if scalar else "B T H K"
        validation.check_array(NAME, sizes, "log_decay", log_decay, dims)
    scale = validation.check_scale(NAME, scale, sizes["K"])
    validation.check_chunk_size(NAME, chunk_size)
    if segment_ids is not None:
        validation.check_segments(NAME, sizes, segment_ids)
        starts = validation.segment_starts(segment_ids)[..., None, None]
        if log_decay is None:
            log_decay = jnp.zeros((*q.shape[:3], 1), jnp.float32)
        log_decay = jnp.where(starts, -jnp.inf, log_decay)
    if initial_state is None:
        shape = tuple(sizes[x] for x in ("B", "H", "K", "V"))
        initial_state = jnp.zeros(shape, jnp.float32)
    validation.check_array(NAME, sizes, "initial_state", initial_state, "B H K V")
    inputs = (*dispatch.promote(q, k, v), log_decay, initial_state.astype(jnp.float32))
    out, state = dispatch.call(NAME, implementation, inputs, scale=scale, chunk_size=chunk_size)
    return out.astype(v.dtype), state
