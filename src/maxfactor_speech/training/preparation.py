"""What a training starts from: data, synthesised or recorded, and a model, new or loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from maxfactor_speech.data import corpus, recordings, synthesis
from maxfactor_speech.data.batches import Utterances, seconds_needed
from maxfactor_speech.data.recordings import RecordedUtterances
from maxfactor_speech.data.tokens import Codec
from maxfactor_speech.errors import InputError
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training.model import SIZES, longest_audio, whisper
from maxfactor_speech.training.progress import Reporter

if TYPE_CHECKING:
    from transformers import WhisperForConditionalGeneration

    from maxfactor_speech.training.settings import Settings

MAX_TOKENS = {"digits": 16, "sentences": 96}


class Prepared(NamedTuple):
    """The data and the model of a training."""

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
    """Synthesise or find the data, build or load the model, and check that they fit together."""
    if settings.data is None:
        train, validation = _synthesised(settings, cache, workers, reporter or Reporter())
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


def trained_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters that are trained."""
    return sum(param.numel() for param in model.parameters() if param.requires_grad)


def fingerprint(data: Utterances) -> str:
    """Return a digest that identifies a set of utterances."""
    digest = hashlib.blake2b(data.lengths.tobytes(), digest_size=16)
    for recording in data.recordings if isinstance(data, RecordedUtterances) else ():
        digest.update(f"{recording.path.name}\t{recording.text}\n".encode())
    return digest.hexdigest()


def task_codec(task: str) -> Codec:
    """Return the tokens of a task in all languages, so that a model can learn another language."""
    units = {unit for language in corpus.DIGITS for unit in corpus.alphabet(task, language)}
    return Codec.build(units, "words" if task == "digits" else "characters")


def _synthesised(
    settings: Settings, cache: Path | None, workers: int | None, reporter: Reporter
) -> tuple[Utterances, Utterances]:
    counts: dict[corpus.Split, int] = {
        "train": settings.utterance_count,
        "validation": settings.validation_utterances,
    }
    reporter.begin("synthesising speech", sum(counts.values()))
    train, validation = (
        synthesis.synthesise(
            synthesis.Script(settings.task, settings.language, split),
            count,
            cache,
            workers,
            progress=reporter.advance,
        )
        for split, count in counts.items()
    )
    return train, validation


def _recorded(data: str, validation: str | None) -> tuple[Utterances, Utterances]:
    found = recordings.find_recordings(Path(data))
    if validation is None:
        train, held_out = recordings.split_recordings(found)
    else:
        train, held_out = found, recordings.find_recordings(Path(validation))
    return RecordedUtterances(train), RecordedUtterances(held_out)


def _codec_for(settings: Settings, train: Utterances, validation: Utterances) -> tuple[Codec, int]:
    """Return tokens for the data, and the maximum number of tokens of a text."""
    if settings.data is None:
        return task_codec(settings.task), MAX_TOKENS[settings.task]
    # After a random split, a rare letter may be in either part.
    parts = [train, validation] if settings.validation is None else [train]
    texts = [part.text(number) for part in parts for number in range(len(part))]
    codec = Codec.build(set("".join(texts)), "characters")
    longest = max(len(codec.encode(text)) for text in texts)
    return codec, longest + longest // 4 + 1  # room for longer validation texts, and for errors


def _check_fit(data: Utterances, model: WhisperForConditionalGeneration, codec: Codec) -> None:
    """Raise InputError if the model has no tokens for a text, or an utterance is too long."""
    most = model.config.max_target_positions - len(codec.start)
    if isinstance(data, RecordedUtterances):
        recordings.check_texts(data.recordings, codec, most)
    else:
        texts = (data.text(number) for number in range(min(len(data), synthesis.SHARD_SIZE)))
        missing = sorted({piece for text in texts for piece in codec.missing(text)})
        if missing:
            raise InputError(f"the model has no token for {', '.join(map(repr, missing[:5]))}")
    longest, limit = seconds_needed(data), longest_audio(model)
    if longest > limit:
        raise InputError(f"the data has audio of {longest} s, but the model takes at most {limit}")
