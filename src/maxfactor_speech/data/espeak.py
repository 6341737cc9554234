"""espeak-ng through ctypes: text to samples.

espeak-ng is a C library with global state, so a process makes one call at a time. The library is
loaded anew for each utterance: otherwise the phase of its oscillators and its random numbers carry
over, and an utterance would depend on the ones before it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxfactor_speech.errors import InputError
from maxfactor_speech.signals import deferred_signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from maxfactor_speech.data.audio import Samples

LIBRARY_VARIABLE = "MAXFACTOR_ESPEAK_LIBRARY"
DATA_VARIABLE = "MAXFACTOR_ESPEAK_DATA"


@dataclass(frozen=True)
class Location:
    """The paths of espeak-ng's shared library and data folder."""

    library: str
    data: str

    @staticmethod
    def find(library: str | None = None, data: str | None = None) -> Location:
        """Return the given paths, else the environment's, else the package espeakng-loader's."""
        library = library or os.environ.get(LIBRARY_VARIABLE)
        data = data or os.environ.get(DATA_VARIABLE)
        if not (library and data):
            try:
                import espeakng_loader
            except ImportError as error:
                raise InputError(
                    "espeak-ng is not installed; run `pip install espeakng-loader`, or set "
                    f"{LIBRARY_VARIABLE} and {DATA_VARIABLE} to its library and data folder"
                ) from error
            library = library or str(espeakng_loader.get_library_path())
            data = data or str(espeakng_loader.get_data_path())
        for path in (library, data):
            if not Path(path).exists():
                raise InputError(f"{path}: no such file; espeak-ng was expected there")
        return Location(library, data)


class Espeak:
    """Speaks one text at a time, independent of the texts before.

    Args:
        location: The library and its data.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._pieces: list[bytes] = []
        # Kept as an attribute: C holds a pointer to it.
        self._callback = _CALLBACK(self._collect)

    def say(self, text: str, voice: str, rate: int, pitch: int) -> tuple[Samples, int]:
        """Return samples and their sampling rate."""
        with self._fresh_library() as (library, sample_rate):
            _choose_voice(library, voice)
            library.espeak_SetParameter(_RATE, rate, 0)
            library.espeak_SetParameter(_PITCH, pitch, 0)
            self._pieces.clear()
            encoded = text.encode() + b"\0"
            with deferred_signals():
                status = library.espeak_Synth(encoded, len(encoded), 0, 0, 0, _UTF8, None, None)
                status = status or library.espeak_Synchronize()
            if status != 0 or not self._pieces:
                raise InputError(f"espeak-ng cannot say {text!r} with the voice {voice!r}")
            return np.frombuffer(b"".join(self._pieces), np.int16), sample_rate

    def phonemes(self, words: Sequence[str], voice: str) -> list[str]:
        """Return how each word is spoken, in espeak-ng's ASCII names of phonemes."""
        with self._fresh_library() as (library, _):
            _choose_voice(library, voice)
            return [_phonemes(library, word) for word in words]

    def version(self) -> str:
        """Return the library's version. Other versions sound different."""
        with self._fresh_library() as (library, _):
            name: bytes = library.espeak_Info(None)
            return name.decode()

    @contextmanager
    def _fresh_library(self) -> Iterator[tuple[ctypes.CDLL, int]]:
        """Load the library and unload it afterwards, which resets its global variables."""
        library = ctypes.CDLL(self._location.library)
        try:
            for name, arguments, result in _SIGNATURES:
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, result
            data = self._location.data.encode()
            rate = int(library.espeak_Initialize(_SYNCHRONOUS, 0, data, _DO_NOT_EXIT))
            if rate <= 0:
                raise InputError(f"{self._location.data}: espeak-ng cannot use this data folder")
            library.espeak_SetSynthCallback(self._callback)
            _reset_random(library)
            yield library, rate
            library.espeak_Terminate()
        finally:
            _unload(library)

    def _collect(self, samples: Any, count: int, _events: Any) -> int:
        if count > 0:
            self._pieces.append(ctypes.string_at(samples, 2 * count))
        return 0  # continue


# ------------------------------------------------------------------------- the C interface

_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: the callback gets all samples before the call returns
_DO_NOT_EXIT = 0x8000  # espeakINITIALIZE_DONT_EXIT: otherwise wrong data ends the process
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
    ("espeak_TextToPhonemes", [ctypes.c_void_p, ctypes.c_int, ctypes.c_int], ctypes.c_char_p),
    ("espeak_Terminate", [], ctypes.c_int),
    ("espeak_Info", [ctypes.c_void_p], ctypes.c_char_p),
)  # fmt: skip


def _choose_voice(library: ctypes.CDLL, voice: str) -> None:
    if library.espeak_SetVoiceByName(voice.encode()) != 0:
        raise InputError(f"espeak-ng has no voice {voice!r}")


def _phonemes(library: ctypes.CDLL, text: str) -> str:
    """A call returns one clause and moves the pointer to the next, or to nothing at the end."""
    left, spoken = ctypes.c_char_p(text.encode()), []
    while left.value is not None:
        spoken.append(library.espeak_TextToPhonemes(ctypes.byref(left), _UTF8, 0).decode())
    return " ".join(spoken)


def _unload(library: ctypes.CDLL) -> None:
    import _ctypes  # the only access to the system's own call

    if sys.platform == "win32":
        _ctypes.FreeLibrary(library._handle)
    else:
        _ctypes.dlclose(library._handle)


def _reset_random(library: ctypes.CDLL) -> None:
    """Seed the random numbers of breathy voices, which the library seeds from the time of day."""
    if hasattr(library, "espeak_ng_SetRandSeed"):
        library.espeak_ng_SetRandSeed(ctypes.c_long(1))
    if sys.platform != "win32":  # versions before 1.52 use C's own generator
        ctypes.CDLL(None).srand(1)
