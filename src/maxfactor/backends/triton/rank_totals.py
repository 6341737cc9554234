"""Totals of parameters that are sharded over ranks: the launches with messages in between.

    statistics   of the shard; its partial sums are added up
      1  sum     of G² by rows or columns, of W², of R before the step; what is not finite
    finalize     (1) to (5), with the sizes of the whole tensor
      2  max     of R in (6)
    maxima       of the shard, or the momentum
      3  max     of |U|, of its rows if columns are sharded; sums of U² and those of FAM
    apply        of the shard

At most three all-reduces per process group, and no wait for the device in a step: whether the step
is skipped is part of the first message and stays on the device. Replicated tensors send nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from maxfactor.backends.guard import NOT_FINITE, OVERFLOWS
from maxfactor.backends.triton.kernels.descriptors import RankSums
from maxfactor.backends.triton.kernels.layout import (
    FINALIZE_WARPS,
    Column,
    Counter,
    Flag,
    GradientSum,
    RowSum,
    Square,
    UpdateSum,
)
from maxfactor.backends.triton.kernels.shards import (
    add_chunks,
    add_parts,
    add_updates,
    average_rows,
)
from maxfactor.backends.triton.launches import FUSION, launch_finalize, launch_rescale
from maxfactor.backends.triton.messages import exchange
from maxfactor.backends.triton.rank_messages import BY_MEAN, RankMessages
from maxfactor.distributed.reductions import Reduction, reduce_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from maxfactor.backends.step_io import StepInput
    from maxfactor.backends.triton.buffers import Buffers
    from maxfactor.backends.triton.kernels.descriptors import Tables
    from maxfactor.backends.triton.launches import Scaling
    from maxfactor.backends.triton.plan import LaunchPlan
    from maxfactor.backends.triton.uploads import Uploads


OUTWEIGHS = 1 << 20  # more than there are ranks, and exact in float32


class RankTotals:
    """Adds up partial sums of this rank, and combines them with those of the others.

    In the combined table all sums are totals, with a single part each. `matrices` and `results` are
    what the kernels other than `finalize` and `rescale` read.

    Args:
        step_io: What the optimizer collected, in its order.
        order: The index in `step_io` of each tensor, in the order of the kernels.
        plan: The plan.
        buffers: Its buffers.
        uploads: To the device of the parameters.
        groups: All process groups over which a parameter is sharded.
    """

    def __init__(
        self,
        step_io: Sequence[StepInput],
        order: Sequence[int],
        plan: LaunchPlan,
        buffers: Buffers,
        uploads: Uploads,
        groups: Sequence[ProcessGroup],
    ) -> None:
        self._groups, self._tensors, matrices = groups, len(order), len(plan.matrices)
        starts = self._allocate(plan, buffers)
        self.matrices = with_one_row_sum(plan.matrices)
        rows = combined_rows(plan, starts)
        owner_of = {index: owner for owner, index in enumerate(order)}
        owners = [owner_of[index] for index in range(len(order))]
        self._messages = RankMessages(step_io, owners, plan, rows, starts)
        self._in_order = uploads.to_device(owners, torch.int64)
        self._combined = uploads.to_device(rows, torch.int64)
        fresh = [[0.0, math.inf, math.inf]] * matrices
        self._fresh_extremes = uploads.to_device(fresh, torch.float32).view(torch.int32)
        self._list_tensors(plan, uploads)
        self._uncounted = uncounted_steps(plan, [step_io[index] for index in order])

    def _allocate(self, plan: LaunchPlan, buffers: Buffers) -> dict[str, int]:
        """Allocate the sums that are sent; return where the parts of their buffers begin."""
        tensors, matrices = self._tensors, len(plan.matrices)
        sizes = {
            "rows": sum(row[Column.ROWS] for row in plan.matrices),
            "cols": sum(row[Column.COLS] for row in plan.matrices),
            "weights": tensors * len(Square),
            "gradients": tensors * len(GradientSum),
            "matrices": matrices * len(RowSum),
        }
        totals = torch.zeros(sum(sizes.values()), dtype=torch.float32, device=buffers.device)
        _, _, weights, gradients, self._matrix_sums = totals.split(list(sizes.values()))
        chunk_sums = totals.new_zeros(plan.sizes.row_chunks, len(RowSum))
        self._sums = RankSums(totals, weights, gradients, chunk_sums)
        parts = [tensors * len(UpdateSum), tensors * len(Square)]
        self._updates = totals.new_zeros(sum(parts))
        self._update_sums, self._update_squares = self._updates.split(parts)
        # What `finalize` and `rescale` read and write in place of the partial sums.
        self._partials = buffers.partials
        self._totals = buffers.partials._replace(
            row_squares=totals,
            col_squares=totals,
            weight_squares=weights,
            update_squares=self._update_squares,
            update_sums=self._update_sums,
        )
        # `finalize` writes sums of R by chunk; the other kernels read one sum per matrix.
        self._by_chunk = buffers.results
        self.results = buffers.results._replace(row_var_sums=totals.new_zeros(matrices))
        starts = dict(zip(sizes, accumulate([0, *sizes.values()]), strict=False))
        return starts | {"updates": parts[0]}

    def _list_tensors(self, plan: LaunchPlan, uploads: Uploads) -> None:
        """List the tensors with a tile on this rank, and the matrices that need a mean."""
        firsts = [plan.matrices[k] for k in plan.first_matrix]
        here = [owner for owner, row in enumerate(firsts) if row[Column.OWNER_TILES]]
        self._here = uploads.to_device(here, torch.int64)
        tiles = [firsts[owner][Column.OWNER_TILE] for owner in here]
        self._first_tiles = uploads.to_device(tiles, torch.int64)
        by_mean = [k for k, row in enumerate(plan.matrices) if is_by_mean(row)]
        self._by_mean = uploads.to_device(by_mean, torch.int64)

    def finalize(self, tables: Tables, scaling: Scaling) -> None:
        """Rounds 1 and 2, and `finalize` between them."""
        combined_tables = tables._replace(matrices=self._combined)
        add_parts[(len(tables.tasks),)](
            tables, self._combined, self._partials, self._sums, num_warps=FINALIZE_WARPS
        )
        if len(self._by_mean):
            add_chunks[(len(self._by_mean),)](
                self._combined, self._by_mean, self._sums.chunk_sums, self._matrix_sums
            )
        scaling = replace(scaling, found_inf=self._send_sums(scaling.found_inf))
        # Ranks without tiles did not reset them, and rounds 2 and 3 wrote them last time.
        self.results.extremes.copy_(self._fresh_extremes)
        self.results.row_max.zero_()
        launch_finalize(combined_tables, self._totals, self._by_chunk, scaling)
        self.results.counters[Counter.SEEN].zero_()  # `apply` does it if there is a tile
        if len(self._by_mean):
            average_rows[(len(self._by_mean),)](
                self._combined, tables.settings, self._by_mean, self._matrix_sums,
                self.results.row_var_sums, **FUSION,
            )  # fmt: skip
        if len(self._partials.gradient_sums):  # each total in place of the first part
            sums = self._sums.gradient_sums.view(-1, len(GradientSum))
            self._partials.gradient_sums.zero_()
            self._partials.gradient_sums[self._first_tiles] = sums[self._here]
        messages = self._messages
        exchange([(messages.max_rows, as_floats(self.results.extremes))], self._groups)

    def _send_sums(self, found_inf: Tensor) -> Tensor:
        """Round 1. All groups learn whether the step is skipped, and why."""
        results, totals = self.results, self._sums.squares
        seen = results.counters[Counter.SEEN : Counter.SEEN + 1]
        # A sum of marks shows the worst of them: one of a gradient that is not finite outweighs
        # those of all other ranks.
        marks = results.nonfinite[self._in_order]
        marks = torch.where(marks == NOT_FINITE, OUTWEIGHS, marks)
        flags = torch.cat([seen, marks]).to(torch.float32)
        flags = torch.cat([found_inf.reshape(1).to(torch.float32), flags])
        shares = [*self._messages.sums.shares(totals), Reduction(flags, self._groups)]
        *values, flags = reduce_all(shares, self._groups)
        self._messages.sums.take(totals, values)
        raised = (flags > 0.0).to(torch.int32)
        seen.copy_(raised[1:2])
        worst = (flags >= OUTWEIGHS).to(torch.int32) * (NOT_FINITE - OVERFLOWS)
        results.nonfinite[self._in_order] = raised[2:] * OVERFLOWS + worst[2:]
        return flags[:1]

    def rescale(self, tables: Tables) -> None:
        """Round 3, and `rescale`."""
        results, messages = self.results, self._messages
        if messages.rescales:
            add_updates[(self._tensors,)](
                tables, self._partials, self._update_sums, self._update_squares
            )
        maxima = [(messages.max_updates, as_floats(results.update_max))]
        maxima += [(messages.max_by_row, as_floats(results.row_max))]
        sums = (messages.update_sums, self._updates)
        exchange([*maxima, sums], self._groups)
        if messages.rescales:
            combined_tables = tables._replace(matrices=self._combined)
            launch_rescale(combined_tables, self._totals, results)
        if self._uncounted:
            taken = (results.counters[Counter.SKIP] == 0).to(torch.int64)
            torch._foreach_add_(self._uncounted, taken)


def with_one_row_sum(rows: Sequence[list[int]]) -> list[list[int]]:
    """Rows of the table, with a single sum of R per matrix in place of one per chunk."""
    table = [list(row) for row in rows]
    for k, row in enumerate(table):
        row[Column.ROW_CHUNK], row[Column.ROW_CHUNKS] = k, 1
    return table


def combined_rows(plan: LaunchPlan, starts: dict[str, int]) -> list[list[int]]:
    """The rows of the combined table."""
    table = [list(row) for row in plan.matrices]
    row_part, col_part = starts["rows"], starts["cols"]
    for row in table:
        owner = row[Column.OWNER]
        row[Column.ROW_PART], row[Column.COL_PART] = row_part, col_part
        row_part, col_part = row_part + row[Column.ROWS], col_part + row[Column.COLS]
        row[Column.STRIPS] = row[Column.DOWN] = 1
        row[Column.OWNER_TILE], row[Column.OWNER_TILES] = owner, int(row[Column.NUMEL] > 0)
        row[Column.OWNER_BLOCK], row[Column.OWNER_BLOCKS] = owner, 1
    return table


def uncounted_steps(plan: LaunchPlan, step_io: Sequence[StepInput]) -> list[Tensor]:
    """The step counts of tensors without a tile on this rank, which no kernel increments."""
    firsts = [plan.matrices[k] for k in plan.first_matrix]
    return [
        each.state["step"]
        for row, each in zip(firsts, step_io, strict=True)
        if row[Column.NUMEL] and not row[Column.OWNER_TILES]
    ]


def is_by_mean(row: list[int]) -> bool:
    """Whether a row of the table is a matrix whose R is divided by its mean."""
    flags = row[Column.FLAGS]
    return bool(flags & BY_MEAN and not flags & Flag.DENSE and row[Column.ALL_COLS])


def as_floats(bits: Tensor) -> Tensor:
    """Maxima that the kernels keep as the bits of floats."""
    return bits.view(torch.float32).view(-1)
