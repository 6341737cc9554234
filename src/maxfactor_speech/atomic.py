"""Atomic file writing: readers see the old file or the whole new one, never a part."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from maxfactor_speech.errors import InputError, failure_reason

if TYPE_CHECKING:
    from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file, and create its folder if needed.

    Raises:
        InputError: If the file cannot be written. The message names it.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # the first error is the one to report
            partial.unlink()
        raise InputError(f"{path}: cannot be written, {failure_reason(error)}") from error


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some file systems refuse it, and need none
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path, option: str) -> None:
    """Raise InputError if files cannot be created in a folder; the folder is not created here.

    Args:
        folder: Where files will be written.
        option: The command-line option that sets the folder, for the message.
    """
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # the name is too long, or a parent folder is not accessible
        reason = error.strerror
    else:
        if not existing.is_dir():
            reason = f"{existing} is a file"
        elif not os.access(existing, os.W_OK | os.X_OK):
            reason = f"permission denied in {existing}"
        else:
            return
    raise InputError(f"{folder}: cannot be written, {reason}; choose another folder with {option}")
