"""Utterances as batches: reading, filling up, features."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from maxfactor.speech.audio import SAMPLE_RATE
from maxfactor.speech.features import HOP, log_mel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from maxfactor.speech.shards import Spoken

GRAIN = 2 * HOP  # samples: the encoder takes frames by twos


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


def collate(data: Utterances, numbers: Iterable[int], samples: int | None = None) -> Collated:
    """Put utterances side by side, as long as the longest, or as long as given."""
    spoken = [data[number] for number in numbers]
    longest = max(len(one.samples) for one in spoken)
    if samples is not None:
        if longest > samples:
            raise ValueError(f"an utterance has {longest} samples, more than the {samples} given")
        longest = samples
    batch = np.zeros((len(spoken), -(-longest // GRAIN) * GRAIN), np.int16)
    for row, one in zip(batch, spoken, strict=True):
        row[: len(one.samples)] = one.samples
    return Collated(torch.from_numpy(batch), [one.text for one in spoken])


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
