"""What a training starts from: data, synthesised or recorded, and a model, new or loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from maxfactor_speech.atomic import write_atomically
from maxfactor_speech.data import corpus, synthesis
from maxfactor_speech.data.batches import Utterances, collate, seconds_needed
from maxfactor_speech.data.features import extract
from maxfactor_speech.data.own_data import load_own_data
from maxfactor_speech.data.recordings import RecordedUtterances
from maxfactor_speech.data.screening import LEFT_OUT, LONGEST, left_out_table, summary
from maxfactor_speech.data.tokens import IGNORED, Codec
from maxfactor_speech.errors import InputError
from maxfactor_speech.training.model import SIZES, longest_audio, loss_of, whisper
from maxfactor_speech.training.model_folder import load_model
from maxfactor_speech.training.progress import Reporter
from maxfactor_speech.training.recogniser import Recogniser, new_recogniser, with_prompt
from maxfactor_speech.training.settings import WEIGHTS, configure_cublas

if TYPE_CHECKING:
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    from maxfactor_speech.training.parallel import SingleProcess
    from maxfactor_speech.training.settings import Settings

MAX_TOKENS = {"digits": 16, "sentences": 96}


class Prepared(NamedTuple):
    """The data and the model of a training."""

    train: Utterances
    validation: Utterances
    model: WhisperForConditionalGeneration
    codec: Codec
    extractor: WhisperFeatureExtractor | None = None  # None: Whisper's, as long as the model takes
    longest_text: int | None = None  # tokens, with the prompt; None: not known

    @property
    def recogniser(self) -> Recogniser:
        """The model with everything that belongs to it."""
        if self.extractor is None:
            return new_recogniser(self.model, self.codec)
        return Recogniser(self.model, self.codec, self.extractor)


def prepare(
    settings: Settings,
    cache: Path | None = None,
    workers: int | None = None,
    reporter: Reporter | None = None,
    device: torch.device | None = None,
    is_resumed: bool = False,
) -> Prepared:
    """Build or load the model, synthesise or find the data, and check that they fit together.

    Args:
        settings: The settings of the training.
        cache: Folder that caches synthesised speech.
        workers: Processes that synthesise speech.
        reporter: Receives progress reports.
        device: Where a model folder is asked how its texts begin; None is the CPU.
        is_resumed: Whether a checkpoint will tell how they begin, so that nobody is asked.
    """
    loaded, reporter = None, reporter or Reporter()
    if settings.model not in SIZES:
        loaded = load_model(Path(settings.model), WEIGHTS[settings.weights], reporter.say)
    if loaded is None or loaded.is_plain:
        _check_plain(settings)
    else:
        loaded = _prompted(loaded, settings)
    if settings.data is None:
        language = (loaded and loaded.language) or settings.spoken_language("en")
        train, validation = _synthesised(settings, language, cache, workers, reporter)
    else:
        train, validation = _recorded(settings, loaded, reporter)
    torch.manual_seed(settings.seed)
    recogniser = loaded or _new_model(settings, train, validation)
    longest_text, _ = (_check_fit(part, recogniser, settings.model) for part in (train, validation))
    if loaded is not None and not is_resumed and _prefers_space_on(device, loaded, train):
        loaded.codec.begin_with_space()
    return Prepared(train, validation, *recogniser, longest_text)


def _prefers_space_on(
    device: torch.device | None, recogniser: Recogniser, data: Utterances
) -> bool:
    """Ask on the device, because a large model takes minutes on a CPU; fall back to the CPU."""
    model: Any = recogniser.model
    configure_cublas()
    try:
        return prefers_space(recogniser._replace(model=model.to(device or "cpu")), data)
    except torch.OutOfMemoryError:
        model.to("cpu")
    return prefers_space(recogniser, data)


def _prompted(recogniser: Recogniser, settings: Settings) -> Recogniser:
    """Set a model to the language and task of the data."""
    language = settings.language
    if language is None and settings.data is None and recogniser.language is None:
        language = "en"  # as the synthesised speech
    return with_prompt(recogniser, language, settings.translate, settings.model)


@torch.no_grad()
def prefers_space(recogniser: Recogniser, data: Utterances, count: int = 2) -> bool:
    """Return whether texts that begin with a space are likelier to a model.

    OpenAI's Whispers were trained on such texts, most that were trained further on others.
    """
    model, codec, extractor = recogniser
    batch = collate(data, range(min(count, len(data))), extractor.n_samples)
    features = extract(extractor, batch.samples.to(model.device))
    rows = [codec.labels([space + text for text in batch.texts]) for space in ("", " ")]
    plain, spaced = (
        float(loss_of(model, features, labels.to(model.device)) * (labels != IGNORED).sum())
        for labels in rows
    )
    return spaced < plain


def _check_plain(settings: Settings) -> None:
    """Raise InputError for options that a model without languages and tasks cannot honour."""
    given = {"--translate": settings.translate, "--language": settings.data and settings.language}
    for option, value in given.items():
        if value:
            raise InputError(
                f"{option} needs a multilingual model folder, but --model {settings.model} has no "
                "languages and tasks; leave it out"
            )


def _new_model(settings: Settings, train: Utterances, validation: Utterances) -> Recogniser:
    codec, max_tokens = _codec_for(settings, train, validation)
    seconds = seconds_needed(train, validation)
    return new_recogniser(whisper(codec, settings.model, seconds, max_tokens), codec)


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
    settings: Settings,
    language: str,
    cache: Path | None,
    workers: int | None,
    reporter: Reporter,
) -> tuple[Utterances, Utterances]:
    try:
        corpus.check(settings.task, language)
    except ValueError as error:
        raise InputError(f"{settings.model}: {error}; give --data in that language") from error
    counts: dict[corpus.Split, int] = {
        "train": settings.utterance_count,
        "validation": settings.validation_utterances,
    }
    reporter.begin("synthesising speech", sum(counts.values()))
    train, validation = (
        synthesis.synthesise(
            synthesis.Script(settings.task, language, split),
            count,
            cache,
            workers,
            progress=reporter.advance,
        )
        for split, count in counts.items()
    )
    return train, validation


def _recorded(
    settings: Settings, loaded: Recogniser | None, reporter: Reporter
) -> tuple[Utterances, Utterances]:
    """Find the recordings, and say which are left out."""
    assert settings.data is not None
    held_out = None if settings.validation is None else Path(settings.validation)
    longest, limit = LONGEST, None  # a new model is made for the texts
    if loaded is not None:
        longest, limit = longest_audio(loaded.model), loaded.text_limit
    train, validation, total = load_own_data(
        Path(settings.data), held_out, longest, settings.strict, limit
    )
    if train.left_out:
        reporter.say(f"{summary(train.left_out, total)}; all are named in {LEFT_OUT}")
    return train, validation


def _codec_for(settings: Settings, train: Utterances, validation: Utterances) -> tuple[Codec, int]:
    """Return tokens for the data, and the maximum number of tokens of a text."""
    if settings.data is None:
        return task_codec(settings.task), MAX_TOKENS[settings.task]
    # A rare letter may be in either part, and so may the longest text.
    texts = [part.text(number) for part in (train, validation) for number in range(len(part))]
    codec = Codec.build(set("".join(texts)), "characters")
    longest = max(len(codec.encode(text)) for text in texts)
    return codec, longest + longest // 4 + 1  # room for errors


def _check_fit(data: Utterances, recogniser: Recogniser, name: str) -> int:
    """Raise InputError if the model cannot spell a text, or if an utterance is too long.

    Returns:
        The tokens of the longest text that was looked at, with the prompt.
    """
    model, codec, _ = recogniser
    limit, is_recorded = recogniser.text_limit, isinstance(data, RecordedUtterances)
    count = len(data) if is_recorded else min(len(data), synthesis.SHARD_SIZE)
    texts = [data.text(number) for number in range(count)]
    for number, missing in limit.unspelled(texts):
        where = data.recordings[number].path if isinstance(data, RecordedUtterances) else name
        raise InputError(
            f"{where}: the model has no token for {', '.join(map(repr, missing[:5]))} in "
            f"{texts[number]!r}; spell it otherwise, or choose another --model"
        )
    tokens = max(map(codec.count, texts))
    if tokens > limit.most:  # only synthesised: such recordings are left out
        raise InputError(
            f"{name}: the data has texts of {tokens} tokens, but the model takes at most "
            f"{limit.most}; choose another --model"
        )
    longest, seconds = seconds_needed(data), longest_audio(model)
    if longest > seconds:
        raise InputError(
            f"the data has audio of {longest} s, but the model takes at most {seconds}"
        )
    return tokens + len(codec.start)
