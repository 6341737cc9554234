"""Audio files of any sampling rate, mono or stereo, read as 16 kHz mono."""

from __future__ import annotations

from contextlib import contextmanager
from math import gcd
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Wave: TypeAlias = NDArray[np.float32]  # samples between -1 and 1
Samples: TypeAlias = NDArray[np.int16]

SAMPLE_RATE = 16_000
FULL_SCALE = 32_768.0  # of 16-bit samples
UNKNOWN_LENGTH = 2**63 - 1  # frames that libsndfile reports if a FLAC header gives no length
HIGHEST_RATE = 768_000  # Hz; resampling takes memory in proportion to the rate
OVERSHOOT = 0.5  # seconds by which the end of a file may be missing, as in Kaldi
RIFF_UNKNOWN = 0x7FFF_0000  # sizes from here on are written by programs that do not know the size
RIFF_SLACK = 4096  # bytes
INCOMPLETE = "it is incomplete, copy it again"
TAPER = 0.05  # fraction of the band over which the resampling filter falls off


class Header(NamedTuple):
    """What the header of an audio file says."""

    frames: int  # samples of each channel
    rate: int  # of sampling, in Hz

    @property
    def seconds(self) -> float:
        """The length of the audio."""
        return self.frames / self.rate


def read(path: Path, start: float = 0.0, samples: int | None = None) -> Wave:
    """Read a file, or a part of it, as 16 kHz mono.

    Args:
        path: The file.
        start: Where to begin, in seconds.
        samples: The length in 16 kHz samples, from the header; no more is decoded, and fewer are
            returned only if less than half a second is missing. None is to the end of the file.

    Raises:
        InputError: If the file cannot be read. The message names it.
    """
    import soundfile  # not needed for synthesised speech, so imported only here

    with _reading(path), soundfile.SoundFile(str(path)) as file:
        rate = _checked_rate(path, file.samplerate)
        file.seek(round(start * rate))
        frames = -1 if samples is None else resampled_length(samples, SAMPLE_RATE, rate)
        channels = file.read(frames, dtype="float32", always_2d=True)
    if not channels.size:
        raise InputError(f"{path}: contains no audio")
    if len(channels) < frames - OVERSHOOT * rate:
        found, expected = len(channels) / rate, frames / rate
        raise InputError(f"{path}: ends after {found:.1f} s of {expected:.1f} s; {INCOMPLETE}")
    if not np.isfinite(channels).all():
        raise InputError(f"{path}: contains samples that are not finite")
    mono = channels.mean(axis=1, dtype=np.float32)
    return resample(mono, rate, SAMPLE_RATE)[:samples]


def read_header(path: Path) -> Header:
    """Read the header of a file only. An InputError names a file that cannot be read."""
    import soundfile

    with _reading(path):
        info = soundfile.info(str(path))
    if info.frames == UNKNOWN_LENGTH:
        raise InputError(
            f"{path}: the header gives no length, as in a file written through a pipe; "
            "convert it to a new file"
        )
    return Header(int(info.frames), _checked_rate(path, info.samplerate))


def samples_in(path: Path) -> int:
    """Return the number of samples that `read` will return, from the header only."""
    header = read_header(path)
    return resampled_length(header.frames, header.rate, SAMPLE_RATE)


def check_complete(path: Path) -> None:
    """Raise InputError for a WAV file that was cut; libsndfile reads it as a shorter one."""
    with _reading(path), path.open("rb") as file:
        start = file.read(8)
        size = int.from_bytes(start[4:], "little")
        is_cut = path.stat().st_size < 8 + size - RIFF_SLACK
    if start[:4] == b"RIFF" and size < RIFF_UNKNOWN and is_cut:
        raise InputError(f"{path}: is shorter than its header says; {INCOMPLETE}")


def is_file(path: Path) -> bool:
    """Whether there is such a file; pipes and devices are none."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long, or contains a zero
        return False


def write(path: Path, samples: Samples) -> None:
    """Write 16 kHz samples as a WAV file."""
    import soundfile

    try:
        soundfile.write(str(path), samples, SAMPLE_RATE)
    except (OSError, soundfile.SoundFileError) as error:
        raise InputError(f"{path}: cannot be written, {error}") from error


def resampled_length(count: int, rate: int, new_rate: int) -> int:
    """Return the number of samples after resampling, rounded up."""
    return -(-count * new_rate // rate)


def resample(wave: Wave, rate: int, new_rate: int) -> Wave:
    """Change the sampling rate with a Fourier transform of the whole wave.

    Frequencies below both Nyquist limits stay as they are, except for the topmost 5 % of the band:
    a raised cosine attenuates them, which prevents ringing.
    """
    if rate == new_rate or not wave.size:
        return wave
    divisor = gcd(rate, new_rate)
    old_step, new_step = rate // divisor, new_rate // divisor
    # The transform is circular: added silence keeps the end from wrapping into the beginning.
    blocks = -(-(wave.size + rate // 50) // old_step)
    spectrum = np.fft.rfft(wave, blocks * old_step)
    new_size = blocks * new_step
    kept = min(spectrum.size, new_size // 2 + 1)
    spectrum = spectrum[:kept] * _taper(kept)
    resampled = np.fft.irfft(spectrum, new_size)[: resampled_length(wave.size, rate, new_rate)]
    return (resampled * (new_step / old_step)).astype(np.float32)


def to_samples(wave: Wave) -> Samples:
    """Round to 16 bits; clip values outside -1 to 1."""
    samples: Samples = np.rint(wave * FULL_SCALE).clip(-FULL_SCALE, FULL_SCALE - 1).astype(np.int16)
    return samples


def _taper(count: int) -> Wave:
    gains = np.ones(count, np.float32)
    edge = int(count * TAPER)
    gains[count - edge :] = 0.5 + 0.5 * np.cos(np.pi * np.arange(1, edge + 1) / (edge + 1))
    return gains


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    import soundfile

    try:
        yield
    # TypeError: soundfile wants to be told the format of a file that is named *.raw.
    except (OSError, TypeError, soundfile.SoundFileError) as error:
        raise InputError(f"{path}: {_why_unreadable(path, error)}") from error


def _checked_rate(path: Path, rate: int) -> int:
    if not 1 <= rate <= HIGHEST_RATE:
        raise InputError(f"{path}: has a sampling rate of {rate} Hz, more than {HIGHEST_RATE}")
    return rate


def _why_unreadable(path: Path, error: Exception) -> str:
    if not path.exists():
        return "no such file"
    if path.is_dir():
        return "is a folder, not an audio file"
    reason = str(error).split(": ", 1)[-1].rstrip(".")
    if "does not exist" in reason:  # what libsndfile says about most files that are not MP3
        reason = "format not recognised"
    return f"cannot be read as audio ({reason}); use WAV, FLAC, OGG or MP3"
