"""Runs the steps of one list of parameters: those of an optimizer, or those of a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from maxfactor.backends.guard import Guard
from maxfactor.backends.step_io import StepResult
from maxfactor.backends.torch.step import step as torch_step
from maxfactor.backends.torch.weight_sums import WeightSums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from maxfactor.backends.step_io import GroupStep, StepInput, StepRecord
    from maxfactor.backends.triton.inputs import Seen
    from maxfactor.backends.triton.sharing import Sharing
    from maxfactor.backends.triton.step import FusedStep
    from maxfactor.settings import Execution


class Runner:
    """What is kept from one step to the next: the fused plan, the guard, the last step sizes.

    Args:
        sharing: What the fused plans of windows share; None for all parameters of an optimizer.
    """

    def __init__(self, sharing: Sharing | None = None) -> None:
        self._guard, self._weight_sums = Guard(), WeightSums()
        self._sharing = sharing
        self.fused: FusedStep | None = None
        self._result = StepResult()
        self._stepped: list[Tensor] = []

    def fits(
        self, flat: Sequence[Tensor], groups: Sequence[GroupStep], states: Mapping[Tensor, object]
    ) -> Seen | None:
        """What a fused plan found of these parameters and states; None if it does not fit."""
        return None if self.fused is None else self.fused.fits(flat, groups, states)

    def plan(
        self,
        inputs: Sequence[StepInput],
        flat: Sequence[Tensor],
        groups: Sequence[GroupStep],
        idle: Sequence[StepInput],
    ) -> None:
        """Plan the fused step. Imported here, because the torch backend does not need Triton."""
        from maxfactor.backends.triton.step import make_step

        self.fused = make_step(inputs, flat, groups, self.fused, idle, self._sharing)

    def run_torch(
        self,
        inputs: Sequence[StepInput],
        execution: Execution,
        *,
        compiled: bool = False,
        records: bool = False,
    ) -> StepRecord | None:
        """Take a step by the torch backend, with the guard on the host; return its record."""
        check, foreach = execution.nonfinite != "ignore", bool(execution.foreach)
        sums = self._weight_sums if compiled else None
        result = torch_step(inputs, check=check, foreach=foreach, compiled=sums, records=records)
        if result.bad is not None:
            self._guard.failed(result.bad, execution.nonfinite)
        else:
            self._guard.passed()
            self._result, self._stepped = result, [each.param for each in inputs]
        return result.record

    def run_fused(
        self,
        groups: Sequence[GroupStep],
        execution: Execution,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        seen: Seen | None,
        *,
        records: bool = False,
    ) -> StepRecord | None:
        """Launch a step; the device decides whether to skip it, and counts. Return its record."""
        assert self.fused is not None
        self._result = self.fused.step(
            groups,
            nonfinite=execution.nonfinite,
            seen=seen,
            grad_scale=grad_scale,
            found_inf=found_inf,
            records=records,
        )
        self._stepped = self.fused.owners
        return self._result.record

    def drop_plan(self) -> None:
        """Free the buffers of the fused step; the host goes on counting."""
        self._guard.skipped, self.fused = self.skipped, None

    @property
    def skipped(self) -> int:
        """The number of skipped steps; may wait for the device."""
        return self._guard.skipped + (0 if self.fused is None else self.fused.skipped)

    def check_skipped(self) -> None:
        """Raise after too many skipped steps in a row; waits for the device."""
        if self.fused is not None:
            self.fused.check_skipped()

    def step_sizes(self) -> dict[Tensor, float]:
        """The step size of each parameter in the last step; waits for the device."""
        sizes = self._result.step_sizes
        # A host sync, one for a tensor; only the user calls this, not the step.
        values = sizes.tolist() if isinstance(sizes, Tensor) else [float(size) for size in sizes]
        return dict(zip(self._stepped, values, strict=True))
