"""`maxfactor data`: look a data set over without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.bar import Bar
from rich.columns import Columns
from rich.console import Console
from rich.table import Table

from maxfactor_speech.data.overview import look_over
from maxfactor_speech.data.screening import LONGEST, REASONS
from maxfactor_speech.training.model import SIZES, longest_audio
from maxfactor_speech.training.model_folder import load_outline
from maxfactor_speech.training.recogniser import with_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from maxfactor_speech.data.overview import Letter, Overview, Part, Unspelled
    from maxfactor_speech.data.screening import LeftOut
    from maxfactor_speech.data.tokens import TextLimit

NAMED = 5  # recordings, texts and files of each kind that are named
CHARACTERS = 60  # that are shown
COLOUR = "cyan"


def show_data(
    data: Path, validation: Path | None, as_json: bool, decode: bool, model: str | None = None
) -> bool:
    """Print what a data set contains; return whether it can be trained on."""
    overview = look_over(data, validation, decode, *_limits(model))
    # No markup: transcripts and names of files may have square brackets.
    console = Console(markup=False, emoji=False, highlight=False)
    if as_json:
        console.file.write(json.dumps(overview.as_json(), indent=1) + "\n")
    else:
        for section in _sections(overview):
            console.print(section)
    return overview.is_usable


def _limits(model: str | None) -> tuple[float, TextLimit | None]:
    """Return the longest audio and texts of a model; a new one is made for all texts."""
    if model is None or model in SIZES:
        return LONGEST, None
    found = load_outline(Path(model))
    if found.is_multilingual:  # any language makes the prompt as long
        known = [token[2:-2] for token in found.generation.lang_to_id]
        found = with_prompt(found, found.language or known[0], None, model)
    return longest_audio(found.model), found.text_limit


def _sections(overview: Overview) -> Iterator[RenderableType]:
    """Yield tables and lines of text."""
    yield f"layout: {overview.layout}"
    yield _parts(overview.train, overview.validation)
    yield f"validation: {overview.validation_from}"
    if overview.is_usable:
        yield _lengths(overview.train)
        yield from _characters(overview.train.letters)
    yield from _duplicates(overview)
    yield from _unspelled(overview.unspelled)
    yield from _left_out(overview.left_out, overview.total)


def _parts(*parts: Part) -> Table:
    table = _table("", "training", "validation")
    for number in (1, 2):
        table.columns[number].justify = "right"
    for name, values in zip(_FIGURES, zip(*map(_figures, parts), strict=True), strict=True):
        table.add_row(name, *values)
    return table


_FIGURES = ("recordings", "duration", "sampling rates", "words", "different words", "longest text")


def _figures(part: Part) -> tuple[str, ...]:
    rates = ", ".join(f"{rate / 1000:g} kHz" for rate in part.rates)
    return (
        f"{part.recordings:,}",
        _duration(part.hours),
        rates or "none",
        f"{part.words:,}",
        f"{part.different_words:,}",
        f"{len(part.longest_text):,} characters",
    )


def _duration(hours: float) -> str:
    """Return hours, or minutes or seconds if there are few."""
    if hours >= 1.0:
        return f"{hours:,.1f} hours"
    return f"{60.0 * hours:.1f} minutes" if hours >= 1 / 60 else f"{3600.0 * hours:.1f} s"


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


def _unspelled(found: Sequence[Unspelled]) -> Iterator[str]:
    if found:
        missing = sorted({repr(one) for text in found for one in text.missing})
        names = _some([text.recording.path.name for text in found])
        yield f"{len(found):,} texts have what the model has no token for: {_some(missing)}"
        yield f"a training with it refuses them: {names}"


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
