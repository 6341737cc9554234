"""Sizes of the blocks that are orthogonalised one by one, and where the tiles of a matrix are.

The blocks of a batch lie one after the other, each contiguous. A tile of a matrix may belong to
several blocks, so the sizes of blocks are taken from the buffer and not from tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.descriptors import BlockGrid
from maxfactor.backends.triton.kernels.layout import BLOCK_CHUNK, COLUMN, COUNTER, RANGE


@triton.jit(do_not_specialize=["unit"])
def measure_blocks(buffer, squares, counters, size, unit):
    """The sum of squares of a block, by one program, in a fixed order; 0 if the step is skipped.

    Args:
        buffer: The blocks, each of `size` elements.
        squares: (blocks,) float32, written.
        counters: `Results.counters`.
        size: Elements of a block.
        unit: What elements are multiplied by before they are squared.
    """
    block = tl.program_id(0).to(tl.int64)
    end = tl.where(tl.load(counters + COUNTER.SKIP) != 0, 0, size)  # there is no y: read nothing
    total = tl.zeros([BLOCK_CHUNK], tl.float32)
    for first in range(0, end, BLOCK_CHUNK):
        at = first + tl.arange(0, BLOCK_CHUNK)
        values = tl.load(buffer + block * size + at, mask=at < size, other=0.0).to(tl.float32)
        total += (values * unit) * (values * unit)
    tl.store(squares + block, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["norm"])
def normalize_blocks(source, target, squares, counters, size, norm):
    """Write blocks of y with the Frobenius norm `norm`, in the dtype of the iteration.

    Args:
        source: The blocks of y, each of `size` elements.
        target: Where they are written; may be the same memory.
        squares: (blocks,) float32: sums of (y * RANGE)².
        counters: `Results.counters`.
        size: Elements of a block.
        norm: The norm that a block gets.
    """
    end = tl.where(tl.load(counters + COUNTER.SKIP) != 0, 0, size)  # there is no y: iterate zeros
    chunks = tl.cdiv(size, BLOCK_CHUNK)
    block = (tl.program_id(0) // chunks).to(tl.int64)
    at = tl.program_id(0) % chunks * BLOCK_CHUNK + tl.arange(0, BLOCK_CHUNK)
    root = tl.sqrt_rn(tl.load(squares + block))
    factor = norm * RANGE / tl.where(root > 0.0, root, 1.0)
    y = tl.load(source + block * size + at, mask=at < end, other=0.0).to(tl.float32)
    tl.store(target + block * size + at, (y * factor).to(target.dtype.element_ty), mask=at < size)


@triton.jit
def grid_of(entry, squares, first_tile):
    """How a matrix is cut into blocks, and where the sums of its blocks begin.

    All tensors of a batch, which begins with `first_tile`, have as many tiles and blocks.
    """
    m, n = tl.load(entry + COLUMN.ROWS), tl.load(entry + COLUMN.COLS)
    rows = tl.load(entry + COLUMN.BLOCK_ROWS).to(tl.int32)
    cols = tl.load(entry + COLUMN.BLOCK_COLS).to(tl.int32)
    blocks = (m // rows) * (n // cols)
    tiles_before = tl.load(entry + COLUMN.OWNER_TILE) - first_tile
    tensor = tiles_before // tl.load(entry + COLUMN.OWNER_TILES)
    return BlockGrid(rows, cols, squares + tensor * blocks)


@triton.jit
def places_in_blocks(pointer, piece, grid, DTYPE: tl.constexpr):
    """Pointers and mask of a piece of a matrix that is cut into blocks of columns."""
    row_places = piece.rows.to(tl.int64) * grid.cols
    col_places = (piece.cols // grid.cols).to(tl.int64) * (piece.m * grid.cols)
    col_places += piece.cols % grid.cols
    places = pointer.to(tl.pointer_type(DTYPE)) + (row_places[:, None] + col_places[None, :])
    return places, (piece.rows < piece.m)[:, None] & (piece.cols < piece.n)[None, :]


@triton.jit
def load_from_blocks(pointer, piece, grid, DTYPE: tl.constexpr):
    """Load a piece as float32, 0 outside the matrix."""
    places, inside = places_in_blocks(pointer, piece, grid, DTYPE)
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_to_blocks(pointer, values, piece, grid, DTYPE: tl.constexpr):
    """Store a piece."""
    places, inside = places_in_blocks(pointer, piece, grid, DTYPE)
    tl.store(places, values.to(DTYPE), mask=inside)


@triton.jit
def inverse_rms_of_blocks(grid, index, inside):
    """1 / RMS(O) of some blocks of a matrix; 0 if O is 0, which then stays 0."""
    squares = tl.load(grid.squares + index, mask=inside, other=0.0)
    mean = squares / (grid.rows.to(tl.float32) * grid.cols.to(tl.float32))
    return tl.where(mean > 0.0, tl.rsqrt(tl.where(mean > 0.0, mean, 1.0)), 0.0)  # (14)
