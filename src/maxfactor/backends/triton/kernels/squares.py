"""Sums of squares in three parts, which neither overflow nor underflow: see `rule/squares.py`.

The plain sum of a tile is taken as it is while it is usual. If it is not, the tile is read again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import COLUMNS, SQUARE
from maxfactor.backends.triton.kernels.tiles import load_tile, piece_of, sum_of
from maxfactor.rule import squares

UNIT = tl.constexpr(squares.UNIT)
INVERSE_UNIT = tl.constexpr(1.0 / squares.UNIT)
LOW, HIGH = tl.constexpr(squares.LOW**2), tl.constexpr(squares.HIGH**2)
LIMIT, INVERSE_LIMIT = tl.constexpr(squares.LIMIT), tl.constexpr(1.0 / squares.LIMIT)
EXPONENT = tl.constexpr(0x7F800000)  # the bits of a float32's exponent
LARGEST = tl.constexpr(0x7E800000)  # the bits of 2^126, whose inverse is not subnormal
BOTH = tl.constexpr(0x7F000000)  # the bits of x and 1 / x add up to it, for a power of two


@triton.jit
def power_of_two(x):
    """A power of two near x >= 0, from 2^-126 to 2^126: x divided by it is below 4."""
    bits = tl.minimum(x.to(tl.int32, bitcast=True) & EXPONENT, LARGEST)
    return tl.maximum(bits, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(power):
    """1 / power, exactly, for a result of `power_of_two`."""
    return (-(power.to(tl.int32, bitcast=True) - BOTH)).to(tl.float32, bitcast=True)


@triton.jit
def is_unusual(total):
    """Whether a plain sum of squares is so large, or so small, that it cannot be trusted."""
    return (total < LOW) | (total > HIGH)  # false for NaN


@triton.jit
def store_usual(place, total):
    """Store a plain sum of squares."""
    tl.store(place + SQUARE.USUAL, total)
    tl.store(place + SQUARE.LARGE, 0.0)
    tl.store(place + SQUARE.SMALL, 0.0)


@triton.jit
def store_scaled(place, total, unit):
    """Store a sum of squares of values that were divided by `unit`, a power of two."""
    large, small = unit > LIMIT, unit < INVERSE_LIMIT
    own = unit * tl.where(large, INVERSE_UNIT, tl.where(small, UNIT, 1.0))
    total = total * own * own
    tl.store(place + SQUARE.USUAL, tl.where(large | small, 0.0, total))
    tl.store(place + SQUARE.LARGE, tl.where(large, total, 0.0))
    tl.store(place + SQUARE.SMALL, tl.where(small, total, 0.0))


@triton.jit
def store_weight_squares(place, target, total, P_DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Store the sum of W² of a tile; `total` are its plain sums by column."""
    everything = tl.sum(total, axis=0)
    if is_unusual(everything):
        tl.debug_barrier()  # other threads of this program may have written what is read here
        peaks = tl.zeros([COLUMNS], tl.float32)
        for number in range(target.span.pieces):
            piece = piece_of(target.span, number, target.m, target.n)
            w = load_tile(target.pointer, piece, P_DTYPE, ALIGNED)
            peaks = tl.maximum(peaks, tl.max(tl.abs(w), axis=0))
        unit = power_of_two(tl.max(peaks, axis=0))
        again = tl.zeros([COLUMNS], tl.float32)
        for number in range(target.span.pieces):
            piece = piece_of(target.span, number, target.m, target.n)
            w = load_tile(target.pointer, piece, P_DTYPE, ALIGNED) * inverse_of(unit)
            again += tl.sum(w * w, axis=0)
        store_scaled(place, tl.sum(again, axis=0), unit)
    else:
        store_usual(place, everything)


@triton.jit
def root_of(parts, first, count, divisor, factor):
    """Return factor * sqrt(sum / divisor) of `count` sums from `first` on, in a fixed order."""
    usual = sum_of(parts + SQUARE.USUAL, first, count, SQUARE.COUNT)
    large = sum_of(parts + SQUARE.LARGE, first, count, SQUARE.COUNT)
    small = sum_of(parts + SQUARE.SMALL, first, count, SQUARE.COUNT)
    is_large, is_small = large > 0.0, usual == 0.0
    total = tl.where(is_small, small, usual + small * INVERSE_UNIT * INVERSE_UNIT)
    total = tl.where(is_large, large + usual * INVERSE_UNIT * INVERSE_UNIT, total)
    unit = tl.where(is_large, UNIT, tl.where(is_small & (small > 0.0), INVERSE_UNIT, 1.0))
    return tl.sqrt_rn(total / divisor) * factor * unit
