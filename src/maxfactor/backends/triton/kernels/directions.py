"""What comes before and after the iteration of the orthogonal direction: sizes of matrices."""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import (
    ADDRESS,
    COLUMN,
    COLUMNS,
    COUNTER,
    RANGE,
    UPDATE_SUM,
)
from maxfactor.backends.triton.kernels.tiles import (
    address_of,
    load_tile,
    piece_of,
    span_of,
    store_tile,
    sum_of,
)

STAGES = tl.constexpr(3)  # pieces that are prefetched from memory


@triton.jit(do_not_specialize=["first_tile", "shift", "size"])
def normalize(tables, partials, results, first_tile, shift, size, spec: tl.constexpr):
    """Write a tile of y with the Frobenius norm `size`, in the dtype of the iteration.

    Args:
        tables: `Tables`.
        partials: `Partials`; reads the squares of y in `update_sums`.
        results: `Results`; reads `counters`.
        first_tile: The first tile of this launch.
        shift: How many bytes behind y it is written; 0 to overwrite it.
        size: The norm that it gets.
        spec: `Spec`.
    """
    skip = tl.load(results.counters + COUNTER.SKIP) != 0  # there is no y: iterate zeros
    tile = first_tile + tl.program_id(0)
    entry = tables.matrices + tl.load(tables.tile_matrix + tile).to(tl.int64) * COLUMN.COUNT
    m, n = tl.load(entry + COLUMN.ROWS), tl.load(entry + COLUMN.COLS)
    norm = tl.sqrt_rn(matrix_squares(entry, partials.update_sums))
    factor = size * RANGE / tl.where(norm > 0.0, norm, 1.0)
    span = span_of(entry, tile, m)
    source = address_of(tables.pointers, entry, ADDRESS.ORTHOGONAL, spec.y_dtype)
    target = address_of(tables.pointers, entry, ADDRESS.ORTHOGONAL, spec.o_dtype) + shift
    for number in tl.range(0, span.pieces, num_stages=STAGES):
        piece = piece_of(span, number, m, n)
        y = load_tile(source, piece, spec.y_dtype, spec.aligned)
        x = tl.where(skip, 0.0, y * factor)
        store_tile(target, x, piece, spec.o_dtype, spec.aligned)


@triton.jit(do_not_specialize=["first_tile"])
def measure_directions(tables, partials, first_tile, spec: tl.constexpr):
    """The sum of squares of a tile of O, which `apply` divides by.

    Args:
        tables: `Tables`.
        partials: `Partials`; writes `update_sums`.
        first_tile: The first tile of this launch.
        spec: `Spec`.
    """
    tile = first_tile + tl.program_id(0)
    entry = tables.matrices + tl.load(tables.tile_matrix + tile).to(tl.int64) * COLUMN.COUNT
    m, n = tl.load(entry + COLUMN.ROWS), tl.load(entry + COLUMN.COLS)
    span = span_of(entry, tile, m)
    source = address_of(tables.pointers, entry, ADDRESS.ORTHOGONAL, spec.o_dtype)
    total = tl.zeros([COLUMNS], tl.float32)
    for number in tl.range(0, span.pieces, num_stages=STAGES):
        o = load_tile(source, piece_of(span, number, m, n), spec.o_dtype, spec.aligned)
        total += tl.sum(o * o, axis=0)
    sums = partials.update_sums + tile * UPDATE_SUM.COUNT
    tl.store(sums + UPDATE_SUM.YY, tl.sum(total, axis=0))


@triton.jit
def inverse_rms(entry, update_sums, m, n):
    """1 / RMS(O) of a matrix; 0 if O is 0, which then stays 0."""
    mean = matrix_squares(entry, update_sums) / (m.to(tl.float32) * n.to(tl.float32))
    return tl.where(mean > 0.0, tl.rsqrt(tl.where(mean > 0.0, mean, 1.0)), 0.0)


@triton.jit
def matrix_squares(entry, update_sums):
    """The sum of squares of a matrix from those of its tiles."""
    tiles = tl.load(entry + COLUMN.STRIPS) * tl.load(entry + COLUMN.DOWN)
    squares = update_sums + UPDATE_SUM.YY
    return sum_of(squares, tl.load(entry + COLUMN.FIRST_TILE), tiles, UPDATE_SUM.COUNT)
