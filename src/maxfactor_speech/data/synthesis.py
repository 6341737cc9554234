"""Speech from text by espeak-ng: many voices, rates and pitches, noise, in worker processes.

espeak-ng is a C library with global variables. It is called through ctypes, one call at a time
in a process, and loaded afresh for every utterance: else the phase of its oscillators and its
random numbers carry over, and an utterance would depend on what was said before it.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from maxfactor_speech.data import corpus
from maxfactor_speech.data.audio import SAMPLE_RATE, InputError, Samples, Wave, resample, to_samples
from maxfactor_speech.data.shards import Shards, Spoken, shard_lengths, write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

VERSION = 1  # of the sound: to be raised whenever the same request would sound different
SHARD = 256  # utterances to a file
PEAK = 0.5  # of full scale, before noise

LIBRARY_VARIABLE = "MAXFACTOR_ESPEAK_LIBRARY"
DATA_VARIABLE = "MAXFACTOR_ESPEAK_DATA"

# Named by their files: by its other name a voice is looked for in all of them, which is slow.
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
class Utterance:
    """All that decides how one utterance sounds."""

    text: str
    voice: str
    rate: int  # words per minute
    pitch: int  # 0 to 100
    snr: float  # dB, speech to noise
    seed: int  # of the noise


@dataclass(frozen=True)
class Script:
    """A corpus to be spoken; pairs are the ends of a range that is drawn from.

    Args:
        task: "digits" or "sentences".
        language: "en", "de" or "es".
        split: "train" or "validation".
        seed: Decides texts, voices, rates, pitches and noise.
        voices: espeak-ng's names; none means a choice for the language.
        rate: Words per minute.
        pitch: 0 to 100.
        snr: Speech to noise, dB.

    Example:
        >>> Script("digits", seed=3).utterance(0).text
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

    def utterance(self, number: int) -> Utterance:
        """Utterance `number`, a function of the script and the number alone."""
        text = corpus.draw(self.task, number, self.language, self.split, self.seed)
        random = Random(f"sound/{self.task}/{self.language}/{self.split}/{self.seed}/{number}")
        return Utterance(
            text=text,
            voice=random.choice(self.voices or VOICES[self.language]),
            rate=random.randint(*self.rate),
            pitch=random.randint(*self.pitch),
            snr=round(random.uniform(*self.snr), 2),
            seed=random.getrandbits(32),
        )


@dataclass(frozen=True)
class Location:
    """Where espeak-ng is: from arguments, the environment, or the package espeakng-loader."""

    library: str
    data: str

    @staticmethod
    def find(library: str | None = None, data: str | None = None) -> Location:
        """Look for espeak-ng; what is not given is taken from elsewhere."""
        library = library or os.environ.get(LIBRARY_VARIABLE)
        data = data or os.environ.get(DATA_VARIABLE)
        if not (library and data):
            try:
                import espeakng_loader
            except ImportError as error:
                raise InputError(
                    "espeak-ng is not here: pip install 'maxfactor[speech]', or set "
                    f"{LIBRARY_VARIABLE} and {DATA_VARIABLE} to the library and its data folder"
                ) from error
            library = library or str(espeakng_loader.get_library_path())
            data = data or str(espeakng_loader.get_data_path())
        for path in (library, data):
            if not Path(path).exists():
                raise InputError(f"{path}: no such file, looked for as a part of espeak-ng")
        return Location(library, data)


class Espeak:
    """Speaks, one utterance at a time, each as if it were the first.

    Args:
        location: Where the library and its data are.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._pieces: list[bytes] = []
        # Kept, for C holds a pointer to it.
        self._callback = _CALLBACK(self._collect)

    def say(self, text: str, voice: str, rate: int, pitch: int) -> tuple[Samples, int]:
        """Return samples and their rate."""
        with self._fresh_library() as (library, sample_rate):
            if library.espeak_SetVoiceByName(voice.encode()) != 0:
                raise InputError(f"espeak-ng has no voice {voice!r}")
            library.espeak_SetParameter(_RATE, rate, 0)
            library.espeak_SetParameter(_PITCH, pitch, 0)
            self._pieces.clear()
            encoded = text.encode() + b"\0"
            with _deferred_signals():
                status = library.espeak_Synth(encoded, len(encoded), 0, 0, 0, _UTF8, None, None)
                status = status or library.espeak_Synchronize()
            if status != 0 or not self._pieces:
                raise InputError(f"espeak-ng cannot say {text!r} with the voice {voice!r}")
            return np.frombuffer(b"".join(self._pieces), np.int16), sample_rate

    def version(self) -> str:
        """What the library calls itself; another version sounds different."""
        with self._fresh_library() as (library, _):
            name: bytes = library.espeak_Info(None)
            return name.decode()

    @contextmanager
    def _fresh_library(self) -> Iterator[tuple[ctypes.CDLL, int]]:
        """Load the library, and unload it: loaded twice, it would keep its variables."""
        library = ctypes.CDLL(self._location.library)
        try:
            for name, arguments, result in _SIGNATURES:
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, result
            data = self._location.data.encode()
            rate = int(library.espeak_Initialize(_SYNCHRONOUS, 0, data, _DO_NOT_EXIT))
            if rate <= 0:
                raise InputError(f"{self._location.data}: espeak-ng cannot use this as its data")
            library.espeak_SetSynthCallback(self._callback)
            _reset_random(library)
            yield library, rate
            library.espeak_Terminate()
        finally:
            _unload(library)

    def _collect(self, samples: Any, count: int, _events: Any) -> int:
        if count > 0:
            self._pieces.append(ctypes.string_at(samples, 2 * count))
        return 0  # go on


@contextmanager
def _deferred_signals() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until C has returned.

    Their handlers raise. ctypes drops what is raised inside a callback, so the signal would be
    lost. Only the main thread handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda caught, _: held.append(caught))
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for caught in dict.fromkeys(held):
            signal.raise_signal(caught)


def render(utterance: Utterance, espeak: Espeak) -> Spoken:
    """Speak an utterance at 16 kHz with its noise; the same request, the same samples."""
    samples, rate = espeak.say(utterance.text, utterance.voice, utterance.rate, utterance.pitch)
    speech = resample(samples.astype(np.float32), rate, SAMPLE_RATE)
    loudest = float(np.abs(speech).max())
    speech *= PEAK / max(loudest, 1.0)
    return Spoken(to_samples(_with_noise(speech, utterance)), utterance.text)


def synthesise(
    script: Script,
    count: int,
    cache: Path | None = None,
    workers: int | None = None,
    location: Location | None = None,
    progress: Callable[[int], None] | None = None,
) -> Shards:
    """Speak the first `count` utterances of a script, or take them from the cache.

    The result does not depend on the number of workers. Workers are started by "spawn": a script
    that calls this must have its own start under `if __name__ == "__main__":`.

    Args:
        script: What to say and how.
        count: How many utterances.
        cache: Folder of the shards; None takes `~/.cache/maxfactor/speech`.
        workers: Processes; None takes one per core, 1 none but this one.
        location: Where espeak-ng is; None looks for it.
        progress: Called with the number of utterances that have become ready.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    location = location or Location.find()
    starts = range(0, count, SHARD)
    pieces = [range(start, min(start + SHARD, count)) for start in starts]
    make = partial(_make_shard, script, cache or default_cache(), location)
    paths = []
    for piece, path in zip(
        pieces, _mapped(make, pieces, workers or os.cpu_count() or 1), strict=True
    ):
        paths.append(path)
        if progress is not None:
            progress(len(piece))
    return Shards(paths)


def default_cache() -> Path:
    """Where shards are kept unless said otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "maxfactor" / "speech"


def _mapped(make: Callable[[range], Path], pieces: list[range], workers: int) -> Any:
    """`map`, in worker processes where that is worth their start."""
    workers = min(workers, len(pieces))
    if workers <= 1:
        yield from map(make, pieces)
        return
    with multiprocessing.get_context("spawn").Pool(workers, _ignore_interrupts) as pool:
        yield from pool.imap(make, pieces)


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _make_shard(script: Script, cache: Path, location: Location, numbers: range) -> Path:
    utterances = [script.utterance(number) for number in numbers]
    espeak = _speaker(location)
    path = cache / f"{_key(utterances, _version(location))}.safetensors"
    if not _is_whole(path, len(utterances)):
        write_shard(path, [render(utterance, espeak) for utterance in utterances])
    return path


def _key(utterances: Sequence[Utterance], version: str) -> str:
    """A name for a shard from all that decides what is in it."""
    digest = hashlib.blake2b(f"{VERSION}/{version}/{SAMPLE_RATE}".encode(), digest_size=16)
    for utterance in utterances:
        digest.update(repr(utterance).encode())
    return digest.hexdigest()


def _is_whole(path: Path, count: int) -> bool:
    if not path.exists():
        return False
    try:
        return len(shard_lengths(path)) == count
    except InputError:
        return False  # damaged by something else: made anew


@lru_cache
def _speaker(location: Location) -> Espeak:
    return Espeak(location)


@lru_cache
def _version(location: Location) -> str:
    return _speaker(location).version()


def _with_noise(speech: Wave, utterance: Utterance) -> Wave:
    noise: NDArray[np.float32] = np.random.default_rng(utterance.seed).standard_normal(
        speech.size, dtype=np.float32
    )
    power = float(np.mean(speech**2))
    noise *= np.float32(np.sqrt(power / 10.0 ** (utterance.snr / 10.0)))
    return speech + noise


# ------------------------------------------------------------------------- the C interface

_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: samples come to the callback before the call returns
_DO_NOT_EXIT = 0x8000  # espeakINITIALIZE_DONT_EXIT: else wrong data would end the process
_RATE, _PITCH = 1, 3  # espeakRATE, espeakPITCH
_UTF8 = 1  # espeakCHARS_UTF8

_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)
_SIGNATURES: tuple[tuple[str, list[Any], Any], ...] = (
    (
        "espeak_Initialize",
        [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int],
        ctypes.c_int,
    ),
    ("espeak_SetSynthCallback", [_CALLBACK], None),
    ("espeak_SetVoiceByName", [ctypes.c_char_p], ctypes.c_int),
    ("espeak_SetParameter", [ctypes.c_int] * 3, ctypes.c_int),
    (
        "espeak_Synth",
        [
            ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint,
            ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p,
        ],
        ctypes.c_int,
    ),
    ("espeak_Synchronize", [], ctypes.c_int),
    ("espeak_Terminate", [], ctypes.c_int),
    ("espeak_Info", [ctypes.c_void_p], ctypes.c_char_p),
)  # fmt: skip


def _unload(library: ctypes.CDLL) -> None:
    import _ctypes  # the only way to the system's own call

    if sys.platform == "win32":
        _ctypes.FreeLibrary(library._handle)
    else:
        _ctypes.dlclose(library._handle)


def _reset_random(library: ctypes.CDLL) -> None:
    """Breathy voices draw random numbers, which the library starts from the time of day."""
    if hasattr(library, "espeak_ng_SetRandSeed"):
        library.espeak_ng_SetRandSeed(ctypes.c_long(1))
    if sys.platform != "win32":  # versions before 1.52 draw from C's own, which outlive them
        ctypes.CDLL(None).srand(1)
