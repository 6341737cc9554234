"""Training a Whisper: the loop around the steps, what it leaves behind, and going on."""

from __future__ import annotations

import json
import math
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from maxfactor_speech.data.audio import InputError
from maxfactor_speech.data.shards import check_writable, write_whole
from maxfactor_speech.processes import STOP
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training.folder_lock import alone_in
from maxfactor_speech.training.metrics import Metrics, NoMetrics
from maxfactor_speech.training.model import SIZES
from maxfactor_speech.training.optimizers import check_cut, check_installed
from maxfactor_speech.training.parallel import Alone, check_batch, started
from maxfactor_speech.training.preparation import Prepared, prepare
from maxfactor_speech.training.progress import Pace, Reporter, Silent
from maxfactor_speech.training.settings import SETTINGS, Settings, check_same, find_device
from maxfactor_speech.training.trainer import Trainer, repeatable

if TYPE_CHECKING:
    from collections import abc

    from torch import Tensor

    from maxfactor_speech.data.batches import Batch
    from maxfactor_speech.training.evaluation import Evaluation

# Ctrl-C, what `kill` and schedulers send, and what a comparison sends to its trainings.
STOPPING = tuple(dict.fromkeys((signal.SIGINT, signal.SIGTERM, STOP)))
LOG_EVERY = 10  # steps
MEMORIES = 50  # how often a training notes what FAM remembers


class DivergedError(InputError):
    """A training whose loss is no number any more: nothing later can mend it."""


@dataclass(frozen=True)
class Result:
    """What a training came to."""

    step: int
    evaluation: Evaluation | None  # None when it was stopped
    seconds: float  # of training, evaluations left out
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
) -> Result:
    """Train, with checkpoints and metrics in a folder, which no other process trains in meanwhile.

    On Ctrl-C or SIGTERM the step under way is finished and saved, and the result has no evaluation.

    Args:
        settings: What to do; they must be the same when a training is resumed.
        out: Folder for `settings.json`, `metrics.jsonl` and the checkpoints.
        resume: Go on from the last checkpoint, to the same weights as without the stop.
        reporter: Is told how it goes.
        prepared: Data and model, where they are there already.
        tensorboard: Write for TensorBoard too.
        cache: Where synthesised speech is kept.
        workers: Processes that synthesise.
        shard: "ddp", "fsdp" or "hsdp", in processes that `torchrun` started: how the model is
            spread over them. The first process alone writes and tells.
    """
    check_beforehand(settings, cache, workers)
    with started(shard, settings.torch_device) as ranks, ExitStack() as held:
        reporter = reporter if reporter is not None and ranks.rank == 0 else Silent()
        check_batch(settings.batch_size, ranks.world)
        check_cut(settings.optimizer, ranks.cuts)
        ranks.together(lambda: held.enter_context(alone_in(out)) if ranks.rank == 0 else None)
        last = ranks.together(lambda: check_folder(out, settings, resume))
        if prepared is None:
            prepared = ranks.first_alone(lambda: prepare(settings, cache, workers, reporter))
        trainer = ranks.together(lambda: _trainer(settings, prepared, last, ranks))
        if ranks.rank > 0:
            return _run(trainer, out, NoMetrics(), reporter)
        write_whole(out / SETTINGS, json.dumps(asdict(settings), indent=2).encode() + b"\n")
        metrics = Metrics(out, trainer.step, tensorboard)
        try:
            return _run(trainer, out, metrics, reporter)
        finally:
            metrics.close()


def _trainer(settings: Settings, prepared: Prepared, last: Path | None, ranks: Alone) -> Trainer:
    """A training that begins, or goes on from its last checkpoint."""
    if last is None:
        return Trainer(settings, prepared, ranks)
    model, codec = checkpoint.load_model(last)
    prepared = prepared._replace(model=model, codec=codec)
    trainer = Trainer(settings, prepared, ranks)
    trainer.load(last)
    return trainer


def _run(trainer: Trainer, out: Path, metrics: NoMetrics, reporter: Reporter) -> Result:
    settings = trainer.settings
    reporter.begin("training", settings.steps, trainer.step)
    evaluation: Evaluation | None = None
    folder: Path | None = None
    with _stop_asked() as asked:
        stopping = _agreed(trainer.ranks, asked)
        batches = trainer.batches()
        try:
            while trainer.step < settings.steps and not stopping():
                until = _next_stop(settings, trainer.step)
                pace = train_until(trainer, batches, until, stopping)
                metrics.pace(pace, trainer.memory() if _tells_memory(settings, pace.step) else {})
                reporter.pace(pace)
                if trainer.step == until and _is_evaluation(settings, until):
                    evaluation = trainer.evaluate()
                    metrics.evaluated(pace, evaluation)
                    reporter.evaluated(trainer.step, evaluation)
                    folder = trainer.save(out)
        finally:
            batches.close()  # ends its thread
        finished = trainer.step == settings.steps
        if folder is None or not finished:
            folder = trainer.save(out)
    if finished and evaluation is None:  # resumed after its end
        evaluation = trainer.evaluate()
    return Result(
        step=trainer.step,
        evaluation=evaluation if finished else None,
        seconds=trainer.seconds,
        checkpoint=folder,
        trainer=trainer,
    )


def train_until(
    trainer: Trainer,
    batches: abc.Iterator[list[Batch]],
    until: int,
    stopping: abc.Callable[[], bool] = lambda: False,
) -> Pace:
    """Train up to a step, or until asked to stop; the device is waited for once, at the end."""
    start, first = time.perf_counter(), trainer.step
    losses: list[Tensor] = []
    try:
        with repeatable(trainer.device):
            while trainer.step < until and not (losses and stopping()):
                losses.append(trainer.train_step(next(batches)))
        loss = trainer.ranks.mean(float(torch.stack(losses).mean()))
        trainer.check()
    except FloatingPointError as error:  # our optimizers give up
        raise DivergedError(f"step {trainer.step}: {error}") from error
    # A single loss that is none may be of a step that was skipped; the last one is of weights
    # that all steps before have left behind.
    if not math.isfinite(loss) and not math.isfinite(trainer.ranks.mean(float(losses[-1]))):
        raise DivergedError(_not_finite(trainer, loss))
    seconds = time.perf_counter() - start
    trainer.seconds += seconds
    return Pace(
        step=trainer.step,
        loss=loss,
        lr=float(trainer.optimizers[0].param_groups[0]["lr"]),
        effective_lr=trainer.effective_lr(),
        steps_per_second=(trainer.step - first) / seconds,
        seconds=trainer.seconds,
    )


def _not_finite(trainer: Trainer, loss: float) -> str:
    rate = trainer.settings.rate
    return f"the loss is {loss} at step {trainer.step}; lower --lr, which is {rate:g}"


def _tells_memory(settings: Settings, step: int) -> bool:
    """Whether the memory of FAM is noted: about MEMORIES times in a training, and at its end."""
    return step % max(1, settings.steps // MEMORIES) < LOG_EVERY or step == settings.steps


def _next_stop(settings: Settings, step: int) -> int:
    """The next step after which there is something to tell."""
    ends = [every * (step // every + 1) for every in (LOG_EVERY, settings.evaluate_every)]
    return min(*ends, settings.steps)


def _is_evaluation(settings: Settings, step: int) -> bool:
    return step % settings.evaluate_every == 0 or step == settings.steps


def check_beforehand(
    settings: Settings, cache: Path | None = None, workers: int | None = None
) -> None:
    """Refuse at once what would fail only in the middle of the work."""
    if settings.device != "auto":
        find_device(settings.device)
    check_installed(settings.optimizer)
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    if cache is not None and not cache.is_dir():  # one that only can be read will do if it is full
        check_writable(cache, "--cache")


def check_model(settings: Settings) -> None:
    """Refuse a model that is not there, before any speech is synthesised for it."""
    if settings.model not in SIZES:
        checkpoint.find_model(Path(settings.model))


def check_folder(out: Path, settings: Settings, resume: bool) -> Path | None:
    """The checkpoint to go on from, if asked to; refuse to mix two trainings in a folder.

    A folder that cannot be written is refused too, and a model to begin from that is not there.
    """
    check_writable(out, "--out")
    found = checkpoint.checkpoints(out)
    if resume:
        check_same(out, settings)
    elif found:
        raise InputError(
            f"{out}: holds a training already; --resume goes on with it, --out names another"
        )
    if found:
        return found[-1]
    check_model(settings)
    return None


def _agreed(ranks: Alone, asked: abc.Callable[[], bool]) -> abc.Callable[[], bool]:
    """The same answer on all processes: yes where one of them was asked to stop."""
    return lambda: ranks.total(int(asked())) > 0


@contextmanager
def _stop_asked() -> abc.Iterator[abc.Callable[[], bool]]:
    """Turn the first of each signal to stop into an answer to a question; the second is as ever."""
    asked: list[int] = []
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOPPING}

    def ask(number: int, _frame: object) -> None:
        asked.append(number)
        signal.signal(number, before[number])

    try:
        for number in STOPPING:
            signal.signal(number, ask)
    except ValueError:  # not in the main thread, which alone may do this
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        for number in STOPPING:
            signal.signal(number, before[number])
