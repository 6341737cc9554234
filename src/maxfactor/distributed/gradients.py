"""Gradients of sharded parameters, redistributed to the placements of the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxfactor.distributed.placement import is_sharded, local, moved
from maxfactor.distributed.reductions import Reduction, process_groups, reduce_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.placement_types import Placement

    from maxfactor.backends.step_io import StepInput


def local_gradients(inputs: Sequence[StepInput]) -> list[Tensor]:
    """The local shard of each gradient, with the placements of its parameter.

    Pending sums of Partial gradients (sequence-parallel layers) share one all-reduce per group.
    """
    reductions = []
    for each in inputs:
        groups = groups_to_sum(each)
        grad = each.grad if groups else moved(each.grad, each.param)
        reductions.append(Reduction(local(grad).float() if groups else local(grad), groups))
    return reduce_all(reductions, list(dict.fromkeys(g for r in reductions for g in r.groups)))


def groups_to_sum(each: StepInput) -> list[ProcessGroup]:
    """The groups of a gradient's pending sums; none if it must be redistributed otherwise."""
    grad, param = each.grad, each.param
    if not is_sharded(grad) or not is_sharded(param) or grad.device_mesh != param.device_mesh:
        return []
    pairs = list(zip(grad.placements, param.placements, strict=True))
    if not all(have == want or is_pending_sum(have, want) for have, want in pairs):
        return []
    return [grad.device_mesh.get_group(i) for i, (have, want) in enumerate(pairs) if have != want]


def is_pending_sum(have: Placement, want: Placement) -> bool:
    """Whether a Partial sum over a mesh dimension must become a Replicate."""
    return want.is_replicate() and getattr(have, "reduce_op", None) == "sum"


def all_zero(inputs: Sequence[StepInput]) -> bool:
    """Whether every gradient is zero, on all ranks."""
    largest = torch.stack([_largest(local(each.grad)) for each in inputs])
    groups = process_groups(each.param for each in inputs)
    groups = list(dict.fromkeys([*groups, *(g for each in inputs for g in groups_to_sum(each))]))
    (found,) = reduce_all([Reduction(largest, groups, is_sum=False)], groups)
    # Waits for the device; called only before the first step, and only if lr is 0.
    return not any(found.tolist())


def _largest(grad: Tensor) -> Tensor:
    if grad.numel() == 0:
        return grad.new_zeros((), dtype=torch.float32)
    return grad.abs().amax().to(torch.float32)
