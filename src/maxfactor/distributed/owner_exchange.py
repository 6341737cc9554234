"""Whole matrices from shards: each goes to one rank, is orthogonalised there, and comes back.

A matrix that is cut over one process group costs two messages, one to its owner and one back, and
all matrices travel in the same two. Where it is cut over several groups it travels through one
after the other, so there are two messages for each group. Every rank computes the whole plan from
global shapes, and so knows what it will get without being told.

Owners are chosen so that all ranks have about the same work. Copies (HSDP, or a dimension of
tensor parallelism that does not cut a matrix) deal among themselves and get the same bits.
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

BATCH = 1 << 24  # elements that are orthogonalised in one call
WIRE = {"cuda": torch.bfloat16}  # what travels, where the iteration itself runs in it


@dataclass(frozen=True)
class Cut:
    """One way in which a tensor was cut: its parts along `dim`, one for each rank of a group."""

    group: ProcessGroup
    dim: int
    sizes: Shape
    rank: int  # this one


class Travelling:
    """What this rank has of a matrix on its way to its owner, and back.

    `value` is None before there is one, and while the tensor is with other ranks.
    """

    def __init__(self, param: Tensor, layout: Factoring) -> None:
        self.value: Tensor | None = None
        self.shape, self.layout, self.device = tuple(param.shape), layout, param.device
        self.cuts = cuts_of(param)
        self.owner: Shape = ()  # its rank in the group of each cut
        self.shapes = [tuple(local(param).shape)]  # before a cut is undone, and after it
        for cut in self.cuts:
            self.shapes.append(resized(self.shapes[-1], cut.dim, sum(cut.sizes)))
        self.undone = 0

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """Over which it is cut."""
        return tuple(cut.group for cut in self.cuts)

    @property
    def cost(self) -> int:
        """Of a product of the matrix with itself, for each matrix of a batch."""
        *_, m, n = self.layout.matrix
        return math.prod(self.shape) * min(m, n)

    def whole(self) -> Tensor:
        """Return the gathered tensor; assert that it exists."""
        assert self.value is not None
        return self.value

    def goes_by(self, group: ProcessGroup) -> bool:
        """Whether the next cut to undo is over this group."""
        return self.undone < len(self.cuts) and self.cuts[self.undone].group is group

    def is_here(self, step: int) -> bool:
        """Whether this rank takes part in undoing a cut: after the others it is the owner's."""
        before = zip(self.cuts[:step], self.owner[:step], strict=True)
        return all(cut.rank == owner for cut, owner in before)


def orthogonalize_(parts: Sequence[Travelling], orthogonal: Callable[[Tensor], Tensor]) -> None:
    """Replace each matrix by `orthogonal` of the whole one, cut as it was."""
    assign_owners(parts)
    journey = gather(parts)
    here = [part for part in parts if part.value is not None]
    for batch in batches(here):
        matrices = [part.whole().reshape(part.layout.matrix) for part in batch]
        moves = orthogonal(torch.stack(matrices)) if len(batch) > 1 else [orthogonal(matrices[0])]
        for part, move in zip(batch, moves, strict=True):
            part.value = move.reshape(part.shape)
    for group, travellers, steps in reversed(journey):
        send_back(travellers, steps, group)


def batches(parts: Sequence[Travelling]) -> list[list[Travelling]]:
    """Matrices of one shape together, as far as a batch goes.

    Only those that are cut alike: copies on other ranks get the same bits from the same batch.
    """
    alike: dict[object, list[list[Travelling]]] = defaultdict(list)
    for part in parts:
        found = alike[part.layout.matrix, part.groups]
        most = max(1, BATCH // max(1, math.prod(part.shape)))
        if not found or len(found[-1]) == most or len(part.layout.matrix) > 2:
            found.append([])
        found[-1].append(part)
    return [batch for found in alike.values() for batch in found]


# ------------------------------------------------------------------------------------- the plan


def cuts_of(param: Tensor) -> list[Cut]:
    """The cuts of a tensor in the order in which they can be undone."""
    if not is_sharded(param):
        return []
    mesh, shape, found = param.device_mesh, list(param.shape), list[Cut]()
    # FSDP cuts what tensor parallelism has cut before, though its mesh dimension comes first.
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
    if len({cut.dim for cut in found}) == len(found):  # in any order: in that of the mesh
        return found
    return found[::-1]


def chunk_sizes(length: int, ranks: int) -> Shape:
    """How torch cuts a dimension: all parts alike but the last ones, which may be empty.

    Example:
        >>> chunk_sizes(7, 3)
        (3, 3, 1)
        >>> chunk_sizes(2, 3)
        (1, 1, 0)
    """
    most = -(-length // ranks)
    return tuple(min(most, max(0, length - rank * most)) for rank in range(ranks))


def resized(shape: Shape, dim: int, size: int) -> Shape:
    """The shape with another size of one dimension."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def assign_owners(parts: Sequence[Travelling]) -> None:
    """Choose the owner of each matrix, by its rank in the group of each cut."""
    alike: dict[tuple[ProcessGroup, ...], list[Travelling]] = defaultdict(list)
    for part in parts:
        alike[part.groups].append(part)
    for same in alike.values():
        counts = [len(cut.sizes) for cut in same[0].cuts]
        owners = balanced(tuple(part.cost for part in same), math.prod(counts))
        for part, owner in zip(same, owners, strict=True):
            part.owner = coordinates(owner, counts)


@lru_cache(maxsize=64)
def balanced(costs: tuple[int, ...], ranks: int) -> Shape:
    """A rank for each cost: the dearest first, each to the rank that has least to do.

    Example:
        >>> balanced((4, 9, 5, 1), 2)
        (1, 0, 1, 0)
    """
    load = [(0, rank) for rank in range(ranks)]  # a heap already
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        busy, owners[index] = load[0]
        heapq.heapreplace(load, (busy + costs[index], owners[index]))
    return tuple(owners)


def coordinates(index: int, counts: Sequence[int]) -> Shape:
    """The place of a flat index in a grid."""
    found = []
    for count in reversed(counts):
        index, last = divmod(index, count)
        found.append(last)
    return tuple(reversed(found))


# --------------------------------------------------------------------------------- the messages


def gather(parts: Sequence[Travelling]) -> list[tuple[ProcessGroup, list[Travelling], list[int]]]:
    """Send every part to its owner; return what went by which group, and as which cut of each."""
    groups = list(dict.fromkeys(group for part in parts for group in part.groups))
    journey = []
    while any(part.undone < len(part.cuts) for part in parts):
        for group in groups:
            travellers = [part for part in parts if part.goes_by(group)]
            if travellers:
                steps = [part.undone for part in travellers]
                send_on(travellers, steps, group)
                journey.append((group, travellers, steps))
    return journey


def send_on(parts: Sequence[Travelling], steps: Sequence[int], group: ProcessGroup) -> None:
    """Undo a cut of each: its owner in the group gets all parts."""
    ranks = len(parts[0].cuts[steps[0]].sizes)
    leaving: list[list[Tensor]] = [[] for _ in range(ranks)]
    coming: list[list[Shape]] = [[] for _ in range(ranks)]
    kept = []
    for part, step in zip(parts, steps, strict=True):
        part.undone += 1
        if not part.is_here(step):
            continue
        cut, owner = part.cuts[step], part.owner[step]
        leaving[owner].append(part.whole())
        part.value = None
        if owner == cut.rank:
            kept.append((part, cut.dim))
            for rank, size in enumerate(cut.sizes):
                coming[rank].append(resized(part.shapes[step], cut.dim, size))
    got = exchanged(leaving, coming, group, parts[0].device)
    for i, (part, dim) in enumerate(kept):
        part.value = torch.cat([from_rank[i] for from_rank in got], dim=dim)


def send_back(parts: Sequence[Travelling], steps: Sequence[int], group: ProcessGroup) -> None:
    """Cut again what `send_on` put together."""
    ranks = len(parts[0].cuts[steps[0]].sizes)
    leaving: list[list[Tensor]] = [[] for _ in range(ranks)]
    coming: list[list[Shape]] = [[] for _ in range(ranks)]
    expected: list[list[Travelling]] = [[] for _ in range(ranks)]
    for part, step in zip(parts, steps, strict=True):
        if not part.is_here(step):
            continue
        cut, owner = part.cuts[step], part.owner[step]
        if owner == cut.rank:
            for pieces, piece in zip(leaving, part.whole().split(cut.sizes, cut.dim), strict=True):
                pieces.append(piece)
        coming[owner].append(part.shapes[step])
        expected[owner].append(part)
    got = exchanged(leaving, coming, group, parts[0].device)
    for waiting, arrived in zip(expected, got, strict=True):
        for part, value in zip(waiting, arrived, strict=True):
            part.value = value


def exchanged(
    leaving: list[list[Tensor]],
    coming: list[list[Shape]],
    group: ProcessGroup,
    device: torch.device,
) -> list[list[Tensor]]:
    """One message: the tensors for each rank, and those from each rank, whose shapes are known."""
    import torch.distributed as dist

    dtype = WIRE.get(device.type, torch.float32)
    nothing = torch.empty(0, dtype=dtype, device=device)  # a rank may have none to send
    packed = torch.cat([nothing, *(x.reshape(-1).to(dtype) for each in leaving for x in each)])
    sent = [sum(x.numel() for x in to_rank) for to_rank in leaving]
    counts = [[math.prod(shape) for shape in from_rank] for from_rank in coming]
    received = [sum(each) for each in counts]
    got = packed.new_empty(sum(received))
    dist.all_to_all_single(got, packed, received, sent, group=group)
    return [
        [x.view(shape).float() for x, shape in zip(own.split(sizes), shapes, strict=True)]
        for own, sizes, shapes in zip(got.split(received), counts, coming, strict=True)
    ]
