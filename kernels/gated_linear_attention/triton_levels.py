"""Kernels for chunks in which some channel's decays are strong. Imports nothing but Triton.

e^{-G} would overflow there, so that the scores split into levels: halve the chunk, then its halves.
A query in a right half and a key in the left half of the same block meet at the block's middle m,

    e^{G_t - G_j} = e^{sum of g over (m, t]} e^{sum of g over (j, m]},

two factors at most 1 whatever the decay. On each level a token is only a query or only a key, so
one scaled matrix x serves as both sides of the product, and sums come from products with 0/1
matrices: nothing is subtracted, so nothing is lost.

Each block looks at GROUP chunks, of which few are strong or none.
"""

import triton
import triton.language as tl

from kernels.gated_linear_attention.triton_kernels import (
    crossing_states,
    finite,
    is_mild,
    ones_where,
    read_states,
    score_gradients,
    summed,
)
from kernels.triton_blocks import FORGET, dot, exp, load_tile, store_tile


@triton.jit
def level_masks(at, half_log):
    """Blocks of two halves: which tokens are queries, what they sum, and which pairs meet here."""
    apart = (at[:, None] ^ at[None, :]) >> half_log  # 0 in the same half, 1 in the same block
    query = (at >> half_log) % 2 == 1
    upto = at[None, :] <= at[:, None]
    return query, (apart == 0) & (upto == query[:, None]), apart == 1


@triton.jit
def strong_chunks(
    gains, first, entries, column, K: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr
):
    """1 for each of GROUP chunks that is not mild in these channels, else 0."""
    entry = first + tl.arange(0, GROUP)
    mask = (entry < entries)[:, None] & (column < K)[None, :]
    gain = tl.load(gains + entry[:, None] * K + column[None, :], mask=mask, other=1.0)
    return tl.where(is_mild(tl.trans(gain), dtype), 0, 1)


@triton.jit
def scores_kernel(
    q, k, g, gains, scores, decayed_q, decayed_k, length, entries,
    scale: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """What `triton_kernels.scores_kernel` leaves to do. C = 2 ** LEVELS; WIDTH: K and more."""
    dtype: tl.constexpr = q.dtype.element_ty
    even: tl.constexpr = K % BK == 0
    first = tl.program_id(0).to(tl.int64) * GROUP
    strong = strong_chunks(gains, first, entries, tl.arange(0, WIDTH), K, GROUP, dtype)
    chunks = (length + C - 1) // C
    at = tl.arange(0, C)
    causal = at[:, None] >= at[None, :]
    upto = ones_where(causal, dtype)
    after = ones_where(at[:, None] < at[None, :], dtype)
    for i in tl.range(0, GROUP, num_stages=1):
        if tl.sum(tl.where(tl.arange(0, GROUP) == i, strong, 0), 0) > 0:
            entry = first + i
            chunk, sequence = entry % chunks, entry // chunks
            left = length - chunk * C
            tokens = ((sequence // H * length + chunk * C) * H + sequence % H) * K
            total = tl.zeros([C, C], tl.float32)
            for start in tl.range(0, K, BK, num_stages=1):
                column = start + tl.arange(0, BK)
                q_tile = load_tile(q + tokens, at, left, H * K, column, K, even)
                k_tile = load_tile(k + tokens, at, left, H * K, column, K, even)
                decay = finite(load_tile(g + tokens, at, left, H * K, column, K, even))
                x_q = q_tile.to(tl.float32) * (exp(summed(upto, decay)) * scale)
                store_tile(decayed_q + tokens, x_q, at, left, H * K, column, K, even)
                x_k = k_tile.to(tl.float32) * exp(summed(after, decay))
                store_tile(decayed_k + tokens, x_k, at, left, H * K, column, K, even)
                diagonal = tl.sum(q_tile.to(tl.float32) * k_tile.to(tl.float32), 1)
                total += tl.where(at[:, None] == at[None, :], diagonal[:, None], 0.0)
                for level in tl.range(0, LEVELS, num_stages=1):  # unrolled, it would spill
                    query, select, pairs = level_masks(at, level)
                    factor = exp(summed(ones_where(select, dtype), decay))
                    x = (tl.where(query[:, None], q_tile, k_tile).to(tl.float32) * factor).to(dtype)
                    total += tl.where(pairs & causal, dot(x, tl.trans(x)), 0.0)
            square = entry * (C * C) + at[:, None] * C + at[None, :]
            tl.store(scores + square, (total * scale).to(dtype))


@triton.jit
def gradients_kernel(
    q, k, v, g, gains, d_o, states, d_states, d_q, d_k, d_g, length, entries,
    scale: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """What `triton_kernels.channel_gradients_kernel` leaves to do."""
    dtype: tl.constexpr = q.dtype.element_ty
    even_k: tl.constexpr = K % BK == 0
    tiles: tl.constexpr = (K + BK - 1) // BK
    column = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    first = (tl.program_id(0) // tiles).to(tl.int64) * GROUP
    strong = strong_chunks(gains, first, entries, column, K, GROUP, dtype)
    chunks = (length + C - 1) // C
    at = tl.arange(0, C)
    later = at[:, None] > at[None, :]
    for i in tl.range(0, GROUP, num_stages=1):
        if tl.sum(tl.where(tl.arange(0, GROUP) == i, strong, 0), 0) > 0:
            entry = first + i
            chunk, sequence = entry % chunks, entry // chunks
            left = length - chunk * C
            row = (sequence // H * length + chunk * C) * H + sequence % H
            tokens = row * K
            state = states + entry * (K * V)
            d_state = d_states + entry * (K * V)
            d_scores = score_gradients(d_o + row * V, v + row * V, at, left, H, V, BV) * scale
            decay = finite(load_tile(g + tokens, at, left, H * K, column, K, even_k))
            q_tile = load_tile(q + tokens, at, left, H * K, column, K, even_k)
            k_tile = load_tile(k + tokens, at, left, H * K, column, K, even_k)
            past_q = read_states(d_o + row * V, state, at, left, column, H, K, V, BV) * scale
            past_q *= exp(summed(ones_where(at[:, None] >= at[None, :], dtype), decay))
            from_past = past_q * q_tile.to(tl.float32)
            past_k = read_states(v + row * V, d_state, at, left, column, H, K, V, BV)
            past_k *= exp(summed(ones_where(at[:, None] < at[None, :], dtype), decay))
            diagonal = tl.sum(tl.where(at[:, None] == at[None, :], d_scores, 0.0), 1)[:, None]
            past_q += diagonal * k_tile.to(tl.float32)
            past_k += diagonal * q_tile.to(tl.float32)
            # Entry (t, j) belongs to the two tokens, whichever is the query.
            pair = tl.where(later, d_scores, tl.trans(d_scores)).to(dtype)
            for level in tl.range(0, LEVELS, num_stages=1):  # unrolled, it would spill
                query, select, pairs = level_masks(at, level)
                factor = exp(summed(ones_where(select, dtype), decay))
                q_tile = load_tile(q + tokens, at, left, H * K, column, K, even_k)
                k_tile = load_tile(k + tokens, at, left, H * K, column, K, even_k)
                x = (tl.where(query[:, None], q_tile, k_tile).to(tl.float32) * factor).to(dtype)
                d_x = dot(tl.where(pairs, pair, 0.0), x)
                flow = x.to(tl.float32) * d_x
                from_past += tl.where(query[:, None], flow, -flow)
                d_x *= factor
                past_q += tl.where(query[:, None], d_x, 0.0)
                past_k += tl.where(query[:, None], 0.0, d_x)
            store_tile(d_q + tokens, past_q, at, left, H * K, column, K, even_k)
            store_tile(d_k + tokens, past_k, at, left, H * K, column, K, even_k)
            d_decay = summed(ones_where(at[:, None] <= at[None, :], dtype), from_past)
            # Read again: registers are scarce above.
            raw = load_tile(g + tokens, at, left, H * K, column, K, even_k)
            k_tile = load_tile(k + tokens, at, left, H * K, column, K, even_k)
            past_k = read_states(v + row * V, d_state, at, left, column, H, K, V, BV)
            past_k *= exp(summed(ones_where(at[:, None] < at[None, :], dtype), finite(raw)))
            d_decay += summed(ones_where(later, dtype), past_k * k_tile.to(tl.float32))
            gain = tl.load(gains + entry * K + column, mask=column < K, other=1.0)
            d_decay += (crossing_states(state, d_state, column, K, V, BV) * gain)[None, :]
            d_decay = tl.where(raw < FORGET, 0.0, d_decay)
            store_tile(d_g + tokens, d_decay, at, left, H * K, column, K, even_k)
