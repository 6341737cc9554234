"""The variance of (5), (5'), (6) and (10), as several kernels need it.

Factored as in Adafactor: Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
Cost" (2018), https://arxiv.org/abs/1804.04235.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import COLUMN, EXTREME, FLAG, SETTING, TINY
from maxfactor.backends.triton.kernels.tiles import inverse_root, load_tile, sum_of


@triton.jit
def statistic_weight(t, setting):
    """The weight of the newest statistic."""
    power = tl.exp2(tl.load(setting + SETTING.BETA2_DECAY) * tl.log2(t))  # (1)
    power = tl.maximum(power, tl.load(setting + SETTING.KAPPA_LOW))
    return tl.minimum(power, tl.load(setting + SETTING.KAPPA_HIGH))


@triton.jit
def dense_variance(entry, setting, t, g, piece, ALIGNED: tl.constexpr):
    """The new variance of a piece of a tensor that keeps a full one."""
    pointer = tl.load(entry + COLUMN.COL_VAR)
    old = load_tile(pointer, piece, tl.float32, ALIGNED)
    square = g * g
    if (tl.load(entry + COLUMN.FLAGS) & FLAG.ADAFACTOR) != 0:
        kappa = statistic_weight(t, setting)
        square += tl.load(setting + SETTING.OFFSET)
        new = tl.where(kappa == 1.0, square, old + kappa * (square - old))
    else:
        gamma = tl.load(setting + SETTING.GAMMA)
        new = gamma * old + tl.load(setting + SETTING.ONE_MINUS_GAMMA) * square  # (5')
    return new


@triton.jit
def mean_row_var(entry, row_var_sums):
    """The mean of R."""
    first, count = tl.load(entry + COLUMN.ROW_CHUNK), tl.load(entry + COLUMN.ROW_CHUNKS)
    return sum_of(row_var_sums, first, count) / tl.load(entry + COLUMN.ALL_ROWS).to(tl.float32)


@triton.jit
def row_divisor(entry, setting, k, results, flags):
    """What R is divided by in (6): max R, or mean R for Adafactor, or 1."""
    largest = tl.load(results.extremes + k * EXTREME.COUNT + EXTREME.MAX_ROW)
    divisor = tl.maximum(largest.to(tl.float32, bitcast=True), tl.load(setting + SETTING.FLOOR))
    if (flags & (FLAG.ADAFACTOR | FLAG.FACTORED)) != 0:
        divisor = tl.maximum(mean_row_var(entry, results.row_var_sums), TINY)
    return tl.where((flags & FLAG.MAX_NORM) != 0, divisor, 1.0)


@triton.jit
def is_floored(setting, k, extremes, divisor):
    """Whether the floor of (6) acts anywhere in a matrix."""
    place = extremes + k * EXTREME.COUNT
    least_r = tl.load(place + EXTREME.MIN_ROW).to(tl.float32, bitcast=True)
    least_c = tl.load(place + EXTREME.MIN_COL).to(tl.float32, bitcast=True)
    return least_r / divisor * least_c < tl.load(setting + SETTING.VARIANCE_FLOOR)


@triton.jit
def factor_roots(pointer, at, end, divisor):
    """1 / sqrt(values / divisor) of some of R or C, infinite where they are 0."""
    values = tl.load(pointer.to(tl.pointer_type(tl.float32)) + at, mask=at < end, other=1.0)
    return tl.where(values > 0.0, inverse_root(values / divisor), float("inf"))


@triton.jit
def inverse_roots(row_roots, col_roots, root_of_floor):
    """1 / sqrt(V) of a piece. V is never below its floor, so the root is never above its own."""
    return tl.minimum(row_roots[:, None] * col_roots[None, :], root_of_floor)  # (6)
