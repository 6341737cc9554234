"""The training loop: steps, evaluations, checkpoints, stopping and resuming."""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from maxfactor_speech.atomic import check_writable, write_atomically
from maxfactor_speech.errors import DivergedError, InputError
from maxfactor_speech.signals import stop_requests
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training.adapters import check_peft
from maxfactor_speech.training.checksums import check_checkpoint
from maxfactor_speech.training.folder_lock import folder_lock
from maxfactor_speech.training.memory_needs import (
    available_memory,
    describe_needs,
    explained_out_of_memory,
    memory_needs,
)
from maxfactor_speech.training.metrics import Metrics, NoMetrics
from maxfactor_speech.training.model import SIZES
from maxfactor_speech.training.model_folder import find_model, load_model
from maxfactor_speech.training.optimizers import check_installed, check_shardable
from maxfactor_speech.training.parallel import SingleProcess, check_batch, training_processes
from maxfactor_speech.training.preparation import (
    Prepared,
    check_same_data,
    prepare,
    write_left_out,
)
from maxfactor_speech.training.progress import Pace, Reporter
from maxfactor_speech.training.settings import (
    SETTINGS,
    WEIGHTS,
    Settings,
    configure_cublas,
    find_device,
    resumed,
)
from maxfactor_speech.training.trainer import Trainer, repeatable

if TYPE_CHECKING:
    from collections import abc

    from torch import Tensor

    from maxfactor_speech.data.batches import Batch
    from maxfactor_speech.training.evaluation import Evaluation

LOG_EVERY = 10  # steps
BETA_LINES = 50  # how often a training logs the betas of FAM


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training."""

    step: int
    evaluation: Evaluation | None  # None if the training was stopped
    seconds: float  # of training, without evaluations
    checkpoint: Path
    trainer: Trainer


def train(
    settings: Settings,
    out: Path,
    resume: bool = False,
    reporter: Reporter | None = None,
    prepared: Prepared | None = None,
    tensorboard: bool = False,
    cache: Path | None = None,
    workers: int | None = None,
    shard: str | None = None,
) -> TrainingResult:
    """Train, and write checkpoints and metrics to a folder, which is locked meanwhile.

    On Ctrl-C or SIGTERM, the current step is finished and saved. The result then has no
    evaluation.

    Args:
        settings: The settings; to resume, only those in `MAY_CHANGE` may have changed.
        out: Folder for `settings.json`, `metrics.jsonl` and the checkpoints.
        resume: Continue from the last checkpoint. The final weights are those of a training that
            was not stopped.
        reporter: Receives progress reports.
        prepared: Data and model, if they are already prepared.
        tensorboard: Write TensorBoard logs.
        cache: Folder that caches synthesised speech.
        workers: Processes that synthesise speech.
        shard: "ddp", "fsdp" or "hsdp", in processes that `torchrun` started: how the model is
            distributed. Only the first process reports and writes.
    """
    configure_cublas()
    check_requirements(settings, cache, workers)
    with training_processes(shard, settings.torch_device) as processes, ExitStack() as stack:
        is_first = processes.rank == 0
        reporter = reporter if reporter is not None and is_first else Reporter()
        check_batch(settings.batch_size, processes.world)
        check_shardable(settings.optimizer, processes.is_sharded)
        check_processes(settings, processes)
        processes.run_on_all(lambda: stack.enter_context(folder_lock(out)) if is_first else None)
        last = processes.run_on_all(lambda: check_folder(out, settings, resume))
        if last is not None:
            processes.run_on_all(lambda: check_checkpoint(last) if is_first else None)
        settings = resumed(out, settings) if resume else settings
        if prepared is None:
            device = None if processes.is_sharded else processes.device(settings.torch_device)
            prepared = processes.run_first_then_others(
                lambda: prepare(settings, cache, workers, reporter, device, last is not None)
            )
        check_same_data(prepared, processes)
        if not processes.is_sharded:
            needs = memory_needs(settings, prepared, processes.world)
            reporter.say(describe_needs(needs, available_memory(settings.torch_device)))
            stack.enter_context(explained_out_of_memory(settings, prepared, out, processes.world))
        trainer = processes.run_on_all(lambda: _trainer(settings, prepared, last, processes))
        if not is_first:
            return _run(trainer, out, NoMetrics(), reporter)
        if settings.lr is None and settings.is_fine_tuning:
            reporter.say(
                f"learning rate: {settings.peak_lr:g}, a quarter of the default of "
                f"{settings.optimizer}, because the model is trained already; --lr sets another"
            )
        write_atomically(out / SETTINGS, json.dumps(asdict(settings), indent=2).encode() + b"\n")
        write_left_out(out, prepared)
        metrics = Metrics(out, -1 if last is None else trainer.step, tensorboard)
        try:
            return _run(trainer, out, metrics, reporter)
        finally:
            metrics.close()


def _trainer(
    settings: Settings, prepared: Prepared, last: Path | None, processes: SingleProcess
) -> Trainer:
    """Return a trainer at step 0, or at its last checkpoint."""
    if last is None:
        return Trainer(settings, prepared, processes)
    own = load_model(last, WEIGHTS[settings.weights], say=None)
    if settings.lora is not None:  # adapters belong to the weights that the training started from
        own = own._replace(model=prepared.model)
    trainer = Trainer(settings, prepared._replace(**own._asdict()), processes)
    trainer.load(last)
    return trainer


def _run(trainer: Trainer, out: Path, metrics: NoMetrics, reporter: Reporter) -> TrainingResult:
    settings = trainer.settings
    reporter.begin("training", settings.steps, trainer.step)
    evaluation: Evaluation | None = None
    folder: Path | None = None
    with stop_requests() as requested:
        stopping = _agreed(trainer.processes, requested)
        if trainer.evaluated is None:
            _evaluate(trainer, metrics, reporter)
            folder = trainer.save(out) if trainer.best is not None else None
        batches = trainer.batches()
        try:
            while not trainer.is_finished and not stopping():
                until = _next_report(settings, trainer.step)
                pace = train_until(trainer, batches, until, stopping)
                metrics.pace(pace, trainer.fam_betas() if _logs_betas(settings, pace.step) else {})
                reporter.pace(pace)
                folder = None
                if trainer.step == until and _is_evaluation(settings, until):
                    evaluation = _evaluate(trainer, metrics, reporter)
                    folder = trainer.save(out)
        finally:
            batches.close()  # ends its thread
        if folder is None:
            folder = trainer.save(out)
    if trainer.is_finished and evaluation is None:  # resumed after the last step
        evaluation = trainer.evaluate()
    return TrainingResult(
        step=trainer.step,
        evaluation=evaluation if trainer.is_finished else None,
        seconds=trainer.seconds,
        checkpoint=folder,
        trainer=trainer,
    )


def _evaluate(trainer: Trainer, metrics: NoMetrics, reporter: Reporter) -> Evaluation:
    """Evaluate, and report the result."""
    evaluation = trainer.evaluate()
    trainer.note(evaluation)
    best = None if trainer.best is None else trainer.best.step
    metrics.evaluated(trainer.step, trainer.seconds, evaluation, best, trainer.telemetry())
    reporter.evaluated(trainer.step, evaluation, best == trainer.step)
    return evaluation


def train_until(
    trainer: Trainer,
    batches: abc.Iterator[list[Batch]],
    until: int,
    stopping: abc.Callable[[], bool] = lambda: False,
) -> Pace:
    """Train up to a step, or until asked to stop; wait for the device only at the end."""
    start, first = time.perf_counter(), trainer.step
    losses: list[Tensor] = []
    try:
        with repeatable(trainer.device):
            while trainer.step < until and not (losses and stopping()):
                if trainer.step + 1 == until and _is_evaluation(trainer.settings, until):
                    trainer.record_step()
                losses.append(trainer.train_step(next(batches)))
        loss = trainer.processes.mean(float(torch.stack(losses).mean()))
        trainer.check_skipped()
    except FloatingPointError as error:  # raised by MaxFactor after many skipped steps
        raise DivergedError(f"step {trainer.step}: {error}") from error
    # A single loss may be NaN if its step was skipped. The last loss shows whether the weights are
    # still finite.
    if not math.isfinite(loss) and not math.isfinite(trainer.processes.mean(float(losses[-1]))):
        raise DivergedError(
            f"the loss is {loss} at step {trainer.step}; lower --lr, which is "
            f"{trainer.settings.peak_lr:g}"
        )
    seconds = time.perf_counter() - start
    trainer.seconds += seconds
    return Pace(
        step=trainer.step,
        loss=loss,
        lr=trainer.lr(),
        effective_lr=trainer.effective_lr(),
        steps_per_second=(trainer.step - first) / seconds,
        seconds=trainer.seconds,
    )


def _logs_betas(settings: Settings, step: int) -> bool:
    """Whether to log the betas of FAM: about BETA_LINES times, and at the end."""
    return step % max(1, settings.steps // BETA_LINES) < LOG_EVERY or step == settings.steps


def _next_report(settings: Settings, step: int) -> int:
    """Return the next step with something to report."""
    ends = [every * (step // every + 1) for every in (LOG_EVERY, settings.evaluate_every)]
    return min(*ends, settings.steps)


def _is_evaluation(settings: Settings, step: int) -> bool:
    return step % settings.evaluate_every == 0 or step == settings.steps


def check_requirements(
    settings: Settings, cache: Path | None = None, workers: int | None = None
) -> None:
    """Raise InputError at once for what would otherwise fail later."""
    if settings.device != "auto":
        find_device(settings.device)
    check_installed(settings.optimizer)
    check_peft(settings)
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    if cache is not None and not cache.is_dir():  # an existing one may be complete and read-only
        check_writable(cache, "--cache")


def check_processes(settings: Settings, processes: SingleProcess) -> None:
    """Raise InputError for settings that several processes cannot honour."""
    if settings.release_gradients and processes.is_distributed:
        raise InputError(
            "--release-gradients is for one process: several average their gradients after the "
            "backward pass; leave it out, or leave out --shard"
        )
    if settings.lora is not None and processes.is_sharded:
        raise InputError(
            f"--lora {settings.lora} cannot be sharded; use --shard ddp, since the model itself "
            "takes no gradients and no state"
        )


def check_model(settings: Settings) -> None:
    """Raise InputError for a missing model, before speech is synthesised for it."""
    if settings.model in SIZES:
        return
    try:
        find_model(Path(settings.model))
    except InputError as error:
        if Path(settings.model).exists():
            raise
        raise InputError(
            f"{error}; {', '.join(SIZES)} are sizes of new models with random weights"
        ) from error


def check_folder(out: Path, settings: Settings, resume: bool) -> Path | None:
    """Return the checkpoint to resume from, or None for a new training.

    Raises:
        InputError: If the folder cannot be written, if it contains another training, or if the
            model to start from is missing.
    """
    check_writable(out, "--out")
    found = checkpoint.checkpoints(out)
    if resume:
        resumed(out, settings)
        if found and checkpoint.step_of(found[-1]) > settings.steps:
            raise InputError(
                f"--steps {settings.steps}: the training in {out} is already at step "
                f"{checkpoint.step_of(found[-1])}; give at least that many"
            )
    elif found:
        raise InputError(
            f"{out}: already contains a training; continue it with --resume, or choose another "
            "--out"
        )
    if found:
        return found[-1]
    check_model(settings)
    return None


def _agreed(processes: SingleProcess, requested: abc.Callable[[], bool]) -> abc.Callable[[], bool]:
    """Give all processes the same answer: stop if any of them was asked to."""
    return lambda: processes.sum(int(requested())) > 0
