"""Replays the launches of a step as a CUDA graph: one call of the host in place of hundreds.

A graph holds the arguments of its launches. Parameters, gradients, learning rates and step counts
are found through tables on the device, so they may change from step to step. What a step borrows
from torch's allocator has its address in the arguments: another address is another graph. While
gradients are released, the windows share memory that stays in place, see `sharing`.
"""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

SEEN_BEFORE = 2  # steps with the same arguments before they are captured; kernels are compiled then
MOST = 3  # graphs that are kept
MOST_COUNTED = 16  # arguments that are remembered


class LaunchArguments(NamedTuple):
    """What differs between steps of a plan and is an argument of a launch."""

    workspace_at: int  # the address of what the step borrows
    check: bool
    measure: bool
    is_scaled: bool


class Replay:
    """The graphs of a plan.

    Args:
        device: The parameters' device; there are graphs for a GPU only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.enabled = has_graphs(device)  # tests compare with ordinary launches
        self.failure: str | None = None  # why there are ordinary launches from now on
        self.captured = self.replayed = 0  # how many graphs, and steps
        self._counts: Counter[LaunchArguments] = Counter()
        self._graphs: dict[LaunchArguments, torch.cuda.CUDAGraph] = {}  # last used last
        self.is_deferred = False  # `run` does not capture, but leaves that to `capture`
        self._pending: LaunchArguments | None = None  # for it

    def run(self, arguments: LaunchArguments, launch: Callable[[], None]) -> None:
        """Replay the launches if they were captured; else launch, and capture if it is time.

        Args:
            arguments: What determines the arguments of all launches.
            launch: The launches. It must not allocate memory.
        """
        if not self.may_replay:
            launch()
            return
        graph = self._graphs.pop(arguments, None)
        if graph is None and self._is_due(arguments):
            if self.is_deferred:
                self._pending = arguments
            else:
                graph = self._capture(launch)
        if graph is None:
            launch()  # a capture that failed has run nothing
            return
        self._graphs[arguments] = graph
        graph.replay()
        self.replayed += 1

    def take_pending(self) -> LaunchArguments | None:
        """The arguments that `run` would have captured, once."""
        pending, self._pending = self._pending, None
        return pending

    def capture(self, arguments: LaunchArguments, launch: Callable[[], None]) -> None:
        """Capture the launches for later steps with these arguments; nothing is run."""
        if self.may_replay and (graph := self._capture(launch)) is not None:
            self._graphs[arguments] = graph

    @property
    def may_replay(self) -> bool:
        """Whether graphs may be used now; the workspace of cuBLAS is that of one stream."""
        return self.enabled and is_default_stream(self._device)

    def _is_due(self, arguments: LaunchArguments) -> bool:
        """Count the arguments; whether they are worth a graph, as more steps with them will come.

        Each graph asks for twice as many steps as the one before it. So where addresses change all
        the time, captures soon become rare.
        """
        self._counts[arguments] += 1
        if self._counts[arguments] <= SEEN_BEFORE << min(self.captured, 32):
            if len(self._counts) > MOST_COUNTED:
                self._counts = Counter({arguments: self._counts[arguments]})
            return False
        del self._counts[arguments]
        return True

    def _capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Capture the launches without running them; None, and no more captures, if it fails."""
        if len(self._graphs) >= MOST:
            del self._graphs[next(iter(self._graphs))]
        try:
            graph = captured(launch, self._device, shared_pool(self._device))
        except Exception as error:  # whatever it is, ordinary launches work
            self.enabled, self.failure = False, f"{type(error).__name__}: {error}"
            self._graphs.clear()
            return None
        self.captured += 1
        return graph


def captured(launch: Callable[[], object], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of launches, which are not run.

    `torch.cuda.graph` would wait for the device and empty torch's cache first.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # it could free events or graphs, which a capture does not allow
    try:
        with torch.cuda.stream(capture_stream(device)):
            # Other threads may go on to allocate memory.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with suppress(Exception):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


def has_graphs(device: torch.device) -> bool:
    """Whether there are graphs for a device; not in Triton's interpreter."""
    return device.type == "cuda"


def is_default_stream(device: torch.device) -> bool:
    """Whether kernels are launched on the device's default stream."""
    return torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def is_in_order(device: torch.device) -> bool:
    """Whether what is launched now runs after all that used the memory of windows before."""
    # A graph of the user is captured on another stream, and replayed at any time.
    return not has_graphs(device) or is_default_stream(device)


@lru_cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all plans: torch keeps a workspace of cuBLAS for each stream that it has seen."""
    return torch.cuda.Stream(device)


def shared_pool(device: torch.device) -> Any:
    """The memory of all graphs. It has that workspace, and those of its lanes, at most.

    Since `first_graph` stays, a workspace stays in place even if torch is told to free it.
    """
    return first_graph(device).pool()


@lru_cache
def first_graph(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph that is never replayed."""
    something = torch.zeros(1, device=device)
    return captured(something.zero_, device, pool=None)
