"""Checksums of a checkpoint's files, so that damage is found before anything is loaded.

`checksums.json` has the SHA-256 of every other file of the folder. It is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from maxfactor_speech.atomic import sync_folder
from maxfactor_speech.errors import InputError, failure_reason

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CHECKSUMS = "checksums.json"
ALGORITHM = "sha256"
WEIGHTS = ".safetensors"  # files that nobody edits by hand
TEXTS = (".json", ".txt", ".jinja")
CHUNK = 1 << 22  # bytes read at a time
THREADS = 4  # files that are read at the same time; hashing does not hold Python's lock


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder, and wait until everything is on the disk."""
    (folder / CHECKSUMS).unlink(missing_ok=True)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(THREADS) as pool:
        sums = dict(zip(names, pool.map(_stored_checksum, paths), strict=True))
    with (folder / CHECKSUMS).open("w", encoding="utf-8") as file:
        json.dump({ALGORITHM: sums}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for inner in {path.parent for path in paths} | {folder}:
        sync_folder(inner)


def check_checkpoint(folder: Path) -> None:
    """Raise InputError if a checkpoint is not what was written, whichever file it is."""
    remedy = f"delete {folder} to resume from a checkpoint before it, if there is one"
    sums = _listed(folder, remedy)
    if sums is None:
        raise InputError(
            f"{folder / CHECKSUMS}: no such file, so damage cannot be found; begin a new training "
            f"with --model {folder}"
        )
    for name in _changed(folder, sums, sums):
        raise _damaged(folder / name, remedy)


def check_model(folder: Path) -> list[str]:
    """Raise InputError if the weights of a model folder are damaged; folders of others pass.

    Returns:
        The other files that are not as they were written: damaged, or edited by hand.
    """
    remedy = f"restore it, or delete {CHECKSUMS} if you changed it yourself"
    sums = _listed(folder, remedy) or {}
    own = [name for name in sums if "/" not in name]  # adapters and shards are for a training
    weights = [name for name in own if name.endswith(WEIGHTS)]
    for name in _changed(folder, sums, weights):
        raise _damaged(folder / name, remedy)
    return list(_changed(folder, sums, [name for name in own if name.endswith(TEXTS)]))


def _listed(folder: Path, remedy: str) -> dict[str, str] | None:
    """Return the checksums by the names of files; None if there is no list of ours."""
    path = folder / CHECKSUMS
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or ALGORITHM not in found:
            return None
        sums = found[ALGORITHM]
        if not isinstance(sums, dict):
            raise TypeError(f"{ALGORITHM} must be a dict, got {type(sums).__name__}")
        if outside := [name for name in sums if _is_outside(name)]:
            raise ValueError(f"{outside[0]} is not in the folder")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read, {failure_reason(error)}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: is damaged; {remedy}") from error
    return sums


def _is_outside(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts


def _changed(folder: Path, sums: dict[str, str], names: Iterable[str]) -> Iterable[str]:
    """Yield the names of files that are missing, or whose checksum is another one."""
    chosen = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(_checksum, [folder / name for name in chosen])
        for name, checksum in zip(chosen, found, strict=True):
            if checksum != sums[name]:
                yield name


def _damaged(path: Path, remedy: str) -> InputError:
    if not path.exists():
        return InputError(f"{path}: no such file, although {CHECKSUMS} lists it; {remedy}")
    return InputError(f"{path}: is damaged, as its SHA-256 is not that of {CHECKSUMS}; {remedy}")


def _stored_checksum(path: Path) -> str:
    """Wait until a file is on the disk, and return its checksum."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    checksum = _checksum(path)
    assert checksum is not None
    return checksum


def _checksum(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it is not there."""
    digest = hashlib.new(ALGORITHM)
    try:
        if not path.is_file():  # a device or pipe might never end
            return None
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise InputError(f"{path}: cannot be read, {failure_reason(error)}") from error
    return digest.hexdigest()
