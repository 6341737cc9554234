"""The passes over matrices, compiled by numba. All compiled functions are in this file.

A matrix is cut into tasks, which are blocks of rows. A kernel runs tasks `first` to `last`, without
Python's lock, so that several threads run it side by side. What a task returns depends on its rows
alone, and never on the number of threads. Kernels get tensors as addresses in a table, so one call
serves matrices of many shapes.

    sums            of G^2 by row and column, and of W^2
    totals_of       the sums of G^2 of whole matrices
    moments         (5) and (6), for whole matrices
    measure         maxima and squares of U for (7) and (8)
    write_by_sign   (9)
    write           the move by U, or by y of (10) to (13)

One core reads several streams faster than one. So a pass that reads little else takes four rows at
a time, a quarter of the task apart.

Gradients are finite here: the guard has seen the sums before anything is written.
"""

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from maxfactor.settings import BLOCK, FLOAT32_TINY

FOUR = 4  # rows at a time
LARGEST_CODE = np.float32(127.0)
ZERO = np.float32(0.0)
ONE = np.float32(1.0)
TINY = np.float32(FLOAT32_TINY)
HALF = 0.5
NO_BITS, MAGNITUDE = np.int32(0), np.int32(0x7FFFFFFF)

# Addresses of tensors, and where the rows, columns and tasks of a matrix begin in flat arrays.
MATRIX = np.dtype(
    [
        (name, np.int64)
        for name in (
            "grad", "param", "row_var", "col_var", "momentum", "momentum_scale",
            "m", "n", "first_row", "first_column", "first_task", "last_task",
        )
    ]
)  # fmt: skip
# Rows `start` to `stop` of a matrix; its sums over columns begin at `part`.
TASK = np.dtype([(name, np.int64) for name in ("matrix", "start", "stop", "part")])


def compiled(**options):
    """`numba.njit` with code on disk, or without where no folder for it can be written."""

    def decorate(function):
        settings = {"nogil": True, "error_model": "numpy", **options}
        try:
            return njit(cache=True, **settings)(function)
        except RuntimeError:  # numba finds no folder for its cache
            return njit(**settings)(function)

    return decorate


# Sums may be taken in any order, and a product and a sum rounded once.
ANY_ORDER = {"fastmath": {"reassoc", "contract"}}


def pointer_to(kind):
    """An operation that turns an address into a pointer."""

    @intrinsic
    def pointer(context, address):
        def convert(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), convert

    return pointer


float_pointer, int8_pointer = pointer_to(types.float32), pointer_to(types.int8)


@compiled()
def as_float(bits):
    """A float from its bits."""
    return np.int32(bits).view(np.float32)


# ------------------------------------------------------------------------------ rows of a matrix


@compiled(**ANY_ORDER)
def add_squares(a, b, c, d, columns):
    """Add the squares of four rows to `columns`; return their sums by row."""
    of_a, of_b, of_c, of_d = ZERO, ZERO, ZERO, ZERO
    for j in range(columns.size):
        aa, bb, cc, dd = a[j] * a[j], b[j] * b[j], c[j] * c[j], d[j] * d[j]
        columns[j] += (aa + bb) + (cc + dd)
        of_a += aa
        of_b += bb
        of_c += cc
        of_d += dd
    return of_a, of_b, of_c, of_d


@compiled(**ANY_ORDER)
def square_sum(x):
    """The sum of x^2 in float64, whose range holds the squares of all float32."""
    quarter = x.size // FOUR
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    for j in range(quarter):
        a += np.float64(x[j]) ** 2
        b += np.float64(x[j + quarter]) ** 2
        c += np.float64(x[j + 2 * quarter]) ** 2
        d += np.float64(x[j + 3 * quarter]) ** 2
    for j in range(FOUR * quarter, x.size):
        a += np.float64(x[j]) ** 2
    return (a + b) + (c + d)


@compiled()
def normalize(u, g, row, columns, cap):
    """U = G / sqrt(V), with 1 / sqrt(V) as a product of roots that is at most `cap`."""
    for j in range(g.size):
        root = row * columns[j]
        u[j] = g[j] * (root if root < cap else cap)


@compiled()
def bits_of(g, root, cap):
    """The bits of |U| of one entry. Bits of floats that are not negative sort as the floats do."""
    return np.float32(abs(g) * (root if root < cap else cap)).view(np.int32)


@compiled()
def largest_of_four(a, b, c, d, rows, columns, cap):
    """The bits of the largest |U| of each of four rows."""
    of_a, of_b, of_c, of_d = NO_BITS, NO_BITS, NO_BITS, NO_BITS
    row_a, row_b, row_c, row_d = rows
    for j in range(columns.size):
        root = columns[j]
        of_a = np.maximum(of_a, bits_of(a[j], row_a * root, cap))
        of_b = np.maximum(of_b, bits_of(b[j], row_b * root, cap))
        of_c = np.maximum(of_c, bits_of(c[j], row_c * root, cap))
        of_d = np.maximum(of_d, bits_of(d[j], row_d * root, cap))
    return of_a, of_b, of_c, of_d


@compiled()
def square_of(g, root, cap):
    """U^2 of one entry, in float64."""
    return np.float64(g * (root if root < cap else cap)) ** 2


@compiled(**ANY_ORDER)
def squares_of_four(a, b, c, d, rows, columns, cap):
    """The sum of U^2 of four rows."""
    total = 0.0
    row_a, row_b, row_c, row_d = rows
    for j in range(columns.size):
        root = columns[j]
        first = square_of(a[j], row_a * root, cap) + square_of(b[j], row_b * root, cap)
        second = square_of(c[j], row_c * root, cap) + square_of(d[j], row_d * root, cap)
        total += first + second
    return total


@compiled()
def move_(w, u, coefficient, keep):
    """W <- keep * W - coefficient * U."""
    for j in range(w.size):
        w[j] = keep * w[j] - coefficient * u[j]


@compiled()
def move_by_sign_(w, u, coefficient, keep):
    """W <- keep * W - coefficient * sign(U)."""
    for j in range(w.size):
        move = coefficient if u[j] > ZERO else (-coefficient if u[j] < ZERO else ZERO)
        w[j] = keep * w[j] - move


# ------------------------------------------------------------------------------------- momentum


@compiled(**ANY_ORDER)
def average_block_(momentum, x, beta, totals):
    """Equation (12) for 64 values, before M is stored. Adds sums of x M and of x^2 to `totals`."""
    rest, agreement, power = ONE - beta, ZERO, ZERO
    for j in range(BLOCK):
        agreement += x[j] * momentum[j]
        power += x[j] * x[j]
        momentum[j] = beta * momentum[j] + rest * x[j]  # (12)
    totals[0] += agreement
    totals[1] += power


@compiled()
def largest_of_block(x):
    """The largest |x| of 64 values."""
    bits, found = x.view(np.int32), NO_BITS
    for j in range(BLOCK):
        found = np.maximum(found, np.bitwise_and(bits[j], MAGNITUDE))
    return as_float(found)


@compiled()
def encode_block_(codes, momentum, scale):
    """The int8 codes of 64 values, as floats; `momentum` becomes what is stored."""
    divisor = scale if scale > TINY else TINY
    for j in range(BLOCK):
        codes[j] = np.rint(momentum[j] / divisor)
        momentum[j] = codes[j] * scale


@compiled()
def filter_(x, codes, scales, space, numbers, totals):
    """Equations (11) to (13) for a row: x <- y, and M is stored.

    Rows of x and `space` are as long as all blocks, and 0 after the end of the matrix's row.
    `numbers` are beta, the factor of M in (13), and mu.
    """
    beta, of_momentum, mix = numbers[0], numbers[1], numbers[2]
    momentum, rounded = space[0], space[1]
    for j in range(codes.size):
        momentum[j] = np.float32(codes[j])
    for block in range(scales.size):
        start, stop = block * BLOCK, block * BLOCK + BLOCK
        own, stored, scale = x[start:stop], momentum[start:stop], scales[block]
        for j in range(BLOCK):
            stored[j] *= scale
        average_block_(stored, own, beta, totals)
        scale = largest_of_block(stored) / LARGEST_CODE
        scales[block] = scale
        encode_block_(rounded[start:stop], stored, scale)
        for j in range(BLOCK):
            own[j] = of_momentum * stored[j] + mix * own[j]  # (13)
    for j in range(codes.size):
        codes[j] = np.int8(rounded[j])


# -------------------------------------------------------------------------------------- kernels


@compiled()
def widest(tasks, matrices, first, last):
    """The most columns that a task has."""
    n = 1
    for k in range(first, last):
        n = max(n, matrices[tasks[k].matrix].n)
    return n


@compiled()
def row_of(x, i, nothing):
    """Row i, or zeros if there is none."""
    return x[i] if i < x.shape[0] else nothing


@compiled()
def entry_of(x, i):
    """Entry i, or zero if there is none."""
    return x[i] if i < x.size else ZERO


@compiled()
def store(out, i, value):
    """Set entry i, if there is one."""
    if i < out.size:
        out[i] = value


@compiled()
def sums(first, last, tasks, matrices, row_sums, parts, weight_squares, reads):
    """Sums of G^2 by row, and by column for each task; of W^2 where a matrix `reads` it."""
    zeros = np.zeros(widest(tasks, matrices, first, last), np.float32)
    for k in range(first, last):
        task = tasks[k]
        own, count = matrices[task.matrix], task.stop - task.start
        offset = task.start * own.n
        g = carray(float_pointer(own.grad + 4 * offset), (count, own.n))
        columns, nothing = parts[task.part : task.part + own.n], zeros[: own.n]
        columns[:] = ZERO
        rows = row_sums[own.first_row + task.start : own.first_row + task.stop]
        apart = (count + FOUR - 1) // FOUR
        for a in range(apart):
            b, c, d = a + apart, a + 2 * apart, a + 3 * apart
            of_a, of_b, of_c, of_d = add_squares(
                g[a], row_of(g, b, nothing), row_of(g, c, nothing), row_of(g, d, nothing), columns
            )
            rows[a] = of_a
            store(rows, b, of_b)
            store(rows, c, of_c)
            store(rows, d, of_d)
        if reads[task.matrix]:
            w = carray(float_pointer(own.param + 4 * offset), count * own.n)
            weight_squares[k] = square_sum(w)


@compiled()
def totals_of(first, last, matrices, row_sums, totals):
    """The sum of G^2 of each matrix, from those of its rows."""
    for i in range(first, last):
        own = matrices[i]
        total = 0.0
        for row in range(own.first_row, own.first_row + own.m):
            total += row_sums[row]
        totals[i] = total


@compiled()
def average_moments_(moments, found, count, offset, kappa):
    """Equation (5): lerp as torch computes it, exact for kappa = 1."""
    for j in range(moments.size):
        newest, before = found[j] / count + offset, moments[j]
        change = newest - before
        near = before + kappa * change
        moments[j] = near if kappa < HALF else newest - change * (ONE - kappa)  # (5)


@compiled()
def inverse_roots(out, x, divisor):
    """1 / sqrt(x / divisor); inf for 0, which the cap of `normalize` bounds."""
    for j in range(out.size):
        out[j] = ONE / np.sqrt(x[j] / divisor)


@compiled()
def moments(
    first, last, tasks, matrices, row_sums, parts, row_roots, column_roots, means, numbers, by_max
):
    """Equations (5) and (6): new R and C, the roots of V's factors, and the mean of R.

    `numbers` are kappa, what is added to counts and to squares, and the least divisor.
    """
    kappa, count_eps, offset, floor = numbers[0], numbers[1], numbers[2], numbers[3]
    for i in range(first, last):
        own = matrices[i]
        rows = slice(own.first_row, own.first_row + own.m)
        column_sums = column_roots[own.first_column : own.first_column + own.n]
        column_sums[:] = ZERO
        for k in range(own.first_task, own.last_task):
            part = parts[tasks[k].part : tasks[k].part + own.n]
            for j in range(own.n):
                column_sums[j] += part[j]
        row_var = carray(float_pointer(own.row_var), own.m)
        col_var = carray(float_pointer(own.col_var), own.n)
        average_moments_(row_var, row_sums[rows], np.float32(own.n + count_eps), offset, kappa)
        average_moments_(col_var, column_sums, np.float32(own.m + count_eps), offset, kappa)
        total, peak = 0.0, ZERO
        for value in row_var:
            total += value
            peak = max(peak, value)
        means[i] = total / own.m
        inverse_roots(row_roots[rows], row_var, max(peak if by_max else means[i], floor))  # (6)
        inverse_roots(column_sums, col_var, ONE)


@compiled()
def measure(
    first, last, tasks, matrices, row_roots, column_roots, cap, peaks, squares, needs_peaks,
    needs_squares,
):  # fmt: skip
    """Without momentum: the largest |U| of each row, and the sum of U^2 of each task.

    Runs backwards: what the pass before has read last is still in the cache.
    """
    zeros = np.zeros(widest(tasks, matrices, first, last), np.float32)
    for k in range(last - 1, first - 1, -1):
        task = tasks[k]
        own, count = matrices[task.matrix], task.stop - task.start
        x = carray(float_pointer(own.grad + 4 * task.start * own.n), (count, own.n))
        columns = column_roots[own.first_column : own.first_column + own.n]
        of_rows = row_roots[own.first_row + task.start : own.first_row + task.stop]
        found = peaks[own.first_row + task.start : own.first_row + task.stop]
        nothing, apart, total = zeros[: own.n], (count + FOUR - 1) // FOUR, 0.0
        for a in range(apart):
            b, c, d = a + apart, a + 2 * apart, a + 3 * apart
            g = x[a], row_of(x, b, nothing), row_of(x, c, nothing), row_of(x, d, nothing)
            roots = of_rows[a], entry_of(of_rows, b), entry_of(of_rows, c), entry_of(of_rows, d)
            if needs_squares:
                total += squares_of_four(g[0], g[1], g[2], g[3], roots, columns, cap)
            if needs_peaks:
                bits = largest_of_four(g[0], g[1], g[2], g[3], roots, columns, cap)
                found[a] = as_float(bits[0])
                store(found, b, as_float(bits[1]))
                store(found, c, as_float(bits[2]))
                store(found, d, as_float(bits[3]))
        squares[k] = total


@compiled()
def momentum_of(own, row):
    """The codes and scales of a row."""
    blocks = (own.n + BLOCK - 1) // BLOCK
    codes = carray(int8_pointer(own.momentum + row * own.n), own.n)
    return codes, carray(float_pointer(own.momentum_scale + 4 * row * blocks), blocks)


@compiled()
def write_by_sign(first, last, tasks, matrices, coefficients, keeps, weight_squares, squares_too):
    """Equation (9) without momentum, as sign(U) = sign(G); the sums of the new W^2 if asked for."""
    for k in range(first, last):
        task = tasks[k]
        own, count = matrices[task.matrix], task.stop - task.start
        offset = 4 * task.start * own.n
        g = carray(float_pointer(own.grad + offset), (count, own.n))
        w = carray(float_pointer(own.param + offset), (count, own.n))
        for row in range(count):
            coefficient = coefficients[own.first_row + task.start + row]
            move_by_sign_(w[row], g[row], coefficient, keeps[task.matrix])
        if squares_too:  # while W is in the cache
            weight_squares[k] = square_sum(carray(float_pointer(own.param + offset), count * own.n))


@compiled()
def write(
    first, last, tasks, matrices, coefficients, keeps, weight_squares, squares_too, row_roots,
    column_roots, cap, factors, memory, totals,
):  # fmt: skip
    """W <- keep * W - coefficient * U, or y of (13) with momentum; as `write_by_sign`."""
    space = np.zeros((3, widest(tasks, matrices, first, last) + BLOCK), np.float32)
    for k in range(first, last):
        task = tasks[k]
        own, count = matrices[task.matrix], task.stop - task.start
        offset, begin = 4 * task.start * own.n, own.first_row + task.start
        g = carray(float_pointer(own.grad + offset), (count, own.n))
        w = carray(float_pointer(own.param + offset), (count, own.n))
        columns = column_roots[own.first_column : own.first_column + own.n]
        factor, space[:, own.n : own.n + BLOCK] = factors[task.matrix], ZERO
        for row in range(count):
            normalize(space[0], g[row], factor * row_roots[begin + row], columns, factor * cap)
            if own.momentum:
                codes, scales = momentum_of(own, task.start + row)
                filter_(space[0], codes, scales, space[1:], memory[task.matrix], totals[k])
            move_(w[row], space[0], coefficients[begin + row], keeps[task.matrix])
        if squares_too:
            weight_squares[k] = square_sum(carray(float_pointer(own.param + offset), count * own.n))
