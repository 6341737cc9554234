"""A small Whisper learns connected digits, with the batches of `maxfactor train`.

Stored rows were measured with the loop of that command. Its batches have utterances of similar
length, padded to the longest of them, and float32 features. Shapes change from step to step, so
unlike sentences there is no table of features on the device.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speech_application import (
    MAX_TOKENS,
    Order,
    Script,
    Size,
    Split,
    Utterances,
    collate,
    evaluation_batches,
    log_mel,
    loss_of,
    seconds_needed,
    synthesise_shards,
    whisper,
)
from studies.runs import SIZES, Run
from studies.speech_task import codec_of, word_error_rate

if TYPE_CHECKING:
    from pathlib import Path

    from measurement import Record

DECODED_BATCHES = 4  # training batches that are decoded at once


def digits(run: Run, cache: Path, workers: int = 1) -> tuple[Utterances, Utterances]:
    """The utterances of a run for training and validation, synthesised if not in the cache."""
    return (
        _utterances(run.language, "train", run.train, cache, workers),
        _utterances(run.language, "validation", run.validation, cache, workers),
    )


@functools.lru_cache
def _utterances(language: str, split: Split, count: int, cache: Path, workers: int) -> Utterances:
    return synthesise_shards(Script("digits", language, split), count, cache / "digits", workers)


class DigitsTask:
    """The model of a run, the loss of each step, and the word error rate.

    Args:
        run: What to train.
        cache: Folder of synthesised speech.
        device: Where the model is.
    """

    def __init__(self, run: Run, cache: Path, device: torch.device) -> None:
        self._run, self._device, self._codec = run, device, codec_of(run.task)
        self._train, self._validation = digits(run, cache)
        self._order = Order(self._train.lengths, run.batch, run.seed)
        seconds = seconds_needed(self._train, self._validation)
        torch.manual_seed(run.seed)
        self.model = whisper(self._codec, Size(*SIZES[run.size]), seconds, MAX_TOKENS[run.task])
        self.model.to(device)  # type: ignore[arg-type]  # mistaken by a decorator's types

    def loss(self, at: Tensor) -> Tensor:
        """Mean cross-entropy of a step's batch; its number is read on the host."""
        batch = collate(self._train, self._order[int(at)])
        labels = self._codec.labels(batch.texts).to(self._device)
        return loss_of(self.model, log_mel(batch.samples.to(self._device)), labels)

    def measured(self) -> Record:
        """The word error rate of the trained model."""
        size = DECODED_BATCHES * self._run.batch
        batches = evaluation_batches(self._validation, size, self._device)
        return {"wer": word_error_rate(self.model, self._codec, batches, self._device)}
