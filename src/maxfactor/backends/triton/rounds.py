"""The orthogonal direction of shards: in rounds, each matrix is gathered and iterated by one rank.

Ranks filter their shards, exchange them, iterate the matrices that they own, return the directions
with an RMS of 1, and apply what they get back to their shards. What a round needs is bounded, as in
a batch of whole matrices, and the next round has the same memory.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch

from maxfactor.backends.triton.kernels.layout import Column
from maxfactor.backends.triton.launches import launch_normalize
from maxfactor.backends.triton.orthogonal import Workspace
from maxfactor.backends.triton.plan import TileRange
from maxfactor.backends.triton.workspace import GRAIN, ROUND_ELEMENTS, layout
from maxfactor.distributed.owner_exchange import ExchangedMatrix, exchanges
from maxfactor.distributed.placement import shards_of
from maxfactor.rule.newton_schulz import from_blocks, to_blocks
from maxfactor.state import block_shape, factoring

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from maxfactor.backends.step_io import StepInput
    from maxfactor.backends.triton.plan import LaunchKey, LaunchPlan
    from maxfactor.backends.triton.workspace import Formats, Layout
    from maxfactor.distributed.owner_exchange import Bundle, Exchange


class Segment(NamedTuple):
    """Shards of one round and one launch group, with tiles side by side."""

    key: LaunchKey
    tiles: TileRange
    first_tile: int  # its number in the round


class Round(NamedTuple):
    """Matrices that are exchanged together."""

    exchange: Exchange
    segments: list[Segment]
    owners: list[tuple[int, int]]  # each tensor, in the order of the kernels, and its place


def exchanges_of(step_io: Sequence[StepInput]) -> list[Exchange]:
    """The rounds of the orthogonal matrices that are cut, the same on all ranks.

    Matrices are known by their index in `step_io`.
    """
    found = {
        index: exchanged_matrix(each)
        for index, each in enumerate(step_io)
        if each.rule.is_orthogonal and each.param.numel() and shards_of(each.param)
    }
    return exchanges(found, most=ROUND_ELEMENTS, grain=GRAIN)


def exchanged_matrix(step_io: StepInput) -> ExchangedMatrix:
    """How a tensor is put together."""
    shape = tuple(step_io.param.shape)
    factored = factoring(shape, step_io.rule.factor)
    assert factored is not None
    return ExchangedMatrix(step_io.param, factored, block_shape(shape, step_io.rule))


class OrthogonalRounds:
    """The rounds of a plan, and the memory that one of them needs, borrowed for a step.

    Args:
        rounds: What is exchanged.
        order: The index in the optimizer's order of each tensor, in the order of the kernels.
        keys: Their launch keys.
        plan: The plan.
        formats: The dtypes of y and O, of equal size: O takes the place of y.
        device: The parameters' device.
    """

    def __init__(
        self,
        rounds: Sequence[Exchange],
        order: Sequence[int],
        keys: Sequence[LaunchKey],
        plan: LaunchPlan,
        formats: Formats,
        device: torch.device,
    ) -> None:
        self._formats, self._device = formats, device
        owner_of = {index: owner for owner, index in enumerate(order)}
        self.rounds = []
        for exchange in rounds:
            owners = [(owner_of[index], start) for index, start in exchange.starts]
            segments = list(segments_of(sorted(owner for owner, _ in owners), keys, plan))
            self.rounds.append(Round(exchange, segments, owners))
        segments = [segment for each in self.rounds for segment in each.segments]
        self.tiles = [(segment.key, segment.tiles) for segment in segments]
        self.most_tiles = max((each.first_tile + each.tiles.number for each in segments), default=0)
        self.borrowed_bytes = borrowed_bytes(rounds, formats)
        self._workspace = Workspace([layouts_of(rounds, formats)], formats, device)
        self._shard_elements = max((each.shard_elements for each in rounds), default=0)
        self._shards: Tensor | None = None

    def allocate(self, addresses: array[int]) -> array[int]:
        """Allocate the shards; return all addresses, with those of what is exchanged."""
        if not self.rounds:
            return addresses
        elements, y = self._shard_elements, self._formats.y
        self._shards = torch.empty(elements, dtype=y, device=self._device)
        first, addresses = self._shards.data_ptr(), addresses[:]
        for each in self.rounds:
            for owner, start in each.owners:
                addresses[owner] = first + start * y.itemsize
        return addresses

    def orthogonalize(self, round_: Round, counters: Tensor) -> None:
        """Replace the shards of y by those of O, which have an RMS of 1 in each block."""
        assert self._shards is not None
        exchange = round_.exchange
        shards = self._shards[: exchange.shard_elements]
        whole = exchange.gather(shards)
        self._workspace.allocate()
        for bundle, run in exchange.owned:
            self._iterate(bundle, run.of(whole), counters)
        self._workspace.release()
        exchange.scatter(whole.view(self._formats.o), shards.view(self._formats.o))

    def _iterate(self, bundle: Bundle, tensors: Tensor, counters: Tensor) -> None:
        """Orthogonalise whole matrices in their place."""
        form = layout_of(bundle, self._formats)
        y = tensors.view(-1, *bundle.first.layout.matrix[-2:])
        blocks = to_blocks(y, bundle.first.block).contiguous()
        memory = self._workspace.memory_of(form)
        launch_normalize(blocks, memory.x, form, form.norm, counters)
        self._workspace.iterate(form)
        o = blocks.view(self._formats.o)
        launch_normalize(memory.o, o, form, math.sqrt(form.m * form.n), counters)  # RMS 1
        if o.data_ptr() != y.data_ptr():  # blocks of columns are copies
            y.view(self._formats.o).copy_(from_blocks(o, tuple(y.shape)))

    def release(self) -> None:
        """Return the memory to torch."""
        self._shards = None


def layout_of(bundle: Bundle, formats: Formats) -> Layout:
    """What of a bundle is iterated: its matrices, or their blocks."""
    m, n = bundle.first.block or bundle.first.layout.matrix[-2:]
    matrices = len(bundle.members) * math.prod(bundle.first.shape) // (m * n)
    return layout(m, n, [matrices], formats.o)


def layouts_of(rounds: Sequence[Exchange], formats: Formats) -> list[Layout]:
    """What this rank iterates in all rounds."""
    return [layout_of(bundle, formats) for each in rounds for bundle, _ in each.owned]


def borrowed_bytes(rounds: Sequence[Exchange], formats: Formats) -> int:
    """Of shards, gathered matrices, and what is iterated or, before and after that, sent."""
    itemsize = formats.o.itemsize
    shards = max((each.shard_elements * itemsize for each in rounds), default=0)
    whole = max((each.whole_elements * itemsize for each in rounds), default=0)
    iterated = max((each.nbytes for each in layouts_of(rounds, formats)), default=0)
    # Blocks of columns are copied before and after the iteration.
    owned = [bundle.first for each in rounds for bundle, _ in each.owned]
    has_copies = any(each.block and each.block[1] != each.layout.matrix[-1] for each in owned)
    return shards + whole + max(whole, iterated + 2 * whole * has_copies)


def segments_of(
    owners: Sequence[int], keys: Sequence[LaunchKey], plan: LaunchPlan
) -> Iterator[Segment]:
    """The tiles of tensors that are side by side for each launch key; none of empty shards."""
    first_tile = 0
    for key, run in groupby(owners, lambda owner: keys[owner]):
        rows = [plan.matrices[plan.first_matrix[owner]] for owner in run]
        rows = [row for row in rows if row[Column.OWNER_TILES]]
        if rows:
            number = sum(row[Column.OWNER_TILES] for row in rows)
            yield Segment(key, TileRange(rows[0][Column.OWNER_TILE], number), first_tile)
            first_tile += number
