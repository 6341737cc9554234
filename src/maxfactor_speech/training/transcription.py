"""Transcription of audio files with a trained model."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from maxfactor_speech.data.audio import SAMPLE_RATE, read, samples_in
from maxfactor_speech.errors import InputError, failure_reason
from maxfactor_speech.training.evaluation import PipelineDecoder
from maxfactor_speech.training.model_folder import load_model
from maxfactor_speech.training.settings import find_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from maxfactor_speech.training.evaluation import Segment


def transcribe_files(
    model_folder: Path,
    paths: Sequence[Path],
    device: str = "cpu",
    timestamps: bool = False,
    say: Callable[[str], object] = warnings.warn,
) -> Iterator[tuple[Path, str, list[Segment]]]:
    """Yield each file, its text, and its segments if time stamps are wanted.

    All files are checked before the first is transcribed.

    Args:
        model_folder: The folder of a training, a checkpoint, or any Whisper model.
        paths: Audio files of any sampling rate, mono or stereo. Those longer than the model takes,
            normally 30 s, are transcribed piece by piece, which needs a model with time stamps.
        device: Where to compute.
        timestamps: Whether to find the time of each segment.
        say: Receives remarks about the model folder.
    """
    place = find_device(device)
    recogniser = load_model(model_folder, dtype=None, say=say)
    if timestamps and not recogniser.has_timestamps:
        raise InputError(f"{model_folder}: this model has no time stamps; leave out --timestamps")
    longest = recogniser.extractor.chunk_length
    for path in paths:
        seconds = samples_in(path) / SAMPLE_RATE
        if seconds > longest and not recogniser.has_timestamps:
            raise InputError(
                f"{path}: {seconds:.1f} s long, but the model takes at most {longest} s, since it "
                "has no time stamps; cut the recording"
            )
    recogniser.model.to(place)  # type: ignore[arg-type]  # a decorator has wrong types
    decoder = PipelineDecoder(recogniser)
    for path in paths:
        wave = read(path)
        try:
            found = decoder.long(wave, timestamps)
        except (IndexError, TypeError, ValueError) as error:  # of settings that contradict
            raise InputError(
                f"{model_folder}: cannot be used on {path}, {failure_reason(error)}; are its "
                "files those of one model?"
            ) from error
        yield path, *found
