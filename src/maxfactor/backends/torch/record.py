"""What a recorded step of the torch backend measures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.backends.step_io import Measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.backends.step_io import StepInput
    from maxfactor.rule.reference import Scalar
    from maxfactor.settings import TensorRule

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class BatchRecord:
    """The sums of the k tensors of a batch, each of k values on their device.

    Args:
        count: The number of tensors, k.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.beta: Scalar | None = None
        self.clip: Scalar = 1.0
        self.gradients: Scalar = 0.0
        self.changes: Scalar = 0.0
        self.weights: Scalar = 0.0
        self.lost: Scalar = 0.0

    def begin(self, gradient_squares: Tensor, rule: TensorRule) -> None:
        """Note the sums of G^2, and a beta that is fixed."""
        self.gradients = gradient_squares
        self.beta = rule.beta if rule.has_momentum else None

    def add_clip(self, clip: Scalar) -> None:
        """Note a number that the update was divided by."""
        self.clip = self.clip * clip

    def add_write(self, before: Tensor, wanted: Tensor, after: Tensor) -> None:
        """Measure rows of W, (k, rows, n): as they were, as computed, and as written."""
        wide = torch.promote_types(after.dtype, torch.float32)
        self.changes = self.changes + self._squares(after.to(wide) - before)
        self.weights = self.weights + self._squares(after)
        if after.dtype in SIXTEEN_BITS:
            dropped = (wanted.to(after.dtype) == before) & (wanted != before)
            self.lost = self.lost + dropped.reshape(self._count, -1).sum(dim=1)

    def _squares(self, x: Tensor) -> Tensor:
        """The sum of x^2 of each tensor. Row by row first, as one long sum would lose digits."""
        wide = torch.promote_types(x.dtype, torch.float32)
        by_row = vector_norm(x, dim=-1, dtype=wide).reshape(self._count, -1)
        norm: Tensor = vector_norm(by_row, dim=-1)
        return norm.square()

    def values(self, of: Scalar | None) -> Sequence[float | None]:
        """One number for each tensor; waits for the device."""
        if isinstance(of, Tensor):
            # The user asked for it.
            flat: list[float] = of.reshape(-1).expand(self._count).tolist()
            return flat
        return [of] * self._count


class TorchRecord:
    """The measurements of a step.

    Args:
        inputs: All parameters of the step, the empty ones included.
        step_sizes: Their step sizes; none if the step was skipped.
        batches: The parameters of each batch, with what was measured of them.
    """

    def __init__(
        self,
        inputs: Sequence[StepInput],
        step_sizes: Sequence[float | Tensor] | Tensor,
        batches: Sequence[tuple[Sequence[StepInput], BatchRecord]],
    ) -> None:
        self._params = [each.param for each in inputs]
        self._sizes = list(step_sizes)
        self._batches = [([each.param for each in some], record) for some, record in batches]

    def read(self) -> tuple[bool, dict[Tensor, Measured]]:
        """Whether the step was skipped, and what was measured; waits for the device."""
        found = {param: Measured(0.0, 0.0) for param in self._params}
        skipped = not self._sizes
        sizes = dict(zip(self._params, map(float, self._sizes), strict=False))
        for params, record in self._batches:
            rows = zip(
                params,
                record.values(record.gradients),
                record.values(record.changes),
                record.values(record.weights),
                record.values(record.lost),
                record.values(record.beta),
                record.values(record.clip),
                strict=True,
            )
            for param, gradients, changes, weights, lost, beta, clip in rows:
                found[param] = Measured(
                    step_size=sizes.get(param, 0.0),
                    gradient_squares=gradients or 0.0,
                    change_squares=changes or 0.0,
                    weight_squares=weights or 0.0,
                    lost=lost or 0.0,
                    beta=beta,
                    clip=clip if clip is not None and math.isfinite(clip) else 1.0,
                )
        return skipped, found
