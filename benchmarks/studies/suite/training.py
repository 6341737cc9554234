"""One trial: the steps, with gradients from a CUDA graph where that is possible, and the record."""

from __future__ import annotations

import gc
import math
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from measurement import Record, state_bytes_per_parameter
from studies.speech_task import save_atomically
from studies.suite.optimizers import CLIP, clips, iteration_of, make_optimizers
from studies.suite.tasks import TASKS, base_path, make_task

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from studies.suite.tasks import Task
    from studies.suite.trials import Trial

EAGER_STEPS = 3  # before a capture, so that allocations and handles exist
LOOK_EVERY = 25  # steps between reads of the loss, which wait for the device
WARM_UP = 0.1  # of the steps
WORST = {"wer": 100.0, "nats": math.log(256.0)}  # of a training that became NaN
PARTS = 20  # of a training, whose mean losses are recorded


class Training:
    """The steps of a trial."""

    def __init__(self, trial: Trial, task: Task) -> None:
        self.trial, self.task, self.device = trial, task, task.device
        self.params = [param for param in task.model.parameters() if param.requires_grad]
        self.optimizers = make_optimizers(trial, task.model)
        self.groups = [group for each in self.optimizers for group in each.param_groups]
        self.rates = [float(group["lr"]) for group in self.groups]
        self.losses = torch.full((task.steps,), math.nan, device=self.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.taken, self.seconds = 0, 0.0
        self.graph = "none"

    def gradients(self) -> None:
        """Forward and backward pass; new gradients each time, which a graph then owns."""
        for param in self.params:
            param.grad = None
        loss = self.task.loss(self.taken, self.at)
        loss.backward()
        self.losses.index_copy_(0, self.at, loss.detach().float().reshape(1))

    def one(self, compute: Callable[[], None]) -> None:
        """One step."""
        compute()
        factor = rate_factor(self.trial, self.taken, self.task.steps)
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = factor * rate
        if clips(self.trial):
            nn.utils.clip_grad_norm_(self.params, CLIP, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
        self.at.add_(1)
        self.taken += 1

    def run(self) -> None:
        """Take all steps, or until the loss is not finite."""
        self.task.model.train()
        for optimizer in self.optimizers:
            if hasattr(optimizer, "train"):  # Schedule-Free
                optimizer.train()
        compute = self.gradients
        if self.device.type == "cuda" and self.task.fits_graph:
            compute = self.captured()
        begun, first = time.perf_counter(), self.taken
        while self.taken < self.task.steps:
            self.one(compute)
            if self.taken % LOOK_EVERY == 0 and not self.is_finite():
                break
        self.is_finite()
        self.seconds = (time.perf_counter() - begun) / max(1, self.taken - first)
        for optimizer in self.optimizers:
            if hasattr(optimizer, "eval"):
                optimizer.eval()

    def captured(self) -> Callable[[], None]:
        """Take the first steps one by one, then capture forward and backward pass."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(min(EAGER_STEPS, self.task.steps)):
                self.one(self.gradients)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.gradients()
        except RuntimeError as error:  # a capture runs nothing, so no step is lost
            self.graph = f"failed: {str(error).splitlines()[0][:120]}"
            torch.cuda.synchronize()
            return self.gradients
        self.graph = "captured"
        return graph.replay

    def is_finite(self) -> bool:
        """Wait for the device without spinning, and look at the last loss."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record()
            event.synchronize()
        return bool(self.losses[self.taken - 1].isfinite())


def rate_factor(trial: Trial, step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine to zero, or constant.

    Schedule-Free is made for a constant rate.
    """
    warmup = max(1, round(WARM_UP * steps))
    if step < warmup:
        return (step + 1) / warmup
    if TASKS[trial.task].schedule == "constant" or trial.optimizer == "schedule-free":
        return 1.0
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def perform(trial: Trial, cache: Path, device: torch.device) -> tuple[Record, Record]:
    """Train; return the record, and the errors on test data, which are stored apart."""
    begun = time.perf_counter()
    task = make_task(trial, cache, device)
    training = Training(trial, task)
    with iteration_of(trial):
        training.run()
    losses = training.losses[: training.taken].cpu()
    is_nan = not bool(losses.isfinite().all())
    smooth = losses.unfold(0, min(50, len(losses)), 1).mean(dim=1)
    lowest, last = float(smooth.min()), float(smooth[-1])
    measured = [{task.measure: WORST[task.measure]}] * 2
    if not is_nan:
        measured = [task.evaluate("dev"), task.evaluate("test")]
    parameters = sum(param.numel() for param in training.params)
    record = {
        "key": trial.key,
        "trial": trial.described,
        **measured[0],
        "loss": None if is_nan else round(last, 4),
        "curve": [round(float(part.mean()), 4) for part in losses.tensor_split(PARTS) if len(part)],
        "is_nan": is_nan,
        "diverged": is_nan or last > 1.5 * lowest,
        "steps": training.taken,
        "ms_per_step": round(1e3 * training.seconds, 3),
        "state_bytes_per_parameter": round(
            state_bytes_per_parameter(training.optimizers, parameters), 4
        ),
        "parameters": parameters,
        "graph": training.graph,
        "seconds": round(time.perf_counter() - begun, 2),
        "machine": machine(device),
    }
    if trial.is_base:
        save_atomically(task.model.state_dict(), base_path(cache, trial.task, trial.quick))
    return record, {"key": trial.key, "trial": trial.described, **measured[1]}


def machine(device: torch.device) -> str:
    """The device and the version of torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__.split('+')[0]}"


def serve(connection: Connection, cache: Path, device_name: str) -> None:
    """Do the trials that come through a connection, one after another, until None comes."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # TF32: small models are slowed by casts
    device = torch.device(device_name)
    while (order := connection.recv()) is not None:
        trial, _ = order
        try:
            record, test = perform(trial, cache, device)
        except Exception:  # the other trials continue, and the parent starts a new worker
            failed: dict[str, Any] = {"error": traceback.format_exc()[-2000:]}
            connection.send({"trial": trial.described, **failed})
            return
        connection.send({**record, "test": test})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the memory is shared with the other workers
