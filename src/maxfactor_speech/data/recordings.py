"""A user's own recordings: a folder in LibriSpeech's layout, or a list of files and texts.

Everything that can be seen without decoding the audio is checked before a training starts.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from maxfactor_speech.data.audio import SAMPLE_RATE, InputError, read, samples_in, to_samples
from maxfactor_speech.data.corpus import VALIDATION_SHARE
from maxfactor_speech.data.shards import Spoken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from maxfactor_speech.training.model import Codec

AUDIO_SUFFIXES = (".flac", ".wav", ".ogg")
LONGEST = 30  # seconds, the most that Whisper listens to at once


@dataclass(frozen=True)
class Recording:
    """A file and what is said in it."""

    path: Path
    text: str


class Files:
    """Utterances in audio files, by number; headers are read now, the audio when asked for.

    Args:
        recordings: Files and texts.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings = list(recordings)
        self.lengths = np.array([_checked_length(one) for one in self.recordings], np.int32)

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, number: int) -> Spoken:
        recording = self.recordings[number]
        return Spoken(to_samples(read(recording.path)), recording.text)

    def text(self, number: int) -> str:
        """What is said, without reading the audio."""
        return self.recordings[number].text


def find_recordings(path: Path) -> list[Recording]:
    """List the recordings of a folder in LibriSpeech's layout, or of a TSV or JSONL file."""
    if path.is_dir():
        recordings = list(_librispeech(path))
        if not recordings:
            raise InputError(
                f"{path}: no *.trans.txt below this folder, which is how LibriSpeech names its "
                "texts; give a TSV or JSONL file of path and text instead"
            )
    elif not path.exists():
        raise InputError(f"{path}: no such file or folder")
    elif path.suffix == ".jsonl":
        recordings = list(_jsonl(path))
    elif path.suffix == ".tsv":
        recordings = list(_tsv(path))
    else:
        raise InputError(f"{path}: must be a folder, or a .tsv or .jsonl file of path and text")
    if not recordings:
        raise InputError(f"{path}: lists no recordings")
    return recordings


def held_out(recordings: Iterable[Recording]) -> tuple[list[Recording], list[Recording]]:
    """Split into training and validation, one in twenty, by the text: it never is in both."""
    train: list[Recording] = []
    validation: list[Recording] = []
    for recording in recordings:
        digest = hashlib.blake2b(recording.text.encode(), digest_size=8).digest()
        kept_back = int.from_bytes(digest, "big") < VALIDATION_SHARE * 2**64
        (validation if kept_back else train).append(recording)
    if not (train and validation):
        texts = len({recording.text for recording in train + validation})
        raise InputError(
            f"only {len(train) + len(validation)} recordings of {texts} texts, too few to keep "
            "texts back for validation; name others with --validation"
        )
    return train, validation


def check_texts(recordings: Iterable[Recording], codec: Codec, max_tokens: int) -> None:
    """Refuse a text that the model's tokens cannot spell, or that is longer than it can write."""
    for recording in recordings:
        missing = codec.missing(recording.text)
        if missing:
            raise InputError(
                f"{recording.path}: its text has {', '.join(map(repr, missing[:5]))}, "
                "which the model has no token for"
            )
        tokens = len(codec.encode(recording.text))
        if tokens > max_tokens:
            raise InputError(
                f"{recording.path}: its text has {tokens} tokens, the model takes {max_tokens}"
            )


def _librispeech(folder: Path) -> Iterator[Recording]:
    """`1089-134686.trans.txt` holds lines of name and text; the audio lies beside it."""
    for transcript in sorted(folder.rglob("*.trans.txt")):
        for number, line in _lines(transcript):
            name, _, text = line.partition(" ")
            candidates = [transcript.parent / f"{name}{suffix}" for suffix in AUDIO_SUFFIXES]
            path = next((path for path in candidates if path.exists()), candidates[0])
            # Capitals throughout tell nothing, and a model would have to learn both.
            yield _recording(path, text.lower(), f"{transcript}:{number}")


def _jsonl(path: Path) -> Iterator[Recording]:
    for number, line in _lines(path):
        where = f"{path}:{number}"
        try:
            entry = json.loads(line)
            audio, text = entry["path"], entry["text"]
            if not (isinstance(audio, str) and isinstance(text, str)):
                raise TypeError(line)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f'{where}: must be {{"path": …, "text": …}}, got {line!r}') from error
        yield _recording(_beside(path, audio), text, where)


def _tsv(path: Path) -> Iterator[Recording]:
    for number, line in _lines(path):
        where, row = f"{path}:{number}", line.split("\t")  # quotation marks are text
        if number == 1 and row[:2] == ["path", "text"]:
            continue
        if len(row) < 2:
            raise InputError(f"{where}: must be a path, a tab and a text, got {row!r}")
        yield _recording(_beside(path, row[0]), row[1], where)


def _recording(path: Path, text: str, where: str) -> Recording:
    if not text.split():
        raise InputError(f"{where}: the transcript of {path} is empty")
    if not path.exists():  # or something that is no path, as in a heading
        raise InputError(f"{where}: {path}: no such file")
    # A letter with an accent is one letter, however it is written, as for the tokenizer.
    return Recording(path, unicodedata.normalize("NFC", " ".join(text.split())))


def _beside(listing: Path, audio: str) -> Path:
    """Paths in a list are relative to it."""
    return listing.parent / Path(audio).expanduser()


def _lines(path: Path) -> list[tuple[int, str]]:
    """Lines with something in them, and their numbers; what ends them is a newline alone."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without the mark of some editors
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text, {error}") from error
    lines = enumerate(text.split("\n"), 1)
    return [(number, line) for number, line in lines if line.strip()]


def _checked_length(recording: Recording) -> int:
    samples = samples_in(recording.path)
    if samples == 0:
        raise InputError(f"{recording.path}: holds no audio")
    if samples > LONGEST * SAMPLE_RATE:
        raise InputError(
            f"{recording.path}: {samples / SAMPLE_RATE:.1f} s long, Whisper takes {LONGEST} at most"
        )
    return samples
