"""Batches of utterances: their order, padding, features, and reading ahead."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from maxfactor_speech.data.audio import SAMPLE_RATE
from maxfactor_speech.data.features import GRAIN, log_mel
from maxfactor_speech.data.tokens import IGNORED

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from maxfactor_speech.data.shards import Utterance
    from maxfactor_speech.data.tokens import Codec

POOL = 50  # batches whose utterances are sorted by length together
AHEAD = 4  # batches that are read in advance


class Utterances(Protocol):
    """A set of utterances, in shards or in audio files."""

    lengths: NDArray[np.int32]  # samples at 16 kHz

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Utterance: ...
    def text(self, number: int, /) -> str:
        """Return the text without reading the audio."""
        ...


class Collated(NamedTuple):
    """Several utterances, padded to the same length."""

    samples: Tensor  # (batch, samples), int16, padded with silence
    texts: list[str]


class Batch(NamedTuple):
    """The input of one forward pass."""

    samples: Tensor  # (batch, samples), int16, padded with silence
    labels: Tensor  # (batch, tokens), padded with IGNORED


class BatchSlice(NamedTuple):
    """The part of each batch that one process takes."""

    rank: int = 0
    world: int = 1

    def of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this process's part of a batch."""
        return np.split(numbers, self.world)[self.rank]


class Padding(NamedTuple):
    """How far batches are padded. Coarse steps give few different shapes.

    Attributes:
        samples: Audio is padded to a multiple of this number of samples.
        tokens: Labels are padded to a multiple of this number of tokens.
        most_samples: Audio is not padded beyond this length.
        most_tokens: Labels are not padded beyond this length.
    """

    samples: int = GRAIN
    tokens: int = 1
    most_samples: int | None = None
    most_tokens: int | None = None

    def width(self, samples: int) -> int:
        """Return the padded number of samples."""
        return _round_up(samples, self.samples, self.most_samples)

    def length(self, tokens: int) -> int:
        """Return the padded number of tokens."""
        return _round_up(tokens, self.tokens, self.most_tokens)


def _round_up(count: int, grain: int, most: int | None) -> int:
    up = -(-count // grain) * grain
    return up if most is None else max(count, min(up, most))


class Order:
    """The utterances of batch 0, 1, 2, …, without an end.

    The order depends only on the seed, so a resumed training sees the same batches. A batch has
    utterances of similar length: each epoch is shuffled, sorted by length within pools of 50
    batches, cut into batches, and the batches are shuffled.

    Args:
        lengths: The lengths of the utterances.
        batch_size: Utterances per batch.
        seed: Each seed gives another order.
    """

    def __init__(self, lengths: NDArray[np.int32], batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self._lengths, self._batch_size, self._seed = lengths, batch_size, seed
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self.per_epoch = max(1, len(lengths) // batch_size)

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        epoch, place = divmod(number, self.per_epoch)
        batch: NDArray[np.int64] = self._epoch(epoch)[place]
        return batch

    def _make_epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return (batches, batch_size) indices; a remainder smaller than a batch is left out."""
        random = np.random.default_rng([self._seed, epoch])
        size = self._batch_size
        numbers = random.permutation(len(self._lengths))
        if len(numbers) < size:  # too few for one batch: repeat them
            numbers = np.resize(numbers, size)
        numbers = numbers[: self.per_epoch * size]
        for start in range(0, len(numbers), POOL * size):
            pool = numbers[start : start + POOL * size]
            pool[:] = pool[np.argsort(self._lengths[pool], kind="stable")]
        return random.permutation(numbers.reshape(-1, size))


def collate(data: Utterances, numbers: Iterable[int], samples: int | None = None) -> Collated:
    """Pad utterances to the longest one, or to the given number of samples."""
    utterances = [data[int(number)] for number in numbers]
    longest = max(len(one.samples) for one in utterances)
    if samples is not None:
        if longest > samples:
            raise ValueError(f"an utterance has {longest} samples, more than the {samples} given")
        longest = samples
    batch = np.zeros((len(utterances), -(-longest // GRAIN) * GRAIN), np.int16)
    for row, one in zip(batch, utterances, strict=True):
        row[: len(one.samples)] = one.samples
    return Collated(torch.from_numpy(batch), [one.text for one in utterances])


def training_batches(
    data: Utterances,
    codec: Codec,
    order: Order,
    first: int,
    pin: bool = False,
    padding: Padding | None = None,
    part: BatchSlice | None = None,
) -> Generator[Batch, None, None]:
    """Yield batches from number `first` on; a thread reads ahead.

    Args:
        data: The utterances.
        codec: Encodes the texts as labels.
        order: The utterances of each batch.
        first: Number of the first batch.
        pin: Whether to use pinned memory, from which a GPU copies asynchronously.
        padding: How far to pad; None is as little as possible.
        part: The part of each batch to yield, padded like the whole batch; None is all of it.
    """
    padding, part = padding or Padding(), part or BatchSlice()

    def make(number: int) -> Batch:
        numbers = order[number]
        width = padding.width(int(data.lengths[numbers].max()))
        collated = collate(data, part.of(numbers), width)
        labels = codec.labels(collated.texts)
        missing = padding.length(labels.shape[1]) - labels.shape[1]
        batch = Batch(collated.samples, nn.functional.pad(labels, (0, missing), value=IGNORED))
        return Batch(*(tensor.pin_memory() for tensor in batch)) if pin else batch

    reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
    try:
        numbers = count(first)
        ahead: deque[Future[Batch]] = deque()
        while True:
            while len(ahead) < AHEAD:
                ahead.append(reader.submit(make, next(numbers)))
            yield ahead.popleft().result()
    finally:
        reader.shutdown(cancel_futures=True)


def collated_batches(
    data: Utterances,
    batch_size: int,
    samples: int | None = None,
    part: BatchSlice | None = None,
) -> Iterator[Collated]:
    """Yield all utterances once, sorted by length, the longest first.

    Args:
        data: The utterances.
        batch_size: Utterances per batch.
        samples: The length that each is padded to; None is the longest of its batch.
        part: Process r of w gets every w-th batch, starting with batch r; None is all of them.
    """
    numbers = np.argsort(-data.lengths, kind="stable")
    rank, world = part or BatchSlice()
    for start in range(rank * batch_size, len(numbers), world * batch_size):
        yield collate(data, numbers[start : start + batch_size], samples)


def evaluation_batches(
    data: Utterances, batch_size: int, device: torch.device | str = "cpu", mels: int = 80
) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield features and texts of all utterances, each batch padded as little as possible."""
    for batch in collated_batches(data, batch_size):
        yield log_mel(batch.samples.to(device), mels), batch.texts


def seconds_needed(*data: Utterances) -> int:
    """Return the length of the longest utterance in seconds, rounded up."""
    longest = max(int(one.lengths.max()) for one in data)
    return -(-longest // SAMPLE_RATE)


def all_features(
    data: Utterances,
    seconds: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    numbers: Sequence[int] | None = None,
    at_once: int = 256,
) -> tuple[Tensor, list[str]]:
    """Return the log-mel features and the texts of a whole set, for sets that fit into memory.

    Args:
        data: The utterances.
        seconds: The length that each is padded to, see `seconds_needed`.
        device: Where the features are computed and stored.
        dtype: How they are stored.
        numbers: Indices of the utterances to take; None is all.
        at_once: Utterances that are processed together.

    Returns:
        (utterances, 80, 100 * seconds), and the texts.
    """
    numbers = range(len(data)) if numbers is None else numbers
    pieces: list[Tensor] = []
    texts: list[str] = []
    for start in range(0, len(numbers), at_once):
        batch = collate(data, numbers[start : start + at_once], seconds * SAMPLE_RATE)
        pieces.append(log_mel(batch.samples.to(device)).to(dtype))
        texts += batch.texts
    return torch.cat(pieces), texts
