"""Speech synthesised from texts: many voices, rates and pitches, with noise, cached in shards."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from dataclasses import astuple, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from maxfactor_speech.data import corpus
from maxfactor_speech.data.audio import SAMPLE_RATE, Wave, resample, to_samples
from maxfactor_speech.data.espeak import Espeak, Location
from maxfactor_speech.data.shards import ShardedUtterances, Utterance, shard_lengths, write_shard
from maxfactor_speech.errors import InputError
from maxfactor_speech.signals import ignore_interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

VERSION = 1  # to be raised whenever the same request sounds different
SHARD_SIZE = 256  # utterances per file
PEAK = 0.5  # of full scale, before noise is added

# File names of voices: espeak-ng would search all files for any other name, which is slow.
VOICES = {
    "en": (
        "gmw/en-US", "gmw/en-US+f1", "gmw/en-US+f2", "gmw/en-US+m3", "gmw/en+f3", "gmw/en+m1",
        "gmw/en+m7", "gmw/en-GB-scotland+f4", "gmw/en-GB-x-rp+m2",
    ),
    "de": ("gmw/de", "gmw/de+f1", "gmw/de+f2", "gmw/de+f4", "gmw/de+m1", "gmw/de+m3", "gmw/de+m7"),
    "es": (
        "roa/es", "roa/es+f1", "roa/es+f2", "roa/es+m1", "roa/es+m3", "roa/es-419+f4",
        "roa/es-419+m7",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SpeechRequest:
    """Everything that determines the sound of one utterance."""

    text: str
    voice: str
    rate: int  # words per minute
    pitch: int  # 0 to 100
    snr: float  # signal-to-noise ratio, dB
    seed: int  # of the noise


@dataclass(frozen=True)
class Script:
    """A corpus to be spoken. Voice, rate, pitch and noise of each utterance are drawn at random.

    Args:
        task: "digits" or "sentences".
        language: "en", "de" or "es".
        split: "train" or "validation".
        seed: Determines texts, voices, rates, pitches and noise.
        voices: Names of espeak-ng voices; if empty, a selection for the language.
        rate: Range of words per minute.
        pitch: Range within 0 to 100.
        snr: Range of signal-to-noise ratios, dB.

    Example:
        >>> Script("digits", seed=3).request(0).text
        'eight two nine'
    """

    task: str = "digits"
    language: str = "en"
    split: corpus.Split = "train"
    seed: int = 0
    voices: Sequence[str] = field(default=())
    rate: tuple[int, int] = (150, 210)
    pitch: tuple[int, int] = (30, 70)
    snr: tuple[float, float] = (10.0, 30.0)

    def __post_init__(self) -> None:
        corpus.check(self.task, self.language)
        for name, (low, high) in (("rate", self.rate), ("pitch", self.pitch), ("snr", self.snr)):
            if low > high:
                raise ValueError(f"{name} must be (low, high), got {(low, high)}")

    def request(self, number: int) -> SpeechRequest:
        """Return request `number`, which depends only on the script and the number."""
        text = corpus.draw(self.task, number, self.language, self.split, self.seed)
        random = Random(f"sound/{self.task}/{self.language}/{self.split}/{self.seed}/{number}")
        return SpeechRequest(
            text=text,
            voice=random.choice(self.voices or VOICES[self.language]),
            rate=random.randint(*self.rate),
            pitch=random.randint(*self.pitch),
            snr=round(random.uniform(*self.snr), 2),
            seed=random.getrandbits(32),
        )


def render(request: SpeechRequest, espeak: Espeak) -> Utterance:
    """Speak a request at 16 kHz with noise; equal requests give equal samples."""
    samples, rate = espeak.say(request.text, request.voice, request.rate, request.pitch)
    speech = resample(samples.astype(np.float32), rate, SAMPLE_RATE)
    loudest = float(np.abs(speech).max())
    speech *= PEAK / max(loudest, 1.0)
    return Utterance(to_samples(_with_noise(speech, request)), request.text)


def synthesise(
    script: Script,
    count: int,
    cache: Path | None = None,
    workers: int | None = None,
    location: Location | None = None,
    progress: Callable[[int], None] | None = None,
) -> ShardedUtterances:
    """Speak the first `count` utterances of a script, or read them from the cache.

    The result does not depend on the number of workers. Workers are started by "spawn", so a
    program that calls this function needs `if __name__ == "__main__":`.

    Args:
        script: The corpus.
        count: The number of utterances.
        cache: Folder of the shards; None is `~/.cache/maxfactor/speech`.
        workers: Worker processes; None is one per core, 1 uses only this process.
        location: Where espeak-ng is; None searches for it.
        progress: Called with the number of utterances each time a shard is ready.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    location = location or Location.find()
    starts = range(0, count, SHARD_SIZE)
    pieces = [range(start, min(start + SHARD_SIZE, count)) for start in starts]
    make = partial(_make_shard, script, cache or default_cache(), location)
    paths = []
    for piece, path in zip(
        pieces, _mapped(make, pieces, workers or os.cpu_count() or 1), strict=True
    ):
        paths.append(path)
        if progress is not None:
            progress(len(piece))
    return ShardedUtterances(paths)


def default_cache() -> Path:
    """Return the folder of shards that is used by default."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "maxfactor" / "speech"


def _mapped(make: Callable[[range], Path], pieces: list[range], workers: int) -> Any:
    """Map in worker processes, or in this one if there is only one piece."""
    workers = min(workers, len(pieces))
    if workers <= 1:
        yield from map(make, pieces)
        return
    with multiprocessing.get_context("spawn").Pool(workers, ignore_interrupts) as pool:
        yield from pool.imap(make, pieces)


def _make_shard(script: Script, cache: Path, location: Location, numbers: range) -> Path:
    requests = [script.request(number) for number in numbers]
    espeak = _speaker(location)
    path = cache / f"{_key(requests, _version(location))}.safetensors"
    if not _is_complete(path, len(requests)):
        write_shard(path, [render(request, espeak) for request in requests])
    return path


def _key(requests: Sequence[SpeechRequest], version: str) -> str:
    """Return a file name that depends on everything that determines the content of a shard."""
    digest = hashlib.blake2b(f"{VERSION}/{version}/{SAMPLE_RATE}".encode(), digest_size=16)
    for request in requests:
        digest.update(repr(astuple(request)).encode())
    return digest.hexdigest()


def _is_complete(path: Path, count: int) -> bool:
    if not path.exists():
        return False
    try:
        return len(shard_lengths(path)) == count
    except InputError:
        return False  # the file is damaged: synthesise it again


@lru_cache
def _speaker(location: Location) -> Espeak:
    return Espeak(location)


@lru_cache
def _version(location: Location) -> str:
    return _speaker(location).version()


def _with_noise(speech: Wave, request: SpeechRequest) -> Wave:
    noise: NDArray[np.float32] = np.random.default_rng(request.seed).standard_normal(
        speech.size, dtype=np.float32
    )
    power = float(np.mean(speech**2))
    noise *= np.float32(np.sqrt(power / 10.0 ** (request.snr / 10.0)))
    return speech + noise
