"""The momentum, (10) to (13), or what is to be orthogonalised."""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import (
    ALPHA,
    BETA,
    BLOCK,
    COL_VAR,
    COLS,
    DENSE,
    FACTOR,
    FLAGS,
    GAIN,
    GROUP,
    KEEP,
    MAXIMIZE,
    MEAN,
    MIX,
    MOMENTUM,
    MOMENTUM_SCALE,
    NUMEL,
    ORIGIN,
    OWNER,
    OWNER_TILE,
    OWNER_TILES,
    ROW_SPACE,
    ROW_VAR,
    ROWS,
    SCALARS,
    SEEN,
    SETTINGS,
    SKIP,
    START,
    STEP,
    STRIDE,
    SUMS,
    TABLE,
    TIME,
    TINY,
    VARIANCE_FLOOR,
    WHITENS,
    XM,
    XX,
    YY,
)
from maxfactor.backends.triton.kernels.rounding import noise_key, write_weights
from maxfactor.backends.triton.kernels.tiles import (
    address,
    has_zeros,
    inverse_root,
    load_tile,
    marked,
    sign_places,
    store_tile,
    sum_of,
    within_tile,
)
from maxfactor.backends.triton.kernels.variance import (
    capped,
    dense_variance,
    factor_roots,
    mean_row_var,
)


@triton.jit
def filtered(
    pointers,
    table,
    settings,
    tile_matrix,
    row_sum_var,
    row_max,
    update_max,
    tile_sums,
    filter_sums,
    squares,
    scalars,
    signs,
    unsigned,
    status,
    grad_scale,
    seed_keys,
    first_tile,
    SCALED: tl.constexpr,
    SIGNED: tl.constexpr,
    GENERAL: tl.constexpr,
    VARIANCES: tl.constexpr,
    WHITENING: tl.constexpr,
    PEAKS: tl.constexpr,
    DIRECT: tl.constexpr,
    STORE: tl.constexpr,
    KEEPS: tl.constexpr,
    O_KIND: tl.constexpr,
    P_KIND: tl.constexpr,
    G_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
    TILE: tl.constexpr,
    STAGES_: tl.constexpr,
):
    """The momentum, (10) to (13), maxima and signs of y, or what is to be orthogonalised.

    DIRECT: W moves by y as it is, so that it can do so at once, and `apply` is not needed.
    """
    if DIRECT:
        if tl.program_id(0) == 0:
            tl.store(status + SEEN, 0)  # as in `apply`
    if tl.load(status + SKIP) != 0:
        return
    tile = first_tile + tl.program_id(0)
    k = tl.load(tile_matrix + tile).to(tl.int64)
    entry = table + k * TABLE
    setting = settings + tl.load(entry + GROUP) * SETTINGS
    flags = tl.load(entry + FLAGS)
    owner = tl.load(entry + OWNER)
    m = tl.load(entry + ROWS)
    n = tl.load(entry + COLS)
    first_row, pieces, cols = within_tile(entry, tile, m, ROWS_, COLS_, TILE)
    scalar = scalars + owner * SCALARS
    beta, gain = tl.load(scalar + BETA), tl.load(scalar + GAIN)
    share = tl.load(setting + MIX)
    t = tl.load(scalar + TIME)
    floor = tl.load(setting + VARIANCE_FLOOR)
    pointer = address(pointers, entry, 1, G_KIND)
    factor, mean = input_scale(entry, setting, flags, tile_sums, row_sum_var)
    if tile == tl.load(entry + OWNER_TILE):
        tl.store(scalar + FACTOR, factor)
        tl.store(scalar + MEAN, mean)
    inverse_scale = 1.0
    if SCALED:
        inverse_scale = 1.0 / tl.load(grad_scale)
    whitens = WHITENING and (flags & WHITENS) != 0
    dense = VARIANCES and (flags & DENSE) != 0
    r_pointer, r_end = tl.load(entry + ROW_VAR), tl.where(dense, 0, m)
    col_roots = factor_roots(tl.load(entry + COL_VAR), cols, tl.where(dense, 0, n), 1.0)
    divisor, root_of_floor = tl.maximum(mean, TINY), inverse_root(floor)
    kept, scales = momentum_places(entry, STORE)
    o_pointer = address(pointers, entry, 2, O_KIND)
    place = row_max + tl.load(entry + ROW_SPACE)
    root_of_mean = tl.sqrt_rn(mean)
    if DIRECT:
        keep, alpha = tl.load(scalar + KEEP), tl.load(scalar + ALPHA)
        key = noise_key(seed_keys, tl.load(entry + GROUP), t)
        origin, stride = tl.load(entry + ORIGIN), tl.load(entry + STRIDE)
        w_pointer = address(pointers, entry, 0, P_KIND)
    agreement = tl.zeros([COLS_], tl.float32)
    power = tl.zeros([COLS_], tl.float32)
    total = tl.zeros([COLS_], tl.float32)  # of the squares of y, or of those of the new W
    least = tl.full([COLS_], float("inf"), tl.float32)
    marks = tl.zeros([ROWS_, COLS_], tl.uint32)
    highest = tl.zeros([ROWS_], tl.float32)
    for piece in tl.range(0, pieces, num_stages=STAGES_):
        rows = first_row + piece * ROWS_ + tl.arange(0, ROWS_)
        g = load_tile(pointer, rows, cols, m, n, G_KIND, ALIGNED)
        roots = capped(factor_roots(r_pointer, rows, r_end, divisor), col_roots, root_of_floor)
        v = g
        if dense:
            whole = g * inverse_scale
            v = dense_variance(entry, setting, t, whole, rows, cols, m, n, ALIGNED)
            roots = tl.rsqrt(tl.maximum(v, floor))
        x = g * (factor * inverse_scale)
        if not whitens:
            x *= roots  # (10)
        y = x
        if KEEPS:
            momentum = recalled(kept, scales, rows, cols, m, n, STORE, ALIGNED, ROWS_, COLS_)
            agreement += tl.sum(x * momentum, axis=0)
            power += tl.sum(x * x, axis=0)
            momentum = beta * momentum + (1.0 - beta) * x  # (12)
            momentum = remembered(
                kept, scales, momentum, rows, cols, m, n, STORE, ALIGNED, ROWS_, COLS_
            )
            y = momentum * gain + share * x  # (13)
        if whitens:
            y *= roots * root_of_mean
            store_tile(o_pointer, y, rows, cols, m, n, O_KIND, ALIGNED)
        else:
            if PEAKS:
                by_row = tl.max(tl.abs(y), axis=1)  # y is 0 outside the matrix, as G and M are
                highest = tl.maximum(highest, by_row)
                if not dense:
                    bits = by_row.to(tl.int32, bitcast=True)
                    tl.atomic_max(place + rows, bits, mask=rows < m, sem="relaxed")
            if DIRECT:
                if dense:
                    store_tile(tl.load(entry + COL_VAR), v, rows, cols, m, n, tl.float32, ALIGNED)
                w = load_tile(w_pointer, rows, cols, m, n, P_KIND, ALIGNED)
                w = write_weights(
                    w_pointer, w, y * alpha, keep, key, origin, stride, rows, cols, m, n, flags,
                    P_KIND, ALIGNED,
                )  # fmt: skip
                total += tl.sum(w * w, axis=0)
            elif GENERAL:
                total += tl.sum(y * y, axis=0)
            if SIGNED:
                marks = marked(marks, y)
                least = tl.minimum(least, tl.min(tl.abs(y), axis=0))
    sums = filter_sums + tile * SUMS
    tl.store(sums + XM, tl.sum(agreement, axis=0))
    tl.store(sums + XX, tl.sum(power, axis=0))
    if DIRECT:
        tl.store(squares + tile, tl.sum(total, axis=0))
        if tile == tl.load(entry + OWNER_TILE):
            tl.store(tl.load(entry + STEP).to(tl.pointer_type(tl.float32)), t)
    else:
        tl.store(sums + YY, tl.sum(total, axis=0))
    if PEAKS:
        most = tl.max(highest, axis=0).to(tl.int32, bitcast=True)
        tl.atomic_max(update_max + owner, most, sem="relaxed")
    if SIGNED:
        tl.store(unsigned + tile, (has_zeros(least, cols, n) | whitens).to(tl.int8))
        if (not dense) & (not whitens):
            tl.store(sign_places(signs, tile, ROWS_, COLS_), marks.to(tl.int32, bitcast=True))


@triton.jit
def input_scale(entry, setting, flags, tile_sums, row_sum_var):
    """What of (10) is one number for each tensor: (factor of G, mean R or mean v)."""
    first, count = tl.load(entry + OWNER_TILE), tl.load(entry + OWNER_TILES)
    numel = tl.load(entry + NUMEL).to(tl.float32)
    mean_square = sum_of(tile_sums, first, count, SUMS) / numel
    if (flags & DENSE) != 0:
        mean = sum_of(tile_sums + 1, first, count, SUMS) / numel
    else:
        mean = mean_row_var(entry, row_sum_var)
    clip = tl.maximum(tl.sqrt_rn(mean_square / tl.maximum(mean, TINY)), 1.0)
    if (flags & WHITENS) != 0:
        clip *= tl.sqrt_rn(tl.maximum(mean, tl.load(setting + VARIANCE_FLOOR)))
    return tl.where((flags & MAXIMIZE) != 0, -1.0, 1.0) / clip, mean


@triton.jit
def momentum_places(entry, STORE: tl.constexpr):
    """Where a matrix's stored momentum and its scales begin."""
    bytes_: tl.constexpr = STORE.primitive_bitwidth // 8
    pointer = tl.load(entry + MOMENTUM) + tl.load(entry + START) * bytes_
    return pointer, tl.load(entry + MOMENTUM_SCALE)


@triton.jit
def recalled(
    pointer,
    scales,
    rows,
    cols,
    m,
    n,
    STORE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
):
    """A piece of the momentum as it was stored; STORE is its dtype."""
    momentum = load_tile(pointer, rows, cols, m, n, STORE, ALIGNED)
    if tl.int8 == STORE:
        places, real = scale_places(scales, rows, cols, m, n, COLS_)
        momentum *= spread(tl.load(places, mask=real, other=0.0), ROWS_, COLS_)
    return momentum


@triton.jit
def remembered(
    pointer,
    scales,
    momentum,
    rows,
    cols,
    m,
    n,
    STORE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
):
    """Store a piece of the momentum, return what was stored; `quantize.quantized`."""
    if tl.int8 == STORE:
        blocks: tl.constexpr = COLS_ // BLOCK
        largest = tl.max(tl.reshape(tl.abs(momentum), [ROWS_, blocks, BLOCK]), axis=2)
        step = largest * 0.007874015748031496  # 1 / 127
        places, real = scale_places(scales, rows, cols, m, n, COLS_)
        tl.store(places, step, mask=real)
        codes = momentum * spread(1.0 / tl.maximum(step, TINY), ROWS_, COLS_)
        codes += 12582912.0  # 1.5 * 2^23: the nearest whole, ties to even, is in the lowest bits
        bytes_ = codes.to(tl.int32, bitcast=True).to(tl.int8)
        store_tile(pointer, bytes_, rows, cols, m, n, tl.int8, ALIGNED)
        momentum = (codes - 12582912.0) * spread(step, ROWS_, COLS_)
    else:
        store_tile(pointer, momentum, rows, cols, m, n, STORE, ALIGNED)
        momentum = momentum.to(STORE).to(tl.float32)
    return momentum


@triton.jit
def scale_places(scales, rows, cols, m, n, COLS_: tl.constexpr):
    """Where the scales of a piece's stored momentum are, and which of them exist."""
    blocks = (n + BLOCK - 1) // BLOCK
    block = tl.min(cols, axis=0) // BLOCK + tl.arange(0, COLS_ // BLOCK)
    base = scales.to(tl.pointer_type(tl.float32))
    places = base + (rows.to(tl.int64)[:, None] * blocks + block[None, :])
    return places, (rows < m)[:, None] & (block < blocks)[None, :]


@triton.jit
def spread(scales, ROWS_: tl.constexpr, COLS_: tl.constexpr):
    """A value of each block as one of each column."""
    blocks: tl.constexpr = COLS_ // BLOCK
    wide = tl.broadcast_to(tl.expand_dims(scales, 2), [ROWS_, blocks, BLOCK])
    return tl.reshape(wide, [ROWS_, COLS_])
