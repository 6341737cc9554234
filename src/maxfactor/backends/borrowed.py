"""The memory that a step on a GPU borrows, beside weights, gradients and state."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from maxfactor.backends.dispatch import has_triton
from maxfactor.backends.torch.step import DEVICE_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.backends.step_io import StepInput

FLOAT32 = 4  # bytes
SCRATCH, ORTHOGONAL_SCRATCH = 4, 5  # float32 buffers of the torch backend, of a batch's size
COLUMN_BLOCKS_SCRATCH = 1  # more, as blocks of columns are copied


def borrowed_bytes(inputs: Sequence[StepInput], *, by_window: bool) -> int:
    """Estimate the borrowed bytes of a step: exact buffers of the kernels, or the torch backend's.

    Args:
        inputs: All parameters, on the meta device.
        by_window: Whether windows are stepped one after the other, as released gradients are.
    """
    windows = [list(inputs)]
    if by_window:
        windows = [list(each) for _, each in groupby(inputs, key=lambda each: each.window)]
    if not has_triton() or any(each.rule.bands > 1 for each in inputs):
        return max(map(_by_torch, windows))
    from maxfactor.backends.triton.borrowed import borrowed_bytes as by_kernels

    found = [by_kernels(window) for window in windows]
    # Windows share one workspace, which stays while gradients are released.
    workspace, signs = max(each.workspace for each in found), max(each.signs for each in found)
    return sum(each.kept for each in found) + workspace + signs


def _by_torch(inputs: Sequence[StepInput]) -> int:
    """Scratch buffers for the largest batch."""
    largest = [0]
    for each in inputs:
        numel = each.param.numel()
        if each.rule.is_orthogonal:  # never cut into blocks of rows
            buffers = ORTHOGONAL_SCRATCH + COLUMN_BLOCKS_SCRATCH * bool(each.rule.block_cols)
            largest.append(buffers * max(numel, min(DEVICE_BLOCK, numel * len(inputs))))
        else:
            largest.append(SCRATCH * min(DEVICE_BLOCK, numel * len(inputs)))
    return FLOAT32 * max(largest)
