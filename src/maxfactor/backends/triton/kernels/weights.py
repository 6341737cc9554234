"""The last launch of a step: new weights, (4) (8) (9), rounded."""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import (
    ALPHA,
    BOOST,
    BOOSTED,
    COL_VAR,
    COLS,
    DENSE,
    EPS1,
    FACTOR,
    FLAGS,
    GAIN,
    GROUP,
    KEEP,
    MAXIMIZE,
    MEAN,
    MIX,
    ORIGIN,
    OWNER,
    OWNER_TILE,
    ROW_SPACE,
    ROW_VAR,
    ROWS,
    SCALARS,
    SCALE,
    SEEN,
    SETTINGS,
    SIGN,
    SKIP,
    STEP,
    STRIDE,
    TABLE,
    TIME,
    TINY,
    VARIANCE_FLOOR,
    VECTOR,
    WHITENS,
)
from maxfactor.backends.triton.kernels.maxima import divisor_of
from maxfactor.backends.triton.kernels.momentum import momentum_places, recalled
from maxfactor.backends.triton.kernels.rounding import noise_key, write_weights
from maxfactor.backends.triton.kernels.tiles import (
    address,
    inverse_root,
    load_tile,
    negated,
    sign_places,
    store_tile,
    within_tile,
)
from maxfactor.backends.triton.kernels.variance import (
    capped,
    dense_variance,
    factor_roots,
    row_scale,
)


@triton.jit(do_not_specialize=["first_tile", "measure"])
def apply(
    pointers,
    table,
    settings,
    tile_matrix,
    extremes,
    row_sum_var,
    row_max,
    update_max,
    squares,
    scalars,
    signs,
    unsigned,
    status,
    grad_scale,
    seed_keys,
    first_tile,
    measure,
    SCALED: tl.constexpr,
    SIGNED: tl.constexpr,
    FILTERS: tl.constexpr,
    VARIANCES: tl.constexpr,
    WHITENING: tl.constexpr,
    STORE: tl.constexpr,
    KEEPS: tl.constexpr,
    O_KIND: tl.constexpr,
    P_KIND: tl.constexpr,
    G_KIND: tl.constexpr,
    GENERAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
    TILE: tl.constexpr,
    STAGES_: tl.constexpr,
):
    """New weights, (4) and (9), and the sum of their squares for the next step's (3).

    With `measure` only the sum, before a step, when somebody else wrote W. It is this kernel and
    no other, so that the sum has the same last bit.
    """
    if measure == 0:
        if tl.program_id(0) == 0:
            tl.store(status + SEEN, 0)  # for the next step; SKIP says what happens in this one
        if tl.load(status + SKIP) != 0:
            return
    tile = first_tile + tl.program_id(0)
    k = tl.load(tile_matrix + tile).to(tl.int64)
    entry = table + k * TABLE
    group = tl.load(entry + GROUP)
    setting = settings + group * SETTINGS
    flags = tl.load(entry + FLAGS)
    owner = tl.load(entry + OWNER)
    m = tl.load(entry + ROWS)
    n = tl.load(entry + COLS)
    first_row, pieces, cols = within_tile(entry, tile, m, ROWS_, COLS_, TILE)
    scalar = scalars + owner * SCALARS
    keep = tl.load(scalar + KEEP)
    alpha = tl.load(scalar + ALPHA)
    t = tl.load(scalar + TIME)
    key = noise_key(seed_keys, group, t)
    origin, stride = tl.load(entry + ORIGIN), tl.load(entry + STRIDE)
    w_pointer = address(pointers, entry, 0, P_KIND)
    place = row_max + tl.load(entry + ROW_SPACE)
    if GENERAL:
        scale = alpha * tl.load(scalar + SCALE)
    else:
        scale = alpha / divisor_of(setting, update_max, owner)  # (7), and (8) is 1
    if not FILTERS:  # there G itself is negated, as M remembers it
        if (flags & MAXIMIZE) != 0:
            scale = -scale
    vector = VARIANCES and (flags & VECTOR) != 0
    dense = VARIANCES and (flags & DENSE) != 0
    total = tl.zeros([COLS_], tl.float32)
    by_signs = False
    if SIGNED:
        by_signs = (dense == 0) & (tl.load(unsigned + tile) == 0)
    if measure != 0:
        for piece in tl.range(0, pieces, num_stages=STAGES_):
            rows = first_row + piece * ROWS_ + tl.arange(0, ROWS_)
            w = load_tile(w_pointer, rows, cols, m, n, P_KIND, ALIGNED)
            total += tl.sum(w * w, axis=0)
    elif by_signs:
        marks = tl.load(sign_places(signs, tile, ROWS_, COLS_)).to(tl.uint32, bitcast=True)
        for piece in tl.range(0, pieces, num_stages=STAGES_):
            rows = first_row + piece * ROWS_ + tl.arange(0, ROWS_)
            w = load_tile(w_pointer, rows, cols, m, n, P_KIND, ALIGNED)
            bits = tl.load(place + rows, mask=rows < m, other=0)
            size = (bits.to(tl.float32, bitcast=True) * scale)[:, None]
            move = negated(size, marks, piece, pieces)  # (9)
            w = write_weights(
                w_pointer, w, move, keep, key, origin, stride, rows, cols, m, n, flags,
                P_KIND, ALIGNED,
            )  # fmt: skip
            total += tl.sum(w * w, axis=0)
        total = tl.where(cols < n, total, 0.0)  # outside, W was 0 and moved
    else:
        g_pointer = address(pointers, entry, 1, G_KIND)
        floor = tl.load(setting + VARIANCE_FLOOR)
        whole = tl.load(update_max + owner)
        inverse_scale = 1.0
        if SCALED:
            inverse_scale = 1.0 / tl.load(grad_scale)
        whitens = WHITENING and (flags & WHITENS) != 0
        if FILTERS:
            gain, share = tl.load(scalar + GAIN), tl.load(setting + MIX)
            factor, mean = tl.load(scalar + FACTOR), tl.load(scalar + MEAN)
            kept, scales = momentum_places(entry, STORE)
            o_pointer = address(pointers, entry, 2, O_KIND)
            divisor = tl.maximum(mean, TINY)
        elif GENERAL:
            divisor = row_scale(entry, setting, k, extremes, row_sum_var, flags)
        if FILTERS or GENERAL:
            r_pointer, r_end = tl.load(entry + ROW_VAR), tl.where(dense, 0, m)
            col_roots = factor_roots(tl.load(entry + COL_VAR), cols, tl.where(dense, 0, n), 1.0)
            root_of_floor = inverse_root(floor)
        for piece in tl.range(0, pieces, num_stages=STAGES_):
            rows = first_row + piece * ROWS_ + tl.arange(0, ROWS_)
            g = load_tile(g_pointer, rows, cols, m, n, G_KIND, ALIGNED) * inverse_scale
            w = load_tile(w_pointer, rows, cols, m, n, P_KIND, ALIGNED)
            bits = tl.where(vector, whole, tl.load(place + rows, mask=rows < m, other=0))
            size = (bits.to(tl.float32, bitcast=True) * scale)[:, None]
            u, v = g, g
            if dense:
                v = dense_variance(entry, setting, t, g, rows, cols, m, n, ALIGNED)
                store_tile(tl.load(entry + COL_VAR), v, rows, cols, m, n, tl.float32, ALIGNED)
            if FILTERS:  # y of (13) once more, or O
                if whitens:
                    u = load_tile(o_pointer, rows, cols, m, n, O_KIND, ALIGNED)
                else:
                    if dense:
                        u *= factor * tl.rsqrt(tl.maximum(v, floor))
                    else:
                        row_roots = factor_roots(r_pointer, rows, r_end, divisor)
                        u *= factor * capped(row_roots, col_roots, root_of_floor)
                    if KEEPS:
                        stored = recalled(
                            kept, scales, rows, cols, m, n, STORE, ALIGNED, ROWS_, COLS_
                        )
                        u = stored * gain + share * u
            move = tl.where(u > 0.0, size, tl.where(u < 0.0, -size, 0.0))  # (9)
            if FILTERS:
                if whitens:
                    move = u * alpha
                elif (flags & SIGN) == 0:
                    move = u * scale
            elif dense:
                if GENERAL:
                    if (flags & SIGN) == 0:
                        move = g * tl.rsqrt(tl.maximum(v, floor)) * scale
                    if (flags & BOOSTED) != 0:
                        root = tl.maximum(tl.sqrt_rn(v) + tl.load(setting + EPS1), TINY)
                        up = tl.where((flags & MAXIMIZE) != 0, -alpha, alpha)
                        move = g / root * tl.load(setting + BOOST) * up
            elif GENERAL:
                if (flags & SIGN) == 0:
                    row_roots = factor_roots(r_pointer, rows, r_end, divisor)
                    move = g * (scale * capped(row_roots, col_roots, root_of_floor))
            w = write_weights(
                w_pointer, w, move, keep, key, origin, stride, rows, cols, m, n, flags,
                P_KIND, ALIGNED,
            )  # fmt: skip
            total += tl.sum(w * w, axis=0)  # 0 outside the matrix, where W and G were read as 0
    tl.store(squares + tile, tl.sum(total, axis=0))
    if (tile == tl.load(entry + OWNER_TILE)) & (measure == 0):
        tl.store(tl.load(entry + STEP).to(tl.pointer_type(tl.float32)), t)
