"""Audio files of any sampling rate, mono or stereo, read as 16 kHz mono."""

from __future__ import annotations

import os
from contextlib import contextmanager
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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
# Hz; resampling takes memory in proportion to the rate, and lengthens what has a low one.
LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000
LONGEST_FILE = 4 * 3600  # seconds of a file that is read whole …
MOST_DECODED = LONGEST_FILE * 48_000 * 2  # … and its samples in all channels
BLOCK = 2**23  # samples that are decoded at a time, in all channels: half a minute of most
LOUDEST = 1e6  # times full scale; far above it, resampling overflows
OVERSHOOT = 0.5  # seconds by which the end of a file may be missing, as in Kaldi
RIFF_UNKNOWN = 0x7FFF_0000  # sizes from here on are written by programs that do not know the size
RIFF_SLACK = 4096  # bytes
UNKNOWN_FORMAT = "format not recognised"
INCOMPLETE = "it is incomplete, copy it again"
# How files begin that libsndfile may open: WAV, its large forms, FLAC, OGG, MP3 with a tag, AIFF,
# AU, CAF, NIST. It knows many more formats, old and rare, whose readers are little tested.
KNOWN_STARTS = (
    b"RIFF", b"RIFX", b"RF64", b"riff", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd", b"dns.",
    b"caff", b"NIST_1A",
)  # fmt: skip
MPEG_SYNC = 0xFFE0  # the first bits of an MP3 frame
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
    with _opened(path) as file:
        rate = _checked_rate(path, file.samplerate)
        if samples is None:
            _check_size(path, file)
        file.seek(round(start * rate))
        frames = file.frames if samples is None else resampled_length(samples, SAMPLE_RATE, rate)
        mono = _decode(file, frames)
    if not mono.size:
        raise InputError(f"{path}: contains no audio")
    if samples is not None and len(mono) < frames - OVERSHOOT * rate:
        found, expected = len(mono) / rate, frames / rate
        raise InputError(f"{path}: ends after {found:.1f} s of {expected:.1f} s; {INCOMPLETE}")
    if not (np.abs(mono) <= LOUDEST).all():
        raise InputError(f"{path}: contains samples that are not finite, or far too loud")
    return resample(mono, rate, SAMPLE_RATE)[:samples]


def read_header(path: Path) -> Header:
    """Read the header of a file only. An InputError names a file that cannot be read."""
    with _opened(path) as file:
        return _header(path, file)


def samples_in(path: Path) -> int:
    """Return the number of samples that `read` will return, from the header only.

    Raises:
        InputError: If the file cannot be read, or is too long to be read whole.
    """
    with _opened(path) as file:
        header = _header(path, file)
        _check_size(path, file)
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
    import soundfile  # not needed for synthesised speech, so imported only here

    try:
        yield
    # TypeError: soundfile wants to be told the format of a file that is named *.raw.
    except (OSError, TypeError, soundfile.SoundFileError) as error:
        raise InputError(f"{path}: {_why_unreadable(path, error)}") from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file with libsndfile, if it begins like audio; what it says becomes an InputError."""
    import soundfile

    with _reading(path):
        if not is_file(path):  # before it is opened: a pipe would wait for ever
            raise OSError("it is a pipe or a device, or its name is not possible")
        with path.open("rb") as start:
            if not _is_known(start.read(16)):
                raise OSError(UNKNOWN_FORMAT)
        # Encoded here, because soundfile fails on names that are not valid Unicode.
        name = os.fsencode(path) if os.name == "posix" else str(path)
        with soundfile.SoundFile(name) as file:
            yield file


def _is_known(start: bytes) -> bool:
    is_mpeg = int.from_bytes(start[:2], "big") & MPEG_SYNC == MPEG_SYNC
    return is_mpeg or start.startswith(KNOWN_STARTS)


def _decode(file: Any, frames: int) -> Wave:
    """Decode up to a number of frames to mono, block by block.

    Memory follows what is in the file, not what its header claims.
    """
    size = max(1, BLOCK // file.channels)
    blocks: list[Wave] = [np.zeros(0, np.float32)]
    while frames > 0:
        channels = file.read(min(frames, size), dtype="float32", always_2d=True)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks at the result
            blocks.append(channels.mean(axis=1, dtype=np.float32))
        if len(channels) < min(frames, size):
            break
        frames -= len(channels)
    return np.concatenate(blocks)


def _header(path: Path, file: Any) -> Header:
    if file.frames == UNKNOWN_LENGTH:
        raise InputError(
            f"{path}: the header gives no length, as in a file written through a pipe; "
            "convert it to a new file"
        )
    return Header(int(file.frames), _checked_rate(path, file.samplerate))


def _check_size(path: Path, file: Any) -> None:
    """Raise InputError for a file that would take too much memory as a whole."""
    _header(path, file)
    seconds = file.frames / file.samplerate
    if seconds > LONGEST_FILE or file.frames * file.channels > MOST_DECODED:
        raise InputError(
            f"{path}: has {seconds / 3600:.1f} h of audio in {file.channels} channels at "
            f"{file.samplerate} Hz, but at most {LONGEST_FILE // 3600} h of stereo at 48000 Hz can "
            "be read at once; cut the recording"
        )


def _checked_rate(path: Path, rate: int) -> int:
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise InputError(
            f"{path}: has a sampling rate of {rate} Hz, which is not between {LOWEST_RATE} and "
            f"{HIGHEST_RATE}"
        )
    return rate


def _why_unreadable(path: Path, error: Exception) -> str:
    if not path.exists():
        return "no such file"
    if path.is_dir():
        return "is a folder, not an audio file"
    reason = getattr(error, "error_string", str(error)).rstrip(".")
    if "does not exist" in reason:  # what libsndfile says about most files that are not MP3
        reason = UNKNOWN_FORMAT
    return f"cannot be read as audio ({reason}); use WAV, FLAC, OGG or MP3"
