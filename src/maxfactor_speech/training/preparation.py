"""What a training starts from: data, synthesised or recorded, and a model, new or loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from maxfactor_speech.atomic import write_atomically
from maxfactor_speech.data import corpus, recordings, synthesis
from maxfactor_speech.data.batches import Utterances, seconds_needed
from maxfactor_speech.data.own_data import load_own_data
from maxfactor_speech.data.recordings import RecordedUtterances
from maxfactor_speech.data.screening import LEFT_OUT, LONGEST, left_out_table, summary
from maxfactor_speech.data.tokens import Codec
from maxfactor_speech.errors import InputError
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training.model import SIZES, longest_audio, whisper
from maxfactor_speech.training.progress import Reporter

if TYPE_CHECKING:
    from transformers import WhisperForConditionalGeneration

    from maxfactor_speech.training.parallel import SingleProcess
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
    loaded = None if settings.model in SIZES else checkpoint.load_model(Path(settings.model))
    if settings.data is None:
        train, validation = _synthesised(settings, cache, workers, reporter or Reporter())
    else:
        longest = LONGEST if loaded is None else longest_audio(loaded[0])
        train, validation = _recorded(settings, longest, reporter or Reporter())
    torch.manual_seed(settings.seed)
    if loaded is None:
        codec, max_tokens = _codec_for(settings, train, validation)
        seconds = seconds_needed(train, validation)
        model = whisper(codec, settings.model, seconds, max_tokens)
    else:
        model, codec = loaded
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
        digest.update(recording.identity.encode())
    return digest.hexdigest()


def write_left_out(out: Path, prepared: Prepared) -> None:
    """Write the recordings that are left out, if there are any, to a table in a folder."""
    data = prepared.train
    if isinstance(data, RecordedUtterances) and data.left_out:
        write_atomically(out / LEFT_OUT, left_out_table(data.left_out))


def check_same_data(prepared: Prepared, processes: SingleProcess) -> None:
    """Raise InputError if the processes of a training have found different utterances."""
    mine = int(fingerprint(prepared.train)[:8], 16) ^ int(fingerprint(prepared.validation)[:8], 16)
    total = processes.sum(mine)

    def check() -> None:
        if total != mine * processes.world:
            raise InputError(
                "the processes found different recordings; check that all machines read the same "
                "files"
            )

    processes.run_on_all(check)


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


def _recorded(
    settings: Settings, longest: int, reporter: Reporter
) -> tuple[Utterances, Utterances]:
    """Find the recordings, and say which are left out."""
    assert settings.data is not None
    held_out = None if settings.validation is None else Path(settings.validation)
    train, validation, total = load_own_data(
        Path(settings.data), held_out, longest, settings.strict
    )
    if train.left_out:
        reporter.say(f"{summary(train.left_out, total)}; all are named in {LEFT_OUT}")
    return train, validation


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
