"""Forked processes that are killed: torch is imported once, by the parent."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIMIT = 120.0  # seconds; a busy machine may take many
# What Python tells before it changes a file or a folder. It also tells of files that are read.
WRITES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree")


def forked(action: Callable[[], object], told: Path | None = None) -> int:
    """Run a function in a forked process, which then ends; return the id of the process.

    What it raises is written to the file `told`, or to the standard error.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of pytest do not matter
        process = os.fork()
    if process:
        return process
    status = 1
    try:
        action()
        status = 0
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if told is None:
            traceback.print_exc()
        else:
            told.write_text(text)
    finally:
        os._exit(status)


def ended(processes: Sequence[int], seconds: float = LIMIT) -> list[int]:
    """Wait for processes; return their exit codes, negative for a signal. Kill those that hang."""
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        for process in processes:
            if process not in codes:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    codes[process] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for process in set(processes) - codes.keys():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            raise TimeoutError(f"{len(processes) - len(codes)} processes took {seconds} s")
        time.sleep(0.001)
    return [codes[process] for process in processes]


def killed_at(number: int, action: Callable[[], object]) -> bool:
    """Run a function in a process that is killed just before its n-th change of the disk.

    Returns:
        Whether it came so far.
    """
    [code] = ended([forked(lambda: _kill_at(number, action))])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def _kill_at(number: int, action: Callable[[], object]) -> None:
    counter = itertools.count()
    is_over = False  # what is written after it, such as the measured coverage, does not count

    def hook(event: str, details: tuple[Any, ...]) -> None:
        if is_over or event not in WRITES or not _changes(event, details):
            return
        if next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    action()
    is_over = True


def _changes(event: str, details: tuple[Any, ...]) -> bool:
    return event != "open" or bool(details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def killed_beyond(size: int, action: Callable[[], object]) -> bool:
    """Run a function in a process that the system kills when a file exceeds `size` bytes.

    So it dies amid a write, also in code that is not Python's.
    """
    import resource

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        action()

    [code] = ended([forked(limited)])
    assert code in (0, -signal.SIGXFSZ)
    return code != 0
