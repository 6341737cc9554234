"""A lock on a training's folder: only one process trains in it."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from maxfactor_speech.atomic import check_writable
from maxfactor_speech.errors import InputError, failure_reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK = "lock"  # the file always stays; it is locked while a process trains


@contextmanager
def folder_lock(out: Path) -> Iterator[None]:
    """Lock a folder, which is created if needed; the system frees the lock if the process dies.

    If the folder was created here and nothing was written into it, it is removed afterwards.
    """
    check_writable(out, "--out")
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("w")
    except OSError as error:
        raise InputError(
            f"{out / LOCK}: cannot be written, {failure_reason(error)}; choose another folder with "
            "--out"
        ) from error
    with file:
        _acquire(file, out)
        try:
            yield
        finally:
            if is_new and [*out.iterdir()] == [out / LOCK]:
                shutil.rmtree(out, ignore_errors=True)


def _acquire(file: TextIO, out: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_taken = os.fstat(file.fileno()).st_nlink == 0  # its owner has just removed the folder
    except BlockingIOError:
        is_taken = True
    except OSError:  # the file system has no locks
        return
    if is_taken:
        raise InputError(
            f"{out}: another process is training here; wait until it ends, or choose another --out"
        )
