"""The launches of the kernels, with their arguments and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from maxfactor.backends.triton.kernels.directions import measure_directions, normalize
from maxfactor.backends.triton.kernels.layout import FINALIZE_WARPS, TILE_WARPS
from maxfactor.backends.triton.kernels.maxima import maxima, rescale
from maxfactor.backends.triton.kernels.momentum import with_momentum
from maxfactor.backends.triton.kernels.statistics import finalize, statistics
from maxfactor.backends.triton.kernels.weights import apply
from maxfactor.backends.triton.plan import repeat_values

if TYPE_CHECKING:
    from torch import Tensor

    from maxfactor.backends.triton.buffers import Buffers
    from maxfactor.backends.triton.kernels.descriptors import Partials, Results, Spec, Tables
    from maxfactor.backends.triton.orthogonal import Batch
    from maxfactor.backends.triton.plan import LaunchGroup, LaunchPlan, TileRange
    from maxfactor.backends.triton.uploads import Uploads

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
        self, group: LaunchGroup, spec: Spec, partials: Partials, results: Results, uploads: Uploads
    ) -> None:
        self.group, self._spec = group, spec
        self._partials, self._results = partials, results
        self._block_matrix = uploads.to_device(repeat_values(group.blocks), torch.int32)

    def statistics(self, tables: Tables, signs: Tensor, scaling: Scaling, *, check: bool) -> None:
        """Sums and signs of G."""
        statistics[(self.group.tiles,)](
            tables, self._partials, self._results, signs, scaling.grad_scale,
            self.group.first_tile, CHECK=check, SCALED=scaling.is_scaled, spec=self._spec,
            **TILE_OPTIONS,
        )  # fmt: skip

    def direction(self, tables: Tables, signs: Tensor, scaling: Scaling, tiles: TileRange) -> None:
        """Maxima of |U|, or the momentum of some tiles."""
        if self.group.with_momentum:
            with_momentum[(tiles.number,)](
                tables, self._partials, self._results, signs, scaling.grad_scale,
                tiles.first, SCALED=scaling.is_scaled, spec=self._spec, **options_of(tiles),
            )  # fmt: skip
        else:
            maxima[(len(self._block_matrix),)](
                tables, self._block_matrix, self._partials, self._results, scaling.grad_scale,
                SCALED=scaling.is_scaled, ROWS=self.group.maxima_rows,
                WIDTH=self.group.maxima_width, spec=self._spec, **TILE_OPTIONS,
            )  # fmt: skip

    def normalize(self, tables: Tables, batch: Batch) -> None:
        """Give y the norm and the dtype of the iteration."""
        normalize[(batch.tiles.number,)](
            tables, self._partials, self._results, batch.tiles.first, batch.shift, batch.norm,
            spec=self._spec, **options_of(batch.tiles),
        )  # fmt: skip

    def measure_directions(self, tables: Tables, tiles: TileRange) -> None:
        """Sums of squares of orthogonal directions."""
        measure_directions[(tiles.number,)](
            tables, self._partials, tiles.first, spec=self._spec, **options_of(tiles)
        )

    def measure(self, tables: Tables, signs: Tensor, scaling: Scaling) -> None:
        """Sums of squares of all weights."""
        for tiles in (self.group.other_tiles, self.group.orthogonal_tiles):
            if tiles.number:
                self._apply(tables, signs, scaling, tiles, measure=True)

    def apply(self, tables: Tables, signs: Tensor, scaling: Scaling, tiles: TileRange) -> None:
        """Write the weights of some tiles."""
        self._apply(tables, signs, scaling, tiles, measure=False)

    def _apply(
        self, tables: Tables, signs: Tensor, scaling: Scaling, tiles: TileRange, *, measure: bool
    ) -> None:
        apply[(tiles.number,)](
            tables, self._partials, self._results, signs, scaling.grad_scale,
            tiles.first, int(measure), SCALED=scaling.is_scaled,
            STAGES=self.group.apply_stages, spec=self._spec, **options_of(tiles),
        )  # fmt: skip


def options_of(tiles: TileRange) -> dict[str, Any]:
    """The options of a launch over some tiles."""
    return {"num_warps": tiles.warps, **FUSION}


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
