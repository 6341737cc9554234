"""What a data set contains: lengths, sampling rates, alphabet, transcripts, duplicates."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maxfactor_speech.data.audio import SAMPLE_RATE
from maxfactor_speech.data.own_data import select
from maxfactor_speech.data.screening import LONGEST
from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from maxfactor_speech.data.recordings import Recording
    from maxfactor_speech.data.screening import LeftOut
    from maxfactor_speech.data.tokens import TextLimit

BINS = (0, 1, 2, 3, 5, 8, 12, 16, 20, 25, 30)  # seconds
RARE_SCRIPT = 0.01  # of all letters: letters of a rarer script are unusual
NAMED = 20  # recordings and duplicates in the JSON form
BLOCK = 2**20  # bytes of a file that are read at once


@dataclass(frozen=True)
class Letter:
    """A character of the transcripts."""

    character: str
    count: int
    unusual: str  # what is unusual about it; empty for most


@dataclass(frozen=True)
class Part:
    """The usable recordings of a part, for training or for validation."""

    recordings: int
    hours: float
    lengths: list[tuple[str, int]]  # "3 to 5 s" and the number of recordings
    rates: dict[int, int]  # recordings by sampling rate
    words: int
    different_words: int
    longest_text: str
    letters: list[Letter]  # the most frequent first


class Unspelled(NamedTuple):
    """A recording whose text a model cannot spell."""

    recording: Recording
    missing: list[str]  # characters or words that it has no token for


@dataclass(frozen=True)
class Overview:
    """What a training would use, and what it would leave out."""

    layout: str
    train: Part
    validation: Part
    validation_from: str  # where the validation set comes from, or why there is none
    same_texts: list[str]  # in training and validation
    same_audio: list[tuple[str, str]]  # the same audio in training and validation
    left_out: list[LeftOut]
    total: int  # recordings that are listed
    unspelled: list[Unspelled]  # which a training with the model refuses

    @property
    def is_usable(self) -> bool:
        """Whether there is something to train on."""
        return self.train.recordings > 0

    def as_json(self) -> dict[str, Any]:
        """Return the same for machines."""
        reasons = Counter(one.reason for one in self.left_out)
        return {
            "usable": self.is_usable,
            "listed": self.total,
            "layout": self.layout,
            "train": _part_json(self.train),
            "validation": _part_json(self.validation),
            "validation_from": self.validation_from,
            "same_texts": {"count": len(self.same_texts), "first": self.same_texts[:NAMED]},
            "same_audio": {"count": len(self.same_audio), "first": self.same_audio[:NAMED]},
            "unspelled": {
                "count": len(self.unspelled),
                "characters": sorted({one for text in self.unspelled for one in text.missing}),
                "first": [str(one.recording.path) for one in self.unspelled[:NAMED]],
            },
            "left_out": {"count": len(self.left_out), "reasons": dict(sorted(reasons.items()))},
            "left_out_recordings": [
                {"path": str(r.path), "reason": reason, "detail": detail, "listed_in": r.where}
                for r, reason, detail in self.left_out
            ],
        }


def look_over(
    data: Path,
    validation: Path | None = None,
    decode: bool = False,
    longest: float = LONGEST,
    limit: TextLimit | None = None,
) -> Overview:
    """Look a data set over as a training would use it.

    Args:
        data: A data set.
        validation: Another one for validation, or None.
        decode: Decode all audio, which finds all damaged files.
        longest: The longest audio that the model takes, in seconds.
        limit: What the model's texts may be; None for a model that is made for them.
    """
    found = select(data, validation, longest, decode, limit)
    used = [*found.train, *found.validation]
    unspelled = [] if limit is None else [*limit.unspelled(one.text for one in used)]
    train_texts, validation_texts = (
        {one.text for one in part} for part in (found.train, found.validation)
    )
    return Overview(
        layout=found.layout,
        train=_part(found.train),
        validation=_part(found.validation),
        validation_from=found.validation_from,
        same_texts=sorted(train_texts & validation_texts),
        same_audio=same_audio(found.train, found.validation),
        left_out=found.left_out,
        total=found.total,
        unspelled=[Unspelled(used[number], missing) for number, missing in unspelled],
    )


def same_audio(
    train: Sequence[Recording], validation: Sequence[Recording]
) -> list[tuple[str, str]]:
    """Return pairs of recordings with the same audio, by the content of their files."""
    sizes = {one: _size(one.path) for one in (*train, *validation)}
    shared = {sizes[one] for one in train} & {sizes[one] for one in validation}
    digests: dict[Path, bytes] = {}

    def key(recording: Recording) -> tuple[bytes, float, int]:
        path = recording.path
        if path not in digests:
            digests[path] = _digest(path)
        return digests[path], recording.start, recording.samples

    known = {key(one): one.path for one in train if sizes[one] in shared}
    again = [one for one in validation if sizes[one] in shared and key(one) in known]
    return [(str(known[key(one)]), str(one.path)) for one in again]


def _part(recordings: Sequence[Recording]) -> Part:
    texts = [one.text for one in recordings]
    words = Counter(word for text in texts for word in text.split())
    samples = np.array([one.samples for one in recordings], np.int64)
    counts, _ = np.histogram(samples / SAMPLE_RATE, [*BINS[:-1], np.inf])
    spans = [f"{low} to {high} s" for low, high in pairwise(BINS)]
    return Part(
        recordings=len(recordings),
        hours=float(samples.sum()) / SAMPLE_RATE / 3600,
        lengths=list(zip(spans, map(int, counts), strict=True)),
        rates=dict(sorted(Counter(one.rate for one in recordings).items())),
        words=words.total(),
        different_words=len(words),
        longest_text=max(texts, key=len, default=""),
        letters=letters(texts),
    )


def letters(texts: Iterable[str]) -> list[Letter]:
    """Count the characters of texts, and say which are unusual.

    Control characters and symbols are unusual, and so are letters of a script that is rare here,
    such as a Cyrillic letter in English.

    Example:
        >>> [one for one in letters(["hello " * 20 + "w\u043erld"]) if one.unusual]
        [Letter(character='\u043e', count=1, unusual='a letter of another script: CYRILLIC')]
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    scripts: Counter[str] = Counter()
    for character, count in counts.items():
        if character.isalpha():
            scripts[_script(character)] += count
    rare = {name for name, count in scripts.items() if count < RARE_SCRIPT * scripts.total()}
    return [
        Letter(character, count, _unusual(character, rare))
        for character, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    ]


def _unusual(character: str, rare_scripts: set[str]) -> str:
    category = unicodedata.category(character)
    if category[0] == "C":
        return "a control character or undefined"
    if category[0] == "S":
        return "a symbol"
    if character.isalpha() and _script(character) in rare_scripts:
        return f"a letter of another script: {_script(character)}"
    return ""


def _script(letter: str) -> str:
    """Return the first word of a letter's name in Unicode, which is its script."""
    return unicodedata.name(letter, "UNKNOWN").split()[0]


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "recordings": part.recordings,
        "hours": part.hours,
        "lengths": dict(part.lengths),
        "sampling_rates": {str(rate): count for rate, count in part.rates.items()},
        "words": part.words,
        "different_words": part.different_words,
        "longest_text": part.longest_text,
        "characters": {one.character: one.count for one in part.letters},
        "unusual_characters": {one.character: one.unusual for one in part.letters if one.unusual},
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # deleted meanwhile
        return -1


def _digest(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    except OSError as error:
        raise InputError(f"{path}: cannot be read, {error.strerror}") from error
    return digest.digest()
