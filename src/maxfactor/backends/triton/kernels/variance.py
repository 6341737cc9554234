"""The variance of (5), (5'), (6) and (10), as several kernels need it."""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import (
    ADAFACTOR,
    ALL_ROWS,
    BETA2_DECAY,
    COL_VAR,
    FACTORED,
    FLAGS,
    FLOOR,
    GAMMA,
    KAPPA_HIGH,
    KAPPA_LOW,
    MAX_NORM,
    OFFSET,
    ONE_MINUS_GAMMA,
    ROW_CHUNK,
    ROW_CHUNKS,
    TINY,
    VARIANCE_FLOOR,
)
from maxfactor.backends.triton.kernels.tiles import inverse_root, load_tile, sum_of


@triton.jit
def statistic_weight(t, setting):
    """Equation (1)."""
    power = tl.exp2(tl.load(setting + BETA2_DECAY) * tl.log2(t))
    power = tl.maximum(power, tl.load(setting + KAPPA_LOW))
    return tl.minimum(power, tl.load(setting + KAPPA_HIGH))


@triton.jit
def dense_variance(entry, setting, t, g, rows, cols, m, n, ALIGNED: tl.constexpr):
    """Equation (5') for a tile of a tensor that keeps a full variance."""
    pointer = tl.load(entry + COL_VAR)
    old = load_tile(pointer, rows, cols, m, n, tl.float32, ALIGNED)
    square = g * g
    if (tl.load(entry + FLAGS) & ADAFACTOR) != 0:
        kappa = statistic_weight(t, setting)
        square += tl.load(setting + OFFSET)
        new = tl.where(kappa == 1.0, square, old + kappa * (square - old))
    else:
        gamma = tl.load(setting + GAMMA)
        new = gamma * old + tl.load(setting + ONE_MINUS_GAMMA) * square
    return new


@triton.jit
def mean_row_var(entry, row_sum_var):
    """The mean of R."""
    total = sum_of(row_sum_var, tl.load(entry + ROW_CHUNK), tl.load(entry + ROW_CHUNKS))
    return total / tl.load(entry + ALL_ROWS).to(tl.float32)


@triton.jit
def row_scale(entry, setting, k, extremes, row_sum_var, flags):
    """What R is divided by in (6): max R, or mean R for Adafactor, or nothing."""
    largest = tl.load(extremes + k * 3).to(tl.float32, bitcast=True)
    scale = tl.maximum(largest, tl.load(setting + FLOOR))
    if (flags & (ADAFACTOR | FACTORED)) != 0:
        scale = tl.maximum(mean_row_var(entry, row_sum_var), TINY)
    return tl.where((flags & MAX_NORM) != 0, scale, 1.0)


@triton.jit
def is_floored(setting, k, extremes, scale):
    """Whether the floor of (6) acts somewhere in a matrix."""
    least_r = tl.load(extremes + k * 3 + 1).to(tl.float32, bitcast=True)
    least_c = tl.load(extremes + k * 3 + 2).to(tl.float32, bitcast=True)
    return least_r / scale * least_c < tl.load(setting + VARIANCE_FLOOR)


@triton.jit
def factor_roots(pointer, at, end, divisor):
    """1 / sqrt of some of R or C, infinite where they are 0, and where the other is R / divisor."""
    values = tl.load(pointer.to(tl.pointer_type(tl.float32)) + at, mask=at < end, other=1.0)
    return tl.where(values > 0.0, inverse_root(values / divisor), float("inf"))


@triton.jit
def capped(row_roots, col_roots, root_of_floor):
    """1 / sqrt(V) of a piece, where V = R C is never below its floor."""
    return tl.minimum(row_roots[:, None] * col_roots[None, :], root_of_floor)
