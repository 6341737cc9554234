"""Orthogonalises sharded matrices: each is gathered on its owner rank and scattered back.

There are two all-to-alls for each process group that shards a matrix, one to the owners and one
back, for all matrices together. A matrix that several groups shard is gathered over one group after
the other. Every rank computes the whole plan from global shapes, so no sizes are sent.

Matrices are assigned to owner ranks so that the cost is balanced. Replicas (HSDP, or a mesh
dimension that does not shard a matrix) assign owners among themselves and get the same bits.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxfactor.distributed.placement import is_sharded, is_strided, local, shards_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from maxfactor.state import Factoring

Shape = tuple[int, ...]

BATCH = 1 << 24  # most elements that are orthogonalised in one call
WIRE = {"cuda": torch.bfloat16}  # dtype of messages; on CUDA the iteration runs in bfloat16


@dataclass(frozen=True)
class Cut:
    """A sharded dimension of a tensor: the sizes of the shards along `dim`, one for each rank."""

    group: ProcessGroup
    dim: int
    sizes: Shape
    rank: int  # of this process in the group


class ExchangedMatrix:
    """The part of a matrix on this rank, on its way to the owner and back.

    `value` is None until it is set, and while other ranks hold the matrix.
    """

    def __init__(
        self, param: Tensor, layout: Factoring, block: tuple[int, int] | None = None
    ) -> None:
        self.value: Tensor | None = None
        self.block = block
        self.shape, self.layout, self.device = tuple(param.shape), layout, param.device
        self.cuts = cuts_of(param)
        self.owner: Shape = ()  # the owner's rank in the group of each cut
        self.shapes = [tuple(local(param).shape)]  # local, and after each cut is undone
        for cut in self.cuts:
            self.shapes.append(resized(self.shapes[-1], cut.dim, sum(cut.sizes)))
        self.undone = 0

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The process groups that shard it."""
        return tuple(cut.group for cut in self.cuts)

    @property
    def cost(self) -> int:
        """Multiplications of X Xᵀ, over all matrices of a batch, or all blocks."""
        return math.prod(self.shape) * min(self.block or self.layout.matrix[-2:])

    def whole(self) -> Tensor:
        """Return the gathered tensor; assert that it exists."""
        assert self.value is not None
        return self.value

    def is_next(self, group: ProcessGroup) -> bool:
        """Whether the next cut to undo is over this group."""
        return self.undone < len(self.cuts) and self.cuts[self.undone].group is group

    def is_here(self, step: int) -> bool:
        """Whether this rank takes part in undoing cut `step`: it owns all earlier cuts."""
        before = zip(self.cuts[:step], self.owner[:step], strict=True)
        return all(cut.rank == owner for cut, owner in before)


def orthogonalize_by_owners_(
    parts: Sequence[ExchangedMatrix],
    orthogonal: Callable[[Tensor, tuple[int, int] | None], Tensor],
) -> None:
    """Replace each part by its shard of `orthogonal` of the whole matrix, cut into its blocks."""
    assign_owners(parts)
    journey = gather(parts)
    here = [part for part in parts if part.value is not None]
    for batch in batches(here):
        matrices = [part.whole().reshape(part.layout.matrix) for part in batch]
        block = batch[0].block
        if len(batch) > 1:
            moves = list(orthogonal(torch.stack(matrices), block))
        else:
            moves = [orthogonal(matrices[0], block)]
        for part, move in zip(batch, moves, strict=True):
            part.value = move.reshape(part.shape)
    for group, travellers, steps in reversed(journey):
        send_back(travellers, steps, group)


def batches(parts: Sequence[ExchangedMatrix]) -> list[list[ExchangedMatrix]]:
    """Batch matrices of one shape and one size of blocks, up to `BATCH` elements.

    Only those that the same groups shard: replicas have the same batches and get the same bits.
    """
    alike: dict[object, list[list[ExchangedMatrix]]] = defaultdict(list)
    for part in parts:
        found = alike[part.layout.matrix, part.block, part.groups]
        most = max(1, BATCH // max(1, math.prod(part.shape)))
        if not found or len(found[-1]) == most or len(part.layout.matrix) > 2:
            found.append([])
        found[-1].append(part)
    return [batch for found in alike.values() for batch in found]


# ------------------------------------------------------------------------------------- the plan


def cuts_of(param: Tensor) -> list[Cut]:
    """The cuts of a tensor, in the order in which to undo them."""
    if not is_sharded(param):
        return []
    mesh, shape, found = param.device_mesh, list(param.shape), list[Cut]()
    # FSDP shards the shards of tensor parallelism, though its mesh dimension comes first.
    made = sorted(shards_of(param), key=lambda each: is_strided(param.placements[each[0]]))
    for i, dim in made:
        sizes, rank = chunk_sizes(shape[dim], mesh.size(i)), mesh.get_local_rank(i)
        found.append(Cut(mesh.get_group(i), dim, sizes, rank))
        shape[dim] = sizes[rank]
    own = tuple(local(param).shape)
    if tuple(shape) != own:
        raise RuntimeError(
            f"a parameter {tuple(param.shape)} placed as {param.placements} has a shard of shape "
            f"{own} where {tuple(shape)} was expected; shard it with "
            "fully_shard or distribute_tensor"
        )
    if len({cut.dim for cut in found}) == len(found):  # distinct dimensions: any order will do
        return found
    return found[::-1]


def chunk_sizes(length: int, ranks: int) -> Shape:
    """How torch shards a dimension: equal sizes, but the last ones may be smaller or 0.

    Example:
        >>> chunk_sizes(7, 3)
        (3, 3, 1)
        >>> chunk_sizes(2, 3)
        (1, 1, 0)
    """
    most = -(-length // ranks)
    return tuple(min(most, max(0, length - rank * most)) for rank in range(ranks))


def resized(shape: Shape, dim: int, size: int) -> Shape:
    """The shape with one dimension replaced."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def assign_owners(parts: Sequence[ExchangedMatrix]) -> None:
    """Assign an owner to each matrix, as its rank in the group of each cut."""
    alike: dict[tuple[ProcessGroup, ...], list[ExchangedMatrix]] = defaultdict(list)
    for part in parts:
        alike[part.groups].append(part)
    for same in alike.values():
        counts = [len(cut.sizes) for cut in same[0].cuts]
        owners = balanced(tuple(part.cost for part in same), math.prod(counts))
        for part, owner in zip(same, owners, strict=True):
            part.owner = coordinates(owner, counts)


@lru_cache(maxsize=64)
def balanced(costs: tuple[int, ...], ranks: int) -> Shape:
    """A rank for each cost: the largest cost first, to the rank with the smallest load.

    Example:
        >>> balanced((4, 9, 5, 1), 2)
        (1, 0, 1, 0)
    """
    load = [(0, rank) for rank in range(ranks)]  # is a heap
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        busy, owners[index] = load[0]
        heapq.heapreplace(load, (busy + costs[index], owners[index]))
    return tuple(owners)


def coordinates(index: int, counts: Sequence[int]) -> Shape:
    """Unravel a flat index in a grid."""
    found = []
    for count in reversed(counts):
        index, last = divmod(index, count)
        found.append(last)
    return tuple(reversed(found))


# --------------------------------------------------------------------------------- the messages


def gather(
    parts: Sequence[ExchangedMatrix],
) -> list[tuple[ProcessGroup, list[ExchangedMatrix], list[int]]]:
    """Gather every matrix on its owner; return (group, parts, cut indices) of each exchange."""
    groups = list(dict.fromkeys(group for part in parts for group in part.groups))
    journey = []
    while any(part.undone < len(part.cuts) for part in parts):
        for group in groups:
            travellers = [part for part in parts if part.is_next(group)]
            if travellers:
                steps = [part.undone for part in travellers]
                send_on(travellers, steps, group)
                journey.append((group, travellers, steps))
    return journey


def send_on(parts: Sequence[ExchangedMatrix], steps: Sequence[int], group: ProcessGroup) -> None:
    """Undo one cut of each matrix: the owner in the group gets all shards."""
    ranks = len(parts[0].cuts[steps[0]].sizes)
    outgoing: list[list[Tensor]] = [[] for _ in range(ranks)]
    incoming: list[list[Shape]] = [[] for _ in range(ranks)]
    kept = []
    for part, step in zip(parts, steps, strict=True):
        part.undone += 1
        if not part.is_here(step):
            continue
        cut, owner = part.cuts[step], part.owner[step]
        outgoing[owner].append(part.whole())
        part.value = None
        if owner == cut.rank:
            kept.append((part, cut.dim))
            for rank, size in enumerate(cut.sizes):
                incoming[rank].append(resized(part.shapes[step], cut.dim, size))
    got = exchanged(outgoing, incoming, group, parts[0].device)
    for i, (part, dim) in enumerate(kept):
        part.value = torch.cat([from_rank[i] for from_rank in got], dim=dim)


def send_back(parts: Sequence[ExchangedMatrix], steps: Sequence[int], group: ProcessGroup) -> None:
    """Undo `send_on`: scatter the matrices back to shards."""
    ranks = len(parts[0].cuts[steps[0]].sizes)
    outgoing: list[list[Tensor]] = [[] for _ in range(ranks)]
    incoming: list[list[Shape]] = [[] for _ in range(ranks)]
    expected: list[list[ExchangedMatrix]] = [[] for _ in range(ranks)]
    for part, step in zip(parts, steps, strict=True):
        if not part.is_here(step):
            continue
        cut, owner = part.cuts[step], part.owner[step]
        if owner == cut.rank:
            for pieces, piece in zip(outgoing, part.whole().split(cut.sizes, cut.dim), strict=True):
                pieces.append(piece)
        incoming[owner].append(part.shapes[step])
        expected[owner].append(part)
    got = exchanged(outgoing, incoming, group, parts[0].device)
    for waiting, arrived in zip(expected, got, strict=True):
        for part, value in zip(waiting, arrived, strict=True):
            part.value = value


def exchanged(
    outgoing: list[list[Tensor]],
    incoming: list[list[Shape]],
    group: ProcessGroup,
    device: torch.device,
) -> list[list[Tensor]]:
    """One all-to-all: sends tensors to each rank; returns those from each rank by their shapes."""
    import torch.distributed as dist

    dtype = WIRE.get(device.type, torch.float32)
    nothing = torch.empty(0, dtype=dtype, device=device)  # torch.cat needs a tensor
    packed = torch.cat([nothing, *(x.reshape(-1).to(dtype) for each in outgoing for x in each)])
    sent = [sum(x.numel() for x in to_rank) for to_rank in outgoing]
    counts = [[math.prod(shape) for shape in from_rank] for from_rank in incoming]
    received = [sum(each) for each in counts]
    got = packed.new_empty(sum(received))
    dist.all_to_all_single(got, packed, received, sent, group=group)
    return [
        [x.view(shape).float() for x, shape in zip(own.split(sizes), shapes, strict=True)]
        for own, sizes, shapes in zip(got.split(received), counts, incoming, strict=True)
    ]
