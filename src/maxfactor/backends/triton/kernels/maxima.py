"""Maxima of |U|, (6) and (7), and what the direction of a tensor is multiplied by."""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import (
    ADAFACTOR,
    ADAPTIVE,
    BAND_SUMS,
    BETA,
    CLIP,
    COL_CHUNK,
    COL_VAR,
    COLS,
    DENSE,
    FACTORED,
    FILTERED,
    FIRST_BLOCK,
    FLAGS,
    FLOOR,
    GROUP,
    NUMEL,
    OWNER,
    OWNER_BLOCK,
    OWNER_BLOCKS,
    OWNER_TILE,
    OWNER_TILES,
    ROW_PART,
    ROW_SPACE,
    ROW_VAR,
    ROWS,
    SCALARS,
    SCALE,
    SETTINGS,
    SKIP,
    STRIPS,
    SUMS,
    TABLE,
    THETA,
    TIME,
    TINY,
    VARIANCE_FLOOR,
    XM,
    XX,
    YY,
    D,
)
from maxfactor.backends.triton.kernels.tiles import address, inverse_root, load_tile, sum_of
from maxfactor.backends.triton.kernels.variance import dense_variance, is_floored, row_scale


@triton.jit
def maxima(
    pointers,
    table,
    settings,
    block_matrix,
    row_peak,
    ratios,
    extremes,
    row_sum_var,
    row_max,
    update_max,
    update_squares,
    scalars,
    status,
    grad_scale,
    SCALED: tl.constexpr,
    G_KIND: tl.constexpr,
    GENERAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
    BUNDLE_: tl.constexpr,
    STRIPS_: tl.constexpr,
    WIDTH_: tl.constexpr,
    STAGES_: tl.constexpr,
):
    """Maxima of |U| before it is normalised, (6) and the left of (7), for a block of rows."""
    if tl.load(status + SKIP) != 0:
        return
    block = tl.program_id(0)
    k = tl.load(block_matrix + block).to(tl.int64)
    entry = table + k * TABLE
    setting = settings + tl.load(entry + GROUP) * SETTINGS
    flags = tl.load(entry + FLAGS)
    m = tl.load(entry + ROWS)
    n = tl.load(entry + COLS)
    strips = tl.load(entry + STRIPS).to(tl.int32)
    local = (block - tl.load(entry + FIRST_BLOCK)).to(tl.int32)
    rows = local * ROWS_ + tl.arange(0, ROWS_)
    pointer = address(pointers, entry, 1, G_KIND)
    inverse_scale = 1.0
    if SCALED:
        inverse_scale = 1.0 / tl.load(grad_scale)
    t = tl.load(scalars + tl.load(entry + OWNER) * SCALARS + TIME)
    dense = (flags & DENSE) != 0
    row_end, col_end = tl.where(dense, 0, m), tl.where(dense, 0, n)
    scale = row_scale(entry, setting, k, extremes, row_sum_var, flags)
    floor = tl.load(setting + VARIANCE_FLOOR)
    row_pointer = tl.load(entry + ROW_VAR).to(tl.pointer_type(tl.float32))
    col_pointer = tl.load(entry + COL_VAR).to(tl.pointer_type(tl.float32))
    r = tl.load(row_pointer + rows, mask=rows < row_end, other=1.0) / scale
    total = tl.zeros([ROWS_], tl.float32)
    by_row = tl.zeros([ROWS_], tl.float32)
    # Where the floor of (6) acts nowhere, the root of R can wait until after the maximum.
    separate = (dense == 0) & (is_floored(setting, k, extremes, scale) == 0)
    if separate & (GENERAL == 0):
        by_row = pruned_row_maxima(
            pointer,
            row_peak + tl.load(entry + ROW_PART) * 2,
            ratios + tl.load(entry + COL_CHUNK) * 2,
            col_pointer,
            rows,
            m,
            n,
            strips,
            inverse_scale,
            G_KIND,
            COLS_,
            BUNDLE_,
            STRIPS_,
            WIDTH_,
        )
        by_row *= inverse_root(r)
    elif separate:
        for strip in tl.range(0, strips, num_stages=STAGES_):
            cols = strip * COLS_ + tl.arange(0, COLS_)
            g = load_tile(pointer, rows, cols, m, n, G_KIND, ALIGNED)
            c = tl.load(col_pointer + cols, mask=cols < n, other=1.0)
            u = tl.abs(g) * inverse_root(c)[None, :]
            by_row = tl.maximum(by_row, tl.max(u, axis=1))
            if GENERAL:
                total += tl.sum(u * u, axis=1)
        by_row *= inverse_root(r) * inverse_scale
        total *= inverse_root(r) * inverse_root(r) * inverse_scale * inverse_scale
    else:
        for first in range(0, n.to(tl.int32), WIDTH_):
            cols = first + tl.arange(0, WIDTH_)
            g = load_tile(pointer, rows, cols, m, n, G_KIND, ALIGNED) * inverse_scale
            if dense:
                v = dense_variance(entry, setting, t, g, rows, cols, m, n, ALIGNED)
            else:
                c = tl.load(col_pointer + cols, mask=cols < col_end, other=1.0)
                v = r[:, None] * c[None, :]
            u = tl.abs(g) * tl.rsqrt(tl.maximum(v, floor))
            by_row = tl.maximum(by_row, tl.max(u, axis=1))
            if GENERAL:
                total += tl.sum(u * u, axis=1)
    bits = by_row.to(tl.int32, bitcast=True)
    tl.store(row_max + tl.load(entry + ROW_SPACE) + rows, bits, mask=rows < m)
    tl.atomic_max(update_max + tl.load(entry + OWNER), tl.max(bits, axis=0), sem="relaxed")
    if GENERAL:
        tl.store(update_squares + tl.load(entry + OWNER_BLOCK) + local, tl.sum(total, axis=0))


@triton.jit
def pruned_row_maxima(
    pointer,
    peaks,
    changes,
    col_pointer,
    rows,
    m,
    n,
    strips,
    inverse_scale,
    G_KIND: tl.constexpr,
    COLS_: tl.constexpr,
    BUNDLE_: tl.constexpr,
    STRIPS_: tl.constexpr,
    WIDTH_: tl.constexpr,
):
    """The largest |G| / sqrt(C) of each row, reading little of G.

    `peaks` has, by the C of the step before, the largest of each strip with its bundle of columns,
    and the largest outside that bundle. How much 1 / sqrt(C) has changed lies between the bounds in
    `changes`. First the likeliest bundle is read, then what bundles, and what else of a strip, may
    still have more; the slack covers rounding and the bits that the bundle's number took.
    """
    bundles: tl.constexpr = COLS_ // BUNDLE_
    many = tl.arange(0, STRIPS_)
    start = rows.to(tl.int64) * n  # of each row
    likeliest = tl.zeros_like(rows)
    least = tl.zeros_like(rows).to(tl.float32)
    for first in range(0, strips, STRIPS_):
        which = first + many
        peak = strip_values(peaks, which, rows, m, strips)
        low = tl.load(changes + which * 2, mask=which < strips, other=0.0)
        value = peak.to(tl.float32, bitcast=True) * low[:, None]
        highest, column = highest_of(
            value, which[:, None] * COLS_ + (peak & (bundles - 1)) * BUNDLE_
        )
        likeliest = tl.where(highest > least, column, likeliest)
        least = tl.maximum(least, highest)
    real = rows < m
    by_row = largest_in(pointer, col_pointer, start, likeliest, real, n, G_KIND, BUNDLE_)
    by_row *= inverse_scale
    for first in range(0, strips, STRIPS_):
        which = first + many
        high = tl.load(changes + which * 2 + 1, mask=which < strips, other=0.0)[:, None] * 1.0001
        peak = strip_values(peaks, which, rows, m, strips)
        columns = which[:, None] * COLS_ + (peak & (bundles - 1)) * BUNDLE_
        most = peak.to(tl.float32, bitcast=True) * high
        most = tl.where(columns == likeliest[None, :], 0.0, most)  # this one is read
        highest, column = highest_of(most, columns)
        while tl.max((highest > by_row).to(tl.int32), axis=0) != 0:
            needed = real & (highest > by_row)
            found = largest_in(pointer, col_pointer, start, column, needed, n, G_KIND, BUNDLE_)
            by_row = tl.maximum(by_row, found * inverse_scale)
            most = tl.where(columns == column[None, :], 0.0, most)
            highest, column = highest_of(most, columns)
        other = strip_values(peaks + 1, which, rows, m, strips)
        most = other.to(tl.float32, bitcast=True) * high
        columns = which[:, None] * COLS_ + tl.zeros_like(peak)
        highest, column = highest_of(most, columns)
        while tl.max((highest > by_row).to(tl.int32), axis=0) != 0:
            needed = real & (highest > by_row)
            for at in range(0, COLS_, WIDTH_):
                found = largest_in(
                    pointer, col_pointer, start, column + at, needed, n, G_KIND, WIDTH_
                )
                by_row = tl.maximum(by_row, found * inverse_scale)
            most = tl.where(columns == column[None, :], 0.0, most)
            highest, column = highest_of(most, columns)
    return by_row


@triton.jit
def strip_values(values, which, rows, m, strips):
    """One of the two values of each strip (down) and row (across) in `peaks`."""
    inside = (which < strips)[:, None] & (rows < m)[None, :]
    return tl.load(values + (which[:, None] * m + rows[None, :]) * 2, mask=inside, other=0)


@triton.jit
def highest_of(values, columns):
    """The highest value over the strips, for each row, and the column that goes with it."""
    highest = tl.max(values, axis=0)
    return highest, tl.max(tl.where(values == highest[None, :], columns, 0), axis=0)


@triton.jit
def largest_in(
    pointer, col_pointer, start, first, needed, n, G_KIND: tl.constexpr, WIDTH_: tl.constexpr
):
    """The largest |G| / sqrt(C) of WIDTH_ columns from `first` on, 0 for rows not needed."""
    cols = first[:, None] + tl.arange(0, WIDTH_)[None, :]
    inside = needed[:, None] & (cols < n)
    base = pointer.to(tl.pointer_type(G_KIND))
    g = tl.load(base + (start[:, None] + cols), mask=inside, other=0.0).to(tl.float32)
    c = tl.load(col_pointer + cols, mask=inside, other=1.0)
    return tl.max(tl.abs(g) * inverse_root(c), axis=1)


@triton.jit
def divisor_of(setting, update_max, owner):
    """The divisor of (7)."""
    bits = tl.load(update_max + owner)
    return tl.maximum(bits.to(tl.float32, bitcast=True), tl.load(setting + FLOOR))


@triton.jit
def rescale(table, settings, first_of, update_max, update_squares, filter_sums, scalars, status):
    """What a tensor's direction is multiplied by, (7) (8) and the clip; FAM's sums, (11)."""
    owner = tl.program_id(0)
    entry = table + tl.load(first_of + owner).to(tl.int64) * TABLE
    setting = settings + tl.load(entry + GROUP) * SETTINGS
    flags = tl.load(entry + FLAGS)
    scale = 1.0 / divisor_of(setting, update_max, owner)  # (7)
    numel = tl.maximum(tl.load(entry + NUMEL).to(tl.float32), 1.0)
    first, count = tl.load(entry + OWNER_TILE), tl.load(entry + OWNER_TILES)
    if (flags & FILTERED) != 0:
        squares = sum_of(filter_sums + YY, first, count, SUMS)
    else:
        squares = sum_of(
            update_squares, tl.load(entry + OWNER_BLOCK), tl.load(entry + OWNER_BLOCKS)
        )
    clip = tl.load(setting + CLIP)
    if (flags & (ADAFACTOR | FACTORED)) != 0:
        bound = tl.where((flags & FACTORED) != 0, tl.load(setting + D), clip)
        scale = 1.0 / tl.maximum(1.0, tl.sqrt_rn(squares / numel) / bound)
    else:
        norm = tl.sqrt_rn(squares) * scale
        shrink = tl.where(clip > 0.0, clip / tl.maximum(tl.maximum(norm, clip), TINY), 1.0)
        s = tl.maximum(1.0, norm * shrink / tl.sqrt_rn(numel) / tl.load(setting + D))  # (8)
        scale = scale * shrink / s
    tl.store(scalars + owner * SCALARS + SCALE, scale)
    if ((flags & ADAPTIVE) != 0) & (count > 0) & (tl.load(status + SKIP) == 0):
        sums = tl.load(entry + BAND_SUMS).to(tl.pointer_type(tl.float32))
        theta, beta = tl.load(setting + THETA), tl.load(scalars + owner * SCALARS + BETA)
        before = tl.load(sums + 2)
        agreement = sum_of(filter_sums + XM, first, count, SUMS) / numel
        agreement /= tl.maximum(before, TINY)
        power = sum_of(filter_sums + XX, first, count, SUMS) / numel
        tl.store(sums, theta * tl.load(sums) + (1.0 - theta) * agreement)  # (11)
        tl.store(sums + 1, theta * tl.load(sums + 1) + (1.0 - theta) * power)
        tl.store(sums + 2, beta * before + (1.0 - beta))  # (12)
