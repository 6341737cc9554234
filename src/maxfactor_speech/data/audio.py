"""Audio files of any sampling rate, mono or stereo, read as 16 kHz mono."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

Wave: TypeAlias = NDArray[np.float32]  # samples between -1 and 1
Samples: TypeAlias = NDArray[np.int16]

SAMPLE_RATE = 16_000
FULL_SCALE = 32_768.0  # of 16-bit samples
UNKNOWN_LENGTH = 2**63 - 1  # frames that libsndfile reports if a FLAC header gives no length
TAPER = 0.05  # fraction of the band over which the resampling filter falls off


def read(path: Path) -> Wave:
    """Read a file as 16 kHz mono. An InputError names a file that cannot be read."""
    import soundfile  # not needed for synthesised speech, so imported only here

    try:
        channels, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise InputError(f"{path}: {_why_unreadable(path, error)}") from error
    if not channels.size:
        raise InputError(f"{path}: contains no audio")
    if not np.isfinite(channels).all():
        raise InputError(f"{path}: contains samples that are not finite")
    mono = channels.mean(axis=1, dtype=np.float32)
    return resample(mono, int(rate), SAMPLE_RATE)


def samples_in(path: Path) -> int:
    """Return the number of samples that `read` will return, from the header only."""
    import soundfile

    try:
        info = soundfile.info(str(path))
    except (OSError, soundfile.SoundFileError) as error:
        raise InputError(f"{path}: {_why_unreadable(path, error)}") from error
    if info.frames == UNKNOWN_LENGTH:
        raise InputError(
            f"{path}: the header gives no length, as in a file written through a pipe; "
            "convert it to a new file"
        )
    return resampled_length(int(info.frames), int(info.samplerate), SAMPLE_RATE)


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


def _why_unreadable(path: Path, error: Exception) -> str:
    if not path.exists():
        return "no such file"
    if path.is_dir():
        return "is a folder, not an audio file"
    reason = str(error).split(": ", 1)[-1].rstrip(".")
    return f"cannot be read as audio ({reason}); use WAV, FLAC or OGG"
