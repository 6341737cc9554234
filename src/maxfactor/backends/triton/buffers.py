"""The buffers that kernels of one step pass on to each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from maxfactor.backends.triton.kernels.descriptors import Partials, Results
from maxfactor.backends.triton.kernels.layout import (
    BatchSum,
    Extreme,
    GradientSum,
    Measure,
    Scalar,
    Size,
    Square,
    UpdateSum,
)

if TYPE_CHECKING:
    from torch import Tensor

    from maxfactor.backends.triton.plan import LaunchPlan
    from maxfactor.backends.triton.status import StepStatus


class Buffers:
    """The buffers of a plan, allocated once, but for the sign bits.

    Args:
        plan: The plan.
        status: The counters.
        batch_tiles: Most tiles of batches of orthogonal matrices that are worked on together.
        batch_blocks: Most blocks of those whose matrices are cut into blocks.
    """

    def __init__(
        self, plan: LaunchPlan, status: StepStatus, batch_tiles: int, batch_blocks: int
    ) -> None:
        self.device, sizes, tiles = status.device, plan.sizes, plan.tile_count
        with_momentum = tiles if any(group.with_momentum for group in plan.groups) else 0
        self.partials = Partials(
            row_squares=self._zeros(sizes.row_part),
            row_peaks=self._zeros(sizes.row_peaks, 2, dtype=torch.int32),
            col_squares=self._zeros(sizes.col_part),
            gradient_sums=self._zeros(with_momentum, len(GradientSum)),
            update_sums=self._zeros(with_momentum, len(UpdateSum)),
            weight_squares=self._zeros(tiles, len(Square)),
            update_squares=self._zeros(plan.block_count, len(Square)),
            unsigned=self._zeros(tiles, dtype=torch.int8),
            batch_sums=self._zeros(batch_tiles * Size.PARTS, len(BatchSum)),
            block_squares=self._zeros(batch_blocks),
            measures=self._zeros(0, len(Measure)),
        )
        tensors = len(plan.first_matrix)
        self.results = Results(
            extremes=self._zeros(len(plan.matrices), len(Extreme), dtype=torch.int32),
            row_var_sums=self._zeros(sizes.row_chunks),
            col_changes=self._zeros(sizes.col_chunks, 2),
            row_max=self._zeros(sizes.rows, dtype=torch.int32),
            update_max=self._zeros(tensors, dtype=torch.int32),
            scalars=self._zeros(tensors, len(Scalar)),
            nonfinite=status.nonfinite_marks,
            counters=status.counters,
        )
        signed = [group.other_tiles for group in plan.groups if not group.general]
        ends = [tiles.first + tiles.number for tiles in signed if tiles.number]
        signed_tiles = max(ends, default=0)
        self._sign_shape = (signed_tiles, Size.PIECE_ROWS * Size.COLUMNS)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def sign_bytes(self) -> int:
        """The size of `sign_bits`."""
        return 4 * math.prod(self._sign_shape)

    def sign_bits(self) -> Tensor:
        """One bit per element, only for the time of a step: (tiles, words) int32."""
        return torch.empty(self._sign_shape, dtype=torch.int32, device=self.device)
