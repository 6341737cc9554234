"""A small Whisper learns synthesised sentences: the data, the model, the word error rate.

Speech is synthesised once and stored as features. During a run all of them are on the device, with
a table of the utterances that each step takes, so that a CUDA graph can hold a whole step.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from speech_application import (
    HOP,
    IGNORED,
    MAX_TOKENS,
    Codec,
    Espeak,
    Location,
    Script,
    Size,
    Split,
    Utterance,
    collate,
    decode,
    in_batches,
    log_mel,
    loss_of,
    render,
    task_codec,
    whisper,
)
from studies.runs import SIZES, Run, quick

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from transformers import WhisperForConditionalGeneration

    from measurement import Record

CHUNK = 128  # utterances that a worker synthesises at a time
CHUNKS_PER_WORKER = 4  # at least: starting a process takes as long
SILENT_FRAMES = 4  # at the end of each utterance, more than a window is long
MODEL_SECONDS = 6  # the longest audio that the model takes
DECODED_AT_ONCE = 500


# ------------------------------------------------------------------------------- the speech


@dataclass(frozen=True)
class Speech:
    """A set of utterances."""

    task: str
    language: str
    split: Split
    count: int

    def path(self, cache: Path) -> Path:
        """Where its features are stored."""
        return cache / f"{self.task}-{self.language}-{self.split}-{self.count}.pt"

    @property
    def script(self) -> Script:
        """Nine English voices or seven others, noise at 10 to 30 dB."""
        return Script(self.task, self.language, self.split, seed=0)


class Chunk(NamedTuple):
    """Some utterances, on their way between processes."""

    features: NDArray[np.int16]  # (utterances, 80, frames), the bits of bfloat16
    texts: list[str]


class Features(NamedTuple):
    """Utterances on a device."""

    features: Tensor  # (utterances, 80, frames), bfloat16
    labels: Tensor  # (utterances, tokens), int64
    texts: list[str]


def training_speech(run: Run) -> Speech:
    """The utterances that a run learns from."""
    return Speech(run.task, run.language, "train", run.train)


def validation_speech(run: Run, language: str) -> Speech:
    """The utterances that a run is measured on."""
    return Speech(run.task, language, "validation", run.validation)


def needed_speech(runs: Sequence[Run]) -> list[Speech]:
    """The sentences that runs need, and the models that they start from."""
    spoken = [run for run in runs if run.task == "sentences"]
    bases = [english_base(run) for run in spoken if run.start is not None]
    found = []
    for run in (*spoken, *bases):
        languages = dict.fromkeys([run.language, *(["en"] if run.start else [])])
        found += [training_speech(run), *(validation_speech(run, each) for each in languages)]
    return list(dict.fromkeys(found))


def synthesise(wanted: Sequence[Speech], cache: Path, workers: int) -> None:
    """Synthesise what is not in the cache yet, in worker processes."""
    missing = [speech for speech in wanted if not speech.path(cache).exists()]
    cache.mkdir(parents=True, exist_ok=True)
    chunks = [
        (speech, range(start, min(start + CHUNK, speech.count)))
        for speech in missing
        for start in range(0, speech.count, CHUNK)
    ]
    found: dict[Speech, list[Chunk]] = {}
    for (speech, _), chunk in zip(chunks, mapped(synthesised, chunks, workers), strict=True):
        found.setdefault(speech, []).append(chunk)
    for speech in missing:
        store_features(speech, cache, found.pop(speech))


def mapped(function: Callable[[Any], Any], items: Sequence[Any], workers: int) -> Iterator[Any]:
    """`map`, in worker processes if there is enough to do for several."""
    workers = min(workers, len(items) // CHUNKS_PER_WORKER)
    if workers <= 1:
        yield from map(function, items)
        return
    with multiprocessing.get_context("spawn").Pool(workers, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap(function, items)


def synthesised(chunk: tuple[Speech, range]) -> Chunk:
    """Synthesise some utterances of a set."""
    speech, numbers = chunk
    speaker = espeak()
    spoken = [render(speech.script.request(number), speaker) for number in numbers]
    longest = max(len(one.samples) for one in spoken)
    # The last frames are silent, so repeating them makes all chunks equally long.
    batch = collate(Listed(spoken), range(len(spoken)), longest + SILENT_FRAMES * HOP)
    features = log_mel(batch.samples).to(torch.bfloat16)
    return Chunk(features.view(torch.int16).numpy(), batch.texts)


class Listed:
    """Utterances in memory, as `collate` takes them."""

    def __init__(self, spoken: list[Utterance]) -> None:
        self._spoken = spoken
        self.lengths = np.array([len(one.samples) for one in spoken], np.int32)

    def __len__(self) -> int:
        return len(self._spoken)

    def __getitem__(self, number: int, /) -> Utterance:
        return self._spoken[number]

    def text(self, number: int, /) -> str:
        """The transcript."""
        return self._spoken[number].text


@functools.lru_cache(maxsize=1)
def espeak() -> Espeak:
    """The library, found once in a process."""
    return Espeak(Location.find())


def store_features(speech: Speech, cache: Path, chunks: list[Chunk]) -> None:
    """Write a set as one file, atomically, every utterance as long as the longest."""
    longest = max(features.shape[2] for features, _ in chunks)
    longest += -longest % 16
    features = np.concatenate([lengthened(features, longest) for features, _ in chunks])
    texts = [text for _, own in chunks for text in own]
    labels = codec_of(speech.task).labels(texts)
    labels = nn.functional.pad(labels, (0, -labels.shape[1] % 8), value=IGNORED)
    stored = {"features": torch.from_numpy(features), "labels": labels, "texts": texts}
    save_atomically(stored, speech.path(cache))


def save_atomically(stored: object, path: Path) -> None:
    """Write a file with `torch.save`, complete or not at all."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    torch.save(stored, partial)
    partial.replace(path)


def lengthened(features: NDArray[np.int16], frames: int) -> NDArray[np.int16]:
    """Repeat the silent last frame."""
    return np.pad(features, ((0, 0), (0, 0), (0, frames - features.shape[2])), mode="edge")


def load_features(speech: Speech, cache: Path, device: torch.device) -> Features:
    """Read a set onto a device."""
    stored = torch.load(speech.path(cache), map_location="cpu", mmap=True, weights_only=True)
    features = stored["features"].view(torch.bfloat16).to(device)
    if device.type == "cpu":
        features = features.float()  # a bfloat16 convolution is slow there
    return Features(features, stored["labels"].to(device), stored["texts"])


class FeatureSets:
    """Sets of utterances on a device, each read once."""

    def __init__(self, cache: Path, device: torch.device) -> None:
        self._cache, self._device = cache, device
        self._sets: dict[Speech, Features] = {}

    def __call__(self, speech: Speech) -> Features:
        """The features of a set."""
        if speech not in self._sets:
            self._sets[speech] = load_features(speech, self._cache, self._device)
        return self._sets[speech]


@functools.cache
def codec_of(task: str) -> Codec:
    """Tokens of all languages of a task, so that a model can learn another language."""
    return task_codec(task)


# --------------------------------------------------------------------------------- the task


class SpeechTask:
    """The model of a run, the loss of each step, and the word error rate.

    Args:
        run: What to train.
        cache: Folder of features, and of the model that fine-tuning starts from.
        device: Where the model is.
        sets: Features on that device.
    """

    def __init__(self, run: Run, cache: Path, device: torch.device, sets: FeatureSets) -> None:
        self._run, self._cache, self._sets = run, cache, sets
        self._data = sets(training_speech(run))
        order = torch.from_numpy(batch_order(run, len(self._data.texts)))
        self._order = order.to(device)  # (steps, batch)
        self.model = new_model(run, cache, device)

    def loss(self, at: Tensor) -> Tensor:
        """Mean cross-entropy of a step's batch; the step's number is on the device."""
        numbers = self._order.index_select(0, at)[0]
        features = self._data.features.index_select(0, numbers)
        return loss_of(self.model, features, self._data.labels.index_select(0, numbers))

    def measured(self) -> Record:
        """Word error rates of the trained model, which is stored where others start from it."""
        run = self._run
        if run.start is None and run.key == english_base(run).key:
            save_atomically(self.model.state_dict(), base_path(run, self._cache))
        languages = {"wer": run.language} | ({"english_wer": "en"} if run.start else {})
        return {name: self._word_errors(language) for name, language in languages.items()}

    def _word_errors(self, language: str) -> float:
        data = self._sets(validation_speech(self._run, language))
        batches = in_batches(data.features, data.texts, DECODED_AT_ONCE)
        codec = codec_of(self._run.task)
        return word_error_rate(self.model, codec, batches, data.features.device)


def batch_order(run: Run, count: int) -> NDArray[np.int64]:
    """(steps, batch): the utterances of each step, shuffled again every epoch."""
    random = np.random.default_rng(run.seed)
    needed = run.steps * run.batch
    epochs = [random.permutation(count) for _ in range(-(-needed // count))]
    return np.concatenate(epochs)[:needed].reshape(run.steps, run.batch).astype(np.int64)


def new_model(run: Run, cache: Path, device: torch.device) -> WhisperForConditionalGeneration:
    """A Whisper with random weights from the run's seed, or with those of the English model."""
    torch.manual_seed(run.seed)
    size = Size(*SIZES[run.size])
    model = whisper(codec_of(run.task), size, MODEL_SECONDS, MAX_TOKENS[run.task])
    if run.start is not None:
        weights = torch.load(base_path(run, cache), map_location="cpu", weights_only=True)
        model.load_state_dict(weights)
    model.to(device)  # type: ignore[arg-type]  # mistaken by a decorator's types
    return model


def english_base(run: Run) -> Run:
    """The run whose model a fine-tuning of the same size starts from."""
    base = Run("adamw", lr=2e-3, clip=1.0)
    return quick(base) if run.size == "quick" else base


def base_path(run: Run, cache: Path) -> Path:
    """Where the weights of that model are stored."""
    return cache / f"english-{run.size}.pt"


def word_error_rate(
    model: WhisperForConditionalGeneration,
    codec: Codec,
    batches: Iterable[tuple[Tensor, Sequence[str]]],
    device: torch.device,
) -> float:
    """Word errors in per cent of the words, by greedy decoding of features."""
    dtype = torch.bfloat16 if device.type == "cuda" else None
    decoded = decode(model, codec, batches, dtype)
    pairs = [(a.split(), b.split()) for batch in decoded for a, b in batch]
    words = sum(len(reference) for reference, _ in pairs)
    return round(100.0 * sum(edits(*pair) for pair in pairs) / words, 6)


def edits(reference: Sequence[str], hypothesis: Sequence[str]) -> int:
    """The fewest words to replace, delete and insert; jiwer may be missing on a GPU machine."""
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(hypothesis, 1):
            changed = diagonal + (word != other)
            diagonal, row[j] = row[j], min(changed, row[j] + 1, row[j - 1] + 1)
    return row[-1]
