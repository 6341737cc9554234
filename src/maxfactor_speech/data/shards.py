"""Speech on disk: a few hundred utterances to a file, read piece by piece.

A shard is one safetensors file: 16-bit samples end to end, the texts end to end, and where each
begins. Reading maps the file into memory, so what a corpus takes there does not grow with it but
for four bytes per utterance, its length.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections import OrderedDict
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from maxfactor_speech.data.audio import InputError, Samples

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

OPEN_AT_ONCE = 64  # mapped files


class Spoken(NamedTuple):
    """One utterance: 16 kHz samples and what is said."""

    samples: Samples
    text: str


class Shard(NamedTuple):
    """A file that is open: slices of it are read when asked for, where they begin is known."""

    samples: Any
    text: Any
    samples_at: list[int]
    text_at: list[int]

    def samples_of(self, place: int) -> Samples:
        """One utterance."""
        samples: Samples = self.samples[self.samples_at[place] : self.samples_at[place + 1]]
        return samples

    def text_of(self, place: int) -> str:
        """What is said in it."""
        encoded: bytes = self.text[self.text_at[place] : self.text_at[place + 1]].tobytes()
        return encoded.decode()


class Shards:
    """Utterances in shards, by number.

    Args:
        paths: The files, in order.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        lengths = [shard_lengths(path) for path in self.paths]
        self._ends = list(accumulate(len(piece) for piece in lengths))
        self.lengths: NDArray[np.int32] = np.concatenate([np.empty(0, np.int32), *lengths])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Spoken:
        if not 0 <= number < len(self):
            raise IndexError(f"utterance {number} of {len(self)}")
        shard, place = self._find(number)
        return Spoken(shard.samples_of(place), shard.text_of(place))

    def text(self, number: int) -> str:
        """What is said, without reading the audio."""
        shard, place = self._find(number)
        return shard.text_of(place)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # maps do not travel to other processes

    def _find(self, number: int) -> tuple[Shard, int]:
        """The shard of an utterance, and its place there."""
        index = bisect_right(self._ends, number)
        if index in self._open:
            self._open.move_to_end(index)
        else:
            file = _opened(self.paths[index])
            # Numbers of numpy's: no device is waited for.
            starts = (file.get_tensor(name).tolist() for name in ("samples_at", "text_at"))
            slices = (file.get_slice(name) for name in ("samples", "text"))
            self._open[index] = Shard(*slices, *starts)
            if len(self._open) > OPEN_AT_ONCE:
                self._open.popitem(last=False)
        return self._open[index], number - (self._ends[index - 1] if index else 0)


def write_shard(path: Path, spoken: Sequence[Spoken]) -> None:
    """Write a shard, whole or not at all."""
    texts = [np.frombuffer(one.text.encode(), np.uint8) for one in spoken]
    tensors = {
        "samples": np.concatenate([one.samples for one in spoken]),
        "samples_at": _starts([len(one.samples) for one in spoken]),
        "text": np.concatenate(texts),
        "text_at": _starts([len(text) for text in texts]),
    }
    write_whole(path, save(tensors))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that nobody ever sees a part of it; InputError names it if that fails."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # as where its folder is a file; the first error is the one to tell
            partial.unlink()
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise InputError(f"{path}: cannot be written, {reason}") from error


def check_writable(folder: Path, option: str) -> None:
    """Refuse a folder that cannot be made or written in, before work is spent on it.

    Args:
        folder: Where files will be; it is not made here.
        option: What to name another one by.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long, a folder that must not be looked into
        raise InputError(
            f"{folder}: cannot be written, {error.strerror}; {option} names another"
        ) from error
    if not there.is_dir():
        raise InputError(f"{folder}: cannot be written, {there} is a file; {option} names a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(
            f"{folder}: cannot be written, permission denied in {there}; {option} names another"
        )


def shard_lengths(path: Path) -> NDArray[np.int32]:
    """How many samples each utterance of a shard has."""
    starts: NDArray[np.int64] = _opened(path).get_tensor("samples_at")
    return np.diff(starts).astype(np.int32)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "np")
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path}: cannot be read, {error}; delete it to have it made anew"
        ) from error


def _starts(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)
