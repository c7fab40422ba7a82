"""Gated delta rule: linear attention that replaces what a key held, with a scalar decay per value head."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import dispatch, validation

NAME = "gated_delta_rule"


def gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    log_decay: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Gated DeltaNet's recurrence (arXiv 2412.06464), token by token and head by head:

        S = exp(log_decay_t) S;   S = S + beta_t k_t (v_t - S^T k_t)^T;   o_t = scale S^T q_t

    Value head j reads key head j // (HV // H). It contracts, and stays finite, where beta_t |k_t|^2 <= 2: normalise k.

    Args:
      q: queries.
      k: keys.
      v: values; HV is a multiple of H.
      log_decay: natural log of the decay, <= 0; -inf forgets everything exactly. A positive value grows the
        state without bound; its sign is not checked, as it is unknown under jit.
      beta: write strength, usually in [0, 1].
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
    for name, value, dims in (
        ("q", q, "B T H K"),
        ("k", k, "B T H K"),
        ("v", v, "B T HV V"),
        ("log_decay", log_decay, "B T HV"),
        ("beta", beta, "B T HV"),
    ):
        validation.check_array(NAME, sizes, name, value, dims)
    if sizes["HV"] % sizes["H"]:
        raise ValueError(
            f"{NAME}: v has HV={sizes['HV']} value heads; expected a multiple of H={sizes['H']}, the heads of q and k"
        )
    scale = validation.check_scale(NAME, scale, sizes["K"])
    validation.check_chunk_size(NAME, chunk_size)
    if segment_ids is not None:
        validation.check_segments(NAME, sizes, segment_ids)
        starts = validation.segment_starts(segment_ids)[..., None]
        log_decay = jnp.where(starts, -jnp.inf, log_decay)
    if initial_state is None:
        shape = tuple(sizes[x] for x in ("B", "HV", "K", "V"))
        initial_state = jnp.zeros(shape, jnp.float32)
    validation.check_array(NAME, sizes, "initial_state", initial_state, "B HV K V")
    inputs = (*dispatch.promote(q, k, v), log_decay, beta, initial_state.astype(jnp.float32))
    out, state = dispatch.call(NAME, implementation, inputs, scale=scale, chunk_size=chunk_size)
    return out.astype(v.dtype), state
