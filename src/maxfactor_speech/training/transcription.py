"""What is said in audio files, by a trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from maxfactor_speech.data.audio import SAMPLE_RATE, InputError, read, samples_in
from maxfactor_speech.data.features import GRAIN, log_mel
from maxfactor_speech.training.checkpoint import load_model
from maxfactor_speech.training.evaluation import transcribe
from maxfactor_speech.training.model import POSITIONS_PER_SECOND
from maxfactor_speech.training.settings import find_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def transcribe_files(
    model_folder: Path, paths: Sequence[Path], device: str = "cpu"
) -> Iterator[tuple[Path, str]]:
    """Yield each file and its text; every file is looked at before the first is written down.

    Args:
        model_folder: Of a training, a checkpoint, or any Whisper.
        paths: Audio files of any rate, mono or stereo.
        device: Where to compute.
    """
    place = find_device(device)
    model, codec = load_model(model_folder)
    longest = model.config.max_source_positions // POSITIONS_PER_SECOND
    for path in paths:
        seconds = samples_in(path) / SAMPLE_RATE
        if seconds > longest:
            raise InputError(f"{path}: {seconds:.1f} s long, this model takes {longest} at most")
    model.to(place)  # type: ignore[arg-type]  # mistaken by a decorator's types
    for path in paths:
        wave = torch.from_numpy(read(path)).to(place)
        wave = torch.nn.functional.pad(wave, (0, -len(wave) % GRAIN))
        features = log_mel(wave[None], model.config.num_mel_bins)
        [text] = transcribe(model, codec, features)
        yield path, text
