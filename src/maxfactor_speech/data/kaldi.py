"""Kaldi's data directories: `wav.scp`, `text` and, if there is one, `segments`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from maxfactor_speech.data.tables import Entry, read_lines, seconds, shown
from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

AUDIO, TEXT, SEGMENTS = "wav.scp", "text", "segments"
ARCHIVE = re.compile(r"\.ark:\d+$")
TO_THE_END = "-1"  # as the end of a segment

T = TypeVar("T")


class _Line(NamedTuple):
    where: str
    value: str


class _Segment(NamedTuple):
    file: str  # its name in wav.scp
    start: float = 0.0
    seconds: float | None = None


def is_kaldi(folder: Path) -> bool:
    """Whether a folder is a data directory of Kaldi."""
    return (folder / AUDIO).is_file() and (folder / TEXT).is_file()


def read_kaldi(folder: Path) -> list[Entry]:
    """List the utterances; those that `text` does not contain have an empty text here."""
    files = {name: _file(line) for name, line in _read_map(folder / AUDIO).items()}
    texts = _read_map(folder / TEXT)
    segments, listing = {name: _Segment(name) for name in files}, AUDIO
    if (folder / SEGMENTS).is_file():
        lines = _read_map(folder / SEGMENTS)
        segments, listing = {name: _segment(line) for name, line in lines.items()}, SEGMENTS
    untold = {name: _Line(f"{folder / listing}", "") for name in segments if name not in texts}
    entries = []
    for name, (where, text) in {**texts, **untold}.items():
        segment = _found(segments, name, where, listing)
        file = _found(files, segment.file, where, AUDIO)
        entries.append(Entry(where, file, text, segment.start, segment.seconds))
    return entries


def _found(table: Mapping[str, T], name: str, where: str, listing: str) -> T:
    if name not in table:
        raise InputError(
            f"{where}: {shown(name)} has no line in {listing}; repair the folder with Kaldi's "
            "fix_data_dir.sh"
        )
    return table[name]


def _read_map(path: Path) -> dict[str, _Line]:
    """Read lines of a name and a value, separated by white space."""
    found: dict[str, _Line] = {}
    for number, line in read_lines(path):
        name, *rest = line.split(maxsplit=1)
        where = f"{path}:{number}"
        if name in found:
            raise InputError(f"{where}: {shown(name)} is listed twice; delete one of the lines")
        found[name] = _Line(where, rest[0].strip() if rest else "")
    return found


def _file(line: _Line) -> str:
    where, value = line
    if value.endswith("|"):
        raise InputError(
            f"{where}: {shown(value)} is a command, and commands are not run; write its output to "
            "an audio file, and list that file"
        )
    if ARCHIVE.search(value):
        raise InputError(
            f"{where}: {shown(value)} is in an archive of Kaldi; extract it to an audio file, and "
            "list that file"
        )
    return value


def _segment(line: _Line) -> _Segment:
    where, value = line
    cells = value.split()
    if len(cells) != 3:
        raise InputError(
            f"{where}: must be utterance, recording, start and end in seconds; got {shown(value)}; "
            "was the file written completely?"
        )
    file, start, end = cells[0], seconds(where, "start", cells[1]) or 0.0, cells[2]
    if end == TO_THE_END:
        return _Segment(file, start)
    until = seconds(where, "end", end) or 0.0
    if until <= start:
        raise InputError(f"{where}: the segment must end after its start, got {shown(value)}")
    return _Segment(file, start, until - start)
