"""What a recorded step of the fused backend measures, without another pass over a tensor.

The kernels that read G and write W add a few sums for each tile. They are compiled a second time
for this, with `Spec.records`, so other steps compute nothing for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from maxfactor.backends.step_io import Measured
from maxfactor.backends.triton.kernels.layout import Column, Counter, Measure, Scalar, Size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from maxfactor.backends.triton.buffers import Buffers
    from maxfactor.backends.triton.kernels.descriptors import Tables
    from maxfactor.backends.triton.launches import GroupLaunches
    from maxfactor.settings import TensorRule


class Recorder:
    """The buffer and the launches of recorded steps.

    Args:
        tables: The tables of the plan.
        buffers: The buffers of other steps.
        launches: The launches of other steps.
        rules: The rule of each tensor, in the order of the kernels.
    """

    def __init__(
        self,
        tables: Tables,
        buffers: Buffers,
        launches: Sequence[GroupLaunches],
        rules: Sequence[TensorRule],
    ) -> None:
        self._results, self._rules = buffers.results, rules
        tiles = len(tables.tile_matrix)
        self._measures = torch.zeros(
            (tiles * Size.PARTS, len(Measure)), dtype=torch.float32, device=buffers.device
        )
        self._owners = tables.matrices[:, Column.OWNER][tables.tile_matrix.long()]  # of each tile
        partials = buffers.partials._replace(measures=self._measures)
        self.launches = [each.recording(partials) for each in launches]

    def begin(self) -> None:
        """Forget the last step. A skipped step writes nothing but the sums of G²."""
        self._measures.zero_()

    def finish(self, params: Sequence[Tensor]) -> FusedRecord:
        """Add up the tiles of each tensor, on the device."""
        tiles = self._measures.view(-1, Size.PARTS, len(Measure)).sum(dim=1, dtype=torch.float64)
        sums = tiles.new_zeros(len(self._rules), len(Measure))
        sums.index_add_(0, self._owners, tiles)  # in float64: the order makes no difference
        return FusedRecord(
            list(params),
            self._rules,
            sums,
            self._results.scalars.clone(),
            self._results.update_max.view(torch.float32).clone(),
            self._results.counters[Counter.SKIP].clone(),
        )


class FusedRecord:
    """The measurements of a step, on the device.

    Args:
        params: The parameters, in the order of the kernels.
        rules: Their rules.
        sums: (tensors, Measure) float64.
        scalars: (tensors, Scalar) float32.
        peaks: (tensors,) float32: max|U| of (7).
        skip: Not 0 if the step was skipped.
    """

    def __init__(
        self,
        params: list[Tensor],
        rules: Sequence[TensorRule],
        sums: Tensor,
        scalars: Tensor,
        peaks: Tensor,
        skip: Tensor,
    ) -> None:
        self._params, self._rules = params, rules
        self._sums, self._scalars, self._peaks, self._skip = sums, scalars, peaks, skip

    def read(self) -> tuple[bool, dict[Tensor, Measured]]:
        """Whether the step was skipped, and what was measured; waits for the device."""
        skipped = bool(self._skip.item())  # asked for by the user
        sums, scalars, peaks = (x.tolist() for x in (self._sums, self._scalars, self._peaks))  # so
        rows = zip(self._params, self._rules, sums, scalars, peaks, strict=True)
        return skipped, {
            param: measured(rule, own, scalar, peak) for param, rule, own, scalar, peak in rows
        }


def measured(
    rule: TensorRule, sums: Sequence[float], scalars: Sequence[float], peak: float
) -> Measured:
    """The measurements of a tensor, from its rows of `Measure` and `Scalar`."""
    return Measured(
        step_size=scalars[Scalar.ALPHA],
        gradient_squares=sums[Measure.GRADIENTS],
        change_squares=sums[Measure.CHANGES],
        weight_squares=sums[Measure.WEIGHTS],
        lost=sums[Measure.LOST],
        beta=scalars[Scalar.BETA] if rule.has_momentum else None,
        clip=clip_of(rule, scalars, peak),
    )


def clip_of(rule: TensorRule, scalars: Sequence[float], peak: float) -> float:
    """What bounds divided the update by, from the factors that the kernels multiplied by."""
    factors = 1.0
    if rule.is_filtered:
        factors = abs(scalars[Scalar.FACTOR])
        if rule.is_orthogonal:
            factors *= math.sqrt(max(scalars[Scalar.MEAN], rule.variance_floor))
    if rule.needs_norm and rule.boost is None:
        factors *= scalars[Scalar.SCALE] * (max(peak, rule.floor) if rule.divides_by_peak else 1.0)
    clip = 1.0 / factors if factors > 0.0 else 1.0
    return clip if math.isfinite(clip) else 1.0
