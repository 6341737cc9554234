"""What the fused plans of windows have in common while gradients are released.

Nothing here needs Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from maxfactor.backends.triton.replay import is_in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from maxfactor.backends.step_io import GroupStep
    from maxfactor.backends.triton.group_tables import GroupTables
    from maxfactor.backends.triton.step import FusedStep


# Less memory is not kept: the few orthogonal matrices of `fast` and `lean` are launched one by one.
# Graphs with products would need a workspace of cuBLAS besides, up to 32 MiB.
LEAST_KEPT = 64 << 20


class Sharing:
    """The tables of groups, and the memory in which orthogonal matrices are iterated.

    Each window would upload the learning rates for itself otherwise. And backward allocates memory
    all the time, so that a window would borrow from another place in each step, and its launches
    could not be replayed as a CUDA graph. The windows are stepped one after the other.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Free everything; after the plans that use it."""
        self._tables: GroupTables | None = None
        self._memory: Tensor | None = None
        self._has_failed = False  # there was no memory to keep
        self._stream: torch.cuda.Stream | None = None  # of the window that was stepped last

    def tables_of(
        self, groups: Sequence[GroupStep], make: Callable[[], GroupTables]
    ) -> GroupTables:
        """The tables of these groups; made anew if settings have changed."""
        if self._tables is None or not self._tables.fit(groups):
            self._tables = make()
        return self._tables

    def follow(self, device: torch.device) -> None:
        """Let a window wait for the one before it, if backward runs on several streams."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def memory(self, nbytes: int) -> Tensor | None:
        """The first bytes of the memory that is kept; None if there are not so many."""
        if self._memory is None or len(self._memory) < nbytes:
            return None
        return self._memory[:nbytes]

    def settle(self, plans: Sequence[FusedStep]) -> None:
        """After a step: keep memory for the largest window, and capture the graphs that are due.

        Not in backward: graphs are captured by the thread of the user, while autograd's threads,
        which would have a workspace of cuBLAS of their own for it, have nothing to do.
        """
        largest = max(plans, key=lambda plan: plan.workspace_bytes, default=None)
        if largest is not None and is_in_order(largest.device):
            self._keep(largest.workspace_bytes, largest.device)
        for plan in plans:
            if not plan.workspace_bytes or self.memory(plan.workspace_bytes) is not None:
                plan.capture_pending()

    def _keep(self, nbytes: int, device: torch.device) -> None:
        """Keep at least as much memory; if there is none, windows go on to borrow it."""
        size = 0 if self._memory is None else len(self._memory)
        if nbytes <= size or nbytes < LEAST_KEPT or self._has_failed:
            return
        self._memory = None  # before a larger one is allocated
        try:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            self._has_failed = True
