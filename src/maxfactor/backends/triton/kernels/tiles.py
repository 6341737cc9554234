"""What kernels load and store: pieces of matrices, signs as bits, sums in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import (
    FIRST_TILE,
    OWNER,
    POINTERS,
    START,
    STRIPS,
    TINY,
)


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
    """A piece as float32, 0 outside the matrix."""
    places, inside = places_of(pointer, rows, cols, m, n, KIND, ALIGNED)
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(pointer, tile, rows, cols, m, n, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Write a piece that already has its final values."""
    places, inside = places_of(pointer, rows, cols, m, n, KIND, ALIGNED)
    tl.store(places, tile.to(KIND), mask=inside)


@triton.jit
def address(pointers, entry, column: tl.constexpr, KIND: tl.constexpr):
    """Where a matrix of W (column 0) or of G (column 1) begins."""
    bytes_: tl.constexpr = KIND.primitive_bitwidth // 8
    base = tl.load(pointers + tl.load(entry + OWNER) * POINTERS + column)
    return base + tl.load(entry + START) * bytes_


@triton.jit
def inverse_root(x):
    """1 / sqrt(x), finite for 0."""
    return tl.rsqrt(tl.maximum(x, TINY))


@triton.jit
def marked(marks, values):
    """The signs of a tile's pieces so far, and of one more: the last piece has the lowest bit."""
    return (marks << 1) | (values.to(tl.uint32, bitcast=True) >> 31)


@triton.jit
def negated(size, marks, piece, pieces):
    """`size`, which is one value for each row, with the signs of a piece."""
    sign = (marks << (32 - pieces + piece).to(tl.uint32)) & 0x80000000
    return (size.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def has_zeros(least, cols, n):
    """Whether a tile has a zero. Rows beyond the last read as zeros: slower then, not wrong."""
    return tl.min(tl.where(cols < n, least, 1.0), axis=0) == 0.0


@triton.jit
def sign_places(signs, tile, ROWS_: tl.constexpr, COLS_: tl.constexpr):
    """Where the sign bits of a tile are kept."""
    within = tl.arange(0, ROWS_)[:, None] * COLS_ + tl.arange(0, COLS_)[None, :]
    return signs + tile.to(tl.int64) * (ROWS_ * COLS_) + within


@triton.jit
def sum_of(values, first, count, stride=1):
    """The sum of `count` partial sums from `first` on, always in the same order."""
    total = tl.zeros([1024], tl.float32)
    for i in range(0, count, 1024):
        at = i + tl.arange(0, 1024)
        total += tl.load(values + (first + at) * stride, mask=at < count, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def sum_down(part, parts, length, at, CHUNK_: tl.constexpr, PARTS_: tl.constexpr):
    """The sum of `parts` vectors that lie one behind the other, always in the same order."""
    total = tl.zeros([PARTS_, CHUNK_], tl.float32)
    for i in range(0, parts, PARTS_):
        which = i + tl.arange(0, PARTS_)
        inside = (which < parts)[:, None] & (at < length)[None, :]
        total += tl.load(part + which[:, None] * length + at[None, :], mask=inside, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def within_tile(entry, tile, m, ROWS_: tl.constexpr, COLS_: tl.constexpr, TILE: tl.constexpr):
    """Of a tile of a matrix: its first row, how many pieces it has, and its columns."""
    strips = tl.load(entry + STRIPS).to(tl.int32)
    local = (tile - tl.load(entry + FIRST_TILE)).to(tl.int32)
    first_row = local // strips * TILE
    pieces = tl.cdiv(tl.minimum(m.to(tl.int32) - first_row, TILE), ROWS_)
    return first_row, pieces, local % strips * COLS_ + tl.arange(0, COLS_)
