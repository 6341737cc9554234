"""What a training starts from: the data, made or found, and the model, built or read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from maxfactor_speech.data import corpus
from maxfactor_speech.data import recordings as files
from maxfactor_speech.data import synthesis as synth
from maxfactor_speech.data.audio import InputError
from maxfactor_speech.data.batches import Utterances, seconds_needed
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training.model import POSITIONS_PER_SECOND, SIZES, Codec, whisper
from maxfactor_speech.training.progress import Reporter, Silent

if TYPE_CHECKING:
    from transformers import WhisperForConditionalGeneration

    from maxfactor_speech.training.settings import Settings

MAX_TOKENS = {"digits": 16, "sentences": 96}


class Prepared(NamedTuple):
    """What a training starts from."""

    train: Utterances
    validation: Utterances
    model: WhisperForConditionalGeneration
    codec: Codec


def prepare(
    settings: Settings,
    cache: Path | None = None,
    workers: int | None = None,
    reporter: Reporter | None = None,
) -> Prepared:
    """Make or find the data, and build or read the model; every wrong input shows here."""
    if settings.data is None:
        train, validation = _synthesised(settings, cache, workers, reporter or Silent())
    else:
        train, validation = _recorded(settings.data, settings.validation)
    torch.manual_seed(settings.seed)
    if settings.model in SIZES:
        codec, max_tokens = _codec_for(settings, train, validation)
        seconds = seconds_needed(train, validation)
        model = whisper(codec, settings.model, seconds, max_tokens)
    else:
        model, codec = checkpoint.load_model(Path(settings.model))
    _check_fit(train, model, codec)
    _check_fit(validation, model, codec)
    return Prepared(train, validation, model, codec)


def fingerprint(data: Utterances) -> str:
    """Tells one set of utterances from another; of files their names and texts too."""
    digest = hashlib.blake2b(data.lengths.tobytes(), digest_size=16)
    for recording in data.recordings if isinstance(data, files.Files) else ():
        digest.update(f"{recording.path.name}\t{recording.text}\n".encode())
    return digest.hexdigest()


def task_codec(task: str) -> Codec:
    """Tokens of a task for all its languages, so that one model can learn another language."""
    units = {unit for language in corpus.DIGITS for unit in corpus.alphabet(task, language)}
    return Codec.build(units, "words" if task == "digits" else "characters")


def _synthesised(
    settings: Settings, cache: Path | None, workers: int | None, reporter: Reporter
) -> tuple[Utterances, Utterances]:
    train_count = settings.utterance_count
    parts: list[Utterances] = []
    reporter.begin("synthesising speech", train_count + settings.validation_utterances)
    wanted: list[tuple[corpus.Split, int]] = [
        ("train", train_count),
        ("validation", settings.validation_utterances),
    ]
    for split, count in wanted:
        script = synth.Script(settings.task, settings.language, split)
        parts.append(synth.synthesise(script, count, cache, workers, progress=reporter.advance))
    return parts[0], parts[1]


def _recorded(data: str, validation: str | None) -> tuple[Utterances, Utterances]:
    recordings = files.find_recordings(Path(data))
    if validation is not None:
        return files.Files(recordings), files.Files(files.find_recordings(Path(validation)))
    train, kept_back = files.held_out(recordings)
    return files.Files(train), files.Files(kept_back)


def _codec_for(settings: Settings, train: Utterances, validation: Utterances) -> tuple[Codec, int]:
    """Tokens for the data, and how many of them its longest text may have."""
    if settings.data is None:
        return task_codec(settings.task), MAX_TOKENS[settings.task]
    # Where we have split the data, a rare letter may have come into either part.
    parts = [train, validation] if settings.validation is None else [train]
    texts = [part.text(number) for part in parts for number in range(len(part))]
    codec = Codec.build(set("".join(texts)), "characters")
    longest = max(len(codec.encode(text)) for text in texts)
    return codec, longest + longest // 4 + 1  # validation may be longer, and mistakes too


def _check_fit(data: Utterances, model: WhisperForConditionalGeneration, codec: Codec) -> None:
    """Refuse what the model has no tokens for; what we synthesise for our own tokens fits."""
    most = model.config.max_target_positions - len(codec.start)
    if isinstance(data, files.Files):
        files.check_texts(data.recordings, codec, most)
    else:
        texts = (data.text(number) for number in range(min(len(data), synth.SHARD)))
        missing = sorted({piece for text in texts for piece in codec.missing(text)})
        if missing:
            raise InputError(f"the model has no token for {', '.join(map(repr, missing[:5]))}")
    seconds = model.config.max_source_positions // POSITIONS_PER_SECOND
    if seconds_needed(data) > seconds:
        raise InputError(f"audio of {seconds_needed(data)} s, the model takes {seconds} at most")
