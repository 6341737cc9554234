"""Utterances in which nothing is said, and a small Whisper that listens to them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from maxfactor_speech.data.shards import Utterance
from maxfactor_speech.data.tokens import Codec
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training.model import Size, whisper
from maxfactor_speech.training.preparation import Prepared

LETTERS = "abcdefgh"


class Noise:
    """Utterances of several lengths."""

    def __init__(self, count: int) -> None:
        random = np.random.default_rng(0)
        self.lengths = random.integers(4_000, 30_000, count).astype(np.int32)
        self.texts = ["".join(random.choice(list(LETTERS), 3 + n % 12)) for n in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Utterance:
        random = np.random.default_rng(number)
        samples = random.integers(-3000, 3000, self.lengths[number]).astype(np.int16)
        return Utterance(samples, self.texts[number])

    def text(self, number: int) -> str:
        return self.texts[number]


def prepared(width: int = 64, layers: int = 2) -> Prepared:
    """The same each time."""
    torch.manual_seed(0)
    codec = Codec.build(LETTERS, "characters")
    model = whisper(codec, Size(width, layers, 2), seconds=2, max_tokens=18)
    return Prepared(Noise(24), Noise(6), model, codec)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Those of the last checkpoint in a training's folder."""
    return load_file(checkpoint.checkpoints(out)[-1] / "model.safetensors")


def assert_close_weights(
    first: dict[str, torch.Tensor],
    second: dict[str, torch.Tensor],
    tolerance: float,
    of_convolutions: float | None,
) -> None:
    """The same weights but for rounding.

    Orthogonal convolutions enlarge it in the first steps, where their gradients are of low rank:
    they may differ by this part of their norm.
    """
    assert first.keys() == second.keys()
    for name, weight in first.items():
        if of_convolutions is not None and re.search(r"\.conv\d\.weight", name):
            assert (weight - second[name]).norm() <= of_convolutions * weight.norm(), name
        else:
            torch.testing.assert_close(
                weight, second[name], rtol=tolerance, atol=tolerance, msg=name
            )
