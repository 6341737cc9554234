"""What kernels load and store: pieces of matrices, signs as bits, sums in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.descriptors import Piece, TileSpan
from maxfactor.backends.triton.kernels.layout import (
    ADDRESS,
    CHUNK,
    COLUMN,
    COLUMNS,
    PARTS_AT_ONCE,
    PIECE_ROWS,
    TILE_ROWS,
    TINY,
)


@triton.jit
def places_of(pointer, piece, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers and mask of a piece.

    ALIGNED: rows start on 16 bytes and have a multiple of 8 elements. The shifts then change
    nothing, but they let the compiler see it and move 16 bytes at a time.
    """
    n = piece.n
    if ALIGNED:
        pointer = (pointer >> 4) << 4
        n = (n >> 3) << 3
        base = tl.multiple_of(pointer.to(tl.pointer_type(DTYPE)), 16)
    else:
        base = pointer.to(tl.pointer_type(DTYPE))
    places = base + (piece.rows.to(tl.int64)[:, None] * n + piece.cols[None, :])
    return places, (piece.rows < piece.m)[:, None] & (piece.cols < n.to(tl.int32))[None, :]


@triton.jit
def load_tile(pointer, piece, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a piece as float32, 0 outside the matrix."""
    places, inside = places_of(pointer, piece, DTYPE, ALIGNED)
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(pointer, values, piece, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Store a piece; `values` are already rounded to DTYPE."""
    places, inside = places_of(pointer, piece, DTYPE, ALIGNED)
    tl.store(places, values.to(DTYPE), mask=inside)


@triton.jit
def step_place(entry):
    """Where the step counter of a tensor is; it has 64 bits, as float32 cannot count past 2^24."""
    return tl.load(entry + COLUMN.STEP).to(tl.pointer_type(tl.int64))


@triton.jit
def address_of(pointers, entry, column: tl.constexpr, DTYPE: tl.constexpr):
    """The address of a matrix of W, of G or of the orthogonal directions."""
    bytes_: tl.constexpr = DTYPE.primitive_bitwidth // 8
    base = tl.load(pointers + tl.load(entry + COLUMN.OWNER) * ADDRESS.COUNT + column)
    return base + tl.load(entry + COLUMN.START) * bytes_


@triton.jit
def inverse_root(x):
    """1 / sqrt(x), finite for 0."""
    return tl.rsqrt(tl.maximum(x, TINY))


@triton.jit
def append_signs(signs, values):
    """Shift the signs of one more piece into the words of a tile."""
    return (signs << 1) | (values.to(tl.uint32, bitcast=True) >> 31)


@triton.jit
def with_signs(size, signs, piece, pieces):
    """`size`, one value per row, with the signs of a piece; the last has the lowest bit."""
    sign = (signs << (32 - pieces + piece).to(tl.uint32)) & 0x80000000
    return (size.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def has_zeros(least, cols, n):
    """Whether a tile has a zero. Rows beyond the last read as zeros: slower then, not wrong."""
    return tl.min(tl.where(cols < n, least, 1.0), axis=0) == 0.0


@triton.jit
def sign_places(signs_at, tile):
    """Where the sign bits of a tile are."""
    address = (tl.load(signs_at) >> 4) << 4  # changes nothing, see `places_of`
    sign_bits = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    within = tl.arange(0, PIECE_ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return sign_bits + tile.to(tl.int64) * (PIECE_ROWS * COLUMNS) + within


@triton.jit
def sum_of(values, first, count, stride=1):
    """The sum of `count` partial sums from `first` on, always in the same order."""
    total = tl.zeros([1024], tl.float32)
    for i in range(0, count, 1024):
        at = i + tl.arange(0, 1024)
        total += tl.load(values + (first + at) * stride, mask=at < count, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def sum_down(part, parts, length, at):
    """The sum of `parts` consecutive vectors at some places, always in the same order."""
    total = tl.zeros([PARTS_AT_ONCE, CHUNK], tl.float32)
    for i in range(0, parts, PARTS_AT_ONCE):
        which = i + tl.arange(0, PARTS_AT_ONCE)
        inside = (which < parts)[:, None] & (at < length)[None, :]
        total += tl.load(part + which[:, None] * length + at[None, :], mask=inside, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def span_of(entry, tile, m):
    """The part of a matrix that a tile covers."""
    strips = tl.load(entry + COLUMN.STRIPS).to(tl.int32)
    local = (tile - tl.load(entry + COLUMN.FIRST_TILE)).to(tl.int32)
    first_row = local // strips * TILE_ROWS
    pieces = tl.cdiv(tl.minimum(m.to(tl.int32) - first_row, TILE_ROWS), PIECE_ROWS)
    return TileSpan(first_row, pieces, local % strips * COLUMNS + tl.arange(0, COLUMNS))


@triton.jit
def part_of(span, part, PARTS: tl.constexpr):
    """One of PARTS equal parts of a tile, which may be empty."""
    pieces: tl.constexpr = TILE_ROWS // PIECE_ROWS // PARTS
    first_row = span.first_row + part * (pieces * PIECE_ROWS)
    rest = tl.maximum(span.pieces - part * pieces, 0)
    return TileSpan(first_row, tl.minimum(rest, pieces), span.cols)


@triton.jit
def piece_of(span, number, m, n):
    """A piece of a tile."""
    rows = span.first_row + number * PIECE_ROWS + tl.arange(0, PIECE_ROWS)
    return Piece(rows, span.cols, m, n)
