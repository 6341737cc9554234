"""Tables of recordings: TSV, CSV and JSON lines.

What cannot be read is an InputError that names the file and the line.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from maxfactor_speech.data.audio import is_file
from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

AUDIO_COLUMNS = ("path", "file", "audio", "file_name", "filename", "audio_filepath", "wav")
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript", "normalized_text")
NEMO_COLUMN = "audio_filepath"
BARE_COLUMNS = ("path", "text")  # of a TSV file without names
# They cut a part out of a recording, so they must not be ignored.
OTHER_SPANS = ("start", "end", "start_time", "end_time")
DELIMITERS = (",", ";", "\t")
AUDIO_SUFFIXES = (".flac", ".wav", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".aiff", ".au")
LARGEST = 2 * 2**30  # bytes of a table
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark is its beginning
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class Table(NamedTuple):
    """The lines of a table, and the names of its columns of audio and text."""

    columns: tuple[str, str]
    entries: list[Entry]


class Entry(NamedTuple):
    """What a line of a table says."""

    where: str  # file and line
    audio: str
    text: str
    start: float = 0.0  # seconds into the file
    seconds: float | None = None  # None: to the end of the file


EMPTY = Table(("", ""), [])


def read_tsv(path: Path) -> Table:
    """Read lines of cells separated by tabs; quotation marks are text.

    A first line of column names is found by its names. Without it, the cells are path and text.
    """
    rows = [(number, line.split("\t")) for number, line in read_lines(path)]
    if not rows:
        return EMPTY
    (first, header), *others = rows
    if _columns(header) is not None:
        return _table(path, header, others)
    if not (header[0].lower().endswith(AUDIO_SUFFIXES) or is_file(path.parent / header[0])):
        raise InputError(f"{path}:{first}: {_no_columns(header)}")
    return Table(BARE_COLUMNS, [_bare_entry(f"{path}:{number}", row) for number, row in rows])


def read_csv(path: Path) -> Table:
    """Read a table with a line of column names, separated by commas, semicolons or tabs."""
    text = read_text(path)
    headers: list[tuple[int, list[str]]] = []
    failure: InputError | None = None
    for delimiter in DELIMITERS:
        rows = _csv_rows(path, text, delimiter)
        try:
            headers += [next(rows)]
        except StopIteration:
            return EMPTY
        except InputError as error:  # quotation marks beside another delimiter
            failure = error
        else:
            if _columns(headers[-1][1]) is not None:
                return _table(path, headers[-1][1], rows)
    if failure is not None and not headers:
        raise failure
    number, header = max(headers, key=lambda numbered: len(numbered[1]))
    raise InputError(f"{path}:{number}: {_no_columns(header)}")


def read_json_lines(path: Path) -> Table:
    """Read one JSON object per line, with the names of columns as keys."""
    table = EMPTY
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        fields = _json_object(where, line)
        columns = _columns(list(fields))
        if columns is None:
            raise InputError(f"{where}: {_no_columns(list(fields))}")
        table = table if table.entries else Table(columns, [])
        table.entries.append(_entry(where, fields, columns))
    return table


def read_pipes(path: Path) -> list[Entry]:
    """Read lines of name, text and normalised text, separated by `|`, as LJSpeech has them."""
    entries = []
    for number, line in read_lines(path):
        name, *texts = line.split("|")
        if not texts:
            raise InputError(f"{path}:{number}: must be name|text, got {shown(line)}")
        normalised = texts[1] if len(texts) > 1 else ""
        entries.append(Entry(f"{path}:{number}", name.strip(), normalised or texts[0]))
    return entries


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers; only newlines end a line."""
    text = read_text(path)
    lines = enumerate(text.split("\n" if "\n" in text else "\r"), 1)
    return [(number, line.rstrip("\r")) for number, line in lines if line.strip()]


def read_text(path: Path) -> str:
    """Return the content of a file in UTF-8, or in the encoding of its byte-order mark."""
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise InputError(
                f"{path}: has {size / 2**30:.1f} GiB, but a table may have at most "
                f"{LARGEST // 2**30}; split it"
            )
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read, {error.strerror}") from error
    marks = (mark for mark in BYTE_ORDER_MARKS if content.startswith(mark))
    encoding = BYTE_ORDER_MARKS.get(next(marks, b""), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(
            f"{path}:{line}: cannot be read as text in {encoding.upper()} ({error.reason}); "
            "save it as UTF-8"
        ) from error
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise InputError(
            f"{path}:{line}: contains zero bytes, as UTF-16 without a byte-order mark does; "
            "save it as UTF-8"
        )
    return text


def seconds(where: str, name: str, value: object) -> float | None:
    """Return a time of a table; None and an empty cell are None."""
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise InputError(
            f"{where}: {name} must be seconds, finite and not negative, got {shown(value)}"
        )
    return number


def shown(value: object) -> str:
    """Return a value for a message, not longer than a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _table(path: Path, header: Sequence[str], rows: Iterable[tuple[int, list[str]]]) -> Table:
    names = _normal(header)
    columns = _columns(header)
    assert columns is not None
    table = Table(columns, [])
    for number, row in rows:
        if len(row) != len(names):
            raise InputError(f"{path}:{number}: {_wrong_width(path, len(row), len(names))}")
        # Reversed, so that the first of two columns with the same name is used.
        fields = zip(reversed(names), reversed(row), strict=True)
        table.entries.append(_entry(f"{path}:{number}", dict(fields), columns))
    return table


def _columns(header: Sequence[str]) -> tuple[str, str] | None:
    """Return the names of the columns of audio and text, or None if one of them is missing."""
    names = _normal(header)
    audio = next((name for name in AUDIO_COLUMNS if name in names), None)
    text = next((name for name in TEXT_COLUMNS if name in names), None)
    return None if audio is None or text is None else (audio, text)


def _entry(where: str, fields: Mapping[str, Any], columns: tuple[str, str]) -> Entry:
    for name in columns:
        if not isinstance(fields[name], str):
            raise InputError(f"{where}: {name} must be a text, got {shown(fields[name])}")
    audio, text = (fields[name] for name in columns)
    return Entry(where, audio, text, *_span(where, fields))


def _span(where: str, fields: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return start and length of the part of the file that is meant."""
    for name in OTHER_SPANS:
        if name in fields:
            raise InputError(
                f"{where}: {name} is not supported; give a part of a recording by the columns "
                "offset and duration, in seconds"
            )
    offset = seconds(where, "offset", fields.get("offset"))
    if offset is None and NEMO_COLUMN not in fields:  # a duration alone describes the file
        return 0.0, None
    return offset or 0.0, seconds(where, "duration", fields.get("duration"))


def _bare_entry(where: str, row: Sequence[str]) -> Entry:
    if len(row) < 2:
        raise InputError(f"{where}: must be a path, a tab and a text, got {shown(row[0])}")
    if any(cell.strip() for cell in row[2:]):
        raise InputError(
            f"{where}: has {len(row)} columns; write their names, such as path and text, into the "
            "first line"
        )
    return Entry(where, row[0], row[1])


def _json_object(where: str, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f'{where}: must be a JSON object such as {{"path": …, "text": …}}, one for each line; '
            f"got {shown(line)}; was the file written completely?"
        ) from error
    if not isinstance(entry, dict):
        raise InputError(
            f'{where}: must be {{"path": …, "text": …}}, one for each line; got {shown(line)}'
        )
    return dict(zip(_normal(list(entry)), entry.values(), strict=True))


def _csv_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not blank, with the number of their first line."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        first = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputError(
                f"{path}:{first}: cannot be read as CSV, {error}; check the quotation marks, and "
                "that the file was written completely"
            ) from error
        if row is None:
            return
        if any(cell.strip() for cell in row):
            yield first, row


def _normal(header: Sequence[str]) -> list[str]:
    return [name.strip().casefold() for name in header]


def _no_columns(found: Sequence[str]) -> str:
    return (
        f"the columns are {shown(list(found))}; one must be named {_either(AUDIO_COLUMNS)}, and "
        f"one {_either(TEXT_COLUMNS)}"
    )


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _wrong_width(path: Path, found: int, expected: int) -> str:
    if found < expected:
        remedy = "was the file written completely?"
    elif path.suffix.lower() == ".csv":
        remedy = "put texts with separators into quotation marks"
    else:
        remedy = "a text must not contain tabs"
    return f"has {found} columns, but the first line has {expected}; {remedy}"
