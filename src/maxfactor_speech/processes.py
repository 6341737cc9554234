"""Tasks in worker processes: a killed worker is detected, and workers end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from maxfactor_speech.errors import InputError
from maxfactor_speech.signals import STOP, ignore_interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from multiprocessing.context import SpawnProcess

T = TypeVar("T")
R = TypeVar("R")


class _Worker(NamedTuple):
    item: Any
    process: SpawnProcess


class _Told(NamedTuple):
    """A message of a worker that is not its result."""

    message: Any


_parent: Connection | None = None  # set in a worker: the pipe to the process that started it


def tell_parent(message: object) -> None:
    """Send a message to the `on_message` of `in_processes`; dropped if this is not a worker."""
    if _parent is not None:
        with suppress(BrokenPipeError):  # the parent has ended, and so will this process
            _parent.send(_Told(message))


def in_processes(
    work: Callable[[T], R],
    items: Iterable[T],
    jobs: int,
    on_message: Callable[[T, Any], None] = lambda *_: None,
) -> Generator[R, None, None]:
    """Yield the results of `work(item)` as they arrive, each computed in a new process.

    The pools of `multiprocessing` wait forever for a worker that the system has killed; here a
    killed worker raises InputError. If the generator is closed early, the running workers receive
    STOP, and it waits until they have ended.

    Args:
        work: A function at the top level of a module. An InputError that it raises is re-raised.
        items: One for each process. Messages name a process by `str(item)`.
        jobs: The number of processes that run at the same time.
        on_message: Called with an item and each message that its process sends by `tell_parent`.
    """
    waiting = iter(items)
    workers: dict[Connection, _Worker] = {}
    try:
        workers.update(_start(work, item) for item in islice(waiting, jobs))
        while workers:
            ready = wait(list(workers))[0]
            assert isinstance(ready, Connection)
            result: R | _Told = _receive(ready, workers[ready])
            if isinstance(result, _Told):
                on_message(workers[ready].item, result.message)
                continue
            workers.pop(ready).process.join()
            workers.update(_start(work, item) for item in islice(waiting, 1))
            yield result
    finally:
        for worker in workers.values():
            _stop(worker.process)
        for worker in workers.values():
            worker.process.join()


def _start(work: Callable[[T], R], item: T) -> tuple[Connection, _Worker]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, item, sender), daemon=True)
    process.start()
    sender.close()  # the worker holds the only copy, so its end closes the pipe
    return receiver, _Worker(item, process)


def _stop(process: SpawnProcess) -> None:
    if process.is_alive():  # otherwise the system may have given its id to another process
        assert process.pid is not None
        os.kill(process.pid, STOP)


def _receive(receiver: Connection, worker: _Worker) -> Any:
    try:
        result = receiver.recv()
    except EOFError as error:
        worker.process.join()
        raise InputError(f"{worker.item}: {_ending(worker.process.exitcode)}") from error
    if isinstance(result, InputError):
        raise result
    return result


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return (
            f"its process was killed by signal {-status}, perhaps because memory ran out; run the "
            "same command again to continue, with a smaller --jobs to use less memory"
        )
    return f"its process ended with status {status}; the reason is printed above"


def _run(work: Callable[[T], R], item: T, sender: Connection) -> None:
    """Run in the worker: compute the result and send it."""
    global _parent
    _parent = sender
    ignore_interrupts()
    _end_with_parent()
    try:
        sender.send(work(item))
    except InputError as error:
        sender.send(error)


def _end_with_parent() -> None:
    """End this process as soon as its parent has ended, even if the parent was killed.

    Otherwise a training would outlive a killed comparison, and run beside those of the next one.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)  # immediately: the main thread may be busy for a long time

    threading.Thread(target=watch, daemon=True).start()
