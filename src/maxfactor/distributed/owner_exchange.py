"""Gathers sharded matrices on owner ranks, where they are orthogonalised, and scatters them back.

There are two all-to-alls for each process group that shards a matrix, one to the owners and one
back, for all matrices of a round. A matrix that several groups shard is gathered over one group
after the other. Every rank computes the whole plan from global shapes, so no sizes are sent.

Matrices are assigned to owner ranks so that the cost is balanced. Replicas (HSDP, or a mesh
dimension that does not shard a matrix) assign owners among themselves and get the same bits.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from maxfactor.distributed.placement import is_sharded, is_strided, local, shards_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    """A sharded matrix, and how it is put together.

    `value` is the shard of this rank. It is None until it is set.
    """

    def __init__(
        self, param: Tensor, layout: Factoring, block: tuple[int, int] | None = None
    ) -> None:
        self.value: Tensor | None = None
        self.block = block
        self.shape, self.layout, self.device = tuple(param.shape), layout, param.device
        self.cuts = cuts_of(param)
        self.shapes = [tuple(local(param).shape)]  # local, and after each cut is undone
        for cut in self.cuts:
            self.shapes.append(resized(self.shapes[-1], cut.dim, sum(cut.sizes)))

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The process groups that shard it."""
        return tuple(cut.group for cut in self.cuts)

    @property
    def kind(self) -> tuple[object, ...]:
        """What matrices have in common that travel together."""
        cuts = tuple((cut.dim, cut.sizes) for cut in self.cuts)
        return self.shape, self.layout.matrix, self.block, cuts

    @property
    def cost(self) -> int:
        """Multiplications of X Xᵀ, over all matrices of a batch, or all blocks."""
        return math.prod(self.shape) * min(self.block or self.layout.matrix[-2:])

    def shard(self) -> Tensor:
        """Return the shard of this rank; assert that it exists."""
        assert self.value is not None
        return self.value


def orthogonalize_by_owners_(
    parts: Sequence[ExchangedMatrix],
    orthogonal: Callable[[Tensor, tuple[int, int] | None], Tensor],
) -> None:
    """Replace each part by its shard of `orthogonal` of the whole matrix, cut into its blocks."""
    for exchange in exchanges(dict(enumerate(parts))):
        dtype = WIRE.get(parts[0].device.type, torch.float32)
        shards = torch.empty(exchange.shard_elements, dtype=dtype, device=parts[0].device)
        for index, start in exchange.starts:
            part = parts[index]
            shards[start : start + part.shard().numel()] = part.shard().flatten()
            part.value = None
        whole = exchange.gather(shards)
        for bundle, run in exchange.owned:
            matrix, size = bundle.first.layout.matrix, max(1, math.prod(bundle.first.shape))
            for tensors in run.of(whole).split(max(1, BATCH // size)):
                y = tensors.to(torch.float32).reshape(-1, *matrix[-2:])
                tensors.copy_(orthogonal(y, bundle.first.block).reshape(tensors.shape))
        exchange.scatter(whole, shards)
        for index, start in exchange.starts:
            shape = parts[index].shapes[0]
            shard = shards[start : start + math.prod(shape)].view(shape)
            parts[index].value = shard.to(torch.float32)


# -------------------------------------------------------------------------------------- the cuts


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


# ------------------------------------------------------------------------------------ the owners


class Bundle(NamedTuple):
    """Matrices of one kind and one owner, which travel together."""

    owner: Shape  # its rank in the group of each cut
    first: ExchangedMatrix  # all are of its kind
    members: list[int]  # which they are

    def is_here(self, step: int) -> bool:
        """Whether this rank takes part in undoing cut `step`: it owns all earlier cuts."""
        before = zip(self.first.cuts[:step], self.owner[:step], strict=True)
        return all(cut.rank == owner for cut, owner in before)


def exchanges(
    parts: Mapping[int, ExchangedMatrix], *, most: float = math.inf, grain: int = 1
) -> list[Exchange]:
    """Assign an owner to each matrix; the rounds in which they are exchanged.

    Args:
        parts: The matrices by their index, the same on all ranks.
        most: Elements that a rank gathers in a round, unless a single matrix has more.
        grain: Bundles begin at multiples of it.
    """
    alike: dict[tuple[ProcessGroup, ...], list[int]] = defaultdict(list)
    for index, part in parts.items():
        alike[part.groups].append(index)
    return [
        Exchange(bundles, grain)
        for same in alike.values()
        for bundles in rounds_of(parts, same, most)
    ]


def rounds_of(
    parts: Mapping[int, ExchangedMatrix], same: Sequence[int], most: float
) -> list[list[Bundle]]:
    """The bundles of each round of matrices that the same groups shard, in the order of owners."""
    counts = [len(cut.sizes) for cut in parts[same[0]].cuts]
    costs = tuple(parts[index].cost for index in same)
    sizes = tuple(math.prod(parts[index].shape) for index in same)
    rounds: list[dict[object, Bundle]] = []
    for index, (number, owner) in zip(
        same, dealt(costs, sizes, math.prod(counts), most), strict=True
    ):
        rounds += [{} for _ in range(len(rounds), number + 1)]
        place, part = coordinates(owner, counts), parts[index]
        bundle = rounds[number].setdefault((place, part.kind), Bundle(place, part, []))
        bundle.members.append(index)
    return [sorted(bundles.values(), key=lambda each: each.owner) for bundles in rounds]


@lru_cache(maxsize=64)
def dealt(
    costs: Shape, sizes: Shape, ranks: int, most: float = math.inf
) -> tuple[tuple[int, int], ...]:
    """A round and a rank for each matrix: the largest cost first, to the rank with least to do.

    A round is over when that rank would get more than `most` elements.

    Example:
        >>> dealt((4, 9, 5, 1), (2, 3, 2, 1), 2)
        ((0, 1), (0, 0), (0, 1), (0, 0))
        >>> dealt((4, 9, 5, 1), (2, 3, 2, 1), 2, most=3)
        ((1, 0), (0, 0), (0, 1), (1, 1))
    """
    found, number = [(0, 0)] * len(costs), 0
    load, held = [(0, rank) for rank in range(ranks)], [0] * ranks  # the load is a heap
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = load[0][1]
        if held[rank] and held[rank] + sizes[index] > most:
            number, rank = number + 1, 0
            load, held = [(0, rank) for rank in range(ranks)], [0] * ranks
        found[index] = number, rank
        held[rank] += sizes[index]
        heapq.heapreplace(load, (load[0][0] + costs[index], rank))
    return tuple(found)


def coordinates(index: int, counts: Sequence[int]) -> Shape:
    """Unravel a flat index in a grid."""
    found = []
    for count in reversed(counts):
        index, last = divmod(index, count)
        found.append(last)
    return tuple(reversed(found))


# ---------------------------------------------------------------------------------- the messages


class Run(NamedTuple):
    """Tensors of one shape, one after the other in a buffer."""

    start: int
    number: int
    shape: Shape
    space: int  # elements until the next run begins

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return self.number * math.prod(self.shape)

    def of(self, buffer: Tensor) -> Tensor:
        """The tensors as one: (number, *shape)."""
        flat = buffer[self.start : self.start + self.elements]
        return flat.view(self.number, *self.shape)


def laid_out(
    bundles: Sequence[Bundle], shapes: Sequence[Shape], grain: int, start: int = 0
) -> list[Run]:
    """A run for each bundle, whose tensors have these shapes."""
    runs = []
    for bundle, shape in zip(bundles, shapes, strict=True):
        number = len(bundle.members)
        space = -(-number * math.prod(shape) // grain) * grain
        runs.append(Run(start, number, shape, space))
        start += space
    return runs


class Move(NamedTuple):
    """Where pieces from a rank belong."""

    pieces: Run
    whole: Run
    dim: int  # of the tensor of a run
    first: int  # index along it

    def part_of(self, buffer: Tensor) -> Tensor:
        """The part of whole tensors in `buffer` that the pieces are."""
        size = self.pieces.shape[self.dim - 1]
        return self.whole.of(buffer).narrow(self.dim, self.first, size)


class Stage:
    """The exchange over one group, which undoes one cut of each matrix.

    Args:
        bundles: All of the round, in the order of owners.
        step: Which cut is undone.
        grain: Bundles begin at multiples of it.
    """

    def __init__(self, bundles: Sequence[Bundle], step: int, grain: int) -> None:
        cut = bundles[0].first.cuts[step]
        self._group, ranks = cut.group, range(len(cut.sizes))
        here = [bundle for bundle in bundles if bundle.is_here(step)]
        kept = [bundle for bundle in here if bundle.owner[step] == cut.rank]
        self.before = laid_out(here, [each.first.shapes[step] for each in here], grain)
        self.after = laid_out(kept, [each.first.shapes[step + 1] for each in kept], grain)
        self._sent, self._received = [0 for _ in ranks], [0 for _ in ranks]
        for bundle, run in zip(here, self.before, strict=True):
            self._sent[bundle.owner[step]] += run.space
        self._moves: list[Move] = []
        for rank in ranks:
            cuts = [bundle.first.cuts[step] for bundle in kept]
            own = zip(self.after, cuts, strict=True)
            shapes = [resized(run.shape, each.dim, each.sizes[rank]) for run, each in own]
            pieces = laid_out(kept, shapes, grain, sum(self._received))
            self._received[rank] = sum(run.space for run in pieces)
            self._moves += [
                Move(piece, whole, 1 + each.dim, sum(each.sizes[:rank]))
                for piece, whole, each in zip(pieces, self.after, cuts, strict=True)
            ]

    @property
    def elements_before(self) -> int:
        """Of the buffer of shards."""
        return sum(self._sent)

    @property
    def elements_after(self) -> int:
        """Of the buffer of what they are put together to."""
        return sum(run.space for run in self.after)

    def gather(self, shards: Tensor) -> Tensor:
        """Send shards to their owners; put together those that arrive."""
        pieces = shards.new_empty(sum(self._received))
        self._send(shards, self._sent, pieces, self._received)
        whole = shards.new_empty(self.elements_after)
        for move in self._moves:
            move.part_of(whole).copy_(move.pieces.of(pieces))
        return whole

    def scatter(self, whole: Tensor, shards: Tensor) -> None:
        """Undo `gather`, into `shards`."""
        pieces = whole.new_empty(sum(self._received))
        for move in self._moves:
            move.pieces.of(pieces).copy_(move.part_of(whole))
        self._send(pieces, self._received, shards, self._sent)

    def _send(self, given: Tensor, sent: list[int], got: Tensor, received: list[int]) -> None:
        """One all-to-all, with as many elements to and from each rank as the lists say."""
        import torch.distributed as dist

        dist.all_to_all_single(got, given, received, sent, group=self._group)


class Exchange:
    """One round: the matrices that are gathered and scattered together.

    Args:
        bundles: In the order of owners.
        grain: They begin at multiples of it.
    """

    def __init__(self, bundles: Sequence[Bundle], grain: int) -> None:
        cuts = len(bundles[0].first.cuts)
        self._stages = [Stage(bundles, step, grain) for step in range(cuts)]
        owned = [bundle for bundle in bundles if bundle.is_here(cuts)]
        self.owned = list(zip(owned, self._stages[-1].after, strict=True))
        self.shard_elements = self._stages[0].elements_before
        self.whole_elements = max(stage.elements_after for stage in self._stages)
        # Each matrix, and where its shard begins in the buffer of shards.
        self.starts = [
            (index, run.start + i * math.prod(run.shape))
            for bundle, run in zip(bundles, self._stages[0].before, strict=True)
            for i, index in enumerate(bundle.members)
        ]

    def gather(self, shards: Tensor) -> Tensor:
        """The matrices that this rank owns, at the places that `owned` says."""
        for stage in self._stages:
            shards = stage.gather(shards)
        return shards

    def scatter(self, whole: Tensor, shards: Tensor) -> None:
        """Undo `gather`, into `shards`."""
        for stage in reversed(self._stages[1:]):
            before = whole.new_empty(stage.elements_before)
            stage.scatter(whole, before)
            whole = before
        self._stages[0].scatter(whole, shards)
