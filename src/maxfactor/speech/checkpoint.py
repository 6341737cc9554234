"""Checkpoints of a training: whole or not at all, the last few kept.

A checkpoint is a folder that `transformers` can read, with `training.pt` beside the weights: what
is needed to go on as if nothing had happened.
"""

from __future__ import annotations

import errno
import json
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.utils import logging

from maxfactor.speech.audio import InputError
from maxfactor.speech.model import POSITIONS_PER_SECOND, Codec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = "checkpoints"
TRAINING = "training.pt"
PARTIAL = ".partial"


def save(
    out: Path,
    step: int,
    model: WhisperForConditionalGeneration,
    codec: Codec,
    training: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of a step and remove those before the last `keep`."""
    folder = out / FOLDER / f"step-{step:08d}"
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, model, codec, training)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save turns it into the last
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"{folder}: cannot be written, {_reason(error)}") from error
    for old in checkpoints(out)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def checkpoints(out: Path) -> list[Path]:
    """The whole checkpoints of a training, oldest first."""
    found = (out / FOLDER).glob("step-*")
    return sorted(path for path in found if not path.name.endswith(PARTIAL))


def load_training(folder: Path) -> dict[str, Any]:
    """What `save` was given to go on from."""
    path = folder / TRAINING
    try:
        training: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise InputError(f"{path}: cannot be read, {_reason(error)}") from error
    return training


def load_model(folder: Path) -> tuple[WhisperForConditionalGeneration, Codec]:
    """Read a Whisper and its tokenizer from a folder: a checkpoint, a training, or any other."""
    source = checkpoints(folder)[-1] if checkpoints(folder) else folder
    if not (source / "config.json").is_file():
        raise InputError(f"{folder}: no config.json, so this is not the folder of a model")
    try:
        kind = json.loads((source / "config.json").read_text()).get("model_type")
        if kind != "whisper":
            raise InputError(f"{folder}: holds a model of type {kind!r}, only 'whisper' will do")
        with _quiet():
            model = WhisperForConditionalGeneration.from_pretrained(
                source, local_files_only=True, dtype=torch.float32
            )
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{folder}: cannot be read as a Whisper, {_reason(error)}") from error
    # Sinusoids, which Whisper never trains; reading them from a file makes them trainable.
    model.model.encoder.embed_positions.requires_grad_(False)
    return model, Codec.of(tokenizer)


def _write(
    folder: Path,
    model: WhisperForConditionalGeneration,
    codec: Codec,
    training: dict[str, Any],
) -> None:
    with _quiet():
        model.save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)
    seconds = model.config.max_source_positions // POSITIONS_PER_SECOND
    WhisperFeatureExtractor(
        feature_size=model.config.num_mel_bins, chunk_length=seconds
    ).save_pretrained(folder)
    with (folder / TRAINING).open("wb") as file:
        torch.save(training, file)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `transformers` from drawing bars of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text
    return "the disk is full" if full else text
