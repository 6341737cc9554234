"""Handlers of the signals that stop a program, installed for a while and then restored.

Python runs signal handlers in the main thread only, and only there can they be installed. In any
other thread, the functions here leave all handlers as they are.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Sent to worker processes to stop them. It is not SIGTERM, because a scheduler sends SIGTERM to all
# processes of a job, and a second SIGTERM would end a training that is still saving.
STOP: signal.Signals = getattr(signal, "SIGUSR1", signal.SIGTERM)  # Windows has no SIGUSR1
STOP_SIGNALS = tuple(dict.fromkeys((signal.SIGINT, signal.SIGTERM, STOP)))


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether a signal has asked the program to stop.

    The first signal of each kind only sets this flag. A second one has its usual effect.
    """
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    with _handled_by(note, STOP_SIGNALS) as previous:
        yield lambda: bool(received)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, as Ctrl-C does."""
    with _handled_by(signal.default_int_handler, (signal.SIGTERM,)):
        yield


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until the end of the block.

    Needed around C code that calls back into Python: their handlers raise exceptions, which ctypes
    drops inside a callback, so the signal would be lost.
    """
    received: list[int] = []
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(n))]
    try:
        with _handled_by(lambda number, _: received.append(number), numbers):
            yield
    finally:
        for number in dict.fromkeys(received):
            signal.raise_signal(number)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C in a worker process. It reaches all processes; the parent stops its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _handled_by(
    handler: Callable[[int, Any], object], numbers: Iterable[int]
) -> Iterator[dict[int, Any]]:
    """Handle some signals by one function; yield the previous handlers, and restore them."""
    previous: dict[int, Any] = {}
    if threading.current_thread() is not threading.main_thread():
        yield previous
        return
    try:
        for number in numbers:
            previous[number] = signal.getsignal(number)
            signal.signal(number, handler)
        yield previous
    finally:
        for number, restored in previous.items():
            signal.signal(number, restored)
