"""One process at a time trains in a folder."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from maxfactor_speech.data.audio import InputError
from maxfactor_speech.data.shards import check_writable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK = "lock"  # the file stays; what counts is whether a process holds it


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keep other processes out of a training's folder; the lock goes with the process.

    A folder that was made for it and is left with nothing in it is removed again.
    """
    check_writable(out, "--out")
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("w")
    except OSError as error:
        raise InputError(f"{out / LOCK}: cannot be written, {error.strerror}") from error
    with file:
        _hold(file, out)
        try:
            yield
        finally:
            if is_new and [*out.iterdir()] == [out / LOCK]:
                shutil.rmtree(out, ignore_errors=True)


def _hold(file: TextIO, out: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_taken = os.fstat(file.fileno()).st_nlink == 0  # by one that has just removed it
    except BlockingIOError:
        is_taken = True
    except OSError:  # a file system that has no locks
        return
    if is_taken:
        raise InputError(
            f"{out}: another process trains here; wait for its end, or take another --out"
        )
