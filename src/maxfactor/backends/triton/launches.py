"""The launches of the kernels, with their arguments and options."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from maxfactor.backends.triton.kernels.blocks import measure_blocks, normalize_blocks
from maxfactor.backends.triton.kernels.directions import (
    add_parts_of_tiles,
    measure_directions,
    normalize,
)
from maxfactor.backends.triton.kernels.layout import (
    BLOCK_WARPS,
    FINALIZE_WARPS,
    RANGE,
    TILE_WARPS,
    Size,
)
from maxfactor.backends.triton.kernels.maxima import maxima, rescale
from maxfactor.backends.triton.kernels.momentum import with_momentum
from maxfactor.backends.triton.kernels.statistics import finalize, statistics
from maxfactor.backends.triton.kernels.weights import apply
from maxfactor.backends.triton.plan import ceil_div, repeat_values

if TYPE_CHECKING:
    from torch import Tensor

    from maxfactor.backends.triton.buffers import Buffers
    from maxfactor.backends.triton.kernels.descriptors import Partials, Results, Spec, Tables
    from maxfactor.backends.triton.orthogonal import Batch, Memory
    from maxfactor.backends.triton.plan import LaunchGroup, LaunchPlan, TileRange
    from maxfactor.backends.triton.rounds import Segment
    from maxfactor.backends.triton.uploads import Uploads
    from maxfactor.backends.triton.workspace import Formats, Layout

# Newer versions of Triton fuse a product and a sum into one rounding only if asked to.
FUSION = {"enable_fp_fusion": True}
TILE_OPTIONS = {"num_warps": TILE_WARPS, **FUSION}


@dataclass(frozen=True)
class Scaling:
    """What GradScaler handed over; `grad_scale` is 1 and `found_inf` 0 without it."""

    is_scaled: bool
    grad_scale: Tensor  # (1,) float32: G was multiplied by it
    found_inf: Tensor  # (1,) float32: not 0 to skip the step


class GroupLaunches:
    """The launches of one launch group."""

    def __init__(
        self,
        group: LaunchGroup,
        formats: Formats,
        partials: Partials,
        results: Results,
        uploads: Uploads,
    ) -> None:
        self.group = group
        self._spec, self._batch_spec = group.spec(formats), group.batch_spec(formats)
        self._shard_spec = group.batch_spec(formats, sharded=True)
        self._block_specs = {
            "rows": group.batch_spec(formats, rows=True),
            "columns": group.batch_spec(formats, columns=True),
        }
        self._partials, self._results = partials, results
        self._block_matrix = uploads.to_device(repeat_values(group.blocks), torch.int32)

    def recording(self, partials: Partials) -> GroupLaunches:
        """The same launches for recorded steps, which write `Partials.measures`."""
        other = copy(self)
        other._partials = partials
        other._spec = self._spec._replace(records=True)
        other._batch_spec = self._batch_spec._replace(records=True)
        other._block_specs = {
            side: spec._replace(records=True) for side, spec in self._block_specs.items()
        }
        return other

    def statistics(self, tables: Tables, scaling: Scaling, *, check: bool) -> None:
        """Sums and signs of G."""
        statistics[(self.group.tiles,)](
            tables, self._partials, self._results, scaling.grad_scale,
            self.group.first_tile, CHECK=check, SCALED=scaling.is_scaled, spec=self._spec,
            **TILE_OPTIONS,
        )  # fmt: skip

    def direction(self, tables: Tables, scaling: Scaling) -> None:
        """Maxima of |U|, or the momentum, where the direction is not orthogonal."""
        if self.group.with_momentum:
            self._with_momentum(tables, scaling, self.group.other_tiles, self._spec)
        else:
            maxima[(len(self._block_matrix),)](
                tables, self._block_matrix, self._partials, self._results, scaling.grad_scale,
                SCALED=scaling.is_scaled, ROWS=self.group.maxima_rows,
                WIDTH=self.group.maxima_width, spec=self._spec, **TILE_OPTIONS,
            )  # fmt: skip

    def measure(self, tables: Tables, scaling: Scaling) -> None:
        """Sums of squares of weights, where the direction is not orthogonal."""
        self._apply(tables, scaling, self.group.other_tiles, self._spec, measure=True)

    def apply(self, tables: Tables, scaling: Scaling) -> None:
        """Write the weights, where the direction is not orthogonal."""
        self._apply(tables, scaling, self.group.other_tiles, self._spec, measure=False)

    # ----------------------------------------------------- a batch of orthogonal matrices

    def begin_batch(self, tables: Tables, scaling: Scaling, batch: Batch, memory: Memory) -> None:
        """Write what is orthogonalised, with the norm and the dtype of the iteration."""
        own = self._with_sums_at(batch.first_tile, batch.first_block)
        own._with_momentum(tables, scaling, batch.tiles, self._spec_of(batch))
        if batch.side is not None:
            own._normalize_blocks(batch, memory)
            return
        normalize[(batch.tiles.number * self._batch_spec.parts,)](
            tables, own._partials, self._results, batch.tiles.first, batch.layout.shift,
            batch.layout.norm, spec=self._batch_spec, **TILE_OPTIONS,
        )  # fmt: skip

    def end_batch(self, tables: Tables, scaling: Scaling, batch: Batch, memory: Memory) -> None:
        """Write the weights, from the result of the iteration."""
        own = self._with_sums_at(batch.first_tile, batch.first_block)
        if batch.side is not None:
            own._measure_blocks(batch, memory.o, 1.0)
        else:
            measure_directions[(batch.tiles.number * self._batch_spec.parts,)](
                tables, own._partials, batch.tiles.first, spec=self._batch_spec, **TILE_OPTIONS
            )
        own._apply(tables, scaling, batch.tiles, self._spec_of(batch), measure=False)
        own._add_parts(batch.tiles, measure=False)

    def measure_batch(self, tables: Tables, scaling: Scaling, tiles: TileRange) -> None:
        """Sums of squares of weights."""
        self._apply(tables, scaling, tiles, self._batch_spec, measure=True)
        self._add_parts(tiles, measure=True)

    def _spec_of(self, batch: Batch) -> Spec:
        """What the kernels of a batch are compiled for."""
        return self._batch_spec if batch.side is None else self._block_specs[batch.side]

    def _normalize_blocks(self, batch: Batch, memory: Memory) -> None:
        """Give each block the norm and the dtype of the iteration."""
        self._measure_blocks(batch, memory.y, RANGE.value)
        size = batch.layout.m * batch.layout.n
        normalize_blocks[(batch.layout.matrices * ceil_div(size, Size.BLOCK_CHUNK),)](
            memory.y, memory.x, self._partials.block_squares, self._results.counters,
            size, batch.layout.norm, num_warps=BLOCK_WARPS, **FUSION,
        )  # fmt: skip

    def _measure_blocks(self, batch: Batch, blocks: Tensor, unit: float) -> None:
        """The sum of squares of each block, times `unit` squared."""
        measure_blocks[(batch.layout.matrices,)](
            blocks, self._partials.block_squares, self._results.counters,
            batch.layout.m * batch.layout.n, unit, num_warps=BLOCK_WARPS, **FUSION,
        )  # fmt: skip

    # --------------------------------------------------------------- shards of a round

    def begin_shards(self, tables: Tables, scaling: Scaling, segment: Segment) -> None:
        """Write the shards of what is orthogonalised."""
        own = self._with_sums_at(segment.first_tile)
        own._with_momentum(tables, scaling, segment.tiles, self._shard_spec)

    def end_shards(self, tables: Tables, scaling: Scaling, segment: Segment) -> None:
        """Write the weights, from the shards that the owners returned."""
        own = self._with_sums_at(segment.first_tile)
        own._apply(tables, scaling, segment.tiles, self._shard_spec, measure=False)
        own._add_parts(segment.tiles, measure=False)

    # ------------------------------------------------------------------------ single launches

    def _with_sums_at(self, first_tile: int, first_block: int = 0) -> GroupLaunches:
        """The same launches, with another part of the sums: that of a lane, or of a segment."""
        if first_tile == first_block == 0:
            return self
        other, partials = copy(self), self._partials
        other._partials = partials._replace(
            batch_sums=partials.batch_sums[first_tile * self._batch_spec.parts :],
            block_squares=partials.block_squares[first_block:],
        )
        return other

    def _with_momentum(
        self, tables: Tables, scaling: Scaling, tiles: TileRange, spec: Spec
    ) -> None:
        with_momentum[(tiles.number * spec.parts,)](
            tables, self._partials, self._results, scaling.grad_scale,
            tiles.first, SCALED=scaling.is_scaled, spec=spec, **TILE_OPTIONS,
        )  # fmt: skip

    def _apply(
        self,
        tables: Tables,
        scaling: Scaling,
        tiles: TileRange,
        spec: Spec,
        *,
        measure: bool,
    ) -> None:
        apply[(tiles.number * spec.parts,)](
            tables, self._partials, self._results, scaling.grad_scale,
            tiles.first, int(measure), SCALED=scaling.is_scaled,
            STAGES=self.group.apply_stages, spec=spec, **TILE_OPTIONS,
        )  # fmt: skip

    def _add_parts(self, tiles: TileRange, *, measure: bool) -> None:
        add_parts_of_tiles[(ceil_div(tiles.number, Size.COLUMNS),)](
            self._partials, self._results, tiles.first, tiles.number, int(measure),
            PARTS=self._batch_spec.parts,
        )  # fmt: skip


def launch_normalize(
    source: Tensor, target: Tensor, form: Layout, norm: float, counters: Tensor
) -> None:
    """Write matrices with the Frobenius norm `norm`; zeros if the step is skipped.

    Args:
        source: The matrices, each contiguous.
        target: Where they are written, in its dtype; may be the same memory.
        form: Their number and sizes.
        norm: The norm that each of them gets; a zero matrix stays zero.
        counters: `Results.counters`.
    """
    squares = torch.empty(form.matrices * form.m, dtype=torch.float32, device=source.device)
    options: dict[str, Any] = {"num_warps": BLOCK_WARPS, **FUSION}
    # Row by row: a single program would take long for a whole matrix.
    measure_blocks[(len(squares),)](source, squares, counters, form.n, RANGE.value, **options)
    squares, size = squares.view(form.matrices, form.m).sum(dim=1), form.m * form.n
    normalize_blocks[(form.matrices * ceil_div(size, Size.BLOCK_CHUNK),)](
        source, target, squares, counters, size, norm, **options
    )


def launch_finalize(tables: Tables, partials: Partials, results: Results, scaling: Scaling) -> None:
    """Equations (1) to (5) from the partial sums."""
    options: dict[str, Any] = {"num_warps": FINALIZE_WARPS, **FUSION}
    finalize[(len(tables.tasks),)](
        tables, partials, results, scaling.found_inf, SCALED=scaling.is_scaled, **options
    )


def launch_rescale(tables: Tables, partials: Partials, results: Results) -> None:
    """What the directions are multiplied by."""
    rescale[(len(tables.first_matrix),)](tables, partials, results, **FUSION)


class LocalTotals:
    """Totals of tensors that this process holds as a whole."""

    def __init__(self, plan: LaunchPlan, buffers: Buffers) -> None:
        self.matrices, self.results = plan.matrices, buffers.results
        self._partials = buffers.partials
        self._rescales = any(group.general or group.with_momentum for group in plan.groups)

    def finalize(self, tables: Tables, scaling: Scaling) -> None:
        """After `statistics`."""
        launch_finalize(tables, self._partials, self.results, scaling)

    def rescale(self, tables: Tables) -> None:
        """After the maxima, or the momentum."""
        if self._rescales:
            launch_rescale(tables, self._partials, self.results)
