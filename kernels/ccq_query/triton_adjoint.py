"""The walk back over what later tokens ask of a key; `triton_kernels` has the notation."""

import triton
import triton.language as tl

from kernels.ccq_query.triton_kernels import last_start, load_origin, load_sum
from kernels.triton_blocks import load_tile, load_vector, store_tile


@triton.jit
def move(f, h, kappa, from_i, from_j, to_i, to_j):
    """A tile's part of phi, about another origin."""
    moved = tl.sum(f * (to_j - from_j)[None, :], 1)
    return h + moved, kappa + (to_i - from_i) * (h + 0.5 * moved)


@triton.jit
def adjoint_kernel(
    shares, g, factors, starts, h_terms, kappa_terms, means, states,
    d_count, d_sum, d_outer, part_counts, part_kappas, part_hs, part_fs, length,
    kappas, hs, slopes, fs, crossings,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, FIRST_WALK: tl.constexpr,
    HAS_DECAY: tl.constexpr, RESETS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One tile of F from a part's last token to its first, S a step; writes phi as chunk ends see it.

    `shares` is a_t q_t as of the chunk's start. kappa and h are sums over tiles, and kappa over rows
    too: each tile writes what its F and its share made. `slopes` is h - F origin, the gradient at
    a key of 0; kappa and h are written with decays alone, and with them the sum of phi over all keys
    before the chunk, by their number. BLOCKS: in how many parts a chunk's terms come.

    FIRST_WALK: each of the PARTS of the sequence by itself, and writes phi before its first token
    alone. The second walk starts a part with the phi of those after it.
    """
    tiles_j: tl.constexpr = (K + BJ - 1) // BJ
    tiles: tl.constexpr = (K + BI - 1) // BI * tiles_j
    even_i: tl.constexpr = K % BI == 0
    even_j: tl.constexpr = K % BJ == 0
    steps: tl.constexpr = C // S
    stride: tl.constexpr = H * K
    sequence = (tl.program_id(0) // (tiles * PARTS)).to(tl.int64)
    part = tl.program_id(0) // tiles % PARTS
    tile = tl.program_id(0) % tiles
    tile_i = tile // tiles_j
    tile_j = tile % tiles_j
    batch, head = sequence // H, sequence % H
    chunks = (length + C - 1) // C
    begin = part * chunks // PARTS
    end = (part + 1) * chunks // PARTS
    at = tl.arange(0, S)
    i = tile_i * BI + tl.arange(0, BI)
    j = tile_j * BJ + tl.arange(0, BJ)
    shares += batch * length * stride + head * K
    g += batch * length * stride + head * K
    factors += sequence * chunks * 2
    starts += batch * length
    h_terms += sequence * chunks * BLOCKS * K
    kappa_terms += sequence * chunks * BLOCKS
    means += sequence * (chunks + 1) * K
    states += sequence * (chunks + 1) * K * K
    entry = sequence * PARTS + part if FIRST_WALK else sequence * chunks
    kappas += (entry * tiles_j + tile_j) * K
    crossings += (entry * tiles_j + tile_j) * K
    hs += (entry * tiles_j + tile_j) * K
    slopes += (entry * tiles_j + tile_j) * K
    fs += entry * K * K

    first_j = (tile_j == 0).to(tl.float32)
    first = tl.where(i == 0, first_j, 0.0)
    f = tl.zeros([BI, BJ], tl.float32)
    h = tl.zeros([BI], tl.float32)
    kappa = tl.zeros([BI], tl.float32)
    origin_i = tl.zeros([BI], tl.float32)
    origin_j = tl.zeros([BJ], tl.float32)
    if FIRST_WALK:
        origin_i = load_origin(means + end * K, i, K, CENTERED)
        origin_j = load_origin(means + end * K, j, K, CENTERED)
    else:
        d_outer += sequence * K * K
        f = load_tile(d_outer, i, K, K, j, K, even_j)
        f += tl.trans(load_tile(d_outer, j, K, K, i, K, even_i))
        h = load_vector(d_sum + sequence * K, i, K) * first_j
        kappa = tl.load(d_count + sequence) * first
    if PARTS > 1 and not FIRST_WALK:
        for back in range(0, PARTS - 1 - part):
            later = PARTS - 1 - back
            start_i = load_origin(means + later * chunks // PARTS * K, i, K, CENTERED)
            start_j = load_origin(means + later * chunks // PARTS * K, j, K, CENTERED)
            if CENTERED:
                h, kappa = move(f, h, kappa, origin_i, origin_j, start_i, start_j)
            origin_i, origin_j = start_i, start_j
            after = sequence * PARTS + later
            carried = tl.load(part_counts + after * 2 + 1)
            row = (after * tiles_j + tile_j) * K
            f = carried * f + load_tile(part_fs + after * K * K, i, K, K, j, K, even_j)
            h = carried * h + load_vector(part_hs + row, i, K)
            kappa = carried * kappa + load_vector(part_kappas + row, i, K)
    # What a chunk needs besides its tokens is loaded a chunk ahead.
    mean_i = load_origin(means + (end - 1) * K, i, K, CENTERED)
    mean_j = load_origin(means + (end - 1) * K, j, K, CENTERED)
    h_term = load_sum(h_terms + (end - 1) * BLOCKS * K, i, K, BLOCKS)
    for back in range(0, (end - begin) * steps):
        step = end * steps - 1 - back
        if back % steps == 0:
            chunk = (step // steps).to(tl.int64)
            if CENTERED:
                h, kappa = move(f, h, kappa, origin_i, origin_j, mean_i, mean_j)
                origin_i, origin_j = mean_i, mean_j
            if not FIRST_WALK:
                rounded = f.to(fs.dtype.element_ty)
                slope = h
                if CENTERED:
                    slope -= tl.sum(rounded.to(tl.float32) * origin_j[None, :], 1)
                row = chunk * tiles_j * K + i
                store_tile(fs + chunk * K * K, rounded, i, K, K, j, K, even_j)
                tl.store(slopes + row, slope, mask=i < K)
                if HAS_DECAY:
                    sigma = load_tile(states + chunk * K * K, i, K, K, j, K, even_j)
                    crossing = kappa + 0.5 * tl.sum(f * sigma.to(tl.float32), 1)
                    if not CENTERED:
                        crossing += h * load_vector(means + chunk * K, i, K)
                    tl.store(hs + row, h, mask=i < K)
                    tl.store(kappas + row, kappa, mask=i < K)
                    tl.store(crossings + row, crossing, mask=i < K)
            if HAS_DECAY or RESETS:
                if HAS_DECAY:
                    carried = tl.load(factors + chunk * 2)
                else:
                    carried = tl.where(last_start(starts, chunk * C, C, length) < 0, 1.0, 0.0)
                f *= carried
                h *= carried
                kappa *= carried
            h += first_j * h_term
            if HAS_DECAY:
                for block in tl.static_range(BLOCKS):
                    kappa += first * tl.load(kappa_terms + chunk * BLOCKS + block)
            before = tl.maximum(chunk - 1, 0)
            mean_i = load_origin(means + before * K, i, K, CENTERED)
            mean_j = load_origin(means + before * K, j, K, CENTERED)
            h_term = load_sum(h_terms + before * BLOCKS * K, i, K, BLOCKS)
        left = length - step * S
        token = (step * S).to(tl.int64) * stride
        g_i = load_tile(g + token, at, left, stride, i, K, even_i)
        q_j = load_tile(shares + token, at, left, stride, j, K, even_j)
        f = tl.dot(tl.trans(g_i), q_j, f, input_precision="ieee")
        q_i = load_tile(shares + token, at, left, stride, i, K, even_i)
        g_j = load_tile(g + token, at, left, stride, j, K, even_j)
        f = tl.dot(tl.trans(q_i), g_j, f, input_precision="ieee")
    if FIRST_WALK:
        store_tile(fs, f, i, K, K, j, K, even_j)
        tl.store(hs + i, h, mask=i < K)
        tl.store(kappas + i, kappa, mask=i < K)
