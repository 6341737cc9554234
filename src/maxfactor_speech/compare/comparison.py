"""Running a comparison: several optimizers on the same data, with the same seeds and budget.

Each training runs in a process and a folder of its own. So its memory can be measured, several
trainings can share a GPU, and a stopped comparison can be continued.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from statistics import mean
from typing import TYPE_CHECKING

import torch

from maxfactor_speech.atomic import write_atomically
from maxfactor_speech.compare.progress import RunLines, ToParent
from maxfactor_speech.compare.runs import (
    RESULT,
    RUNS,
    Comparison,
    Run,
    RunResult,
    best_lr,
    finished,
    read_result,
)
from maxfactor_speech.errors import DivergedError, InputError
from maxfactor_speech.processes import in_processes
from maxfactor_speech.signals import sigterm_as_interrupt
from maxfactor_speech.state_size import state_bytes
from maxfactor_speech.training.loop import TrainingResult, train
from maxfactor_speech.training.metrics import read_metrics
from maxfactor_speech.training.preparation import prepare, trained_parameters
from maxfactor_speech.training.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from maxfactor_speech.training.preparation import Prepared

LR_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # multiples of the default learning rate for tuning
SAME_TIME = "same time"


def compare(
    comparison: Comparison,
    out: Path,
    jobs: int = 1,
    cache: Path | None = None,
    display: RunLines | None = None,
) -> list[RunResult]:
    """Train all optimizers of a comparison; finished trainings in the folder are reused.

    Args:
        comparison: What to compare.
        out: The folder; each training has a folder in it.
        jobs: Trainings that run at the same time.
        cache: Folder that caches synthesised speech.
        display: Shows the progress; None prints lines.
    """
    display = RunLines() if display is None else display
    try:
        with sigterm_as_interrupt():
            return _compare(comparison, out, jobs, cache, display)
    except KeyboardInterrupt:
        display.say("stopped; all progress is saved, run the same command to continue")
        raise


def _compare(
    comparison: Comparison, out: Path, jobs: int, cache: Path | None, display: RunLines
) -> list[RunResult]:
    base, optimizers, folder = comparison.base, comparison.optimizers, out / RUNS
    if base.data is not None:
        display.say(f"reading {base.data} …")
    # Once, before several trainings need the data at the same time; this also checks the input.
    prepare(base, cache, None, display)

    def run_all(runs: Iterable[Run]) -> list[RunResult]:
        return _run_all(list(runs), folder, jobs, cache, display)

    lrs: dict[str, float | None] = dict.fromkeys(optimizers, base.lr)
    if comparison.tune:
        results = run_all(_tuning_runs(comparison))
        lrs = {name: best_lr(results, name) for name in optimizers}
        rates = ", ".join(f"{name} {lr:g}" for name, lr in lrs.items())
        display.say(f"best learning rates: {rates}")
    results = run_all(
        comparison.run(name, lrs[name], seed)
        for name in optimizers
        for seed in range(comparison.seeds)
    )
    if comparison.same_time:
        results += run_all(_same_time_runs(comparison, results, lrs))
    return results


def _tuning_runs(comparison: Comparison) -> list[Run]:
    """Return the trainings that search for the best learning rates."""
    if not comparison.tune:
        return []
    return [
        comparison.run(name, factor * comparison.run(name, None, 0).settings.peak_lr, 0)
        for name in comparison.optimizers
        for factor in LR_FACTORS
    ]


def tuning_results(comparison: Comparison, out: Path) -> list[RunResult]:
    """Return the results of the learning rates that a finished comparison has tried."""
    found = (read_result(run, out / RUNS) for run in _tuning_runs(comparison))
    return [result for result in found if result is not None]


def describe(comparison: Comparison, prepared: Prepared) -> str:
    """Return a line about what all trainings of a comparison have in common."""
    base, device = comparison.base, comparison.base.torch_device
    millions = trained_parameters(prepared.model) / 1e6
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    batch = f"batches of {base.batch_size}"
    return ", ".join(
        [
            f"model {base.model} ({millions:.2f} M parameters)",
            batch if base.grad_accum == 1 else f"{base.grad_accum} {batch} per step",
            f"{len(prepared.train)} training and {len(prepared.validation)} validation utterances",
            f"{base.schedule} schedule with {base.warmup:.0%} warm-up",
            base.dtype + (", SpecAugment" if base.spec_augment else ""),
            named,
        ]
    )


def _same_time_runs(
    comparison: Comparison, results: Sequence[RunResult], lrs: dict[str, float | None]
) -> list[Run]:
    """Return runs of the faster optimizers with as many steps as fit into the first one's time."""
    seconds: dict[str, list[float]] = {}
    for one in finished(results):
        seconds.setdefault(one.optimizer, []).append(one.seconds)
    first, *others = comparison.optimizers
    if first not in seconds:
        return []
    runs = []
    for name in others:
        if name not in seconds:
            continue
        steps = int(comparison.base.steps * mean(seconds[first]) / mean(seconds[name]))
        if steps > comparison.base.steps:
            for seed in range(comparison.seeds):
                settings = comparison.run(name, lrs[name], seed).settings
                runs.append(Run(f"{name}, {SAME_TIME}", replace(settings, steps=steps)))
    return runs


def _run_all(
    runs: Sequence[Run], folder: Path, jobs: int, cache: Path | None, display: RunLines
) -> list[RunResult]:
    """Return the results of runs in order; those not stored yet come from new processes."""
    found = {run.folder: read_result(run, folder) for run in runs}
    by_folder = {run.folder: run for run in runs}
    missing = [run for run in runs if found[run.folder] is None]
    waiting = iter(enumerate(missing, 1))

    def announce_next() -> None:
        for number, run in islice(waiting, 1):
            display.started(run, number, len(missing))

    work = partial(_train_in_worker, folder=folder, cache=cache, jobs=jobs)
    for _ in range(jobs):  # the first ones; each that ends starts another
        announce_next()
    # One process per training: its peak memory must not include that of the previous one.
    with closing(in_processes(work, missing, jobs, display.progressed)) as results:
        for result in results:
            found[result.folder] = result
            display.ended(by_folder[result.folder], _outcome(result))
            announce_next()
    return [result for result in (found[run.folder] for run in runs) if result is not None]


def _outcome(result: RunResult) -> str:
    last, best = result.last, result.best
    if last is None or best is None:
        return "diverged"
    at_best = "" if best.step == last.step else f" (best {best.wer:.1%} at step {best.step})"
    return f"WER {last.wer:.1%}{at_best} in {result.seconds:.0f} s"


def _train_in_worker(run: Run, folder: Path, cache: Path | None, jobs: int) -> RunResult:
    """Train in this process, or continue a training that was stopped."""
    _share_cores(run.settings.torch_device, jobs)
    return _train(run, folder / run.folder, cache, jobs)


def _share_cores(device: torch.device, jobs: int) -> None:
    """Use only a share of the cores: several trainings with all cores each are far slower."""
    if device.type == "cpu" and jobs > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // jobs))


def _train(run: Run, out: Path, cache: Path | None, jobs: int) -> RunResult:
    settings = run.settings
    prepared = prepare(settings, cache, 1)
    result = RunResult(
        label=run.label,
        optimizer=settings.optimizer,
        lr=settings.peak_lr,
        seed=settings.seed,
        steps=settings.steps,
        wer=None,
        raw_wer=None,
        cer=None,
        seconds=0.0,
        parameters=trained_parameters(prepared.model),
        state_bytes=0,
        examples=[],
        metrics=[],
        jobs=jobs,
    )
    try:
        resume = (out / SETTINGS).exists()
        trained = train(settings, out, resume, ToParent(), prepared)
    except DivergedError:  # also a result: the other trainings continue
        result = replace(result, metrics=read_metrics(out))
    else:
        result = _with_measurements(result, trained, out)
    write_atomically(out / RESULT, json.dumps(asdict(result), indent=1).encode())
    return result


def _with_measurements(result: RunResult, trained: TrainingResult, out: Path) -> RunResult:
    if trained.evaluation is None:
        raise InputError(f"{out}: stopped; run the same command to continue")
    return replace(
        result,
        wer=trained.evaluation.wer,
        raw_wer=trained.evaluation.raw_wer,
        cer=trained.evaluation.cer,
        seconds=trained.seconds,
        state_bytes=state_bytes(*trained.trainer.optimizers),
        gpu_bytes=_gpu_bytes(trained.trainer.device),
        examples=[example._asdict() for example in trained.evaluation.examples],
        metrics=read_metrics(out),
    )


def _gpu_bytes(device: torch.device) -> int | None:
    """Return the peak of GPU memory. On a CPU, that of the process says nothing of optimizers."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
