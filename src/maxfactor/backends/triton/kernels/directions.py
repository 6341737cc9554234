"""What comes before and after the iteration of a batch of orthogonal matrices: their sizes.

A batch has few tiles, so `Spec.parts` programs share a tile. Each has its place in `batch_sums`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import (
    ADDRESS,
    BATCH_SUM,
    COLUMN,
    COLUMNS,
    COUNTER,
    RANGE,
    SQUARE,
    UPDATE_SUM,
)
from maxfactor.backends.triton.kernels.tiles import (
    address_of,
    load_tile,
    part_of,
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
        partials: `Partials`; reads the squares of y in `batch_sums`.
        results: `Results`; reads `counters`.
        first_tile: The first tile of this launch.
        shift: How many bytes behind y it is written; 0 to overwrite it.
        size: The norm that it gets.
        spec: `Spec`.
    """
    skip = tl.load(results.counters + COUNTER.SKIP) != 0  # there is no y: iterate zeros
    tile = first_tile + tl.program_id(0) // spec.parts
    entry = tables.matrices + tl.load(tables.tile_matrix + tile).to(tl.int64) * COLUMN.COUNT
    m, n = tl.load(entry + COLUMN.ROWS), tl.load(entry + COLUMN.COLS)
    norm = tl.sqrt_rn(matrix_squares(entry, partials.batch_sums, first_tile, spec.parts))
    factor = size * RANGE / tl.where(norm > 0.0, norm, 1.0)
    span = part_of(span_of(entry, tile, m), tl.program_id(0) % spec.parts, spec.parts)
    source = address_of(tables.pointers, entry, ADDRESS.ORTHOGONAL, spec.y_dtype)
    target = address_of(tables.pointers, entry, ADDRESS.ORTHOGONAL, spec.o_dtype) + shift
    for number in tl.range(0, span.pieces, num_stages=STAGES):
        piece = piece_of(span, number, m, n)
        y = load_tile(source, piece, spec.y_dtype, spec.aligned)
        y = tl.where(skip, 0.0, y)  # nobody has written it then
        store_tile(target, y * factor, piece, spec.o_dtype, spec.aligned)


@triton.jit(do_not_specialize=["first_tile"])
def measure_directions(tables, partials, first_tile, spec: tl.constexpr):
    """The sum of squares of a tile of O, which `apply` divides by.

    Args:
        tables: `Tables`.
        partials: `Partials`; writes `batch_sums`.
        first_tile: The first tile of this launch.
        spec: `Spec`.
    """
    tile = first_tile + tl.program_id(0) // spec.parts
    entry = tables.matrices + tl.load(tables.tile_matrix + tile).to(tl.int64) * COLUMN.COUNT
    m, n = tl.load(entry + COLUMN.ROWS), tl.load(entry + COLUMN.COLS)
    span = part_of(span_of(entry, tile, m), tl.program_id(0) % spec.parts, spec.parts)
    source = address_of(tables.pointers, entry, ADDRESS.ORTHOGONAL, spec.o_dtype)
    total = tl.zeros([COLUMNS], tl.float32)
    for number in tl.range(0, span.pieces, num_stages=STAGES):
        o = load_tile(source, piece_of(span, number, m, n), spec.o_dtype, spec.aligned)
        total += tl.sum(o * o, axis=0)
    sums = partials.batch_sums + tl.program_id(0) * BATCH_SUM.COUNT
    tl.store(sums + BATCH_SUM.SQUARES, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["first_tile", "tiles", "measure"])
def add_parts_of_tiles(partials, results, first_tile, tiles, measure, PARTS: tl.constexpr):
    """Add the sums over the parts of each tile, in a fixed order.

    Args:
        partials: `Partials`; reads `batch_sums`, writes `weight_squares` and `update_sums`.
        results: `Results`; reads `counters`.
        first_tile: The first tile of the batch.
        tiles: How many it has.
        measure: Not 0 if only W was measured, before a step.
        PARTS: Parts of a tile.
    """
    if measure == 0:
        if tl.load(results.counters + COUNTER.SKIP) != 0:
            return
    local = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = local < tiles
    usual = tl.zeros([COLUMNS], tl.float32)
    large = tl.zeros([COLUMNS], tl.float32)
    small = tl.zeros([COLUMNS], tl.float32)
    agreement = tl.zeros([COLUMNS], tl.float32)
    power = tl.zeros([COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        sums = partials.batch_sums + (local * PARTS + part) * BATCH_SUM.COUNT
        usual += tl.load(sums + BATCH_SUM.WEIGHTS, mask=real, other=0.0)
        large += tl.load(sums + BATCH_SUM.LARGE_WEIGHTS, mask=real, other=0.0)
        small += tl.load(sums + BATCH_SUM.SMALL_WEIGHTS, mask=real, other=0.0)
        agreement += tl.load(sums + BATCH_SUM.XM, mask=real, other=0.0)
        power += tl.load(sums + BATCH_SUM.XX, mask=real, other=0.0)
    place = partials.weight_squares + (first_tile + local) * SQUARE.COUNT
    tl.store(place + SQUARE.USUAL, usual, mask=real)
    tl.store(place + SQUARE.LARGE, large, mask=real)
    tl.store(place + SQUARE.SMALL, small, mask=real)
    if measure == 0:
        target = partials.update_sums + (first_tile + local) * UPDATE_SUM.COUNT
        tl.store(target + UPDATE_SUM.XM, agreement, mask=real)
        tl.store(target + UPDATE_SUM.XX, power, mask=real)


@triton.jit
def inverse_rms(entry, batch_sums, first_tile, m, n, PARTS: tl.constexpr):
    """1 / RMS(O) of a matrix; 0 if O is 0, which then stays 0."""
    squares = matrix_squares(entry, batch_sums, first_tile, PARTS)
    mean = squares / (m.to(tl.float32) * n.to(tl.float32))
    return tl.where(mean > 0.0, tl.rsqrt(tl.where(mean > 0.0, mean, 1.0)), 0.0)


@triton.jit
def matrix_squares(entry, batch_sums, first_tile, PARTS: tl.constexpr):
    """The sum of squares of a matrix from those of its parts; `first_tile` is the batch's."""
    parts = tl.load(entry + COLUMN.STRIPS) * tl.load(entry + COLUMN.DOWN) * PARTS
    first = (tl.load(entry + COLUMN.FIRST_TILE) - first_tile) * PARTS
    return sum_of(batch_sums + BATCH_SUM.SQUARES, first, parts, BATCH_SUM.COUNT)
