"""Folders with a Whisper: which one is meant, and loading everything that it needs.

Nothing is downloaded. What is missing in a folder is named with the way to get it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from maxfactor_speech.data.audio import SAMPLE_RATE
from maxfactor_speech.data.tokens import Codec
from maxfactor_speech.errors import InputError, download_hint, failure_reason
from maxfactor_speech.training.checkpoint import BEST, checkpoints, quiet
from maxfactor_speech.training.checksums import check_model
from maxfactor_speech.training.folder_checks import (
    check_extractor,
    check_generation,
    check_weights,
    on_meta,
    read_config,
    read_json,
)
from maxfactor_speech.training.recogniser import Recogniser, complete_generation, prompt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
GENERATION = "generation_config.json"
EXTRACTOR_FILES = ("preprocessor_config.json", "processor_config.json")


def find_model(folder: Path) -> Path:
    """Return the model folder in a training's folder (its best checkpoint), or the folder itself.

    Raises:
        InputError: If it contains no Whisper model.
    """
    source = _source(folder)
    if not (source / "config.json").is_file():
        if not folder.exists():
            hint = download_hint(str(folder))
            raise InputError(f"{folder}: no such folder" + (f", and {hint}" if hint else ""))
        raise InputError(f"{folder}: no config.json, so this is not a model folder")
    kind = read_config(source).get("model_type")
    if kind != "whisper":
        raise InputError(f"{folder}: contains a model of type {kind!r}, only 'whisper' is allowed")
    _check_file(source, TOKENIZER_FILES, "tokenizer")
    _check_file(source, EXTRACTOR_FILES, "feature extractor")
    for path in (source / name for name in EXTRACTOR_FILES):
        if path.is_file():
            check_extractor(path)
    return source


def load_outline(folder: Path) -> Recogniser:
    """Load what a model folder has besides its weights; the model is on the meta device."""
    source = find_model(folder)
    try:
        with quiet():
            config = WhisperConfig.from_pretrained(source, local_files_only=True)
            model: Any = on_meta(WhisperForConditionalGeneration, config)
            if (source / GENERATION).is_file():
                model.generation_config = GenerationConfig.from_pretrained(
                    source, local_files_only=True
                )
        return _with_processor(folder, source, model)
    except InputError:
        raise
    except Exception as error:  # damaged files make transformers and tokenizers raise anything
        raise _not_whisper(folder, error) from error


def load_model(
    folder: Path,
    dtype: torch.dtype | None = torch.float32,
    say: Callable[[str], object] | None = warnings.warn,
) -> Recogniser:
    """Load a Whisper from a model folder, a checkpoint, or a training.

    Args:
        folder: The folder.
        dtype: Of the weights; None is bfloat16 if they are stored so, otherwise float32.
        say: Receives a remark if a training wrote the folder, and a text file of it has changed
            since then. None: the checksums have been compared already.
    """
    source = find_model(folder)
    for name in check_model(source) if say is not None else ():
        assert say is not None
        say(f"{source / name}: is not as it was written, but edited or damaged")
    try:
        return _load(folder, source, dtype or _stored_dtype(source))
    except InputError:
        raise
    except Exception as error:  # damaged files make transformers and tokenizers raise anything
        raise _not_whisper(folder, error) from error


def _load(folder: Path, source: Path, dtype: torch.dtype) -> Recogniser:
    with quiet():
        config = WhisperConfig.from_pretrained(source, local_files_only=True)
        check_weights(source, on_meta(WhisperForConditionalGeneration, config))
        loaded: Any = WhisperForConditionalGeneration.from_pretrained(
            source, local_files_only=True, dtype=dtype, output_loading_info=True
        )
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise InputError(f"{folder}: lacks weights of the model, such as {missing[0]}")
    return _with_processor(folder, source, loaded[0])


def _with_processor(
    folder: Path, source: Path, model: WhisperForConditionalGeneration
) -> Recogniser:
    """Add tokens and features to a model, and check that they belong to it."""
    with quiet():
        tokenizer = WhisperTokenizer.from_pretrained(source, local_files_only=True)
        extractor = WhisperFeatureExtractor.from_pretrained(source, local_files_only=True)
    check_generation(source, model)
    complete_generation(model, tokenizer)
    codec = Codec.of(tokenizer, prompt(model.generation_config), model.config.vocab_size)
    if max(*codec.start, codec.end) >= len(codec):
        raise InputError(
            f"{folder}: {TOKENIZER_FILES[0]} belongs to another model, which has more tokens; copy "
            "the file from the model that this one was made from"
        )
    _check_fit(source, model, extractor)
    # Whisper never trains the encoder's sinusoids, but loading makes them trainable.
    model.model.encoder.embed_positions.requires_grad_(False)
    return Recogniser(model, codec, extractor)


def _stored_dtype(source: Path) -> torch.dtype:
    config = read_json(source / "config.json")
    name = config.get("dtype") or config.get("torch_dtype")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _source(folder: Path) -> Path:
    """Return the best checkpoint of a training, its last one, or the folder itself."""
    if (folder / BEST / "config.json").is_file():
        return folder / BEST
    found = checkpoints(folder)
    return found[-1] if found else folder


def _check_file(folder: Path, names: tuple[str, ...], what: str) -> None:
    if not any((folder / name).is_file() for name in names):
        raise InputError(
            f"{folder}: has no {what} ({' or '.join(names)}); copy it from the model that this one "
            "was made from"
        )


def _check_fit(
    folder: Path,
    model: WhisperForConditionalGeneration,
    extractor: WhisperFeatureExtractor,
) -> None:
    """Raise InputError if the feature extractor of a folder belongs to another model."""
    config: Any = model.config
    pairs = {
        "mel bands": (extractor.feature_size, config.num_mel_bins),
        "frames": (extractor.nb_max_frames, 2 * config.max_source_positions),
        "samples per second": (extractor.sampling_rate, SAMPLE_RATE),
    }
    for what, (given, taken) in pairs.items():
        if given != taken:
            raise InputError(
                f"{folder}: {EXTRACTOR_FILES[0]} has {given} {what}, but the model takes {taken}; "
                "copy the file from the model that this one was made from"
            )


def _not_whisper(folder: Path, error: Exception) -> InputError:
    if isinstance(error, SafetensorError):
        return InputError(
            f"{folder}: cannot be read as a Whisper model, its weights are damaged or were not "
            f"copied completely ({failure_reason(error)}); download or copy them again"
        )
    return InputError(f"{folder}: cannot be read as a Whisper model, {failure_reason(error)}")
