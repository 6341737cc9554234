"""Which recordings can be used, by the headers of their files, and which are left out and why.

The result depends on the files only, so all processes of a training keep the same recordings.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from maxfactor_speech.data.audio import (
    OVERSHOOT,
    SAMPLE_RATE,
    Header,
    check_complete,
    is_file,
    read,
    read_header,
    resampled_length,
)
from maxfactor_speech.data.recordings import LONGEST_TEXT
from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from maxfactor_speech.data.recordings import Recording
    from maxfactor_speech.data.tokens import TextLimit

LONGEST = 30  # seconds, the longest audio that Whisper takes
LEFT_OUT = "left-out.tsv"  # in the folder of a training
REASONS = ("missing", "damaged", "no audio", "too long", "outside the file", "no transcript")
NAMED = 3  # recordings that a summary names for each reason
THREADS = 8  # reading a header mostly waits for the disk


class LeftOut(NamedTuple):
    """A recording that cannot be used."""

    recording: Recording
    reason: str  # one of REASONS
    detail: str  # one line that names the file


class Screened(NamedTuple):
    """The recordings that can be used, with their lengths, and the others."""

    kept: list[Recording]
    left_out: list[LeftOut]


def screen(recordings: Sequence[Recording], longest: float = LONGEST) -> Screened:
    """Read the headers, and separate the recordings that can be used from the others.

    Args:
        recordings: What a data set lists.
        longest: The longest audio that the model takes, in seconds.
    """
    paths = list(dict.fromkeys(one.path for one in recordings if one.text))
    with ThreadPoolExecutor(THREADS) as pool:
        headers = dict(zip(paths, pool.map(_header, paths), strict=True))
    return _sorted(
        _measured(one, headers[one.path] if one.text else None, longest) for one in recordings
    )


def screen_texts(recordings: Sequence[Recording], limit: TextLimit) -> Screened:
    """Leave out recordings whose transcript has more tokens than the model takes."""
    return _sorted(_with_text(one, limit) for one in recordings)


def screen_decoded(recordings: Sequence[Recording]) -> Screened:
    """Decode recordings whose headers have been read; leave out those that are damaged."""
    with ThreadPoolExecutor(THREADS) as pool:
        return _sorted(pool.map(_decoded, recordings))


def screen_shortest(recordings: Sequence[Recording]) -> Screened:
    """Leave out the shortest recordings as long as they are damaged.

    Then a recording that turns out to be damaged can be replaced by one that is not longer.
    """
    left_out: list[LeftOut] = []
    for recording in sorted(recordings, key=lambda one: one.samples):
        result = _decoded(recording)
        if not isinstance(result, LeftOut):
            break
        left_out.append(result)
    dropped = {id(one.recording) for one in left_out}
    return Screened([one for one in recordings if id(one) not in dropped], left_out)


def summary(left_out: Sequence[LeftOut], total: int) -> str:
    """Return one line about the recordings that are left out."""
    counts = Counter(one.reason for one in left_out)
    parts = [f"{counts[name]} {name} ({_some(left_out, name)})" for name in REASONS if counts[name]]
    return f"{len(left_out)} of {total} recordings are left out: {', '.join(parts)}"


def left_out_table(left_out: Iterable[LeftOut]) -> bytes:
    """Return the recordings that are left out as a TSV file."""
    rows = [("path", "reason", "detail", "listed in")]
    rows += [(str(r.path), reason, detail, r.where) for r, reason, detail in left_out]
    lines = ("\t".join(" ".join(cell.split()) for cell in row) for row in rows)
    return "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")


def _some(left_out: Iterable[LeftOut], reason: str) -> str:
    names = [one.recording.path.name for one in left_out if one.reason == reason]
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


def _sorted(results: Iterable[Recording | LeftOut]) -> Screened:
    screened = Screened([], [])
    for result in results:
        if isinstance(result, LeftOut):
            screened.left_out.append(result)
        else:
            screened.kept.append(result)
    return screened


class _Unusable(NamedTuple):
    reason: str
    detail: str


def _header(path: Path) -> Header | _Unusable:
    if not is_file(path):
        return _Unusable("missing", f"{path}: no such file")
    try:
        check_complete(path)
        return read_header(path)
    except InputError as error:
        return _Unusable("damaged", str(error))


def _measured(
    recording: Recording, header: Header | _Unusable | None, longest: float
) -> Recording | LeftOut:
    """Return a recording with its length, or why it cannot be used."""
    path, start, seconds = recording.path, recording.start, recording.seconds
    if header is None:
        return LeftOut(recording, "no transcript", f"{path}: its transcript is empty")
    if isinstance(header, _Unusable):
        return LeftOut(recording, *header)
    if len(recording.text) > LONGEST_TEXT:
        detail = f"its transcript has {len(recording.text)} characters, more than {LONGEST_TEXT}"
        return LeftOut(recording, "too long", f"{path}: {detail}")
    if recording.is_part and start + (seconds or 0.0) > header.seconds + OVERSHOOT:
        detail = f"{path}: ends at {header.seconds:.1f} s, but the table goes on to "
        return LeftOut(recording, "outside the file", f"{detail}{start + (seconds or 0.0):.1f} s")
    first = round(start * header.rate)
    last = header.frames if seconds is None else round((start + seconds) * header.rate)
    samples = resampled_length(min(last, header.frames) - first, header.rate, SAMPLE_RATE)
    if samples <= 0:
        return LeftOut(recording, "no audio", f"{path}: contains no audio")
    if samples > longest * SAMPLE_RATE:
        detail = f"{samples / SAMPLE_RATE:.1f} s long, but the model takes at most {longest:g} s"
        return LeftOut(recording, "too long", f"{path}: {detail}")
    return replace(recording, samples=samples, rate=header.rate)


def _with_text(recording: Recording, limit: TextLimit) -> Recording | LeftOut:
    tokens = limit.excess(recording.text)
    if tokens is None:
        return recording
    detail = f"its transcript has {tokens} tokens, but the model takes at most {limit.most}"
    return LeftOut(recording, "too long", f"{recording.path}: {detail}")


def _decoded(recording: Recording) -> Recording | LeftOut:
    """Return a recording, or why it cannot be decoded."""
    try:
        read(recording.path, recording.start, recording.samples)
    except InputError as error:
        return LeftOut(recording, "damaged", str(error))
    return recording
