"""The walk back over what later tokens ask of a key; `triton_kernels` has the notation."""

import triton
import triton.language as tl

from kernels.ccq_query.triton_kernels import last_start, load_origin, load_sum
from kernels.ccq_query.triton_states import store_symmetric, triangle
from kernels.triton_blocks import load_tile, load_vector, store_tile


@triton.jit
def adjoint_kernel(
    shares, g, factors, starts, h_terms, kappa_terms, means, states,
    d_count, d_sum, d_outer, part_counts, part_kappas, part_hs, part_fs, length,
    kappas, hs, fs, crossings,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    BT: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, FIRST_WALK: tl.constexpr, MIRRORED: tl.constexpr,
    HAS_DECAY: tl.constexpr, RESETS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One tile of F from a part's last token to its first, S a step; writes phi as chunk ends see it.

    F is symmetric: a tile stands for its mirror image too, which is written if MIRRORED. `shares`
    is a_t q_t as of the chunk's start. The tiles on the diagonal walk h, the first of them kappa,
    which is written with decays alone, and with it each tile's part of the sum of phi over all keys
    before the chunk, by their number. BLOCKS: in how many parts a chunk's terms come.

    FIRST_WALK: each of the PARTS of the sequence by itself, and writes the phi before its first
    token alone. The second walk starts a part with the phi of those after it.
    """
    tiles_n: tl.constexpr = (K + BT - 1) // BT
    tiles: tl.constexpr = tiles_n * (tiles_n + 1) // 2
    even: tl.constexpr = K % BT == 0
    steps: tl.constexpr = C // S
    stride: tl.constexpr = H * K
    sequence = (tl.program_id(0) // (tiles * PARTS)).to(tl.int64)
    part = tl.program_id(0) // tiles % PARTS
    tile = tl.program_id(0) % tiles
    tile_i, tile_j = triangle(tile, tiles_n)
    off_diagonal = tile_i != tile_j
    batch, head = sequence // H, sequence % H
    chunks = (length + C - 1) // C
    begin = part * chunks // PARTS
    end = (part + 1) * chunks // PARTS
    at = tl.arange(0, S)
    i = tile_i * BT + tl.arange(0, BT)
    j = tile_j * BT + tl.arange(0, BT)
    shares += batch * length * stride + head * K
    g += batch * length * stride + head * K
    factors += sequence * chunks * 2
    starts += batch * length
    h_terms += sequence * chunks * BLOCKS * K
    kappa_terms += sequence * chunks * BLOCKS
    means += sequence * (chunks + 1) * K
    states += sequence * (chunks + 1) * K * K
    entry = sequence * PARTS + part if FIRST_WALK else sequence * chunks
    kappas += entry * tiles_n + tile_i
    crossings += entry * tiles + tile
    hs += entry * K
    fs += entry * K * K

    center = means + chunks * K
    center_i = load_origin(center, i, K, CENTERED)
    center_j = load_origin(center, j, K, CENTERED)
    first = (tile == 0).to(tl.float32)
    f = tl.zeros([BT, BT], tl.float32)
    h = tl.zeros([BT], tl.float32)
    kappa = 0.0
    if not FIRST_WALK:
        d_outer += sequence * K * K
        f = load_tile(d_outer, i, K, K, j, K, even)
        f += tl.trans(load_tile(d_outer, j, K, K, i, K, even))
        if not off_diagonal:
            # About 0, moved to the center.
            moved = tl.zeros([BT], tl.float32)
            if CENTERED:
                for start in range(0, K, BT):
                    column = start + tl.arange(0, BT)
                    x = load_vector(center, column, K)
                    row = load_tile(d_outer, i, K, K, column, K, even)
                    moved += tl.sum(row * x[None, :], 1)
                    row = load_tile(d_outer, column, K, K, i, K, even)
                    moved += tl.sum(row * x[:, None], 0)
            linear = load_vector(d_sum + sequence * K, i, K)
            h = linear + moved
            kappa = tl.sum(center_i * (linear + 0.5 * moved), 0)
            kappa += first * tl.load(d_count + sequence)
    if PARTS > 1 and not FIRST_WALK:
        for back in range(0, PARTS - 1 - part):
            later = sequence * PARTS + PARTS - 1 - back
            carried = tl.load(part_counts + later * 2 + 1)
            f = carried * f + load_tile(part_fs + later * K * K, i, K, K, j, K, even)
            h = carried * h + load_vector(part_hs + later * K, i, K)
            kappa = carried * kappa + tl.load(part_kappas + later * tiles_n + tile_i)
    # A chunk's terms are loaded a chunk ahead.
    h_term = load_sum(h_terms + (end - 1) * BLOCKS * K, i, K, BLOCKS)
    for back in range(0, (end - begin) * steps):
        step = end * steps - 1 - back
        if back % steps == 0:
            chunk = (step // steps).to(tl.int64)
            if not FIRST_WALK:
                rounded = f.to(fs.dtype.element_ty)
                if MIRRORED:
                    store_symmetric(fs + chunk * K * K, rounded, i, j, off_diagonal, K, even)
                else:
                    store_tile(fs + chunk * K * K, rounded, i, K, K, j, K, even)
                if not off_diagonal:
                    tl.store(hs + chunk * K + i, h, mask=i < K)
                if HAS_DECAY:
                    seen = load_tile(states + chunk * K * K, i, K, K, j, K, even).to(tl.float32)
                    away_i = load_vector(means + chunk * K, i, K) - center_i
                    if CENTERED:
                        away_j = load_vector(means + chunk * K, j, K) - center_j
                        seen += away_i[:, None] * away_j[None, :]
                    crossing = tl.sum(tl.sum(f * seen, 1), 0)
                    if not off_diagonal:
                        crossing = 0.5 * crossing + kappa + tl.sum(h * away_i, 0)
                        tl.store(kappas + chunk * tiles_n, kappa)
                    tl.store(crossings + chunk * tiles, crossing)
            if HAS_DECAY or RESETS:
                if HAS_DECAY:
                    carried = tl.load(factors + chunk * 2)
                else:
                    carried = tl.where(last_start(starts, chunk * C, C, length) < 0, 1.0, 0.0)
                f *= carried
                h *= carried
                kappa *= carried
            h += h_term
            if HAS_DECAY:
                for block in tl.static_range(BLOCKS):
                    kappa += first * tl.load(kappa_terms + chunk * BLOCKS + block)
            before = tl.maximum(chunk - 1, 0)
            h_term = load_sum(h_terms + before * BLOCKS * K, i, K, BLOCKS)
        left = length - step * S
        token = (step * S).to(tl.int64) * stride
        g_i = load_tile(g + token, at, left, stride, i, K, even)
        q_j = load_tile(shares + token, at, left, stride, j, K, even)
        f = tl.dot(tl.trans(g_i), q_j, f, input_precision="ieee")
        q_i = load_tile(shares + token, at, left, stride, i, K, even)
        g_j = load_tile(g + token, at, left, stride, j, K, even)
        f = tl.dot(tl.trans(q_i), g_j, f, input_precision="ieee")
    if FIRST_WALK:
        store_tile(fs, f, i, K, K, j, K, even)
        if not off_diagonal:
            tl.store(hs + i, h, mask=i < K)
            tl.store(kappas, kappa)
