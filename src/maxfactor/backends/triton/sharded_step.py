"""The fused kernels on shards: the launches of `fused.py`, with what other ranks have in between.

    statistics   of the shard, their partial sums added up
      1  sum     of G^2 by rows or columns, of W^2, of R before the step; what is not finite
    finalize     (1) to (5), with the sizes of the whole tensor
      2  max     of R in (6)
    maxima       of the shard, or the filter
      3  max     of |U|, of its rows where columns are cut; sums of U^2 and those of FAM
    apply        of the shard

At most three all-reduces for each process group, and no wait for the device in a step: whether it
is skipped is in the first message, and stays on the device. Copies send nothing.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxfactor.backends.torch.sharded import groups_over, process_groups
from maxfactor.backends.triton.kernels import layout as K  # noqa: N812
from maxfactor.backends.triton.kernels import shards as S  # noqa: N812
from maxfactor.backends.triton.kernels.maxima import rescale
from maxfactor.backends.triton.kernels.statistics import finalize
from maxfactor.backends.triton.step import FusedStep
from maxfactor.backends.triton.tables import is_general
from maxfactor.distributed.reductions import Share, combined
from maxfactor.state import factoring

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import ProcessGroup

    from maxfactor.backends.step_io import Work
    from maxfactor.settings import Hyper

    Groups = tuple[ProcessGroup, ...]

BY_MEAN = K.ADAFACTOR.value | K.FACTORED.value | K.FILTERED.value


class Message:
    """Places of a flat float32 buffer whose values are combined over process groups.

    Ranks that share a group add the same places in the same order, be they empty.
    """

    def __init__(self, *, is_sum: bool) -> None:
        self.is_sum = is_sum
        self.places: dict[Groups, list[range]] = {}
        self.indices: dict[Groups, Tensor] = {}

    def add(self, groups: Iterable[ProcessGroup], *places: range) -> None:
        """Combine what is at some places over `groups`, in every step."""
        key = tuple(dict.fromkeys(groups))
        if key:
            self.places.setdefault(key, []).extend(places)

    def finish(self, device: torch.device) -> None:
        """Bring the places to the device."""
        for groups, places in self.places.items():
            index = torch.cat([torch.arange(0, device="cpu"), *map(as_index, places)])
            self.indices[groups] = index.to(device)

    def shares(self, buffer: Tensor) -> list[Share]:
        """What this rank has to say."""
        return [Share(buffer[index], groups, self.is_sum) for groups, index in self.indices.items()]

    def take(self, buffer: Tensor, values: Iterable[Tensor]) -> None:
        """Write what all ranks have said together."""
        for index, value in zip(self.indices.values(), values, strict=True):
            buffer[index] = value


def as_index(places: range) -> Tensor:
    """The places as a tensor."""
    return torch.arange(places.start, places.stop, places.step, device="cpu")


def exchange(messages: Sequence[tuple[Message, Tensor]], groups: Sequence[ProcessGroup]) -> None:
    """One round: each message with its buffer, all in one all-reduce for each of `groups`."""
    shares = [message.shares(buffer) for message, buffer in messages]
    values = iter(combined([share for own in shares for share in own], groups))
    for (message, buffer), own in zip(messages, shares, strict=True):
        message.take(buffer, [next(values) for _ in own])


class FusedShards(FusedStep):
    """Runs steps for parameters of which some are cut over ranks.

    `table` is that of the shards. In `combined` all sums are totals, with a single part each.
    """

    def __init__(
        self,
        works: Sequence[Work],
        flat: Sequence[Tensor],
        hypers: Sequence[Hyper],
        status: Tensor | None = None,
    ) -> None:
        self.groups = process_groups(works)
        super().__init__(works, flat, hypers, status)
        self._write_messages(works)
        self._list_tensors()

    # Tables, buffers and messages ------------------------------------------------------

    def _allocate(self, status: Tensor | None) -> None:
        super()._allocate(status)
        plan, tensors, matrices = self.plan, len(self.params), len(self.plan.table)
        sizes = {"rows": sum(row[K.ROWS.value] for row in plan.table)}
        sizes["cols"] = sum(row[K.COLS.value] for row in plan.table)
        sizes |= {"weights": tensors, "gradients": tensors * K.SUMS.value}
        sizes["matrices"] = matrices * S.ROW_SUMS.value
        total = sum(sizes.values())
        self.totals = torch.zeros(total, dtype=torch.float32, device=self.device)
        self.starts = dict(zip(sizes, accumulate([0, *sizes.values()]), strict=False))
        parts = self.totals.split(list(sizes.values()))
        _, _, self.weight_squares, self.gradient_sums, self.matrix_sums = parts
        self.chunk_sums = self.totals.new_zeros(plan.sizes["row_chunks"], S.ROW_SUMS.value)
        self.row_sums, self.row_sum_var = self.row_sum_var, self.totals.new_zeros(matrices)
        self.update_sums = self.totals.new_zeros(tensors, K.SUMS.value)
        fresh = [0, K.INFINITY_BITS.value, K.INFINITY_BITS.value]
        self.fresh = self._to_device([fresh] * matrices, torch.int32)

    def _upload(self, hypers: Sequence[Hyper]) -> None:
        """Besides the table of the shards, the one of what is combined."""
        super()._upload(hypers)
        table = [list(row) for row in self.plan.table]
        rows, cols = self.starts["rows"], self.starts["cols"]
        for k, (own, row) in enumerate(zip(self.plan.table, table, strict=True)):
            owner = row[K.OWNER.value]
            row[K.ROW_PART.value], row[K.COL_PART.value] = rows, cols
            rows, cols = rows + row[K.ROWS.value], cols + row[K.COLS.value]
            row[K.STRIPS.value] = row[K.DOWN.value] = 1
            row[K.OWNER_TILE.value], row[K.OWNER_TILES.value] = owner, int(row[K.NUMEL.value] > 0)
            row[K.OWNER_BLOCK.value] = owner * K.SUMS.value + K.YY.value
            row[K.OWNER_BLOCKS.value] = 1
            own[K.ROW_CHUNK.value], own[K.ROW_CHUNKS.value] = k, 1  # the total of all ranks
        self.combined_rows = table
        self.combined = self._to_device(table, torch.int64)
        self.table = self._to_device(self.plan.table, torch.int64)

    def _write_messages(self, works: Sequence[Work]) -> None:
        """Lay out what is sent, in the order of the works: that of the tensors is each rank's."""
        owner_of = {index: owner for owner, index in enumerate(self.order)}
        self.in_order = self._to_device([owner_of[i] for i in range(len(works))], torch.int64)
        self.sums, self.update_totals = (Message(is_sum=True) for _ in range(2))
        self.max_rows, self.max_updates, self.max_by_row = (Message(is_sum=False) for _ in range(3))
        self.rescales = False
        for index, work in enumerate(works):
            self._add_tensor(work, owner_of[index])
            self._add_matrices(work, owner_of[index])
        messages = [self.sums, self.max_rows, self.max_updates, self.max_by_row, self.update_totals]
        for message in messages:
            message.finish(self.device)

    def _add_tensor(self, work: Work, owner: int) -> None:
        """The sums and the largest update of a tensor."""
        flags = self._rows_of(owner)[0][K.FLAGS.value]
        everywhere = groups_over(work.param, range(work.param.dim()))
        weights = self.starts["weights"] + owner
        gradients = self.starts["gradients"] + owner * K.SUMS.value
        self.sums.add(everywhere, range(weights, weights + 1))
        if flags & K.FILTERED.value:
            self.sums.add(everywhere, range(gradients, gradients + 2))
        self.max_updates.add(everywhere, range(owner, owner + 1))
        updates = range(owner * K.SUMS.value, (owner + 1) * K.SUMS.value)
        if flags & K.ADAPTIVE.value:
            self.update_totals.add(everywhere, updates[K.XM.value : K.YY.value])
        if is_general(work.hyper, flags):
            self.update_totals.add(everywhere, updates[K.YY.value :])
        self.rescales |= bool(flags & K.FILTERED.value) or is_general(work.hyper, flags)

    def _add_matrices(self, work: Work, owner: int) -> None:
        """The sums and maxima of a tensor's rows and columns."""
        layout = factoring(tuple(work.param.shape), work.hyper.factor)
        if layout is None:
            return
        dims = range(work.param.dim())
        across = groups_over(work.param, [d for d in dims if d not in layout.row_dims])
        down = groups_over(work.param, [d for d in dims if d not in layout.col_dims])
        rows = self._rows_of(owner)
        flags, first = rows[0][K.FLAGS.value], self.plan.first_of[owner]
        if flags & K.SIGN.value:
            spaces = [(row[K.ROW_SPACE.value], row[K.ROWS.value]) for row in rows]
            self.max_by_row.add(across, *(range(at, at + m) for at, m in spaces))
        if flags & K.DENSE.value:
            return
        parts = [(row[K.ROW_PART.value], row[K.ROWS.value]) for row in rows]
        self.sums.add(across, *(range(at, at + m) for at, m in parts))
        parts = [(row[K.COL_PART.value], row[K.COLS.value]) for row in rows]
        self.sums.add(down, *(range(at, at + n) for at, n in parts))
        if flags & BY_MEAN:
            start, size = self.starts["matrices"], S.ROW_SUMS.value
            places = range(start + first * size, start + (first + len(rows)) * size)
            self.sums.add(down, places[S.BEFORE.value :: size])
            self.sums.add([*down, *across], places[S.NEWEST.value :: size])
        elif flags & K.MAX_NORM.value:
            self.max_rows.add(down, range(first * 3, (first + len(rows)) * 3, 3))

    def _rows_of(self, owner: int) -> list[list[int]]:
        """The rows of a tensor's matrices in the table of what is combined."""
        first_of = self.plan.first_of
        end = None if owner + 1 == len(first_of) else first_of[owner + 1]
        return self.combined_rows[first_of[owner] : end]

    def _list_tensors(self) -> None:
        """Which tensors have a tile here, whose steps nobody counts for want of one, and means."""
        firsts = [self.plan.table[k] for k in self.plan.first_of]
        here = [i for i, row in enumerate(firsts) if row[K.OWNER_TILES.value]]
        self.here = self._to_device(here, torch.int64)
        tiles = [firsts[owner][K.OWNER_TILE.value] for owner in here]
        self.first_tiles = self._to_device(tiles, torch.int64)
        by_mean = [k for k, row in enumerate(self.plan.table) if is_by_mean(row)]
        self.by_mean = self._to_device(by_mean, torch.int64)
        self.uncounted = [
            state["step"]
            for row, state in zip(firsts, self.states, strict=True)
            if row[K.NUMEL.value] and not row[K.OWNER_TILES.value]
        ]

    # One step --------------------------------------------------------------------------

    def _finalize(self, found_inf: Tensor, *, scaled: bool) -> None:
        """Rounds 1 and 2, and `finalize` between them."""
        S.add_parts[(len(self.tasks),)](
            self.table, self.combined, self.tasks, self.row_part, self.col_part, self.squares,
            self.tile_sums, self.totals, self.weight_squares, self.gradient_sums, self.chunk_sums,
            CHUNK_=K.CHUNK, PARTS_=K.PARTS_AT_ONCE, num_warps=K.FINALIZE_WARPS,
        )  # fmt: skip
        if len(self.by_mean):
            S.add_chunks[(len(self.by_mean),)](
                self.combined, self.by_mean, self.chunk_sums, self.matrix_sums
            )
        found_inf = self._send_sums(found_inf)
        # What a rank without tiles has not begun anew; what round 2 and 3 wrote last time.
        self.extremes.copy_(self.fresh)
        self.row_max.zero_()
        finalize[(len(self.tasks),)](
            self.combined, self.settings, self.tasks, self.totals, self.totals, self.extremes,
            self.row_sums, self.weight_squares, self.scalars, self.update_max, self.ratios,
            self.row_max, self.bad, self.status, found_inf,
            SCALED=scaled, CHUNK_=K.CHUNK, PARTS_=K.PARTS_AT_ONCE, num_warps=K.FINALIZE_WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip
        self.status[K.SEEN.value].zero_()  # `apply` does it where there is a tile
        if len(self.by_mean):
            S.average_rows[(len(self.by_mean),)](
                self.combined, self.settings, self.by_mean, self.matrix_sums, self.row_sum_var,
                enable_fp_fusion=True,
            )  # fmt: skip
        if len(self.tile_sums):  # each total in place of the first part
            self.tile_sums.zero_()
            self.tile_sums[self.first_tiles] = self.gradient_sums.view(-1, K.SUMS.value)[self.here]
        exchange([(self.max_rows, as_floats(self.extremes))], self.groups)

    def _send_sums(self, found_inf: Tensor) -> Tensor:
        """Round 1. Over all groups: whether the step is skipped, and why; no rank goes on alone."""
        seen = self.status[K.SEEN.value : K.SEEN.value + 1]
        flags = torch.cat([seen, self.bad[self.in_order]]).to(torch.float32)
        flags = torch.cat([found_inf.reshape(1).to(torch.float32), flags])
        shares = [*self.sums.shares(self.totals), Share(flags, self.groups)]
        *values, flags = combined(shares, self.groups)
        self.sums.take(self.totals, values)
        raised = (flags > 0.0).to(torch.int32)
        seen.copy_(raised[1:2])
        self.bad[self.in_order] = raised[2:]
        return flags[:1]

    def _rescale(self) -> None:
        """Round 3, and what follows from it."""
        if self.rescales:
            S.add_updates[(len(self.params),)](
                self.table, self.first_of, self.update_squares, self.filter_sums, self.update_sums
            )
        maxima = [(self.max_updates, as_floats(self.update_max))]
        maxima += [(self.max_by_row, as_floats(self.row_max))]
        exchange([*maxima, (self.update_totals, self.update_sums.view(-1))], self.groups)
        if self.rescales:
            rescale[(len(self.params),)](
                self.combined, self.settings, self.first_of, self.update_max, self.update_sums,
                self.update_sums, self.scalars, self.status, enable_fp_fusion=True,
            )  # fmt: skip
        if self.uncounted:
            taken = (self.status[K.SKIP.value] == 0).to(torch.float32)
            torch._foreach_add_(self.uncounted, taken)

    def _raise_if_given_up(self) -> None:
        """All ranks after the same step: one that goes on would wait for the others forever."""
        if self.event is not None:
            self.event.synchronize()  # of the step before, long past unless the host is far ahead
        super()._raise_if_given_up()


def is_by_mean(row: list[int]) -> bool:
    """Whether a row of the table is a matrix whose R is divided by its mean."""
    flags = row[K.FLAGS.value]
    return bool(flags & BY_MEAN and not flags & K.DENSE.value and row[K.ALL_COLS.value])


def as_floats(bits: Tensor) -> Tensor:
    """Maxima that the kernels keep as the bits of floats."""
    return bits.view(torch.float32).view(-1)
