"""Utterances as batches: which ones together, reading ahead, features."""

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
from maxfactor_speech.training.model import IGNORED

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from maxfactor_speech.data.shards import Spoken
    from maxfactor_speech.training.model import Codec

POOL = 50  # batches that are sorted by length together
AHEAD = 4  # batches read before they are asked for


class Utterances(Protocol):
    """What a training set is: shards, or files."""

    lengths: NDArray[np.int32]  # samples at 16 kHz

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Spoken: ...
    def text(self, number: int, /) -> str:
        """What is said, without reading the audio."""
        ...


class Collated(NamedTuple):
    """Utterances side by side."""

    samples: Tensor  # (batch, samples), int16, filled up with silence
    texts: list[str]


class Batch(NamedTuple):
    """What one step learns from."""

    samples: Tensor  # (batch, samples), int16, filled up with silence
    labels: Tensor  # (batch, tokens), filled up with what the loss ignores


class Part(NamedTuple):
    """Which part of every batch a process takes, and how many parts there are."""

    rank: int = 0
    world: int = 1

    def of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """This part of a batch."""
        return np.split(numbers, self.world)[self.rank]


class Shape(NamedTuple):
    """What batches are filled up to, so that there are few shapes of them.

    Attributes:
        samples: They are a multiple of this.
        tokens: The same.
        most_samples: But never more than this.
        most_tokens: The same.
    """

    samples: int = GRAIN
    tokens: int = 1
    most_samples: int | None = None
    most_tokens: int | None = None

    def width(self, samples: int) -> int:
        """How many samples a batch has whose longest utterance has so many."""
        return _rounded(samples, self.samples, self.most_samples)

    def length(self, tokens: int) -> int:
        """How many tokens a batch has whose longest text has so many."""
        return _rounded(tokens, self.tokens, self.most_tokens)


def _rounded(count: int, grain: int, most: int | None) -> int:
    up = -(-count // grain) * grain
    return up if most is None else max(count, min(up, most))


class Order:
    """Which utterances make up batch number 0, 1, 2, …, without an end.

    A function of the seed alone, so that a training goes on where it stopped. Utterances of about
    the same length come together: each epoch is shuffled, sorted by length within pools of 50
    batches, cut into batches, and the batches are shuffled.

    Args:
        lengths: Of the utterances.
        batch_size: Utterances to a batch.
        seed: Another seed, another order.
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
        """(batches, batch_size): numbers; a rest too small for a batch is left out."""
        random = np.random.default_rng([self._seed, epoch])
        size = self._batch_size
        numbers = random.permutation(len(self._lengths))
        if len(numbers) < size:  # fewer than one batch: some come twice
            numbers = np.resize(numbers, size)
        numbers = numbers[: self.per_epoch * size]
        for start in range(0, len(numbers), POOL * size):
            pool = numbers[start : start + POOL * size]
            pool[:] = pool[np.argsort(self._lengths[pool], kind="stable")]
        return random.permutation(numbers.reshape(-1, size))


def collate(data: Utterances, numbers: Iterable[int], samples: int | None = None) -> Collated:
    """Put utterances side by side, as long as the longest, or as long as given."""
    spoken = [data[int(number)] for number in numbers]
    longest = max(len(one.samples) for one in spoken)
    if samples is not None:
        if longest > samples:
            raise ValueError(f"an utterance has {longest} samples, more than the {samples} given")
        longest = samples
    batch = np.zeros((len(spoken), -(-longest // GRAIN) * GRAIN), np.int16)
    for row, one in zip(batch, spoken, strict=True):
        row[: len(one.samples)] = one.samples
    return Collated(torch.from_numpy(batch), [one.text for one in spoken])


def training_batches(
    data: Utterances,
    codec: Codec,
    order: Order,
    first: int,
    pin: bool = False,
    shape: Shape | None = None,
    part: Part | None = None,
) -> Generator[Batch, None, None]:
    """Yield batches from number `first` on, read ahead by a thread.

    Args:
        data: Utterances.
        codec: Makes labels of their texts.
        order: Which utterances make up a batch.
        first: Number of the first batch.
        pin: Whether to keep them in memory from which a GPU copies without waiting.
        shape: What they are filled up to; None for no more than it takes.
        part: Which part of each batch, filled up as if the others were there; None for all of it.
    """
    shape, part = shape or Shape(), part or Part()

    def make(number: int) -> Batch:
        numbers = order[number]
        width = shape.width(int(data.lengths[numbers].max()))
        collated = collate(data, part.of(numbers), width)
        labels = codec.labels(collated.texts)
        missing = shape.length(labels.shape[1]) - labels.shape[1]
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


def evaluation_batches(
    data: Utterances,
    batch_size: int,
    device: torch.device | str = "cpu",
    part: Part | None = None,
    mels: int = 80,
) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield features and texts of all utterances, longest first, so that like comes with like.

    With a `part`, batches are dealt out to the processes one by one.
    """
    numbers = np.argsort(-data.lengths, kind="stable")
    rank, world = part or Part()
    for start in range(rank * batch_size, len(numbers), world * batch_size):
        batch = collate(data, numbers[start : start + batch_size])
        yield log_mel(batch.samples.to(device), mels), batch.texts


def seconds_needed(*data: Utterances) -> int:
    """Whole seconds that the longest utterance fits in."""
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
    """Log-mel features of a whole set as one tensor, and its texts, for sets that fit.

    Args:
        data: Utterances.
        seconds: How long each is made; `seconds_needed` tells.
        device: Where the features are computed and stay.
        dtype: What they are stored as.
        numbers: Which utterances; None takes all.
        at_once: Utterances per batch.

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
