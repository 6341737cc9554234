"""Several processes over loopback that run the cases of all test files, started once for them.

A case is a function of (rank, world) at the top of a module; what it raises on any rank fails the
test that asked for it.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forked import context
from interpreter import speed_up_interpreter

LIMIT = 180.0  # seconds for one case on all ranks; a busy machine may take many


class Ranks:
    """`world` processes with one gloo group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.start()

    def start(self) -> None:
        """Start the processes, which wait for a case."""
        here = context()
        wait = timedelta(seconds=LIMIT)
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait, wait_for_workers=False)  # type: ignore[attr-defined]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(self.world):
            mine, theirs = here.Pipe()
            process = here.Process(  # type: ignore[attr-defined]
                target=serve, args=(rank, self.world, self.store.port, theirs), daemon=True
            )
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, case: Callable[..., Any], *args: object) -> list[Any]:
        """Run `case(*args)` on every rank; return what each returned."""
        for pipe in self.pipes:
            pipe.send((case, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(LIMIT):
                self.stop()
                self.start()  # for the cases after this one
                raise TimeoutError(f"rank {rank} did not finish {case.__name__}{args}")
            answers.append(pipe.recv())
        errors = [f"rank {i}: {text}" for i, (text, _) in enumerate(answers) if text]
        assert not errors, "\n".join(errors)
        return [value for _, value in answers]

    def stop(self) -> None:
        """End the processes that were started here."""
        for process in self.processes:
            process.terminate()
            process.join()


def serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    """Run what is asked for until the parent ends."""
    speed_up_interpreter()
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT)
    store = dist.TCPStore("127.0.0.1", port, None, False, limit)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[str | None, Any] = (None, case(*args))
        except BaseException:  # whatever it was, the parent reports it
            answer = (traceback.format_exc(), None)
        pipe.send(answer)


def mesh_of(
    *shape: int, names: tuple[str, ...] | None = None, device: str = "cpu"
) -> DeviceMesh | None:
    """The first ranks in this shape; None on the others, which must ask for it too.

    One for all test files: DTensor takes meshes that are equal for one another, and their process
    groups with them.
    """
    return _mesh_of(shape, names, device)


@cache
def _mesh_of(
    shape: tuple[int, ...], names: tuple[str, ...] | None, device: str
) -> DeviceMesh | None:
    if device == "cuda":
        torch.cuda.set_device(0)  # which all ranks share
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    mesh = DeviceMesh(device, ranks, mesh_dim_names=names)
    return None if mesh.get_coordinate() is None else mesh
