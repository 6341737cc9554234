"""`maxfactor data`: look a data set over without training."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich import box
from rich.bar import Bar
from rich.columns import Columns
from rich.console import Console
from rich.table import Table

from maxfactor_speech.data.overview import look_over
from maxfactor_speech.data.screening import REASONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from maxfactor_speech.data.overview import Letter, Overview, Part
    from maxfactor_speech.data.screening import LeftOut

NAMED = 5  # recordings, texts and files of each kind that are named
CHARACTERS = 60  # that are shown
COLOUR = "cyan"


def show_data(data: Path, validation: Path | None, as_json: bool, decode: bool) -> bool:
    """Print what a data set contains; return whether it can be trained on."""
    overview = look_over(data, validation, decode)
    # No markup: transcripts and names of files may have square brackets.
    console = Console(markup=False, emoji=False, highlight=False)
    if as_json:
        console.file.write(json.dumps(overview.as_json(), indent=1) + "\n")
    else:
        for section in _sections(overview):
            console.print(section)
    return overview.is_usable


def _sections(overview: Overview) -> Iterator[RenderableType]:
    """Yield tables and lines of text."""
    yield f"layout: {overview.layout}"
    yield _parts(overview.train, overview.validation)
    yield f"validation: {overview.validation_from}"
    if overview.is_usable:
        yield _lengths(overview.train)
        yield from _characters(overview.train.letters)
    yield from _duplicates(overview)
    yield from _left_out(overview.left_out, overview.total)


def _parts(*parts: Part) -> Table:
    table = _table("", "training", "validation")
    for number in (1, 2):
        table.columns[number].justify = "right"
    for name, values in zip(_FIGURES, zip(*map(_figures, parts), strict=True), strict=True):
        table.add_row(name, *values)
    return table


_FIGURES = ("recordings", "hours", "sampling rates", "words", "different words", "longest text")


def _figures(part: Part) -> tuple[str, ...]:
    rates = ", ".join(f"{rate / 1000:g} kHz" for rate in part.rates)
    return (
        f"{part.recordings:,}",
        f"{part.hours:,.2f}",
        rates or "none",
        f"{part.words:,}",
        f"{part.different_words:,}",
        f"{len(part.longest_text):,} characters",
    )


def _lengths(part: Part) -> Table:
    table = _table("length", "recordings", "", expand=True)
    table.columns[1].justify = "right"
    table.columns[2].ratio = 1
    most = max(count for _, count in part.lengths)
    for span, count in part.lengths:
        table.add_row(span, f"{count:,}", Bar(most, 0, count, color=COLOUR))
    return table


def _characters(letters: Sequence[Letter]) -> Iterator[RenderableType]:
    """Yield the alphabet, and a line for each unusual character."""
    usual = [f"{_visible(one.character)} {one.count:,}" for one in letters if not one.unusual]
    unusual = [one for one in letters if one.unusual]
    yield f"{len(letters):,} characters, {len(unusual):,} of them unusual:"
    more = [f"and {len(usual) - CHARACTERS:,} more"] if len(usual) > CHARACTERS else []
    yield Columns([*usual[:CHARACTERS], *more], padding=(0, 2))
    for one in unusual[:NAMED]:
        name = f"{_visible(one.character)} (U+{ord(one.character):04X})"
        yield f"unusual: {name}, {one.count:,} times, {one.unusual}"
    if len(unusual) > NAMED:
        yield f"unusual: {len(unusual) - NAMED:,} more; --json lists all"


def _visible(character: str) -> str:
    return "␣" if character == " " else character if character.isprintable() else "�"


def _duplicates(overview: Overview) -> Iterator[str]:
    for what, found in (
        ("texts", [repr(text) for text in overview.same_texts]),
        ("audio files", [f"{one} = {other}" for one, other in overview.same_audio]),
    ):
        if found:
            yield f"{len(found):,} {what} are in training and in validation: {_some(found)}"


def _left_out(left_out: Sequence[LeftOut], total: int) -> Iterator[RenderableType]:
    if not left_out:
        yield f"\nnothing is left out of {total:,} recordings"
        return
    yield f"\nleft out: {len(left_out):,} of {total:,} recordings"
    table = _table("reason", "recordings", "the first of them")
    table.columns[1].justify = "right"
    table.columns[2].overflow = "fold"  # paths can be longer than a line
    for reason in REASONS:
        details = [one.detail for one in left_out if one.reason == reason]
        if details:
            table.add_row(reason, f"{len(details):,}", "\n".join(details[:NAMED]))
    yield table


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


def _table(*headers: str, expand: bool = False) -> Table:
    return Table(*headers, box=box.SIMPLE_HEAD, expand=expand, pad_edge=False)
