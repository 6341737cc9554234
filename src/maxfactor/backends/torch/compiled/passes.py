"""Passes over the matrices of a batch: k matrices (m, n), each somewhere else in memory.

Threads share the units, each of which is (matrix, first row, last row). Results are kept by unit,
so they do not depend on the number of threads.

    g_at, w_at          addresses of the gradients and weights, (k,)
    row_root, col_root  1 / sqrt of the factors of V, (k, m) and (k, n)
    most                the largest 1 / sqrt(V)

The sum of a row, and that of a unit's column, are float32; sums over rows are float64. `FLAGS` let
sums be vectorised. NaN and infinity keep their meaning.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic

from maxfactor.settings import BLOCK, FLOAT32_TINY

ZERO, TINY = np.float32(0.0), np.float32(FLOAT32_TINY)
LARGEST_CODE = np.float32(127.0)
FLAGS = {"contract", "reassoc", "nsz"}

# Compiled code is kept on the disk, and loaded by later processes.
compiled = njit(parallel=True, cache=True, fastmath=FLAGS, error_model="numpy")


def pointer_to(kind):
    """A function in compiled code that makes a pointer of an address."""

    @intrinsic
    def pointer(context, address):
        def lower(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), lower

    return pointer


floats, codes = pointer_to(types.float32), pointer_to(types.int8)


@intrinsic
def as_bits(context, x):
    """A float32 as an int32. For x >= 0 their order is the same, and NaN is above infinity."""

    def lower(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), lower


@intrinsic
def as_float(context, bits):
    """The inverse of `as_bits`."""

    def lower(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), lower


@intrinsic
def to_even(context, x):
    """The nearest whole number, ties to even."""

    def lower(context, builder, signature, arguments):
        found = builder.module.declare_intrinsic("llvm.rint", [ir.FloatType()])
        return builder.call(found, arguments)

    return types.float32(types.float32), lower


@compiled
def gradient_squares(units, g_at, n, by_row, by_column):
    """Sums of G^2 by row, (k, m), and by column of each unit, (units, n)."""
    for unit in prange(len(units)):
        k, start, stop = units[unit]
        g = carray(floats(g_at[k]), (stop, n))
        column = by_column[unit]
        column[:] = ZERO
        row = start
        while row + 4 <= stop:  # four rows at a time read and write the column's sums once
            a = b = c = d = ZERO
            for j in range(n):
                aa, bb = g[row, j] * g[row, j], g[row + 1, j] * g[row + 1, j]
                cc, dd = g[row + 2, j] * g[row + 2, j], g[row + 3, j] * g[row + 3, j]
                a += aa
                b += bb
                c += cc
                d += dd
                column[j] += (aa + bb) + (cc + dd)
            by_row[k, row], by_row[k, row + 1] = a, b
            by_row[k, row + 2], by_row[k, row + 3] = c, d
            row += 4
        while row < stop:
            a = ZERO
            for j in range(n):
                aa = g[row, j] * g[row, j]
                a += aa
                column[j] += aa
            by_row[k, row] = a
            row += 1


@njit(fastmath=FLAGS, error_model="numpy")
def row_squares(w, row, n):
    """The sum of W^2 of a row. One function, so that every pass adds in the same order."""
    total = ZERO
    for j in range(n):
        total += w[row, j] * w[row, j]
    return total


@compiled
def weight_squares(units, w_at, n, found):
    """Sums of W^2 by unit."""
    for unit in prange(len(units)):
        k, start, stop = units[unit]
        w = carray(floats(w_at[k]), (stop, n))
        total = 0.0
        for row in range(start, stop):
            total += row_squares(w, row, n)
        found[unit] = total


@compiled
def row_peaks(units, g_at, n, row_root, col_root, most, found):
    """The largest |U| of each row, (k, m)."""
    for unit in prange(len(units)):
        k, start, stop = units[unit]
        g, column = carray(floats(g_at[k]), (stop, n)), col_root[k]
        for row in range(start, stop):
            root, largest = row_root[k, row], np.int32(0)
            for j in range(n):
                factor = root * column[j]
                factor = most if factor > most else factor
                largest = max(largest, as_bits(abs(g[row, j] * factor)))
            found[k, row] = as_float(largest)


@compiled
def update_squares(units, g_at, n, row_root, col_root, most, found):
    """Sums of U^2 by unit."""
    for unit in prange(len(units)):
        k, start, stop = units[unit]
        g, column = carray(floats(g_at[k]), (stop, n)), col_root[k]
        total = 0.0
        for row in range(start, stop):
            root, own = row_root[k, row], ZERO
            for j in range(n):
                factor = root * column[j]
                u = g[row, j] * (most if factor > most else factor)
                own += u * u
            total += own
        found[unit] = total


@compiled
def write_signs(units, g_at, w_at, n, by_row, keep, found):
    """W <- keep W - by_row sign(G). `found` receives the sums of W^2 by unit, if it has room."""
    for unit in prange(len(units)):
        k, start, stop = units[unit]
        g, w = carray(floats(g_at[k]), (stop, n)), carray(floats(w_at[k]), (stop, n))
        kept, total = keep[k], 0.0
        for row in range(start, stop):
            move = by_row[k, row]
            for j in range(n):
                sign = np.float32(g[row, j] > ZERO) - np.float32(g[row, j] < ZERO)
                w[row, j] = kept * w[row, j] - move * sign
            if len(found):  # the row is in the cache
                total += row_squares(w, row, n)
        if len(found):
            found[unit] = total


@compiled
def write_updates(units, g_at, w_at, n, row_root, col_root, most, size, keep, found):
    """W <- keep W - size U. `found` is as in `write_signs`."""
    for unit in prange(len(units)):
        k, start, stop = units[unit]
        g, w = carray(floats(g_at[k]), (stop, n)), carray(floats(w_at[k]), (stop, n))
        column, kept, move, total = col_root[k], keep[k], size[k], 0.0
        for row in range(start, stop):
            root = row_root[k, row]
            for j in range(n):
                factor = root * column[j]
                u = g[row, j] * (most if factor > most else factor)
                w[row, j] = kept * w[row, j] - move * u
            if len(found):
                total += row_squares(w, row, n)
        if len(found):
            found[unit] = total


@compiled
def write_filtered(
    units, g_at, w_at, codes_at, scales_at, n, row_root, col_root, most,
    scalars, totals,
):  # fmt: skip
    """Average x in the momentum M, which is int8, and write W <- keep W - size y.

    `scalars` are, of each matrix, the factor of x, 1 - beta, the factors of M and of x in y, size
    and keep, (k, 6). `totals` receives the sums of x M and of x^2 by unit, (units, 2).
    """
    blocks = (n + BLOCK - 1) // BLOCK
    for unit in prange(len(units)):
        x = np.empty(BLOCK, np.float32)
        average = np.empty(BLOCK, np.float32)
        k, start, stop = units[unit]
        g, w = carray(floats(g_at[k]), (stop, n)), carray(floats(w_at[k]), (stop, n))
        momentum = carray(codes(codes_at[k]), (stop, n))
        scales = carray(floats(scales_at[k]), (stop, blocks))
        column, (scale_in, weight, of_average, of_x, size, keep) = col_root[k], scalars[k]
        along, power = 0.0, 0.0
        for row in range(start, stop):
            root = row_root[k, row]
            own_along = own_power = ZERO
            for block in range(blocks):
                begin = block * BLOCK
                length = min(BLOCK, n - begin)
                scale, largest = scales[row, block], np.int32(0)
                for j in range(length):
                    factor = root * column[begin + j]
                    factor = most if factor > most else factor
                    x[j] = g[row, begin + j] * factor * scale_in
                    before = np.float32(momentum[row, begin + j]) * scale
                    own_along += x[j] * before
                    own_power += x[j] * x[j]
                    average[j] = before + weight * (x[j] - before)
                    largest = max(largest, as_bits(abs(average[j])))
                scale = as_float(largest) / LARGEST_CODE
                scales[row, block] = scale
                divisor = max(scale, TINY)
                for j in range(length):
                    code = to_even(average[j] / divisor)
                    momentum[row, begin + j] = np.int8(np.int32(code))
                    y = code * scale * of_average + of_x * x[j]
                    w[row, begin + j] = keep * w[row, begin + j] - size * y
            along += own_along
            power += own_power
        totals[unit, 0], totals[unit, 1] = along, power
