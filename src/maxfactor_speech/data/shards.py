"""Utterances on disk: a few hundred to a file, read one at a time.

A shard is a safetensors file with three kinds of entries: 16-bit samples end to end, texts end to
end, and the offsets where each utterance starts. Files are memory-mapped, so a corpus needs only
four bytes of memory per utterance, for its length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from maxfactor_speech.atomic import write_atomically
from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from maxfactor_speech.data.audio import Samples

OPEN_AT_ONCE = 64  # memory-mapped files


class Utterance(NamedTuple):
    """16 kHz samples and their text."""

    samples: Samples
    text: str


class Shard(NamedTuple):
    """An open file: its slices are read when needed, the offsets are in memory."""

    samples: Any
    text: Any
    samples_at: list[int]
    text_at: list[int]

    def samples_of(self, place: int) -> Samples:
        """Return the samples of one utterance."""
        samples: Samples = self.samples[self.samples_at[place] : self.samples_at[place + 1]]
        return samples

    def text_of(self, place: int) -> str:
        """Return the text of one utterance."""
        encoded: bytes = self.text[self.text_at[place] : self.text_at[place + 1]].tobytes()
        return encoded.decode()


class ShardedUtterances:
    """Utterances in shards, by index.

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

    def __getitem__(self, number: int) -> Utterance:
        if not 0 <= number < len(self):
            raise IndexError(f"utterance {number} of {len(self)}")
        shard, place = self._find(number)
        return Utterance(shard.samples_of(place), shard.text_of(place))

    def text(self, number: int) -> str:
        """Return the text without reading the audio."""
        shard, place = self._find(number)
        return shard.text_of(place)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # memory maps cannot be pickled

    def _find(self, number: int) -> tuple[Shard, int]:
        """Return the shard of an utterance, and the utterance's place in it."""
        index = bisect_right(self._ends, number)
        if index in self._open:
            self._open.move_to_end(index)
        else:
            file = _opened(self.paths[index])
            # Numpy arrays: `tolist` waits for no device.
            starts = (file.get_tensor(name).tolist() for name in ("samples_at", "text_at"))
            slices = (file.get_slice(name) for name in ("samples", "text"))
            self._open[index] = Shard(*slices, *starts)
            if len(self._open) > OPEN_AT_ONCE:
                self._open.popitem(last=False)
        return self._open[index], number - (self._ends[index - 1] if index else 0)


def write_shard(path: Path, utterances: Sequence[Utterance]) -> None:
    """Write a shard atomically."""
    texts = [np.frombuffer(one.text.encode(), np.uint8) for one in utterances]
    tensors = {
        "samples": np.concatenate([one.samples for one in utterances]),
        "samples_at": _starts([len(one.samples) for one in utterances]),
        "text": np.concatenate(texts),
        "text_at": _starts([len(text) for text in texts]),
    }
    write_atomically(path, save(tensors))


def shard_lengths(path: Path) -> NDArray[np.int32]:
    """Return the number of samples of each utterance in a shard."""
    starts: NDArray[np.int64] = _opened(path).get_tensor("samples_at")
    return np.diff(starts).astype(np.int32)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "np")
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path}: cannot be read, {error}; delete it, and it will be synthesised again"
        ) from error


def _starts(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)
