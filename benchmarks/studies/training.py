"""One training of a study, whatever its task: the steps, CUDA graphs of them, and the record.

A table of the learning rates and one of the losses are on the device, so a whole step, or at least
its forward and backward pass, can be one CUDA graph that is replayed without work on the host.
"""

from __future__ import annotations

import math
import time
import traceback
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from measurement import Record, state_bytes_per_parameter
from studies.digits_task import DigitsTask, digits
from studies.language_task import LanguageTask
from studies.runs import PEERS, Run, group_settings, make_optimizers, rate_factor
from studies.speech_task import FeatureSets, SpeechTask, needed_speech, synthesise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

EAGER_STEPS = 3  # before a capture, so that allocations, handles and state exist
LOOK_EVERY = 25  # steps between reads of the loss, which wait for the device
SMOOTH = 50  # steps that a loss is averaged over


class Task(Protocol):
    """What is trained."""

    model: Any  # transformers' models, whose types no protocol can state

    def loss(self, at: Tensor) -> Tensor:
        """The loss of a step, whose number is a tensor (1,) on the device."""

    def measured(self) -> Record:
        """Errors of the trained model on unseen data."""


def task_of(run: Run, cache: Path, device: torch.device, sets: FeatureSets) -> Task:
    """The task of a run, with a new model."""
    if run.task == "language":
        return LanguageTask(run, device)
    if run.task == "digits":
        return DigitsTask(run, cache, device)
    return SpeechTask(run, cache, device, sets)


def prepare_speech(runs: Sequence[Run], cache: Path, workers: int) -> None:
    """Synthesise all speech that runs need and that is not in the cache yet."""
    synthesise(needed_speech(runs), cache, workers)
    for run in runs:
        if run.task == "digits":
            digits(run, cache, workers)


class Training:
    """One training; its tables of rates and losses are on the device.

    Args:
        run: What to train.
        task: The model and the loss of each step.
        device: Where the model is.
    """

    def __init__(self, run: Run, task: Task, device: torch.device) -> None:
        self.settings, self.task, self.device = run, task, device
        self.params = [param for param in task.model.parameters() if param.requires_grad]
        self.optimizers, self.fits_graph = make_optimizers(run, task.model, device)
        self.groups = [group for each in self.optimizers for group in each.param_groups]
        self.rates = [float(group["lr"]) for group in self.groups]
        self.factors = [rate_factor(run, step) for step in range(run.steps)]
        self.factor_table = torch.tensor(self.factors, device=device)
        self.losses = torch.full((run.steps,), math.nan, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the step's number
        self.mode, self.fallback = "eager", ""
        self.seconds, self.taken, self.timed = 0.0, 0, 1

    def gradients(self) -> None:
        """Forward and backward pass; new gradients each time, which a graph then owns."""
        for param in self.params:
            param.grad = None
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
            loss = self.task.loss(self.at)
        loss.backward()
        self.losses.index_copy_(0, self.at, loss.detach().float().reshape(1))

    def update(self, step: int | None) -> None:
        """Take a step of the optimizers; without a number the rates are read on the device."""
        if step is None:
            factor = self.factor_table.index_select(0, self.at)[0]
            for group, rate in zip(self.groups, self.rates, strict=True):
                group["lr"].copy_(factor * rate)
        else:
            for group, rate in zip(self.groups, self.rates, strict=True):
                group["lr"] = self.factors[step] * rate
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.params, self.settings.clip, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
        self.at.add_(1)

    def run(self, mode: str, look: Callable[[int], None] | None = None) -> None:
        """Take all steps; a capture that fails is recorded, and steps are launched one by one.

        Args:
            mode: "whole" for the whole step in a graph, "half" for all but the optimizer, "eager"
                for no graph.
            look: Called after every step with the number of steps taken.
        """
        if self.device.type != "cuda":
            mode = "eager"
        elif mode == "whole" and not self.fits_graph:
            mode = "half"
        self.mode = mode
        if mode == "whole":
            for group in self.groups:
                group["lr"] = torch.zeros((), device=self.device)
        replay = self._captured() if mode != "eager" else None
        self._synchronize()
        begun, first = time.perf_counter(), self.taken
        while self.taken < self.settings.steps:
            self._one(replay)
            if look is not None:
                look(self.taken)
            if self.taken % LOOK_EVERY == 0:
                self._synchronize()
                if not bool(self.losses[self.taken - 1].isfinite()):
                    break
        self._synchronize()
        self.seconds = time.perf_counter() - begun
        self.timed = max(1, self.taken - first)

    def _one(self, replay: Callable[[], None] | None) -> None:
        if replay is None:
            self.gradients()
        else:
            replay()
        if self.mode != "whole":
            self.update(self.taken)
        elif replay is None:
            self.update(None)
        self.taken += 1

    def _captured(self) -> Callable[[], None] | None:
        """Take the first steps on a separate stream, then capture one; None if that fails."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(min(EAGER_STEPS, self.settings.steps)):
                self._one(None)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.gradients()
                if self.mode == "whole":
                    self.update(None)
        except RuntimeError as error:  # a capture runs nothing, so no step is lost
            self.fallback = f"{self.mode}: {str(error).splitlines()[0][:200]}"
            if self.mode == "half":
                self.mode = "eager"
            torch.cuda.synchronize()
            return None
        return graph.replay

    def _synchronize(self) -> None:
        """Wait for the device without spinning, which would take a core from other runs."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record()
            event.synchronize()

    def outcome(self) -> Record:
        """Loss, time and state of a finished training."""
        losses = self.losses[: self.taken].cpu()
        nan = not bool(losses.isfinite().all())
        smooth = losses.unfold(0, min(SMOOTH, len(losses)), 1).mean(dim=1)
        parameters = sum(param.numel() for param in self.params)
        return {
            "loss": None if nan else round(float(smooth[-1]), 4),
            "lowest_loss": None if nan else round(float(smooth.min()), 4),
            "nan": nan,
            "steps_taken": self.taken,
            "seconds": round(self.seconds, 2),
            "ms_per_step": round(1000 * self.seconds / self.timed, 3),
            "state_bytes_per_parameter": round(
                state_bytes_per_parameter(self.optimizers, parameters), 4
            ),
            "parameters": parameters,
            "mode": self.mode,
            "fallback": self.fallback,
        }


def perform(run: Run, cache: Path, device: torch.device, sets: FeatureSets, mode: str) -> Record:
    """Train, measure, and return the record; `mode` is the most that a graph may hold."""
    begun = time.perf_counter()
    training = Training(run, task_of(run, cache, device, sets), device)
    training.run(mode)
    record = {"key": run.key, "run": run.described, **training.outcome()}
    if run.optimizer not in PEERS:
        record["groups"] = group_settings(run)
    record |= worst(run) if record["nan"] else training.task.measured()
    record["diverged"] = record["nan"] or record["loss"] > 1.5 * record["lowest_loss"]
    record["all_seconds"] = round(time.perf_counter() - begun, 2)
    return record


def worst(run: Run) -> Record:
    """The error of a model whose loss became NaN: every word wrong, or eight bits per byte."""
    if run.task == "language":
        return {"bits": 8.0}
    return {"wer": 100.0} | ({"english_wer": 100.0} if run.start else {})


def serve(connection: Connection, cache: Path, device_name: str) -> None:
    """Do the runs that come through a connection, one after another, until None comes."""
    torch.set_num_threads(1)
    device = torch.device(device_name)
    sets = FeatureSets(cache, device)
    while (order := connection.recv()) is not None:
        run, mode = order
        try:
            record = perform(run, cache, device, sets, mode)
        except Exception:  # the other runs continue, and the parent starts a new worker
            connection.send({"run": run.described, "error": traceback.format_exc()[-2000:]})
            return
        connection.send(record)
