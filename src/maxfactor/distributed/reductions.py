"""Sums and maxima over ranks: one all-reduce for each process group, however many values there are.

Every rank packs the same values in the same order; a rank with an empty shard packs zeros, which
change neither a sum nor the largest of values that are not negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Share:
    """What this rank has of a float32 tensor that is summed, or maximised, over process groups.

    What is maximised must not be negative.
    """

    value: Tensor
    groups: Sequence[ProcessGroup]
    is_sum: bool = True


def combined(shares: Sequence[Share], groups: Sequence[ProcessGroup]) -> list[Tensor]:
    """The values over all ranks, by at most one all-reduce for each of `groups`, in their order."""
    values = [share.value for share in shares]
    for group in groups:
        chosen = [i for i, share in enumerate(shares) if group in share.groups]
        if not chosen:
            continue
        parts = [values[i].reshape(-1) for i in chosen]
        reduced = _all_reduced(parts, [shares[i].is_sum for i in chosen], group)
        for i, value in zip(chosen, reduced, strict=True):
            values[i] = value.reshape(shares[i].value.shape)
    return values


def _all_reduced(parts: list[Tensor], is_sum: list[bool], group: ProcessGroup) -> list[Tensor]:
    """One all-reduce of vectors, each by its own operation."""
    import torch.distributed as dist

    if all(is_sum):
        packed = torch.cat(parts)
        dist.all_reduce(packed, dist.ReduceOp.SUM, group=group)
        return list(packed.split([len(part) for part in parts]))
    # Sums among maxima: each rank has a slot of its own for its part, and adds up all slots.
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    slots = [_slot(p, rank, ranks) if s else p for p, s in zip(parts, is_sum, strict=True)]
    packed = torch.cat([slot.reshape(-1) for slot in slots])
    packed = torch.where(packed.isnan(), torch.inf, packed)  # a maximum may drop a NaN
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
