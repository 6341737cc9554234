"""Where the host's time of a training step goes, with and without released gradients.

`small_memory.py --profile` uses it. Times of whole calls come from a clock, others from profilers,
which slow down what they look at: compare their shares, not their sums.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from maxfactor.optimizer import FactoredOptimizer
from maxfactor.release import GradientRelease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from measurement import Record

CALLS = [
    (GradientRelease, "take"),  # in backward, with the window's step
    (GradientRelease, "finish"),
    (FactoredOptimizer, "step_window"),
    (FactoredOptimizer, "settle_windows"),
    (FactoredOptimizer, "_step_all"),  # without release
    (FactoredOptimizer, "zero_grad"),
]
# What is left out to see what it costs, with and without release.
WITHOUT = {True: (FactoredOptimizer, "step_window"), False: (FactoredOptimizer, "_step_all")}
SHOWN = 15  # rows of a profile


def profiled(run: Callable[[], object], steps: int, device: str, *, released: bool) -> Record:
    """Run steps in several ways.

    Args:
        run: Takes one step.
        steps: How many for each way.
        device: "cuda" or "cpu".
        released: Whether gradients are released.
    """
    with clocked() as calls:
        as_usual = _milliseconds(run, steps, device)
    with patch.object(*WITHOUT[released], lambda *_: None):
        alone = _milliseconds(run, steps, device)
    return {
        "ms_per_step": as_usual,
        "ms_without_optimizer": alone,
        "calls": {name: _per_step(seconds, steps) for name, seconds in calls.items()},
        **_operations(run, steps, device),
        "python_in_hooks": _python_of(run, steps) if released else [],
    }


def _milliseconds(run: Callable[[], object], steps: int, device: str) -> list[float]:
    """The host's time of each step; the last one has the wait for the device."""
    _wait(device)
    times = [time.perf_counter()]
    for number in range(steps):
        run()
        if number + 1 == steps:
            _wait(device)
        times.append(time.perf_counter())
    pairs = pairwise(times)
    return [round(1e3 * (after - before), 1) for before, after in pairs]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _per_step(seconds: list[float], steps: int) -> Record:
    return {"calls": len(seconds) / steps, "ms": round(1e3 * sum(seconds) / steps, 3)}


@contextmanager
def clocked() -> Iterator[dict[str, list[float]]]:
    """Collect the times of CALLS, in all threads."""
    found: dict[str, list[float]] = {}
    patches = [patch.object(owner, name, _timed(owner, name, found)) for owner, name in CALLS]
    for each in patches:
        each.start()
    try:
        yield found
    finally:
        for each in patches:
            each.stop()


def _timed(owner: type, name: str, found: dict[str, list[float]]) -> Callable[..., Any]:
    """The same method; it notes how long it takes."""
    method = getattr(owner, name)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            found.setdefault(name, []).append(time.perf_counter() - start)

    return call


def _operations(run: Callable[[], object], steps: int, device: str) -> Record:
    """Operators and calls of CUDA by their own time on the host, and how busy the device is."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            run()
        _wait(device)
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total)
    # Operators have the time of their kernels as well.
    kernels = [row for row in rows if row.device_type != DeviceType.CPU]
    calls_of_cuda: Counter[str] = Counter()
    for row in rows:
        if row.key.startswith("cu"):  # of the runtime, and of the driver: launches by Triton
            calls_of_cuda[row.key] += row.count
    return {
        "device_ms": round(sum(row.self_device_time_total for row in kernels) / 1e3 / steps, 2),
        "cuda_calls": {name: count / steps for name, count in calls_of_cuda.most_common(SHOWN)},
        "operations": [
            {
                "name": row.key[:60],
                "calls": row.count / steps,
                "ms": round(row.self_cpu_time_total / 1e3 / steps, 3),
            }
            for row in rows[:SHOWN]
        ],
    }


def _python_of(run: Callable[[], object], steps: int) -> list[str]:
    """The functions in which the hooks of gradients spend their time, in autograd's thread."""
    profile, take = cProfile.Profile(), GradientRelease.take

    @wraps(take)
    def looked_at(*args: Any) -> None:
        profile.enable()  # of this thread
        try:
            take(*args)
        finally:
            profile.disable()

    with patch.object(GradientRelease, "take", looked_at):
        for _ in range(steps):
            run()
    found: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = sorted(found.items(), key=lambda item: -item[1][2])[:SHOWN]
    return [
        f"{1e3 * own / steps:.3f} ms, {count / steps:g} calls: {Path(file).name}:{line} {name}"
        for (file, line, name), (_, count, own, *_) in rows
    ]
