"""Sums and maxima over ranks: one all-reduce per process group for any number of values.

Every rank packs the same values in the same order. A rank with an empty shard packs zeros, which
change neither a sum nor a maximum of nonnegative values. In one process there are no groups, and
the values are returned unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxfactor.distributed.placement import is_sharded, shards_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Reduction:
    """A float32 tensor to be summed, or maximised, over process groups.

    Values to be maximised must be nonnegative.
    """

    value: Tensor
    groups: Sequence[ProcessGroup] = ()
    is_sum: bool = True


def reduce_all(reductions: Sequence[Reduction], groups: Sequence[ProcessGroup]) -> list[Tensor]:
    """Return the reduced values; at most one all-reduce for each of `groups`, in their order."""
    values = [each.value for each in reductions]
    for group in groups:
        chosen = [i for i, each in enumerate(reductions) if group in each.groups]
        if not chosen:
            continue
        parts = [values[i].reshape(-1) for i in chosen]
        reduced = _all_reduce(parts, [reductions[i].is_sum for i in chosen], group)
        for i, value in zip(chosen, reduced, strict=True):
            values[i] = value.reshape(reductions[i].value.shape)
    return values


def groups_over(param: Tensor, dims: Iterable[int]) -> list[ProcessGroup]:
    """The process groups that shard the given dimensions."""
    if not is_sharded(param):
        return []
    wanted = set(dims)
    return [param.device_mesh.get_group(i) for i, dim in shards_of(param) if dim in wanted]


def process_groups(params: Iterable[Tensor]) -> list[ProcessGroup]:
    """The process groups that shard any parameter, in the same order on every rank."""
    found: dict[ProcessGroup, None] = {}
    for param in params:
        found.update(dict.fromkeys(groups_over(param, range(param.dim()))))
    return list(found)


def _all_reduce(parts: list[Tensor], is_sum: list[bool], group: ProcessGroup) -> list[Tensor]:
    """One all-reduce of vectors, each by its own operation."""
    import torch.distributed as dist

    if all(is_sum):
        packed = torch.cat(parts)
        dist.all_reduce(packed, dist.ReduceOp.SUM, group=group)
        return list(packed.split([len(part) for part in parts]))
    # Sums by a MAX reduction: each rank fills its own slot, and adds up all slots afterwards.
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    slots = [_slot(p, rank, ranks) if s else p for p, s in zip(parts, is_sum, strict=True)]
    packed = torch.cat([slot.reshape(-1) for slot in slots])
    packed = torch.where(packed.isnan(), torch.inf, packed)  # MAX may drop a NaN
    dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)
    packed = torch.where(packed == torch.inf, torch.nan, packed)
    whole = packed.split([slot.numel() for slot in slots])
    return [
        each.view(ranks, -1).sum(dim=0) if s else each
        for each, s in zip(whole, is_sum, strict=True)
    ]


def _slot(part: Tensor, rank: int, ranks: int) -> Tensor:
    slots = part.new_full((ranks, len(part)), -torch.inf)
    slots[rank] = part
    return slots
