"""The user's own data: what is trained on, what validates, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from maxfactor_speech.data.layouts import find_data
from maxfactor_speech.data.recordings import RecordedUtterances, split_recordings
from maxfactor_speech.data.screening import (
    LONGEST,
    LeftOut,
    Screened,
    screen,
    screen_decoded,
    screen_shortest,
    screen_texts,
    summary,
)
from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from maxfactor_speech.data.recordings import Recording
    from maxfactor_speech.data.tokens import TextLimit


@dataclass(frozen=True)
class Selection:
    """The recordings that can be used, and those that are left out."""

    layout: str
    train: list[Recording]
    validation: list[Recording]
    validation_from: str  # where the validation set comes from, or why there is none
    left_out: list[LeftOut]
    total: int  # recordings that are listed


class OwnData(NamedTuple):
    """The recordings of a training."""

    train: RecordedUtterances  # also says what is left out of both
    validation: RecordedUtterances
    total: int  # recordings that are listed


def load_own_data(
    data: Path,
    validation: Path | None = None,
    longest: float = LONGEST,
    strict: bool = False,
    limit: TextLimit | None = None,
) -> OwnData:
    """Find the recordings of a training, without those that cannot be used.

    Args:
        data: A data set in any layout of `find_data`.
        validation: Another one; None is the data set's own part for validation, or else one in
            twenty of its recordings.
        longest: The longest audio that the model takes, in seconds.
        strict: Refuse a data set with a recording that cannot be used.
        limit: How long the texts may be; None for a model that is made for them.

    Raises:
        InputError: If no recordings are left, if one cannot be used with `strict`, or if a data
            set cannot be read.
    """
    found = select(data, validation, longest, limit=limit)
    if strict and found.left_out:
        first = found.left_out[0]
        where = f"{first.recording.where}: " if first.recording.where else ""
        raise InputError(f"{where}{first.detail}; leave out --strict to train without it")
    if not (found.train and found.validation):
        why = found.validation_from if found.train else "no recordings are left"
        rest = f"; {summary(found.left_out, found.total)}" if found.left_out else ""
        raise InputError(f"{data}: {why}{rest}")
    return OwnData(
        RecordedUtterances(found.train, found.left_out),
        RecordedUtterances(found.validation),
        found.total,
    )


def select(
    data: Path,
    validation: Path | None,
    longest: float = LONGEST,
    decode: bool = False,
    limit: TextLimit | None = None,
) -> Selection:
    """Separate the recordings that can be used from the others.

    Those for validation are decoded, because each evaluation needs all of them. For training only
    headers are read, because decoding a large data set takes long.

    Args:
        data: A data set.
        validation: Another one for validation, or None.
        longest: The longest audio that the model takes, in seconds.
        decode: Decode the recordings for training, too.
        limit: How long the texts may be; None is as long as they are.
    """
    found = find_data(data)
    held_out, origin = found.validation, f"the part for validation of {data}"
    if validation is not None:
        held_out, origin = find_data(validation).held_out, str(validation)
    train, left_out = _screened(found.train, longest, limit)
    if held_out is None:
        train, kept, origin = _split(train)
    else:
        kept, unusable = _screened(held_out, longest, limit)
        left_out += unusable
    kept, damaged = screen_decoded(kept)
    train, also_damaged = (screen_decoded if decode else screen_shortest)(train)
    if held_out is not None and not kept:
        origin = f"no recordings are left of {origin}"
    return Selection(
        layout=found.layout,
        train=train,
        validation=kept,
        validation_from=origin,
        left_out=[*left_out, *damaged, *also_damaged],
        total=len(found.train) + len(held_out or []),
    )


def _screened(recordings: Sequence[Recording], longest: float, limit: TextLimit | None) -> Screened:
    kept, left_out = screen(recordings, longest)
    if limit is None:
        return Screened(kept, left_out)
    kept, too_long = screen_texts(kept, limit)
    return Screened(kept, left_out + too_long)


def _split(recordings: Sequence[Recording]) -> tuple[list[Recording], list[Recording], str]:
    """Return recordings for training and for validation, and how they were separated."""
    try:
        return *split_recordings(recordings), "about one in twenty recordings, by their texts"
    except InputError as error:
        return list(recordings), [], str(error)
