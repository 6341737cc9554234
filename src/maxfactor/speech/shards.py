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
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from maxfactor.speech.audio import InputError, Samples

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

OPEN_AT_ONCE = 64  # mapped files


class Spoken(NamedTuple):
    """One utterance: 16 kHz samples and what is said."""

    samples: Samples
    text: str


class Shards:
    """Utterances in shards, by number.

    Args:
        paths: The files, in order.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._open: OrderedDict[int, Any] = OrderedDict()
        lengths = [shard_lengths(path) for path in self.paths]
        self._ends = list(accumulate(len(piece) for piece in lengths))
        self.lengths: NDArray[np.int32] = np.concatenate([np.empty(0, np.int32), *lengths])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Spoken:
        if not 0 <= number < len(self):
            raise IndexError(f"utterance {number} of {len(self)}")
        shard = bisect_right(self._ends, number)
        file = self._file(shard)
        place = number - (self._ends[shard - 1] if shard else 0)
        return Spoken(_piece(file, "samples", place), _text(file, place))

    def text(self, number: int) -> str:
        """What is said, without reading the audio."""
        shard = bisect_right(self._ends, number)
        place = number - (self._ends[shard - 1] if shard else 0)
        return _text(self._file(shard), place)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # maps do not travel to other processes

    def _file(self, shard: int) -> Any:
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            self._open[shard] = _opened(self.paths[shard])
            if len(self._open) > OPEN_AT_ONCE:
                self._open.popitem(last=False)
        return self._open[shard]


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
        partial.unlink(missing_ok=True)
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise InputError(f"{path}: cannot be written, {reason}") from error


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


def _piece(file: Any, name: str, place: int) -> Any:
    start, end = file.get_slice(f"{name}_at")[place : place + 2]
    return file.get_slice(name)[int(start) : int(end)]


def _text(file: Any, place: int) -> str:
    encoded: bytes = _piece(file, "text", place).tobytes()
    return encoded.decode()


def _starts(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)
