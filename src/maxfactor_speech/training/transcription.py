"""Transcription of audio files with a trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from maxfactor_speech.data.audio import SAMPLE_RATE, read, samples_in
from maxfactor_speech.data.features import GRAIN, log_mel
from maxfactor_speech.errors import InputError
from maxfactor_speech.training.checkpoint import load_model
from maxfactor_speech.training.evaluation import transcribe
from maxfactor_speech.training.model import longest_audio
from maxfactor_speech.training.settings import find_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def transcribe_files(
    model_folder: Path, paths: Sequence[Path], device: str = "cpu"
) -> Iterator[tuple[Path, str]]:
    """Yield each file and its text; all files are checked before the first is transcribed.

    Args:
        model_folder: The folder of a training, a checkpoint, or any Whisper model.
        paths: Audio files of any sampling rate, mono or stereo.
        device: Where to compute.
    """
    place = find_device(device)
    model, codec = load_model(model_folder)
    longest = longest_audio(model)
    for path in paths:
        seconds = samples_in(path) / SAMPLE_RATE
        if seconds > longest:
            raise InputError(f"{path}: {seconds:.1f} s long, but the model takes at most {longest}")
    model.to(place)  # type: ignore[arg-type]  # a decorator in transformers has wrong types
    for path in paths:
        wave = torch.from_numpy(read(path)).to(place)
        wave = torch.nn.functional.pad(wave, (0, -len(wave) % GRAIN))
        features = log_mel(wave[None], model.config.num_mel_bins)
        [text] = transcribe(model, codec, features)
        yield path, text
