"""Kernels that add up the partial sums of a rank, to be sent to the others.

Each has two tables of matrices: `Tables.matrices` says where the partial sums are, `combined` where
their totals go, and where the other kernels find them once those of all ranks have arrived.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import (
    CHUNK,
    COLUMN,
    FLAG,
    GRADIENT_SUM,
    ROW_SUM,
    SETTING,
    SQUARE,
    TASK,
    TASK_COLUMN,
    UPDATE_SUM,
)
from maxfactor.backends.triton.kernels.tiles import step_place, sum_down, sum_of
from maxfactor.backends.triton.kernels.variance import statistic_weight


@triton.jit
def add_parts(tables, combined, partials, totals):
    """Add up the partial sums of a chunk of rows, a chunk of columns, or a tensor.

    Args:
        tables: `Tables`.
        combined: (matrices, Column) int64.
        partials: `Partials`.
        totals: `RankSums`, written.
    """
    task = tables.tasks + tl.program_id(0) * TASK_COLUMN.COUNT
    k = tl.load(task + TASK_COLUMN.MATRIX).to(tl.int64)
    kind = tl.load(task + TASK_COLUMN.KIND)
    chunk = tl.load(task + TASK_COLUMN.CHUNK)
    entry, target = tables.matrices + k * COLUMN.COUNT, combined + k * COLUMN.COUNT
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    if kind == TASK.TENSOR:
        owner = tl.load(entry + COLUMN.OWNER)
        first, count = tl.load(entry + COLUMN.OWNER_TILE), tl.load(entry + COLUMN.OWNER_TILES)
        add_squares(
            totals.weight_squares + owner * SQUARE.COUNT, partials.weight_squares, first, count
        )
        if (tl.load(entry + COLUMN.FLAGS) & FLAG.WITH_MOMENTUM) != 0:
            sums = totals.gradient_sums + owner * GRADIENT_SUM.COUNT
            parts = partials.gradient_sums
            tl.store(sums, sum_of(parts, first, count, GRADIENT_SUM.COUNT))
            tl.store(sums + 1, sum_of(parts + 1, first, count, GRADIENT_SUM.COUNT))
    elif kind == TASK.ROWS:
        m = tl.load(entry + COLUMN.ROWS)
        part = partials.row_squares + tl.load(entry + COLUMN.ROW_PART)
        total = sum_down(part, tl.load(entry + COLUMN.STRIPS), m, at)
        tl.store(totals.squares + tl.load(target + COLUMN.ROW_PART) + at, total, mask=at < m)
        before = tl.load(entry + COLUMN.ROW_VAR).to(tl.pointer_type(tl.float32))
        sums = totals.chunk_sums + (tl.load(target + COLUMN.ROW_CHUNK) + chunk) * ROW_SUM.COUNT
        old = tl.load(before + at, mask=at < m, other=0.0)
        tl.store(sums + ROW_SUM.BEFORE, tl.sum(old, axis=0))
        tl.store(sums + ROW_SUM.NEWEST, tl.sum(total, axis=0))
    elif kind == TASK.COLS:
        n = tl.load(entry + COLUMN.COLS)
        part = partials.col_squares + tl.load(entry + COLUMN.COL_PART)
        total = sum_down(part, tl.load(entry + COLUMN.DOWN), n, at)
        tl.store(totals.squares + tl.load(target + COLUMN.COL_PART) + at, total, mask=at < n)


@triton.jit
def add_chunks(combined, by_mean, chunk_sums, matrix_sums):
    """Add up the sums of a matrix's row chunks.

    Args:
        combined: (matrices, Column) int64.
        by_mean: (programs,) int64: the matrices whose R is divided by its mean.
        chunk_sums: (row chunks, RowSum) float32.
        matrix_sums: (matrices, RowSum) float32, written.
    """
    k = tl.load(by_mean + tl.program_id(0))
    entry = combined + k * COLUMN.COUNT
    first, count = tl.load(entry + COLUMN.ROW_CHUNK), tl.load(entry + COLUMN.ROW_CHUNKS)
    sums = matrix_sums + k * ROW_SUM.COUNT
    before, newest = chunk_sums + ROW_SUM.BEFORE, chunk_sums + ROW_SUM.NEWEST
    tl.store(sums + ROW_SUM.BEFORE, sum_of(before, first, count, ROW_SUM.COUNT))
    tl.store(sums + ROW_SUM.NEWEST, sum_of(newest, first, count, ROW_SUM.COUNT))


@triton.jit
def average_rows(combined, settings, by_mean, matrix_sums, row_var_sums):
    """The sum of the new R: (5) is linear, so it follows from sums and needs no message.

    Args:
        combined: (matrices, Column) int64.
        settings: (groups, Setting) float32.
        by_mean: (programs,) int64: the matrices whose R is divided by its mean.
        matrix_sums: (matrices, RowSum) float32, of all ranks.
        row_var_sums: (matrices,) float32, written.
    """
    k = tl.load(by_mean + tl.program_id(0))
    entry = combined + k * COLUMN.COUNT
    setting = settings + tl.load(entry + COLUMN.GROUP) * SETTING.COUNT
    t = (tl.load(step_place(entry)) + 1).to(tl.float32)
    kappa = statistic_weight(t, setting)
    before = tl.load(matrix_sums + k * ROW_SUM.COUNT + ROW_SUM.BEFORE)
    newest = tl.load(matrix_sums + k * ROW_SUM.COUNT + ROW_SUM.NEWEST)
    count = tl.load(entry + COLUMN.ALL_COLS).to(tl.float32)
    newest /= count + tl.load(setting + SETTING.COUNT_EPS)
    rows = tl.load(entry + COLUMN.ALL_ROWS).to(tl.float32)
    newest += rows * tl.load(setting + SETTING.OFFSET)
    tl.store(row_var_sums + k, tl.where(kappa == 1.0, newest, before + kappa * (newest - before)))


@triton.jit
def add_updates(tables, partials, totals, squares):
    """Add up the sums over a tensor's update that (8) and (11) need.

    Args:
        tables: `Tables`.
        partials: `Partials`.
        totals: (tensors, UpdateSum) float32, written for tensors with momentum.
        squares: (tensors, Square) float32, written for the others.
    """
    owner = tl.program_id(0)
    k = tl.load(tables.first_matrix + owner).to(tl.int64)
    entry = tables.matrices + k * COLUMN.COUNT
    total = totals + owner * UPDATE_SUM.COUNT
    if (tl.load(entry + COLUMN.FLAGS) & FLAG.WITH_MOMENTUM) != 0:
        first, count = tl.load(entry + COLUMN.OWNER_TILE), tl.load(entry + COLUMN.OWNER_TILES)
        xm, xx = partials.update_sums + UPDATE_SUM.XM, partials.update_sums + UPDATE_SUM.XX
        yy = partials.update_sums + UPDATE_SUM.YY
        tl.store(total + UPDATE_SUM.XM, sum_of(xm, first, count, UPDATE_SUM.COUNT))
        tl.store(total + UPDATE_SUM.XX, sum_of(xx, first, count, UPDATE_SUM.COUNT))
        tl.store(total + UPDATE_SUM.YY, sum_of(yy, first, count, UPDATE_SUM.COUNT))
    else:
        first, count = tl.load(entry + COLUMN.OWNER_BLOCK), tl.load(entry + COLUMN.OWNER_BLOCKS)
        add_squares(squares + owner * SQUARE.COUNT, partials.update_squares, first, count)


@triton.jit
def add_squares(place, parts, first, count):
    """Add up `count` sums of squares from `first` on, each of their parts."""
    width: tl.constexpr = SQUARE.COUNT
    for part in tl.static_range(width):
        tl.store(place + part, sum_of(parts + part, first, count, width))
