"""Triton kernels that add up the partial sums of a rank, for `fused_sharded.py` to send.

Each has two tables of `kernels.py`: `table`, where the partial sums are, and `combined`, where
their totals go and where the kernels find them when those of all ranks have come.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import (
    ALL_COLS,
    ALL_ROWS,
    COL_PART,
    COLS,
    COUNT_EPS,
    DOWN,
    FILTERED,
    FLAGS,
    GROUP,
    OF_COLS,
    OF_ROWS,
    OF_TENSOR,
    OFFSET,
    OWNER,
    OWNER_BLOCK,
    OWNER_BLOCKS,
    OWNER_TILE,
    OWNER_TILES,
    ROW_CHUNK,
    ROW_CHUNKS,
    ROW_PART,
    ROW_VAR,
    ROWS,
    SETTINGS,
    STEP,
    STRIPS,
    SUMS,
    TABLE,
    XM,
    XX,
    YY,
)
from maxfactor.backends.triton.kernels.tiles import sum_down, sum_of
from maxfactor.backends.triton.kernels.variance import statistic_weight

# Of a chunk of rows, and of a matrix: the sum of R before the step, and that of G^2.
BEFORE, NEWEST, ROW_SUMS = (tl.constexpr(i) for i in range(3))


@triton.jit
def add_parts(
    table,
    combined,
    tasks,
    row_part,
    col_part,
    squares,
    tile_sums,
    totals,
    weight_squares,
    gradient_sums,
    chunk_sums,
    CHUNK_: tl.constexpr,
    PARTS_: tl.constexpr,
):
    """Add up the partial sums of a chunk of rows, a strip of columns, or a tensor."""
    task = tl.program_id(0)
    k = tl.load(tasks + task * 3).to(tl.int64)
    kind = tl.load(tasks + task * 3 + 1)
    chunk = tl.load(tasks + task * 3 + 2)
    entry, target = table + k * TABLE, combined + k * TABLE
    at = chunk * CHUNK_ + tl.arange(0, CHUNK_)
    if kind == OF_TENSOR:
        owner = tl.load(entry + OWNER)
        first, count = tl.load(entry + OWNER_TILE), tl.load(entry + OWNER_TILES)
        tl.store(weight_squares + owner, sum_of(squares, first, count))
        if (tl.load(entry + FLAGS) & FILTERED) != 0:
            sums = gradient_sums + owner * SUMS
            tl.store(sums, sum_of(tile_sums, first, count, SUMS))
            tl.store(sums + 1, sum_of(tile_sums + 1, first, count, SUMS))
    elif kind == OF_ROWS:
        m = tl.load(entry + ROWS)
        part = row_part + tl.load(entry + ROW_PART)
        total = sum_down(part, tl.load(entry + STRIPS), m, at, CHUNK_, PARTS_)
        tl.store(totals + tl.load(target + ROW_PART) + at, total, mask=at < m)
        before = tl.load(entry + ROW_VAR).to(tl.pointer_type(tl.float32))
        sums = chunk_sums + (tl.load(target + ROW_CHUNK) + chunk) * ROW_SUMS
        tl.store(sums + BEFORE, tl.sum(tl.load(before + at, mask=at < m, other=0.0), axis=0))
        tl.store(sums + NEWEST, tl.sum(total, axis=0))
    elif kind == OF_COLS:
        n = tl.load(entry + COLS)
        part = col_part + tl.load(entry + COL_PART)
        total = sum_down(part, tl.load(entry + DOWN), n, at, CHUNK_, PARTS_)
        tl.store(totals + tl.load(target + COL_PART) + at, total, mask=at < n)


@triton.jit
def add_chunks(combined, matrices, chunk_sums, matrix_sums):
    """Add up the sums of a matrix's chunks of rows."""
    k = tl.load(matrices + tl.program_id(0))
    entry = combined + k * TABLE
    first, count = tl.load(entry + ROW_CHUNK), tl.load(entry + ROW_CHUNKS)
    sums = matrix_sums + k * ROW_SUMS
    tl.store(sums + BEFORE, sum_of(chunk_sums + BEFORE, first, count, ROW_SUMS))
    tl.store(sums + NEWEST, sum_of(chunk_sums + NEWEST, first, count, ROW_SUMS))


@triton.jit
def average_rows(combined, settings, matrices, matrix_sums, row_sum_var):
    """The sum of the new R, (5): an average of the sums, so that it needs no message of its own."""
    k = tl.load(matrices + tl.program_id(0))
    entry = combined + k * TABLE
    setting = settings + tl.load(entry + GROUP) * SETTINGS
    t = tl.load(tl.load(entry + STEP).to(tl.pointer_type(tl.float32))) + 1.0
    kappa = statistic_weight(t, setting)  # (1)
    before = tl.load(matrix_sums + k * ROW_SUMS + BEFORE)
    newest = tl.load(matrix_sums + k * ROW_SUMS + NEWEST)
    newest /= tl.load(entry + ALL_COLS).to(tl.float32) + tl.load(setting + COUNT_EPS)
    newest += tl.load(entry + ALL_ROWS).to(tl.float32) * tl.load(setting + OFFSET)
    tl.store(row_sum_var + k, tl.where(kappa == 1.0, newest, before + kappa * (newest - before)))


@triton.jit
def add_updates(table, first_of, update_squares, filter_sums, sums):
    """Add up the sums over a tensor's update that (8) and (11) want."""
    owner = tl.program_id(0)
    entry = table + tl.load(first_of + owner).to(tl.int64) * TABLE
    place = sums + owner * SUMS
    if (tl.load(entry + FLAGS) & FILTERED) != 0:
        first, count = tl.load(entry + OWNER_TILE), tl.load(entry + OWNER_TILES)
        tl.store(place + XM, sum_of(filter_sums + XM, first, count, SUMS))
        tl.store(place + XX, sum_of(filter_sums + XX, first, count, SUMS))
        tl.store(place + YY, sum_of(filter_sums + YY, first, count, SUMS))
    else:
        first, count = tl.load(entry + OWNER_BLOCK), tl.load(entry + OWNER_BLOCKS)
        tl.store(place + YY, sum_of(update_squares, first, count))
