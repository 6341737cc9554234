"""Data sets as people have them: which layout a path has, and what it lists.

A folder is closed: its tables must not name files outside it, except those of Kaldi, which usually
do. A table that is given by itself may name any file.
"""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from maxfactor_speech.data.audio import is_file
from maxfactor_speech.data.kaldi import is_kaldi, read_kaldi
from maxfactor_speech.data.recordings import LONGEST_TEXT, Recording
from maxfactor_speech.data.tables import (
    NEMO_COLUMN,
    Entry,
    read_csv,
    read_json_lines,
    read_lines,
    read_pipes,
    read_tsv,
    shown,
)
from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Part = Literal["train", "validation", "test"]

SUFFIXES = (".flac", ".wav", ".ogg", ".mp3")  # tried where a layout names files without one
PARTS: dict[str, Part] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
CLIPS = "clips"  # the folder of audio in Common Voice
COMMON_VOICE: dict[str, Part] = {
    "train.tsv": "train",
    "dev.tsv": "validation",
    "test.tsv": "test",
}
VALIDATED = "validated.tsv"  # contains the clips of the other three
TABLES = (".tsv", ".csv", ".json", ".jsonl")
NAMED = 5  # tables that a message names
METADATA = ("metadata.csv", "metadata.jsonl")
INVALID = re.compile("[\0\ud800-\udfff]")  # zeros and lone surrogates, which JSON can spell
ACCEPTED = (
    "a folder in the layout of LibriSpeech (*.trans.txt), Common Voice (train.tsv and clips/), "
    "audiofolder (metadata.csv or metadata.jsonl), LJSpeech (metadata.csv and wavs/) or Kaldi "
    "(wav.scp and text), or a .tsv, .csv, .json or .jsonl file with the columns path and text, "
    "alone in its folder or given by itself"
)


class DataSet(NamedTuple):
    """The recordings that a data set lists; whether they can be used is checked later."""

    layout: str
    train: list[Recording]
    validation: list[Recording] | None = None  # None if the data set has no such part

    @property
    def held_out(self) -> list[Recording]:
        """What to validate with, if this data set is given for validation."""
        return self.train if self.validation is None else self.validation


def find_data(path: Path) -> DataSet:
    """Recognise the layout of a data set, and list its recordings.

    Raises:
        InputError: If no layout fits, or if a table cannot be read. The message names the line.
    """
    try:
        found = _in_folder(path) if path.is_dir() else _in_file(path)
    except OSError as error:  # the name is too long, or a folder is not accessible
        raise InputError(f"{path}: cannot be read, {error.strerror}") from error
    if not found.train:
        raise InputError(
            f"{path}: lists no recordings; a line of a table has the path of an audio file and "
            "its text"
        )
    return found


def _in_folder(folder: Path) -> DataSet:
    if is_kaldi(folder):
        return DataSet("Kaldi", _recordings(read_kaldi(folder), folder))
    if (folder / CLIPS).is_dir() and _has(folder, *COMMON_VOICE, VALIDATED):
        return DataSet("Common Voice", *_common_voice(folder))
    tables = [table for sub in _part_folders(folder) if (table := _metadata(sub)) is not None]
    if tables:
        layout = "LJSpeech" if all(map(_is_ljspeech, tables)) else "audiofolder"
        return DataSet(layout, *_audiofolder(folder, tables))
    transcripts = sorted(filter(is_file, folder.rglob("*.trans.txt")))
    if transcripts:
        return DataSet("LibriSpeech", *_librispeech(folder, transcripts))
    found = [one for one in sorted(folder.iterdir()) if one.suffix.lower() in TABLES]
    tables = [one for one in found if is_file(one)]
    if not tables:
        raise InputError(f"{folder}: no known layout; it must be {ACCEPTED}")
    if len(tables) > 1:
        names = ", ".join(one.name for one in tables[:NAMED])
        more = ", …" if len(tables) > NAMED else ""
        raise InputError(
            f"{folder}: has several tables, {names}{more}; give one of them as the data, and "
            "another one with --validation if you like"
        )
    return _in_file(tables[0], folder)


def _has(folder: Path, *names: str) -> bool:
    """Whether a folder has one of some files."""
    return any((folder / name).is_file() for name in names)


def _in_file(path: Path, root: Path | None = None) -> DataSet:
    """Return the recordings of a table, which must be inside `root`, if it is given."""
    folder, suffix = path.parent, path.suffix.lower()
    if not path.is_file():
        raise InputError(f"{path}: no such file or folder")
    if _is_ljspeech(path):
        return DataSet("LJSpeech", _ljspeech(path, folder))
    if suffix in (".json", ".jsonl"):
        table = read_json_lines(path)
        layout = "NeMo manifest" if table.columns[0] == NEMO_COLUMN else "JSON lines"
    elif suffix == ".csv":
        table, layout = read_csv(path), "CSV"
    elif suffix == ".tsv":
        table, layout = read_tsv(path), "TSV"
        if table.columns == ("path", "sentence") and (folder / CLIPS).is_dir():
            clips = _recordings(table.entries, folder / CLIPS, folder)
            return DataSet("Common Voice", clips)
    else:
        raise InputError(f"{path}: no known layout; it must be {ACCEPTED}")
    return DataSet(layout, _recordings(table.entries, folder, root))


# ------------------------------------------------------------------------------------ layouts


def _common_voice(folder: Path) -> tuple[list[Recording], list[Recording] | None]:
    parts: dict[Part | None, list[Recording]] = {}
    for name, part in COMMON_VOICE.items():
        if (folder / name).is_file():
            parts[part] = _clips(folder / name)
    if "train" not in parts and (folder / VALIDATED).is_file():
        elsewhere = {one.path for found in parts.values() for one in found}
        validated = _clips(folder / VALIDATED)
        parts["train"] = [one for one in validated if one.path not in elsewhere]
    return _training_and_validation(parts)


def _clips(table: Path) -> list[Recording]:
    return _recordings(read_tsv(table).entries, table.parent / CLIPS, table.parent)


def _audiofolder(
    folder: Path, tables: Iterable[Path]
) -> tuple[list[Recording], list[Recording] | None]:
    """Read one table for the whole folder, or one in each folder of a part."""
    parts: dict[Part | None, list[Recording]] = {}
    for table in tables:
        for recording in _metadata_recordings(table, folder):
            parts.setdefault(_part_of(recording.path, folder), []).append(recording)
    return _training_and_validation(parts)


def _metadata_recordings(table: Path, root: Path) -> list[Recording]:
    if _is_ljspeech(table):
        return _ljspeech(table, root)
    read = read_csv if table.suffix == ".csv" else read_json_lines
    return _recordings(read(table).entries, table.parent, root)


def _metadata(folder: Path) -> Path | None:
    """Return the table of a folder, if it has one."""
    found = [folder / name for name in METADATA if (folder / name).is_file()]
    if len(found) > 1:
        raise InputError(f"{folder}: has {' and '.join(METADATA)}; give one of them as the data")
    return found[0] if found else None


def _part_folders(folder: Path) -> list[Path]:
    """Return a folder and its folders of parts, such as train/."""
    inside = (sub for sub in sorted(folder.iterdir()) if _part_named(sub.name) and sub.is_dir())
    return [folder, *inside]


def _is_ljspeech(table: Path) -> bool:
    """Whether a table is a metadata.csv of lines like `LJ001-0001|text`, beside wavs/.

    The first line must name a file there: a line of column names means another layout.
    """
    if table.suffix.lower() != ".csv" or not (table.parent / "wavs").is_dir():
        return False
    first = [Entry("", line.split("|")[0], "") for _, line in read_lines(table)[:1] if "|" in line]
    wavs = table.parent / "wavs"
    return any(is_file(wavs / one.audio) for one in _with_suffixes(first, wavs))


def _ljspeech(table: Path, root: Path) -> list[Recording]:
    wavs = table.parent / "wavs"
    return _recordings(_with_suffixes(read_pipes(table), wavs), wavs, root)


def _librispeech(
    folder: Path, transcripts: Iterable[Path]
) -> tuple[list[Recording], list[Recording] | None]:
    """Read files like `1089-134686.trans.txt`, with lines of name and text, beside the audio."""
    parts: dict[Part | None, list[Recording]] = {}
    for transcript in transcripts:
        # LibriSpeech is all upper case, which carries no information.
        split = ((number, line.partition(" ")) for number, line in read_lines(transcript))
        entries = [
            Entry(f"{transcript}:{number}", name, text.lower()) for number, (name, _, text) in split
        ]
        beside = transcript.parent
        found = _recordings(_with_suffixes(entries, beside), beside, folder)
        parts.setdefault(_part_of(transcript, folder), []).extend(found)
    return _training_and_validation(parts)


# -------------------------------------------------------------------------------------- parts


def _part_named(name: str) -> Part | None:
    """Return the part that a folder such as `train-clean-100` or `dev` contains."""
    return PARTS.get(re.split("[-_]", name.lower())[0])


def _part_of(path: Path, root: Path) -> Part | None:
    """Return the part that the topmost folder of a path inside `root` names."""
    inside = _plain(path).relative_to(_plain(root)).parts
    return _part_named(inside[0]) if len(inside) > 1 else None


def _training_and_validation(
    parts: Mapping[Part | None, list[Recording]],
) -> tuple[list[Recording], list[Recording] | None]:
    """Return the parts to train on and to validate with; without the former, all is one set."""
    if not parts.get("train"):
        return [one for found in parts.values() for one in found], None
    return [*parts["train"], *parts.get(None, [])], parts.get("validation") or None


# -------------------------------------------------------------------------------------- paths


def _with_suffixes(entries: Iterable[Entry], folder: Path) -> list[Entry]:
    """Add the suffix of the audio file to names that have none."""
    named = []
    for entry in entries:
        candidates = [f"{entry.audio}{suffix}" for suffix in ("", *SUFFIXES)]
        there = (name for name in candidates if is_file(folder / name))
        named.append(entry._replace(audio=next(there, candidates[1])))
    return named


def _recordings(
    entries: Iterable[Entry], folder: Path, root: Path | None = None
) -> list[Recording]:
    """Resolve paths relative to `folder`; they must stay inside `root`, if it is given."""
    return [
        Recording(_located(one, folder, root), _text(one), one.start, one.seconds, one.where)
        for one in entries
    ]


def _located(entry: Entry, folder: Path, root: Path | None) -> Path:
    where, audio = entry.where, entry.audio.strip()
    if not audio or not _is_valid(audio):
        raise InputError(f"{where}: must name an audio file, got {shown(entry.audio)}")
    if root is None:
        try:
            return folder / Path(audio).expanduser()
        except RuntimeError as error:  # of a user that does not exist
            raise InputError(f"{where}: {shown(audio)}: {error}") from error
    path = folder / audio
    # Most names are simple, and need no comparison, which takes long for many of them.
    if ".." not in audio and ":" not in audio and audio[0] not in "/\\":
        return path
    if not _plain(path).is_relative_to(_plain(root)):
        raise InputError(
            f"{where}: {shown(audio)} is outside the data set {root}; move it there, or list it in "
            "a table that you give by itself"
        )
    # What was compared is what is opened: `link/..` is not the folder that the link is in.
    return Path(os.path.normpath(path))


def _plain(path: Path) -> Path:
    """Return an absolute path without `..`; links are not followed, as audio often is one."""
    return Path(os.path.normpath(path.absolute()))


def _text(entry: Entry) -> str:
    if not _is_valid(entry.text):
        raise InputError(f"{entry.where}: the text is no valid Unicode, {shown(entry.text)}")
    text = " ".join(entry.text.split())
    if len(text) > LONGEST_TEXT:  # is left out; NFC takes quadratic time for rows of accents
        return text
    # NFC, as in the tokenizer: a letter with an accent is one character.
    return unicodedata.normalize("NFC", text)


def _is_valid(text: str) -> bool:
    return INVALID.search(text) is None
