"""What ranks send to each other between the launches of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxfactor.distributed.reductions import Reduction, reduce_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import ProcessGroup

    Groups = tuple[ProcessGroup, ...]


class Message:
    """Places of a flat float32 buffer whose values are combined over process groups.

    Ranks that share a process group add the same places in the same order, even empty ones.
    """

    def __init__(self, *, is_sum: bool) -> None:
        self.is_sum = is_sum
        self._places: dict[Groups, list[range]] = {}
        self._indices: dict[Groups, Tensor] = {}

    def add(self, groups: Iterable[ProcessGroup], *places: range) -> None:
        """Combine the values at some places over `groups`, in every step."""
        key = tuple(dict.fromkeys(groups))
        if key:
            self._places.setdefault(key, []).extend(places)

    def finish(self, device: torch.device) -> None:
        """Copy the places to the device."""
        for groups, places in self._places.items():
            index = torch.cat([torch.arange(0, device="cpu"), *map(as_index, places)])
            self._indices[groups] = index.to(device)

    def shares(self, buffer: Tensor) -> list[Reduction]:
        """The values of this rank."""
        own = self._indices.items()
        return [Reduction(buffer[index], groups, self.is_sum) for groups, index in own]

    def take(self, buffer: Tensor, values: Iterable[Tensor]) -> None:
        """Write the values of all ranks."""
        for index, value in zip(self._indices.values(), values, strict=True):
            buffer[index] = value


def as_index(places: range) -> Tensor:
    """The places as a tensor."""
    return torch.arange(places.start, places.stop, places.step, device="cpu")


def exchange(messages: Sequence[tuple[Message, Tensor]], groups: Sequence[ProcessGroup]) -> None:
    """Combine several messages, each with its buffer, by one all-reduce per process group."""
    shares = [message.shares(buffer) for message, buffer in messages]
    values = iter(reduce_all([share for own in shares for share in own], groups))
    for (message, buffer), own in zip(messages, shares, strict=True):
        message.take(buffer, [next(values) for _ in own])
