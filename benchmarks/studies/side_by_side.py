"""Trainings side by side: worker processes that do one run after another, on CUDA under MPS."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Protocol

from studies.training import serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    from measurement import Record

ATTEMPTS = 2  # at a run that fails; the second one without CUDA graphs
STOPPED_WITHIN = 5.0  # seconds that a worker has to end
PROBED_WITHIN = 45.0  # seconds that MPS has to answer
MPS_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
MPS_PROBE = "import torch; torch.ones(9, device='cuda').sum().item()"


class Job(Protocol):
    """A training that a worker does."""

    @property
    def key(self) -> str:
        """A digest by which it is found again."""

    @property
    def jobs(self) -> int:
        """How many small trainings it counts for."""

    @property
    def described(self) -> Record:
        """How it is stored."""


@dataclass
class Worker:
    """A process that does one run after another."""

    process: BaseProcess
    connection: Connection
    task: Job | None = None


class Workers:
    """Worker processes that do runs side by side, until there are none or the time is over.

    Args:
        cache: Folder of features.
        device: What to train on.
        jobs: How many small runs at a time; a large one counts for several.
        graph: The most that a CUDA graph may hold: "whole", "half" or "eager".
        serve: What a worker process runs.
    """

    def __init__(
        self,
        cache: Path,
        device: str,
        jobs: int,
        graph: str = "whole",
        serve: Callable[[Connection, Path, str], None] = serve,
    ) -> None:
        self._cache, self._device, self._jobs, self._graph = cache, device, jobs, graph
        self._serve = serve
        self._workers: list[Worker] = []
        self._failures: Counter[str] = Counter()
        self.errors: list[Record] = []

    def work(
        self,
        pending: Callable[[], Sequence[Job]],
        deadline: float,
        keep: Callable[[Record], None],
    ) -> bool:
        """Do pending runs, of which finished ones may cause more; return whether all were done."""
        try:
            while (left := deadline - time.monotonic()) > 0.0:
                self._hand_out(pending())
                busy = [worker for worker in self._workers if worker.task is not None]
                if not busy:
                    return not self.errors
                for connection in wait([worker.connection for worker in busy], min(left, 5.0)):
                    [worker] = [one for one in busy if one.connection is connection]
                    self._receive(worker, keep)
            return False
        finally:
            self._stop()

    def _hand_out(self, runs: Sequence[Job]) -> None:
        running = {worker.task.key for worker in self._workers if worker.task is not None}
        used = sum(worker.task.jobs for worker in self._workers if worker.task is not None)
        for run in runs:
            if run.key in running or self._failures[run.key] >= ATTEMPTS:
                continue
            if used and used + run.jobs > self._jobs:
                break
            worker = self._free()
            worker.task = run
            worker.connection.send((run, "eager" if self._failures[run.key] else self._graph))
            used += run.jobs

    def _free(self) -> Worker:
        for worker in self._workers:
            if worker.task is None:
                return worker
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=self._serve, args=(theirs, self._cache, self._device), daemon=True
        )
        process.start()
        theirs.close()  # or the end of the process would not be noticed
        self._workers.append(Worker(process, ours))
        return self._workers[-1]

    def _receive(self, worker: Worker, keep: Callable[[Record], None]) -> None:
        run = worker.task
        assert run is not None
        try:
            record = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(STOPPED_WITHIN)
            code = worker.process.exitcode
            record = {"run": run.described, "error": f"the worker ended with status {code}"}
        worker.task = None
        if "error" not in record:
            keep({**record, "jobs": self._jobs})
            return
        self._failures[run.key] += 1
        print(f"FAILED {run}\n{record['error']}", flush=True)
        if self._failures[run.key] >= ATTEMPTS:
            self.errors.append(record)
        self._workers.remove(worker)
        _end([worker])

    def _stop(self) -> None:
        for worker in self._workers:
            if worker.task is None:
                worker.connection.send(None)
            else:
                worker.process.terminate()
        _end(self._workers)
        self._workers = []


def _end(workers: Sequence[Worker]) -> None:
    deadline = time.monotonic() + STOPPED_WITHIN
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()


@contextmanager
def shared_gpu(device: str, is_wanted: bool = True) -> Iterator[Callable[[], bool]]:
    """CUDA's multi-process service (MPS) for processes started inside, if it is available.

    Yields a function that returns whether MPS works, and disables it if not. The probe starts at
    once and runs in the background.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if not (is_wanted and device.startswith("cuda")) or control is None:
        yield lambda: False
        return
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        variables = dict.fromkeys(MPS_VARIABLES, folder)
        os.environ.update(variables)
        is_started = _quietly([control, "-d"])
        probe = subprocess.Popen([sys.executable, "-c", MPS_PROBE], stderr=subprocess.DEVNULL)

        def works() -> bool:
            try:
                good = is_started and probe.wait(PROBED_WITHIN) == 0
            except subprocess.TimeoutExpired:
                good = False
            if not good:
                _forget_mps()
            return good

        try:
            yield works
        finally:
            if probe.poll() is None:
                probe.kill()
            _quietly([control], "quit\n", {**os.environ, **variables})
            _forget_mps()


def _quietly(command: list[str], said: str = "", environment: dict[str, str] | None = None) -> bool:
    """Run a command without pipes for its output, which a daemon would keep open."""
    silent = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command,
            input=said.encode(),
            stdout=silent,
            stderr=silent,
            env=environment,
            timeout=PROBED_WITHIN,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _forget_mps() -> None:
    for name in MPS_VARIABLES:
        os.environ.pop(name, None)
