"""Triton kernels of the fused backend. `fused.py` builds their tables and launches them.

A step is three launches over all tensors of a kind (one kind: one pair of dtypes):

1. `statistics`: reads G. Sums of squares of each row (over a strip of columns) and of each column
   (over a slab of rows), and whether anything is not finite.
2. `finalize`: adds the partial sums, equations (1) to (5), and resets what the third launch counts.
3. `update`: a persistent kernel. It takes tiles in a given order; a tile comes up twice, first for
   the row maxima of |U| (6) (7), later for the new weights (4) (8) (9). The order puts the second
   visit soon after the first, while G is still in the L2 cache, but late enough that the tensor's
   maxima are complete when it comes.

Sums are taken in two stages in a fixed order, maxima by integer atomics on the bits of floats that
are not negative: results repeat bit for bit. A ticket is only ever waited for by later tickets, so
the waiting cannot deadlock, whatever number of programs runs at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Tiles of (BLOCK_ROWS, BLOCK_COLS), slabs of SLAB_ROWS rows, CHUNK rows or columns for one program
# of `finalize`. In the interpreter they are small, so that small tensors have several of each.
INTERPRETED = triton.knobs.runtime.interpret
BLOCK_ROWS, BLOCK_COLS, SLAB_ROWS, CHUNK = (4, 32, 8, 16) if INTERPRETED else (16, 256, 256, 256)


def constants(count: int) -> list[tl.constexpr]:
    """0, 1, 2, … as Triton wants its global constants."""
    return [tl.constexpr(i) for i in range(count)]


# Columns of the int64 table, one row for each matrix: a tensor, one matrix of a batch, or a piece
# of a vector. `pointers` is a table of its own, (W, G) of each tensor, since gradients move.
POINTERS = tl.constexpr(2)
(
    ROW_VAR, COL_VAR, STEP, LR,  # addresses
    ROWS, COLS, NUMEL,  # of the matrix, and elements of the whole tensor
    START,  # position of the first element in the tensor
    FLAGS, GROUP,
    OWNER, OWNER_TILE, OWNER_TILES,  # the tensor, its first tile, its number of tiles
    FIRST_TILE, FIRST_SLAB, SLABS, STRIPS,
    ROW_SPACE, ROW_PART, COL_PART, ROW_CHUNK, ROW_CHUNKS,  # places in the work space
    TABLE,
) = constants(23)  # fmt: skip

# Columns of the float32 table of settings, one row for each group.
(
    BETA2_DECAY, EPS1, EPS2, FLOOR, VARIANCE_FLOOR, D, WEIGHT_DECAY, GAMMA, ONE_MINUS_GAMMA,
    MIN_LR, COUNT_EPS, OFFSET, KAPPA_LOW, KAPPA_HIGH, CLIP, BOOST,
    SETTINGS,
) = constants(17)  # fmt: skip

# Columns of the float32 scalars of a tensor.
ALPHA, KEEP, TIME, SCALE, SCALARS = constants(5)

# Slots of the int32 status: a non-finite gradient seen, skipped steps, skipped in a row.
SEEN, SKIPPED, IN_A_ROW, STATUS = constants(4)

# Kinds of a task of `finalize`.
OF_ROWS, OF_COLS, OF_TENSOR, OF_EMPTY = constants(4)

# Bits of FLAGS.
(
    DENSE,  # a full variance in COL_VAR instead of factors
    VECTOR,  # the whole tensor is one row
    SIGN,  # direction sign(U) * row maximum, else U itself
    MAXIMIZE,
    MAX_NORM,  # R / max R in (6), R / mean R for Adafactor
    BOOSTED,  # version 0.3's rule for a single value
    ADAFACTOR,
    RAMP,  # version 0.2's step size
    DECAY_BY_LR,
    ABSOLUTE,  # Adafactor's step size is lr itself
    STOCHASTIC,  # rounding
) = (tl.constexpr(1 << bit) for bit in range(11))
TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32


@triton.jit
def places_of(pointer, rows, cols, m, n, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers and mask of a tile.

    ALIGNED: rows start on 16 bytes and have whole pieces of 8 elements. The shifts then change
    nothing, but they let the compiler see it and move 16 bytes at a time.
    """
    if ALIGNED:
        pointer = (pointer >> 4) << 4
        n = (n >> 3) << 3
        base = tl.multiple_of(pointer.to(tl.pointer_type(KIND)), 16)
    else:
        base = pointer.to(tl.pointer_type(KIND))
    places = base + (rows.to(tl.int64)[:, None] * n + cols[None, :])
    return places, (rows < m)[:, None] & (cols < n.to(tl.int32))[None, :]


@triton.jit
def load_tile(pointer, rows, cols, m, n, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """A tile as float32, 0 outside the matrix."""
    places, inside = places_of(pointer, rows, cols, m, n, KIND, ALIGNED)
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(pointer, tile, rows, cols, m, n, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Write a tile that already has its final values."""
    places, inside = places_of(pointer, rows, cols, m, n, KIND, ALIGNED)
    tl.store(places, tile.to(KIND), mask=inside)


@triton.jit
def address(pointers, entry, column: tl.constexpr, KIND: tl.constexpr):
    """Where a matrix of W (column 0) or of G (column 1) begins."""
    bytes_: tl.constexpr = KIND.primitive_bitwidth // 8
    base = tl.load(pointers + tl.load(entry + OWNER) * POINTERS + column)
    return base + tl.load(entry + START) * bytes_


@triton.jit
def mix(x):
    """A bijection of 32 bits; `rounding.mix` in unsigned arithmetic."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def rounded(w, rows, cols, n, start, key, KIND: tl.constexpr):
    """Stochastic rounding of a tile, bit for bit as `rounding.rounded`."""
    position = start + rows.to(tl.int64)[:, None] * n + cols[None, :]
    high = (position >> 32).to(tl.uint32)
    word = position.to(tl.uint32) ^ (high * 0x9E3779B9)
    noise = mix(word + key)
    bits = w.to(tl.uint32, bitcast=True)
    if KIND == tl.bfloat16:
        low = ((bits + (noise >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        normal = ((bits + (noise >> 19)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        share = (noise >> 9).to(tl.float32) * 1.1920928955078125e-07  # 2^-23
        tiny = tl.floor(w * 16777216.0 + share) * 5.9604644775390625e-08  # spacing 2^-24
        low = tl.where(tl.abs(w) < 6.103515625e-05, tiny, normal)
    return tl.where(tl.abs(w) < float("inf"), low, w)


@triton.jit
def statistics(
    pointers,
    table,
    slab_matrix,
    row_part,
    col_part,
    row_max_var,
    row_max,
    bad,
    status,
    grad_scale,
    CHECK: tl.constexpr,
    SCALED: tl.constexpr,
    G_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
    SLAB: tl.constexpr,
):
    """Partial sums of G^2 over one slab of rows and one strip of columns."""
    slab = tl.program_id(0)
    k = tl.load(slab_matrix + slab).to(tl.int64)
    entry = table + k * TABLE
    m = tl.load(entry + ROWS)
    n = tl.load(entry + COLS)
    strips = tl.load(entry + STRIPS)
    local = slab - tl.load(entry + FIRST_SLAB)
    strip = local % strips
    first_row = local // strips * SLAB
    cols = (strip * COLS_).to(tl.int32) + tl.arange(0, COLS_)
    pointer = address(pointers, entry, 1, G_KIND)
    part = row_part + tl.load(entry + ROW_PART) + strip * m
    space = row_max + tl.load(entry + ROW_SPACE)
    dense = (tl.load(entry + FLAGS) & DENSE) != 0
    scale = 1.0
    if SCALED:
        scale = 1.0 / tl.load(grad_scale)
    if local == 0:
        tl.store(row_max_var + k, 0)  # `finalize` takes maxima into it

    total = tl.zeros([ROWS_, COLS_], tl.float32)
    last_row = tl.minimum(first_row + SLAB, m)
    for row in range(first_row, last_row, ROWS_):
        rows = (row + tl.arange(0, ROWS_)).to(tl.int32)
        g = load_tile(pointer, rows, cols, m, n, G_KIND, ALIGNED) * scale
        square = g * g
        total += square
        if strip == 0:
            tl.store(space + rows, 0, mask=rows < m)  # `update` takes maxima into it
        if not dense:
            tl.store(part + rows, tl.sum(square, axis=1), mask=rows < m)
    by_column = tl.sum(total, axis=0)
    if not dense:
        place = col_part + tl.load(entry + COL_PART) + (local // strips) * n
        tl.store(place + cols, by_column, mask=cols < n)
    if CHECK:
        everything = tl.sum(by_column, axis=0)
        finite = everything < float("inf")  # false for NaN too
        if finite == 0:
            tl.store(status + SEEN, 1)
            tl.store(bad + tl.load(entry + OWNER), 1)


@triton.jit
def weight_squares(
    pointers,
    table,
    tile_matrix,
    squares,
    first_tile,
    P_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
):
    """Partial sums of W^2, one for each tile; needed only when somebody else wrote W."""
    tile = first_tile + tl.program_id(0)
    k = tl.load(tile_matrix + tile).to(tl.int64)
    entry = table + k * TABLE
    m = tl.load(entry + ROWS)
    n = tl.load(entry + COLS)
    strips = tl.load(entry + STRIPS)
    local = tile - tl.load(entry + FIRST_TILE)
    rows = (local // strips * ROWS_).to(tl.int32) + tl.arange(0, ROWS_)
    cols = (local % strips * COLS_).to(tl.int32) + tl.arange(0, COLS_)
    pointer = address(pointers, entry, 0, P_KIND)
    w = load_tile(pointer, rows, cols, m, n, P_KIND, ALIGNED)
    tl.store(squares + tile, tl.sum(tl.sum(w * w, axis=1), axis=0))


@triton.jit
def statistic_weight(t, setting):
    """Equation (1)."""
    power = tl.exp2(tl.load(setting + BETA2_DECAY) * tl.log2(t))
    power = tl.maximum(power, tl.load(setting + KAPPA_LOW))
    return tl.minimum(power, tl.load(setting + KAPPA_HIGH))


@triton.jit
def tensor_scalars(entry, setting, squares, scalars):
    """Equations (2) (3) and the factor of (4) for one tensor."""
    flags = tl.load(entry + FLAGS)
    first = tl.load(entry + OWNER_TILE)
    count = tl.load(entry + OWNER_TILES)
    total = tl.zeros([1024], tl.float32)
    for i in range(0, count, 1024):
        at = i + tl.arange(0, 1024)
        total += tl.load(squares + first + at, mask=at < count, other=0.0)
    mean = tl.sum(total, axis=0) / tl.load(entry + NUMEL).to(tl.float32)
    size = tl.maximum(tl.sqrt_rn(mean), tl.load(setting + EPS2))
    t = tl.load(tl.load(entry + STEP).to(tl.pointer_type(tl.float32))) + 1.0
    lr = tl.load(tl.load(entry + LR).to(tl.pointer_type(tl.float32)))
    root = 1.0 / tl.sqrt_rn(t)
    rho = tl.maximum(tl.minimum(lr, root), tl.load(setting + MIN_LR))  # (2)
    alpha = tl.where(lr > 0.0, rho * size, 0.0)  # (3)
    alpha = tl.where((flags & RAMP) != 0, tl.minimum(size * tl.minimum(1e-6 * t, root), lr), alpha)
    alpha = tl.where((flags & ABSOLUTE) != 0, lr, alpha)
    decay = tl.where((flags & DECAY_BY_LR) != 0, lr, alpha)
    place = scalars + tl.load(entry + OWNER) * SCALARS
    tl.store(place + ALPHA, alpha)
    tl.store(place + KEEP, 1.0 - decay * tl.load(setting + WEIGHT_DECAY))  # (4)
    tl.store(place + TIME, t)


@triton.jit
def finalize(
    table,
    settings,
    tasks,
    row_part,
    col_part,
    row_max_var,
    row_sum_var,
    squares,
    scalars,
    update_max,
    done,
    ready,
    bad,
    status,
    found_inf,
    SCALED: tl.constexpr,
    CHUNK_: tl.constexpr,
):
    """Equations (1) to (5) for a chunk of rows (kind 0), of columns (1), or for a tensor (2)."""
    task = tl.program_id(0)
    k = tl.load(tasks + task * 3).to(tl.int64)
    kind = tl.load(tasks + task * 3 + 1)
    chunk = tl.load(tasks + task * 3 + 2)
    entry = table + k * TABLE
    setting = settings + tl.load(entry + GROUP) * SETTINGS
    skip = tl.load(status + SEEN)
    if SCALED:
        skip += (tl.load(found_inf) != 0.0).to(tl.int32)
    at = chunk * CHUNK_ + tl.arange(0, CHUNK_)
    m = tl.load(entry + ROWS)
    n = tl.load(entry + COLS)
    if kind == OF_EMPTY:
        place = tl.load(entry + STEP).to(tl.pointer_type(tl.float32))
        tl.store(place, tl.load(place) + tl.where(skip == 0, 1.0, 0.0))
    elif kind == OF_TENSOR:
        owner = tl.load(entry + OWNER)
        tl.store(update_max + owner, 0)
        tl.store(done + owner, 0)
        tl.store(ready + owner, 0)
        if tl.load(status + SEEN) == 0:
            tl.store(bad + owner, 0)
        tensor_scalars(entry, setting, squares, scalars)
    else:
        t = tl.load(tl.load(entry + STEP).to(tl.pointer_type(tl.float32))) + 1.0
        kappa = statistic_weight(t, setting)  # (1)
        total = tl.zeros([16, CHUNK_], tl.float32)
        several = tl.arange(0, 16)
        if kind == OF_ROWS:
            inside = at < m
            part = row_part + tl.load(entry + ROW_PART)
            parts = tl.load(entry + STRIPS)
            length, count = m, n
            place = tl.load(entry + ROW_VAR).to(tl.pointer_type(tl.float32))
        else:
            inside = at < n
            part = col_part + tl.load(entry + COL_PART)
            parts = tl.load(entry + SLABS)
            length, count = n, m
            place = tl.load(entry + COL_VAR).to(tl.pointer_type(tl.float32))
        for i in range(0, parts, 16):
            which = i + several
            where = which[:, None] * length + at[None, :]
            total += tl.load(
                part + where, mask=(which < parts)[:, None] & inside[None, :], other=0.0
            )
        mean = tl.sum(total, axis=0) / (count.to(tl.float32) + tl.load(setting + COUNT_EPS))
        mean += tl.load(setting + OFFSET)
        old = tl.load(place + at, mask=inside, other=0.0)
        new = tl.where(kappa == 1.0, mean, old + kappa * (mean - old))  # (5)
        if skip == 0:
            tl.store(place + at, new, mask=inside)
        if kind == OF_ROWS:
            new = tl.where(inside, new, 0.0)
            largest = tl.max(new, axis=0)
            tl.atomic_max(row_max_var + k, largest.to(tl.int32, bitcast=True), sem="relaxed")
            tl.store(row_sum_var + tl.load(entry + ROW_CHUNK) + chunk, tl.sum(new, axis=0))


@triton.jit
def row_scale(entry, setting, k, row_max_var, row_sum_var, flags):
    """What R is divided by in (6): max R, or mean R for Adafactor, or nothing."""
    largest = tl.load(row_max_var + k).to(tl.float32, bitcast=True)
    scale = tl.maximum(largest, tl.load(setting + FLOOR))
    if (flags & ADAFACTOR) != 0:
        first = tl.load(entry + ROW_CHUNK)
        count = tl.load(entry + ROW_CHUNKS)
        part = tl.zeros([256], tl.float32)
        for i in range(0, count, 256):
            at = i + tl.arange(0, 256)
            part += tl.load(row_sum_var + first + at, mask=at < count, other=0.0)
        total = tl.sum(part, axis=0)
        scale = tl.maximum(total / tl.load(entry + ROWS).to(tl.float32), TINY)
    return tl.where((flags & MAX_NORM) != 0, scale, 1.0)


@triton.jit
def dense_variance(entry, setting, g, rows, cols, m, n, ALIGNED: tl.constexpr):
    """Equation (5') for a tile of a tensor that keeps a full variance."""
    pointer = tl.load(entry + COL_VAR)
    old = load_tile(pointer, rows, cols, m, n, tl.float32, ALIGNED)
    square = g * g
    if (tl.load(entry + FLAGS) & ADAFACTOR) != 0:
        t = tl.load(tl.load(entry + STEP).to(tl.pointer_type(tl.float32))) + 1.0
        kappa = statistic_weight(t, setting)
        square += tl.load(setting + OFFSET)
        new = tl.where(kappa == 1.0, square, old + kappa * (square - old))
    else:
        gamma = tl.load(setting + GAMMA)
        new = gamma * old + tl.load(setting + ONE_MINUS_GAMMA) * square
    return new


@triton.jit
def inverse_root(entry, setting, k, rows, cols, m, n, row_max_var, row_sum_var, flags):
    """1 / sqrt(V) of (6) (7) for a tile of a factored tensor."""
    row_pointer = tl.load(entry + ROW_VAR).to(tl.pointer_type(tl.float32))
    col_pointer = tl.load(entry + COL_VAR).to(tl.pointer_type(tl.float32))
    scale = row_scale(entry, setting, k, row_max_var, row_sum_var, flags)
    r = tl.load(row_pointer + rows, mask=rows < m, other=1.0) / scale
    c = tl.load(col_pointer + cols, mask=cols < n, other=1.0)
    floor = tl.load(setting + VARIANCE_FLOOR)
    if tl.min(r, axis=0) * tl.min(c, axis=0) >= floor:  # no floor acts in this tile: V separates
        inverse = tl.rsqrt(r)[:, None] * tl.rsqrt(c)[None, :]
    else:
        inverse = tl.rsqrt(tl.maximum(r[:, None] * c[None, :], floor))
    return inverse


@triton.jit
def maxima_tile(
    entry, setting, k, tile, g, rows, cols, m, n, flags,
    row_max_var, row_sum_var, row_max, update_max, update_squares,
    GENERAL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """First visit: row maxima of |U| before it is normalised, (6) and the left of (7)."""
    if (flags & DENSE) != 0:
        v = dense_variance(entry, setting, g, rows, cols, m, n, ALIGNED)
        u = tl.abs(g) * tl.rsqrt(tl.maximum(v, tl.load(setting + VARIANCE_FLOOR)))
    else:
        u = tl.abs(g) * inverse_root(
            entry, setting, k, rows, cols, m, n, row_max_var, row_sum_var, flags
        )
    by_row = tl.max(u, axis=1)
    bits = by_row.to(tl.int32, bitcast=True)
    if (flags & VECTOR) == 0:
        place = row_max + tl.load(entry + ROW_SPACE) + rows
        tl.atomic_max(place, bits, mask=rows < m, sem="relaxed")
    tl.atomic_max(update_max + tl.load(entry + OWNER), tl.max(bits, axis=0), sem="relaxed")
    if GENERAL:
        tl.store(update_squares + tile, tl.sum(tl.sum(u * u, axis=1), axis=0))


@triton.jit
def close_tensor(entry, setting, flags, update_max, update_squares, scalars, GENERAL: tl.constexpr):
    """After a tensor's last maximum: what its direction is multiplied by, (7) (8) and the clip."""
    owner = tl.load(entry + OWNER)
    place = scalars + owner * SCALARS
    bits = tl.load(update_max + owner, volatile=True)  # written by other programs of this launch
    scale = 1.0 / tl.maximum(bits.to(tl.float32, bitcast=True), tl.load(setting + FLOOR))  # (7)
    if GENERAL:
        first = tl.load(entry + OWNER_TILE)
        count = tl.load(entry + OWNER_TILES)
        total = tl.zeros([1024], tl.float32)
        for i in range(0, count, 1024):
            at = i + tl.arange(0, 1024)
            total += tl.load(update_squares + first + at, mask=at < count, other=0.0, volatile=True)
        squares = tl.sum(total, axis=0)
        numel = tl.load(entry + NUMEL).to(tl.float32)
        if (flags & ADAFACTOR) != 0:
            scale = 1.0 / tl.maximum(1.0, tl.sqrt_rn(squares / numel) / tl.load(setting + CLIP))
        else:
            norm = tl.sqrt_rn(squares) * scale
            clip = tl.load(setting + CLIP)
            shrink = tl.where(clip > 0.0, clip / tl.maximum(tl.maximum(norm, clip), TINY), 1.0)
            s = tl.maximum(1.0, norm * shrink / tl.sqrt_rn(numel) / tl.load(setting + D))  # (8)
            scale = scale * shrink / s
    tl.store(place + SCALE, scale)


@triton.jit
def update_tile(
    entry, setting, k, tile, g, rows, cols, m, n, flags, pointers,
    row_max_var, row_sum_var, row_max, update_max, squares, scalars,
    P_KIND: tl.constexpr, GENERAL: tl.constexpr, ALIGNED: tl.constexpr, seed_key,
):  # fmt: skip
    """Second visit: new weights, (4) and (9), and the sum of their squares for the next step."""
    owner = tl.load(entry + OWNER)
    place = scalars + owner * SCALARS
    alpha = tl.load(place + ALPHA)
    t = tl.load(place + TIME)
    scale = tl.load(place + SCALE, volatile=True)  # written by other programs of this launch
    sign = tl.where(g > 0.0, 1.0, tl.where(g < 0.0, -1.0, 0.0))
    if (flags & MAXIMIZE) != 0:
        sign = -sign
    if (flags & VECTOR) != 0:
        bits = tl.load(update_max + owner, volatile=True) + tl.zeros_like(rows)
    else:
        place_of_rows = row_max + tl.load(entry + ROW_SPACE) + rows
        bits = tl.load(place_of_rows, mask=rows < m, other=0, volatile=True)
    move = sign * (bits.to(tl.float32, bitcast=True) * scale)[:, None]  # (9)
    if (flags & DENSE) != 0:
        v = dense_variance(entry, setting, g, rows, cols, m, n, ALIGNED)
        var_pointer = tl.load(entry + COL_VAR)
        store_tile(var_pointer, v, rows, cols, m, n, tl.float32, ALIGNED)
        if GENERAL:
            if (flags & SIGN) == 0:
                floor = tl.load(setting + VARIANCE_FLOOR)
                move = sign * tl.abs(g) * tl.rsqrt(tl.maximum(v, floor)) * scale
            if (flags & BOOSTED) != 0:
                root = tl.maximum(tl.sqrt_rn(v) + tl.load(setting + EPS1), TINY)
                move = sign * tl.abs(g) / root * tl.load(setting + BOOST)
    elif GENERAL:
        if (flags & SIGN) == 0:
            move = sign * tl.abs(g) * scale
            move *= inverse_root(
                entry, setting, k, rows, cols, m, n, row_max_var, row_sum_var, flags
            )
    pointer = address(pointers, entry, 0, P_KIND)
    w = load_tile(pointer, rows, cols, m, n, P_KIND, ALIGNED)
    w = w * tl.load(place + KEEP) - alpha * move  # (4) (9)
    if P_KIND != tl.float32:
        if (flags & STOCHASTIC) != 0:
            key = mix(seed_key + t.to(tl.uint32))
            w = rounded(w, rows, cols, n, tl.load(entry + START), key, P_KIND)
    store_tile(pointer, w, rows, cols, m, n, P_KIND, ALIGNED)
    kept = w.to(P_KIND).to(tl.float32)
    kept = tl.where((rows < m)[:, None] & (cols < n)[None, :], kept, 0.0)
    tl.store(squares + tile, tl.sum(tl.sum(kept * kept, axis=1), axis=0))
    if tile == tl.load(entry + OWNER_TILE):
        tl.store(tl.load(entry + STEP).to(tl.pointer_type(tl.float32)), t)


@triton.jit
def update(
    pointers,
    table,
    settings,
    order,
    tile_matrix,
    row_max_var,
    row_sum_var,
    row_max,
    update_max,
    update_squares,
    squares,
    scalars,
    done,
    ready,
    tickets,
    status,
    grad_scale,
    found_inf,
    seed_keys,
    count,
    SCALED: tl.constexpr,
    LAST: tl.constexpr,
    P_KIND: tl.constexpr,
    G_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    GENERAL: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
):
    """Takes tickets until none is left; see the module's docstring."""
    seen = tl.load(status + SEEN)
    skip = seen
    inverse_scale = 1.0
    if SCALED:
        overflow = (tl.load(found_inf) != 0.0).to(tl.int32)
        skip += overflow
        seen = tl.where(overflow != 0, 0, seen)  # GradScaler's own business: not counted
        inverse_scale = 1.0 / tl.load(grad_scale)
    end = tl.where(skip == 0, count, 0)
    ticket = tl.atomic_add(tickets, 1, sem="relaxed")
    while ticket < end:
        code = tl.load(order + ticket)
        tile = code >> 1
        k = tl.load(tile_matrix + tile).to(tl.int64)
        entry = table + k * TABLE
        group = tl.load(entry + GROUP)
        setting = settings + group * SETTINGS
        flags = tl.load(entry + FLAGS)
        owner = tl.load(entry + OWNER)
        m = tl.load(entry + ROWS)
        n = tl.load(entry + COLS)
        strips = tl.load(entry + STRIPS)
        local = tile - tl.load(entry + FIRST_TILE)
        rows = (local // strips * ROWS_).to(tl.int32) + tl.arange(0, ROWS_)
        cols = (local % strips * COLS_).to(tl.int32) + tl.arange(0, COLS_)
        pointer = address(pointers, entry, 1, G_KIND)
        g = load_tile(pointer, rows, cols, m, n, G_KIND, ALIGNED)
        g *= inverse_scale
        if (code & 1) == 0:
            maxima_tile(
                entry, setting, k, tile, g, rows, cols, m, n, flags,
                row_max_var, row_sum_var, row_max, update_max, update_squares, GENERAL, ALIGNED,
            )  # fmt: skip
            tl.debug_barrier()  # all threads' maxima before the one atomic that counts the tile
            before = tl.atomic_add(done + owner, 1, sem="acq_rel")
            if before == tl.load(entry + OWNER_TILES) - 1:
                close_tensor(entry, setting, flags, update_max, update_squares, scalars, GENERAL)
                tl.debug_barrier()
                tl.atomic_xchg(ready + owner, 1, sem="release")
        else:
            open_ = tl.atomic_add(ready + owner, 0, sem="acquire")
            while open_ == 0:
                open_ = tl.atomic_add(ready + owner, 0, sem="acquire")
            update_tile(
                entry, setting, k, tile, g, rows, cols, m, n, flags, pointers,
                row_max_var, row_sum_var, row_max, update_max, squares, scalars,
                P_KIND, GENERAL, ALIGNED, tl.load(seed_keys + group).to(tl.uint32),
            )  # fmt: skip
        ticket = tl.atomic_add(tickets, 1, sem="relaxed")

    # The last program to leave prepares the next step.
    left = tl.atomic_add(tickets + 1, 1, sem="acq_rel")
    if left == tl.num_programs(0) - 1:
        tl.store(tickets, 0)
        tl.store(tickets + 1, 0)
        if LAST:
            tl.store(status + SEEN, 0)
            tl.store(status + SKIPPED, tl.load(status + SKIPPED) + seen)
            run = tl.load(status + IN_A_ROW) + seen
            tl.store(status + IN_A_ROW, tl.where(seen != 0, run, 0))
