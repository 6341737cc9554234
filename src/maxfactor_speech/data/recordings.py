"""The user's own recordings: a folder in LibriSpeech's layout, or a list of files and texts.

Everything that can be checked without decoding the audio is checked before a training starts.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from maxfactor_speech.data.audio import SAMPLE_RATE, read, samples_in, to_samples
from maxfactor_speech.data.corpus import split_of
from maxfactor_speech.data.shards import Utterance
from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from maxfactor_speech.data.tokens import Codec

AUDIO_SUFFIXES = (".flac", ".wav", ".ogg")
LONGEST = 30  # seconds, the longest audio that Whisper takes


@dataclass(frozen=True)
class Recording:
    """An audio file and its transcript."""

    path: Path
    text: str


class RecordedUtterances:
    """Utterances in audio files. Headers are read at once, the audio when it is needed.

    Args:
        recordings: Files and transcripts.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings = list(recordings)
        self.lengths = np.array([_checked_length(one) for one in self.recordings], np.int32)

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, number: int) -> Utterance:
        recording = self.recordings[number]
        return Utterance(to_samples(read(recording.path)), recording.text)

    def text(self, number: int) -> str:
        """Return the transcript without reading the audio."""
        return self.recordings[number].text


def find_recordings(path: Path) -> list[Recording]:
    """List the recordings of a folder in LibriSpeech's layout, or of a TSV or JSONL file."""
    if path.is_dir():
        recordings = list(_librispeech(path))
        if not recordings:
            raise InputError(
                f"{path}: this folder has no *.trans.txt, where LibriSpeech keeps transcripts; "
                "give a TSV or JSONL file of path and text instead"
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


def split_recordings(recordings: Iterable[Recording]) -> tuple[list[Recording], list[Recording]]:
    """Split into training and validation, about one in twenty, with no transcript in both."""
    train: list[Recording] = []
    validation: list[Recording] = []
    for recording in recordings:
        (train if split_of(recording.text) == "train" else validation).append(recording)
    if not (train and validation):
        texts = len({recording.text for recording in train + validation})
        raise InputError(
            f"only {len(train) + len(validation)} recordings of {texts} texts, too few to split "
            "off a validation set; give one with --validation"
        )
    return train, validation


def check_texts(recordings: Iterable[Recording], codec: Codec, max_tokens: int) -> None:
    """Raise InputError for a transcript that the tokens cannot spell, or that is too long."""
    for recording in recordings:
        missing = codec.missing(recording.text)
        if missing:
            raise InputError(
                f"{recording.path}: the model has no token for "
                f"{', '.join(map(repr, missing[:5]))} in its transcript"
            )
        tokens = len(codec.encode(recording.text))
        if tokens > max_tokens:
            raise InputError(
                f"{recording.path}: its transcript has {tokens} tokens, but the model takes at "
                f"most {max_tokens}"
            )


def _librispeech(folder: Path) -> Iterator[Recording]:
    """Read files like `1089-134686.trans.txt`, with lines of name and text, beside the audio."""
    for transcript in sorted(folder.rglob("*.trans.txt")):
        for number, line in _lines(transcript):
            name, _, text = line.partition(" ")
            candidates = [transcript.parent / f"{name}{suffix}" for suffix in AUDIO_SUFFIXES]
            path = next((path for path in candidates if path.exists()), candidates[0])
            # LibriSpeech is all upper case, which carries no information.
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
        yield _recording(_resolve(path, audio), text, where)


def _tsv(path: Path) -> Iterator[Recording]:
    for number, line in _lines(path):
        where, row = f"{path}:{number}", line.split("\t")  # no csv: quotation marks are text
        if number == 1 and row[:2] == ["path", "text"]:
            continue
        if len(row) < 2:
            raise InputError(f"{where}: must be a path, a tab and a text, got {row!r}")
        yield _recording(_resolve(path, row[0]), row[1], where)


def _recording(path: Path, text: str, where: str) -> Recording:
    if not text.split():
        raise InputError(f"{where}: the transcript of {path} is empty")
    if not path.exists():  # or the line is a heading
        raise InputError(f"{where}: {path}: no such file")
    # NFC, as in the tokenizer: a letter with an accent is one character.
    return Recording(path, unicodedata.normalize("NFC", " ".join(text.split())))


def _resolve(listing: Path, audio: str) -> Path:
    """Resolve a path relative to the list that contains it."""
    return listing.parent / Path(audio).expanduser()


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers; only newlines end a line."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text, {error}") from error
    lines = enumerate(text.split("\n"), 1)
    return [(number, line) for number, line in lines if line.strip()]


def _checked_length(recording: Recording) -> int:
    samples = samples_in(recording.path)
    if samples == 0:
        raise InputError(f"{recording.path}: contains no audio")
    if samples > LONGEST * SAMPLE_RATE:
        seconds = samples / SAMPLE_RATE
        raise InputError(
            f"{recording.path}: {seconds:.1f} s long, but Whisper takes at most {LONGEST} s"
        )
    return samples
