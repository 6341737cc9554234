"""Maxima of |U|, equations (6) and (7), and what the direction of a tensor is multiplied by.

The rule divides by the largest entry of U and steps by the largest entry of each row. Maxima in
place of sums are known from SM3: Anil et al., "Memory-Efficient Adaptive Optimization" (2019),
https://arxiv.org/abs/1901.11150.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.descriptors import Piece, RowsOfG
from maxfactor.backends.triton.kernels.layout import (
    ADDRESS,
    BUNDLE,
    COLUMN,
    COLUMNS,
    COUNTER,
    FLAG,
    MAXIMA_STAGES,
    SCALAR,
    SETTING,
    SQUARE,
    STRIPS_AT_ONCE,
    TINY,
    UPDATE_SUM,
)
from maxfactor.backends.triton.kernels.momentum import update_band_sums
from maxfactor.backends.triton.kernels.squares import (
    inverse_of,
    is_unusual,
    power_of_two,
    root_of,
    store_scaled,
    store_usual,
)
from maxfactor.backends.triton.kernels.tiles import address_of, inverse_root, load_tile, sum_of
from maxfactor.backends.triton.kernels.variance import dense_variance, is_floored, row_divisor


@triton.jit
def maxima(
    tables,
    block_matrix,
    partials,
    results,
    grad_scale,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    spec: tl.constexpr,
):
    """Maxima of |U| for a block of rows, before it is normalised.

    A row belongs to one program, so its maximum needs no atomic; that of the tensor is an integer
    atomic on the bits of floats that are not negative. Results repeat bit for bit.

    Args:
        tables: `Tables`.
        block_matrix: (blocks,) int32: the matrix of each block of this launch.
        partials: `Partials`; reads `row_peaks`, writes `update_squares` if `spec.general`.
        results: `Results`; writes `row_max` and `update_max`.
        grad_scale: (1,) float32 by which G was multiplied, if SCALED.
        SCALED: Whether `grad_scale` counts.
        ROWS: Rows of a block.
        WIDTH: Columns that are read at a time where neither strips nor bundles are.
        spec: `Spec`.
    """
    if tl.load(results.counters + COUNTER.SKIP) != 0:
        return
    block = tl.program_id(0)
    k = tl.load(block_matrix + block).to(tl.int64)
    entry = tables.matrices + k * COLUMN.COUNT
    setting = tables.settings + tl.load(entry + COLUMN.GROUP) * SETTING.COUNT
    flags = tl.load(entry + COLUMN.FLAGS)
    m = tl.load(entry + COLUMN.ROWS)
    n = tl.load(entry + COLUMN.COLS)
    strips = tl.load(entry + COLUMN.STRIPS).to(tl.int32)
    local = (block - tl.load(entry + COLUMN.FIRST_BLOCK)).to(tl.int32)
    rows = local * ROWS + tl.arange(0, ROWS)
    pointer = address_of(tables.pointers, entry, ADDRESS.GRAD, spec.g_dtype)
    inverse_scale = 1.0
    if SCALED:
        inverse_scale = 1.0 / tl.load(grad_scale)
    t = tl.load(results.scalars + tl.load(entry + COLUMN.OWNER) * SCALAR.COUNT + SCALAR.TIME)
    dense = (flags & FLAG.DENSE) != 0
    row_end, col_end = tl.where(dense, 0, m), tl.where(dense, 0, n)
    divisor = row_divisor(entry, setting, k, results, flags)
    floor = tl.load(setting + SETTING.VARIANCE_FLOOR)
    row_pointer = tl.load(entry + COLUMN.ROW_VAR).to(tl.pointer_type(tl.float32))
    col_pointer = tl.load(entry + COLUMN.COL_VAR).to(tl.pointer_type(tl.float32))
    r = tl.load(row_pointer + rows, mask=rows < row_end, other=1.0) / divisor
    total = tl.zeros([ROWS], tl.float32)
    by_row = tl.zeros([ROWS], tl.float32)
    # If the floor of V acts nowhere, the root of R can wait until after the maximum.
    separate = (dense == 0) & (is_floored(setting, k, results.extremes, divisor) == 0)
    if separate & (spec.general == 0):
        peaks = partials.row_peaks + tl.load(entry + COLUMN.ROW_PART) * 2
        changes = results.col_changes + tl.load(entry + COLUMN.COL_CHUNK) * 2
        matrix = RowsOfG(pointer, col_pointer, rows, m, n)
        by_row = pruned_row_maxima(
            matrix, peaks, changes, strips, inverse_scale, WIDTH, spec.g_dtype
        )
        by_row *= inverse_root(r)
    elif separate:
        for strip in tl.range(0, strips, num_stages=MAXIMA_STAGES):
            cols = strip * COLUMNS + tl.arange(0, COLUMNS)
            g = load_tile(pointer, Piece(rows, cols, m, n), spec.g_dtype, spec.aligned)
            c = tl.load(col_pointer + cols, mask=cols < n, other=1.0)
            u = tl.abs(g) * inverse_root(c)[None, :]
            by_row = tl.maximum(by_row, tl.max(u, axis=1))
            if spec.general:
                total += tl.sum(u * u, axis=1)
        by_row *= inverse_root(r) * inverse_scale
        total *= inverse_root(r) * inverse_root(r) * inverse_scale * inverse_scale
    else:
        for first in range(0, n.to(tl.int32), WIDTH):
            piece = Piece(rows, first + tl.arange(0, WIDTH), m, n)
            g = load_tile(pointer, piece, spec.g_dtype, spec.aligned) * inverse_scale
            c = tl.load(col_pointer + piece.cols, mask=piece.cols < col_end, other=1.0)
            u = tl.abs(g) * roots_of(g, r, c, piece, entry, setting, t, floor, dense, spec)
            by_row = tl.maximum(by_row, tl.max(u, axis=1))
            if spec.general:
                total += tl.sum(u * u, axis=1)
    bits = by_row.to(tl.int32, bitcast=True)
    tl.store(results.row_max + tl.load(entry + COLUMN.ROW_SPACE) + rows, bits, mask=rows < m)
    most = tl.max(bits, axis=0)
    tl.atomic_max(results.update_max + tl.load(entry + COLUMN.OWNER), most, sem="relaxed")
    if spec.general:
        number = tl.load(entry + COLUMN.OWNER_BLOCK) + local
        place = partials.update_squares + number * SQUARE.COUNT
        everything = tl.sum(total, axis=0)
        if is_unusual(everything):  # once more, in units of a power of two near the maximum
            unit = power_of_two(tl.max(by_row, axis=0))
            again = tl.zeros([ROWS], tl.float32)
            for first in range(0, n.to(tl.int32), WIDTH):
                piece = Piece(rows, first + tl.arange(0, WIDTH), m, n)
                g = load_tile(pointer, piece, spec.g_dtype, spec.aligned) * inverse_scale
                c = tl.load(col_pointer + piece.cols, mask=piece.cols < col_end, other=1.0)
                u = g * roots_of(g, r, c, piece, entry, setting, t, floor, dense, spec)
                u *= inverse_of(unit)
                again += tl.sum(u * u, axis=1)
            store_scaled(place, tl.sum(again, axis=0), unit)
        else:
            store_usual(place, everything)


@triton.jit
def roots_of(g, r, c, piece, entry, setting, t, floor, dense, spec: tl.constexpr):
    """1 / sqrt(V) of a piece, V = r c or a full variance; r c may have overflown."""
    v = r[:, None] * c[None, :]
    if dense:
        v = dense_variance(entry, setting, t, g, piece, spec.aligned)
    roots = inverse_root(r)[:, None] * inverse_root(c)[None, :]
    return tl.where(v < float("inf"), tl.rsqrt(tl.maximum(v, floor)), roots)


@triton.jit
def pruned_row_maxima(
    matrix, peaks, changes, strips, inverse_scale, WIDTH: tl.constexpr, G_DTYPE: tl.constexpr
):
    """The largest |G| / sqrt(C) of each row, reading little of G.

    `peaks` has, by the C of the previous step, the largest value of each strip with its bundle of
    columns, and the largest outside that bundle. `changes` bounds how much 1 / sqrt(C) has changed.
    First the likeliest bundle is read, then the bundles, and the rest of the strips, that may still
    hold a larger value. The slack covers rounding and the bits that the bundle's number took.

    Args:
        matrix: `RowsOfG`.
        peaks: int32 (strips, m, 2) of this matrix, from `two_peaks`.
        changes: float32 (strips, 2) of this matrix: least and most.
        strips: Strips of the matrix.
        inverse_scale: What G is multiplied by.
        WIDTH: Columns that are read at a time outside of bundles.
        G_DTYPE: The dtype of G.
    """
    rows, m, n = matrix.rows, matrix.m, matrix.n
    bundles: tl.constexpr = COLUMNS // BUNDLE
    many = tl.arange(0, STRIPS_AT_ONCE)
    start = rows.to(tl.int64) * n  # of each row
    likeliest = tl.zeros_like(rows)
    least = tl.zeros_like(rows).to(tl.float32)
    for first in range(0, strips, STRIPS_AT_ONCE):
        which = first + many
        peak = strip_values(peaks, which, rows, m, strips)
        low = tl.load(changes + which * 2, mask=which < strips, other=0.0)
        value = peak.to(tl.float32, bitcast=True) * low[:, None]
        highest, column = highest_of(
            value, which[:, None] * COLUMNS + (peak & (bundles - 1)) * BUNDLE
        )
        likeliest = tl.where(highest > least, column, likeliest)
        least = tl.maximum(least, highest)
    real = rows < m
    by_row = largest_in(matrix, start, likeliest, real, G_DTYPE, BUNDLE)
    by_row *= inverse_scale
    for first in range(0, strips, STRIPS_AT_ONCE):
        which = first + many
        high = tl.load(changes + which * 2 + 1, mask=which < strips, other=0.0)[:, None] * 1.0001
        peak = strip_values(peaks, which, rows, m, strips)
        columns = which[:, None] * COLUMNS + (peak & (bundles - 1)) * BUNDLE
        most = peak.to(tl.float32, bitcast=True) * high
        most = tl.where(columns == likeliest[None, :], 0.0, most)  # this one is read
        highest, column = highest_of(most, columns)
        while tl.max((highest > by_row).to(tl.int32), axis=0) != 0:
            needed = real & (highest > by_row)
            found = largest_in(matrix, start, column, needed, G_DTYPE, BUNDLE)
            by_row = tl.maximum(by_row, found * inverse_scale)
            most = tl.where(columns == column[None, :], 0.0, most)
            highest, column = highest_of(most, columns)
        other = strip_values(peaks + 1, which, rows, m, strips)
        most = other.to(tl.float32, bitcast=True) * high
        columns = which[:, None] * COLUMNS + tl.zeros_like(peak)
        highest, column = highest_of(most, columns)
        while tl.max((highest > by_row).to(tl.int32), axis=0) != 0:
            needed = real & (highest > by_row)
            for at in range(0, COLUMNS, WIDTH):
                found = largest_in(matrix, start, column + at, needed, G_DTYPE, WIDTH)
                by_row = tl.maximum(by_row, found * inverse_scale)
            most = tl.where(columns == column[None, :], 0.0, most)
            highest, column = highest_of(most, columns)
    return by_row


@triton.jit
def strip_values(values, which, rows, m, strips):
    """One of the two values in `peaks`, (strips, rows)."""
    inside = (which < strips)[:, None] & (rows < m)[None, :]
    return tl.load(values + (which[:, None] * m + rows[None, :]) * 2, mask=inside, other=0)


@triton.jit
def highest_of(values, columns):
    """The highest value of each row over the strips, and its column."""
    highest = tl.max(values, axis=0)
    return highest, tl.max(tl.where(values == highest[None, :], columns, 0), axis=0)


@triton.jit
def largest_in(matrix, start, first, needed, G_DTYPE: tl.constexpr, WIDTH: tl.constexpr):
    """The largest |G| / sqrt(C) of WIDTH columns from `first` on, 0 for rows not needed."""
    cols = first[:, None] + tl.arange(0, WIDTH)[None, :]
    inside = needed[:, None] & (cols < matrix.n)
    base = matrix.pointer.to(tl.pointer_type(G_DTYPE))
    g = tl.load(base + (start[:, None] + cols), mask=inside, other=0.0).to(tl.float32)
    c = tl.load(matrix.col_var + cols, mask=inside, other=1.0)
    return tl.max(tl.abs(g) * inverse_root(c), axis=1)


@triton.jit
def update_divisor(setting, update_max, owner):
    """What U is divided by: its largest entry."""
    bits = tl.load(update_max + owner)
    return tl.maximum(bits.to(tl.float32, bitcast=True), tl.load(setting + SETTING.FLOOR))  # (7)


@triton.jit
def rescale(tables, partials, results):
    """What a tensor's direction is multiplied by, (7), (8) and the clip; FAM's sums, (11).

    One program per tensor. It adds partial sums in a fixed order.

    Args:
        tables: `Tables`.
        partials: `Partials`, of this rank or of all ranks.
        results: `Results`; writes `Scalar.SCALE`.
    """
    owner = tl.program_id(0)
    k = tl.load(tables.first_matrix + owner).to(tl.int64)
    entry = tables.matrices + k * COLUMN.COUNT
    setting = tables.settings + tl.load(entry + COLUMN.GROUP) * SETTING.COUNT
    flags = tl.load(entry + COLUMN.FLAGS)
    scale = 1.0 / update_divisor(setting, results.update_max, owner)
    numel = tl.maximum(tl.load(entry + COLUMN.NUMEL).to(tl.float32), 1.0)
    first, count = tl.load(entry + COLUMN.OWNER_TILE), tl.load(entry + COLUMN.OWNER_TILES)
    by_mean = (flags & (FLAG.ADAFACTOR | FLAG.FACTORED)) != 0
    divisor, factor = tl.where(by_mean, numel, 1.0), tl.where(by_mean, 1.0, scale)
    if (flags & FLAG.WITH_MOMENTUM) != 0:
        squares = sum_of(partials.update_sums + UPDATE_SUM.YY, first, count, UPDATE_SUM.COUNT)
        norm = tl.sqrt_rn(squares / divisor) * factor
    else:
        first_block = tl.load(entry + COLUMN.OWNER_BLOCK)
        blocks = tl.load(entry + COLUMN.OWNER_BLOCKS)
        norm = root_of(partials.update_squares, first_block, blocks, divisor, factor)
    clip = tl.load(setting + SETTING.CLIP)
    if by_mean:
        bound = tl.where((flags & FLAG.FACTORED) != 0, tl.load(setting + SETTING.D), clip)
        scale = 1.0 / tl.maximum(1.0, norm / bound)
    else:
        shrink = tl.where(clip > 0.0, clip / tl.maximum(tl.maximum(norm, clip), TINY), 1.0)
        rms = norm * shrink / tl.sqrt_rn(numel)
        s = tl.maximum(1.0, rms / tl.load(setting + SETTING.D))  # (8)
        scale = scale * shrink / s
    scalar = results.scalars + owner * SCALAR.COUNT
    tl.store(scalar + SCALAR.SCALE, scale)
    taken = tl.load(results.counters + COUNTER.SKIP) == 0
    if ((flags & FLAG.ADAPTIVE) != 0) & (count > 0) & taken:
        update_band_sums(entry, setting, scalar, partials.update_sums, first, count, numel)
