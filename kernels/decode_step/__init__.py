"""One token of generation: CCQ's statistics and query, the state's update, and the read, together."""

from typing import Any

from jaxtyping import Array, Float, Int

from kernels import dispatch, validation
from kernels.ccq_query.state import CCQMoments
from kernels.decode_step.scan import Statistics

NAME = "decode_step"


def decode_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    log_decay: Float[Array, "B HV"] | Float[Array, "B H K"] | Float[Array, "B H 1"] | None,
    state: Float[Array, "B HV K V"] | Float[Array, "L B HV K V"],
    *,
    layer: Int[Array, ""] | None = None,
    beta: Float[Array, "B HV"] | None = None,
    lam: Float[Array, "B H"] | None = None,
    moments: CCQMoments | None = None,
    ccq_k: Float[Array, "B H K"] | None = None,
    ccq_log_decay: Float[Array, "B H"] | None = None,
    centered: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B HV V"], Array, CCQMoments | None]:
    """What `ccq_query` and then a linear attention compute for one token, in one pass over the states.

    With beta the linear attention is `gated_delta_rule`, without it `gated_linear_attention`; log_decay, beta and
    scale are theirs. The cleaned query between the two stays float32.

    Generation is bound by memory: a token reads and writes each state once. On GPUs that is done in place where the
    caller's state is donated, and has no gradient. A model's loop over layers would cut each layer's state out of
    those of all layers and put it back, three times that traffic: hence `layer`.

    Args:
      q: queries.
      k: keys.
      v: values; with beta HV is a multiple of H, else HV = H.
      log_decay: natural log of the state's decay, <= 0: [B, HV] with beta; else [B, H, K], [B, H, 1] or None.
      state: the state before this token, float32.
      layer: given, state and moments are stacked over layers, with these first, and the one of this index is updated.
      beta: the delta rule's write strength.
      lam: strength of CCQ's contraction. None: the query is read with as it is.
      moments: CCQ's statistics before this token, given if lam is: `CCQState.moments`, or zeros.
      ccq_k: the key that the statistics count, if it is not k.
      ccq_log_decay: natural log of the statistics' decay; None is no decay.
      centered: as for `ccq_query`.
      scale: factor of the output, K ** -0.5 by default.
      implementation: "scan" or "triton"; None is the best that this platform has.

    Returns:
      The output in v's dtype, the state and the statistics after this token; None for the statistics without lam.

    Raises:
      TypeError: an argument of a wrong type or dtype. ValueError: a wrong shape or name, or one of lam and moments
      without the other. RuntimeError: the named implementation cannot run here.
    """
    sizes: dict[str, int] = {}
    arrays: list[tuple[str, Any, str]]
    arrays = [("q", q, "B H K"), ("k", k, "B H K"), ("v", v, "B HV V")]
    if beta is not None:
        arrays += [("log_decay", log_decay, "B HV"), ("beta", beta, "B HV")]
    elif log_decay is not None:
        one = getattr(log_decay, "shape", ())[-1:] == (1,)
        arrays += [("log_decay", log_decay, "B HV 1" if one else "B HV K")]
    stacked = "" if layer is None else "L "
    for name, value, dims in [*arrays, ("state", state, f"{stacked}B HV K V")]:
        validation.check_array(NAME, sizes, name, value, dims)
    heads, value_heads = sizes["H"], sizes["HV"]
    if value_heads % heads or (beta is None and value_heads != heads):
        wanted = "H" if beta is None else "a multiple of H"
        raise ValueError(f"{NAME}: v has HV={value_heads} heads; expected {wanted}, H={heads}")
    ccq_k = k if ccq_k is None else ccq_k
    statistics = _statistics(sizes, stacked, ccq_k, lam, ccq_log_decay, moments)
    out, state, moments = dispatch.select(NAME, implementation).forward(
        *(q, k, v, log_decay, beta, state.astype("float32"), statistics, layer),
        scale=validation.check_scale(NAME, scale, sizes["K"]),
        centered=centered,
    )
    return out.astype(v.dtype), state, moments


def _statistics(
    sizes: dict[str, int],
    stacked: str,
    k: Array,
    lam: Array | None,
    log_decay: Array | None,
    moments: CCQMoments | None,
) -> Statistics | None:
    if (lam is None) != (moments is None):
        given, absent = ("moments", "lam") if lam is None else ("lam", "moments")
        raise ValueError(f"{NAME}: {given} is given and {absent} is None; expected both or neither")
    if lam is None or moments is None:
        return None
    if not isinstance(moments, CCQMoments):
        raise TypeError(f"{NAME}: moments is {type(moments).__name__}; expected a CCQMoments")
    arrays = [("ccq_k", k, "B H K"), ("lam", lam, "B H")]
    if log_decay is not None:
        arrays += [("ccq_log_decay", log_decay, "B H")]
    for name, value, dims in zip(
        CCQMoments._fields, moments, ("B H", "B H K", "B H K K"), strict=True
    ):
        arrays += [(f"moments.{name}", value, stacked + dims)]
    for name, value, dims in arrays:
        validation.check_array(NAME, sizes, name, value, dims)
    moments = CCQMoments(*(x.astype("float32") for x in moments))
    return Statistics(k, lam, log_decay, moments)


__all__ = ["decode_step"]
