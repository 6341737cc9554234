"""The user's own recordings: audio files with transcripts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from maxfactor_speech.data.audio import is_file, read, to_samples
from maxfactor_speech.data.corpus import split_of
from maxfactor_speech.data.shards import Utterance
from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from maxfactor_speech.data.screening import LeftOut

LONGEST_TEXT = 5000  # characters; nobody says as many in half a minute
DAMAGED_SHARE = 0.05  # of the recordings: a training stops if more turn out to be damaged …
DAMAGED_COUNT = 10  # … and more than this number

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """An audio file, or a part of one, and its transcript.

    Attributes:
        path: The file.
        text: The transcript.
        start: Where the part begins, in seconds.
        seconds: The length of the part; None is all that follows.
        where: The table and the line that list it, for messages.
        samples: Its length in 16 kHz samples; 0 until its header has been read.
        rate: The sampling rate of the file; 0 until its header has been read.
    """

    path: Path
    text: str
    start: float = 0.0
    seconds: float | None = None
    where: str = field(default="", compare=False)
    samples: int = field(default=0, compare=False)
    rate: int = field(default=0, compare=False)

    @property
    def is_part(self) -> bool:
        """Whether this is a part of a file."""
        return self.start > 0.0 or self.seconds is not None

    @property
    def identity(self) -> str:
        """A line that tells it from other recordings, wherever the data set is stored."""
        part = f"\t{self.start}" if self.start else ""
        return f"{self.path.name}\t{self.text}{part}\n"


class RecordedUtterances:
    """Utterances in audio files, which are read when they are needed.

    Some damage shows only when a file is decoded. Such a recording is replaced by the nearest one
    that is not longer, with a warning. This depends on the files only: all processes of a training
    replace it in the same way, and so does a resumed training.

    Args:
        recordings: Recordings whose headers have been read, see `screening`.
        left_out: What the data lists besides, but cannot be used, for a report.
    """

    def __init__(self, recordings: Sequence[Recording], left_out: Sequence[LeftOut] = ()) -> None:
        self.recordings = list(recordings)
        self.left_out = list(left_out)
        self.lengths = np.array([one.samples for one in self.recordings], np.int32)
        self._by_length = np.argsort(self.lengths, kind="stable")
        self._places = np.argsort(self._by_length)  # of each recording in the order by length
        self._damaged: set[int] = set()

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, number: int) -> Utterance:
        not_longer = self._by_length[self._places[number] :: -1]
        for candidate in map(int, not_longer):
            utterance = self._read(candidate)
            if utterance is not None:
                return utterance
        raise InputError(
            f"{self.recordings[number].path}: damaged, and so are all recordings that are not "
            "longer; find damaged files with: maxfactor data --decode"
        )

    def text(self, number: int) -> str:
        """Return the transcript without reading the audio."""
        return self.recordings[number].text

    def _read(self, number: int) -> Utterance | None:
        """Read a recording; return None if it is damaged."""
        if number in self._damaged:
            return None
        recording = self.recordings[number]
        try:
            wave = read(recording.path, recording.start, recording.samples)
        except InputError as error:
            if not is_file(recording.path):  # the disk is gone, rather than one file damaged
                raise
            self._note_damage(number, error)
            return None
        return Utterance(to_samples(wave), recording.text)

    def _note_damage(self, number: int, error: InputError) -> None:
        self._damaged.add(number)
        count = len(self._damaged)
        if count > max(DAMAGED_COUNT, DAMAGED_SHARE * len(self)):
            raise InputError(
                f"{error}; {count} of {len(self)} recordings are damaged, too many to go on; find "
                "them with: maxfactor data --decode"
            ) from error
        logger.warning("%s; another recording takes its place (%d damaged so far)", error, count)


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
