"""Speech of the suite: phrases spoken by espeak-ng, stored once, read as features or as waves."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speech_application import (
    VOICES,
    SpeechRequest,
    draw,
    log_mel,
    render,
)
from studies.speech_task import espeak, mapped, save_atomically
from studies.suite.texts import Split, split_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    Spoken = tuple[NDArray[np.int16], str]

LONGEST = 56_000  # samples: 3.5 s; longer utterances are left out
CHUNK = 64  # utterances that a worker synthesises at a time
SETS = {"english": ("sentences", "en"), "german": ("sentences", "de"), "digits": ("digits", "en")}
COUNTS: dict[Split, int] = {"train": 12_000, "dev": 500, "test": 1_000}
FEWER = {"german": 4_000, "digits": 6_000}  # of the training data
QUICK_COUNT = 24
ALPHABET = " abcdefghijklmnopqrstuvwxyzäöüß"


class Speech(NamedTuple):
    """Utterances on a device; texts as tokens 1, 2, …, with 0 as padding."""

    waves: Tensor  # (utterances, samples) int16
    lengths: Tensor  # (utterances,) samples
    tokens: Tensor  # (utterances, longest) int64
    texts: list[str]

    def features(self) -> Tensor:
        """Log-mel features, (utterances, 80, frames)."""
        return torch.cat([log_mel(part) for part in self.waves.split(500)])


def texts_of(name: str, split: Split, count: int) -> list[str]:
    """The texts that are spoken, each once, in a fixed random order.

    The application has two splits. Its second one is halved, and begins where the recipes' earlier
    study ended.
    """
    task, language = SETS[name]
    given: Literal["train", "validation"] = "train" if split == "train" else "validation"
    numbers = range(2 * count) if split == "train" else range(1_000, 1_000 + 12 * count)
    found = list(dict.fromkeys(draw(task, number, language, given) for number in numbers))
    if split != "train":
        found = [text for text in found if split_of(text, halves=True) == split]
    Random(f"{name}/{split}").shuffle(found)
    return found[:count]


def synthesise(cache: Path, workers: int, quick: bool, names: Iterable[str] = SETS) -> None:
    """Speak the sets that are not in the cache yet: all, or those named."""
    cache.mkdir(parents=True, exist_ok=True)
    keys = [(name, split) for name in names for split in COUNTS]
    missing = [key for key in keys if not path_of(cache, *key, quick).exists()]
    chunks = []
    for name, split in missing:
        count = FEWER.get(name, COUNTS[split]) if split == "train" else COUNTS[split]
        texts = texts_of(name, split, QUICK_COUNT if quick else count)
        chunks += [
            (name, split, start, texts[start : start + CHUNK])
            for start in range(0, len(texts), CHUNK)
        ]
    spoken: dict[tuple[str, Split], list[Spoken]] = {key: [] for key in missing}
    results = mapped(speak, chunks, workers)
    for (name, split, *_), result in zip(chunks, results, strict=True):
        spoken[name, split] += result
    for key, pairs in spoken.items():
        store(path_of(cache, *key, quick), pairs)


def speak(chunk: tuple[str, Split, int, list[str]]) -> list[Spoken]:
    """Speak some texts, each with its own voice, rate, pitch and noise."""
    name, split, start, texts = chunk
    _, language = SETS[name]
    spoken = []
    for number, text in enumerate(texts, start):
        random = Random(f"sound/{name}/{split}/{number}")
        request = SpeechRequest(
            text=text,
            voice=random.choice(VOICES[language]),
            rate=random.randint(150, 210),
            pitch=random.randint(30, 70),
            snr=round(random.uniform(10.0, 30.0), 2),
            seed=random.getrandbits(32),
        )
        samples = render(request, espeak()).samples
        if len(samples) <= LONGEST:
            spoken.append((samples, text))
    return spoken


def store(path: Path, pairs: list[Spoken]) -> None:
    """Write a set as one file, every utterance padded with zeros to the longest allowed."""
    waves = np.zeros((len(pairs), LONGEST), np.int16)
    for row, (samples, _) in zip(waves, pairs, strict=True):
        row[: len(samples)] = samples
    lengths = [len(samples) for samples, _ in pairs]
    texts = [text for _, text in pairs]
    stored = {"waves": torch.from_numpy(waves), "lengths": torch.tensor(lengths), "texts": texts}
    save_atomically(stored, path)


def path_of(cache: Path, name: str, split: Split, quick: bool) -> Path:
    """Where a set is stored."""
    return cache / f"{name}-{split}{'-quick' if quick else ''}.pt"


def load(
    cache: Path, name: str, split: Split, device: torch.device, quick: bool, count: int | None
) -> Speech:
    """Read a set, or its first utterances, onto a device."""
    path = path_of(cache, name, split, quick)
    stored = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    texts = stored["texts"][:count]
    rows = [[ALPHABET.index(letter) + 1 for letter in text] for text in texts]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    return Speech(
        stored["waves"][:count].to(device), stored["lengths"][:count].to(device), tokens, texts
    )
