"""The plain backend: the equations of `rule.py` without temporaries of a parameter's size.

There are three kinds of task, and two more for what has momentum (`filtered.py`):

    Matrix    one large matrix, in blocks of rows that stay in the cache
    Stack     small matrices, or vectors, of one shape: one call for all of them
    Other     whatever is rare, by `rule.step` itself
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from maxfactor.backends.torch import filtered, tasks
from maxfactor.backends.torch.matrix import MAX_COLUMNS, Matrix, Scratch
from maxfactor.backends.torch.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from maxfactor.backends.step_io import Outcome, Work

CPU_BLOCK = 1 << 19  # elements: two float32 buffers of this size stay in a processor's cache
DEVICE_BLOCK = 1 << 24  # elsewhere a block only has to be small beside the memory
SMALL = 1 << 15  # elements up to which a call costs more than the copy into a stack


def step(works: Sequence[Work], *, check: bool) -> Outcome:
    """Take one step for each parameter; with `check`, none at all if a gradient is not finite."""
    return tasks.run(planned(works), works, check=check)


def planned(works: Sequence[Work]) -> Iterator[tasks.Task]:
    """Sort the works into tasks; the first stage of each runs when it is asked for."""
    scratch = Scratch()
    small, with_memory = [], []
    for work in works:
        shape, limit = tasks.matrix_shape(work), block_size(work.param.device)
        if shape is None:
            yield tasks.Other(work)
        elif tasks.is_filtered(work):
            with_memory.append(work)
        elif work.param.dim() < 2 or work.param.numel() <= SMALL:
            small.append(work)
        elif tasks.is_contiguous(work) and shape[1] <= MAX_COLUMNS:
            yield Matrix(work, shape, limit, scratch)
        else:
            yield tasks.Other(work)
    for t, alike in tasks.grouped(small, lambda work: work.param.shape):
        for chunk in tasks.chunks(alike, block_size(alike[0].param.device)):
            yield Stack(chunk, t)
    yield from filtered.planned(with_memory, block_size, scratch)


def block_size(device: torch.device) -> int:
    """Elements to work on at a time."""
    return CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK
