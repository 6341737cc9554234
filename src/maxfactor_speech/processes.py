"""Work in processes of its own, which are missed when they are killed and end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from maxfactor_speech.data.audio import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from multiprocessing.context import SpawnProcess

# Not SIGTERM, which a scheduler sends to all processes: a second one would end a training at once
# that is about to save for the first.
STOP: signal.Signals = getattr(signal, "SIGUSR1", signal.SIGTERM)  # Windows has no other

T = TypeVar("T")
R = TypeVar("R")


class _UnderWay(NamedTuple):
    name: str
    process: SpawnProcess


def in_processes(work: Callable[[T], R], items: Iterable[T], jobs: int) -> Generator[R, None, None]:
    """Yield what becomes of items as they end, each in a fresh process, `jobs` at the same time.

    `multiprocessing` has pools for this, but they wait forever for one that the system killed.
    Whoever stops early sends STOP to those that are under way, and waits for their end.

    Args:
        work: What to do with an item, at the top of a module; InputError comes through.
        items: One for each process; their `str` names them in messages.
        jobs: Processes at the same time.
    """
    waiting = iter(items)
    under_way: dict[Connection, _UnderWay] = {}
    try:
        under_way.update(_started(work, item) for item in islice(waiting, jobs))
        while under_way:
            answer = wait(list(under_way))[0]
            assert isinstance(answer, Connection)
            result: R = _received(answer, under_way[answer])
            under_way.pop(answer).process.join()
            under_way.update(_started(work, item) for item in islice(waiting, 1))
            yield result
    finally:
        for one in under_way.values():
            _stop(one.process)
        for one in under_way.values():
            one.process.join()


def _started(work: Callable[[T], R], item: T) -> tuple[Connection, _UnderWay]:
    context = multiprocessing.get_context("spawn")
    answer, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(work, item, theirs), daemon=True)
    process.start()
    theirs.close()  # the process alone has it, so that with its end the answer ends
    return answer, _UnderWay(str(item), process)


def _stop(process: SpawnProcess) -> None:
    if process.is_alive():  # else its number may be another's by now
        assert process.pid is not None
        os.kill(process.pid, STOP)


def _received(answer: Connection, one: _UnderWay) -> Any:
    try:
        result = answer.recv()
    except EOFError as error:
        one.process.join()
        raise InputError(f"{one.name}: {_ended(one.process.exitcode)}") from error
    if isinstance(result, InputError):
        raise result
    return result


def _ended(status: int | None) -> str:
    if status is not None and status < 0:
        return (
            f"its process was killed by signal {-status}, as where memory runs out; the same "
            "command goes on, and takes less memory with fewer --jobs"
        )
    return f"its process ended with status {status}, the reason stands above"


def _answer(work: Callable[[T], R], item: T, answer: Connection) -> None:
    """What a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all, the parent passes it on
    _end_with_parent()
    try:
        answer.send(work(item))
    except InputError as error:
        answer.send(error)


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, however that was.

    Else a training of a comparison that was killed would go on, beside that of the next one.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)  # not through the main thread, which may be busy for long

    threading.Thread(target=watch, daemon=True).start()
