"""Linear-attention operators in JAX: array functions, with one implementation a platform behind each.

Dimensions: B batch, T tokens, H key heads, HV value heads, K key width, V value width, N chunks, C chunk length.
"""

from kernels.ccq_query import CCQMoments, CCQState, ccq_query
from kernels.decode_step import decode_step
from kernels.gated_delta_rule import gated_delta_rule
from kernels.gated_linear_attention import gated_linear_attention

__all__ = [
    "CCQMoments",
    "CCQState",
    "ccq_query",
    "decode_step",
    "gated_delta_rule",
    "gated_linear_attention",
]
