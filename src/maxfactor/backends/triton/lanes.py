"""Streams on which batches are worked on side by side."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Lane = Callable[[int], AbstractContextManager[object]]


@contextmanager
def forked(device: torch.device, lanes: int) -> Iterator[Lane]:
    """Fork from the current stream, and join at the end: `with lane(number)` launches in a lane.

    Lane 0 is the current stream itself. What comes after the block waits for all lanes, so memory
    of the current stream may be used in them and freed after it. A capture of the current stream
    has the others in it. Without a GPU, lanes are worked on one after the other.
    """
    if device.type != "cuda" or lanes == 1:
        yield lambda _: nullcontext()  # lane 0 for all
        return
    current = torch.cuda.current_stream(device)
    others = [lane_stream(current, number) for number in range(1, lanes)]
    for other in others:
        other.wait_stream(current)
    try:
        yield lambda number: torch.cuda.stream(others[number - 1]) if number else nullcontext()
    finally:  # after an error, too: what the lanes use is freed then
        for other in others:
            current.wait_stream(other)


@lru_cache
def lane_stream(current: torch.cuda.Stream, number: int) -> torch.cuda.Stream:  # noqa: ARG001
    """A lane of a stream, for all plans: torch keeps a workspace of cuBLAS for each stream.

    Streams do not share their lanes, so that workspace is in the memory of a graph if that of the
    stream is, as with `replay.capture_stream`, and lives as long.
    """
    return torch.cuda.Stream(current.device)
