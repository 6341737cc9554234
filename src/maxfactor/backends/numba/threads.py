"""Runs a kernel on as many threads as torch uses.

The threads are Python's. Those of numba must not be used by two threads of a program at a time, and
its other layers bring an OpenMP of their own, beside torch's.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def launch(kernel: Callable[..., None], ends: Sequence[int], *arguments: Any) -> None:
    """Run `kernel(first, last, *arguments)` for parts of a list; `ends` are the ends of the parts.

    The caller's own thread runs the last part.
    """
    starts = [0, *ends[:-1]]
    parts = [(a, b) for a, b in zip(starts, ends, strict=True) if a < b]
    others = []
    for first, last in parts[:-1]:
        others.append(pool(os.getpid()).submit(kernel, first, last, *arguments))
    try:
        for first, last in parts[-1:]:
            kernel(first, last, *arguments)
    finally:
        for other in others:
            other.result()


def thread_count() -> int:
    """How many threads share a step."""
    return torch.get_num_threads()


@lru_cache(maxsize=1)
def pool(_: int) -> ThreadPoolExecutor:
    """The threads of a process; a forked process has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="maxfactor")
