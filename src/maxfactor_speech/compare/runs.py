"""The trainings of a comparison: what to run, and the results."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from maxfactor_speech.errors import InputError
from maxfactor_speech.training.optimizers import default_lr
from maxfactor_speech.training.settings import check_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from maxfactor_speech.training.settings import Settings

RESULT = "result.json"
RUNS = "runs"  # the folder of the trainings


@dataclass(frozen=True)
class Run:
    """One training of a comparison."""

    label: str  # the name of its curve
    settings: Settings

    def __str__(self) -> str:
        return f"{self.label}, lr {self.settings.peak_lr:g}, seed {self.settings.seed}"

    @property
    def folder(self) -> str:
        """The name of its folder, unique within the comparison."""
        one = self.settings
        return folder_name(one.optimizer, one.peak_lr, one.steps, one.seed)


def folder_name(optimizer: str, lr: float, steps: int, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{optimizer}-lr{lr:g}-steps{steps}-seed{seed}"


class Errors(NamedTuple):
    """The error rates of an evaluation."""

    step: int
    wer: float  # of normalised texts
    raw_wer: float
    cer: float
    examples: list[dict[str, str]]


@dataclass(frozen=True)
class RunResult:
    """The result of a run, with its curves."""

    label: str
    optimizer: str
    lr: float
    seed: int
    steps: int
    wer: float | None  # after the last step, of normalised texts; None if the training diverged
    raw_wer: float | None
    cer: float | None
    seconds: float  # of training, without evaluations
    parameters: int
    state_bytes: int
    examples: list[dict[str, str]]
    metrics: list[dict[str, Any]]
    jobs: int = 1  # trainings that ran at the same time, which slows each of them
    gpu_bytes: int | None = None  # peak of allocated GPU memory; None on a CPU

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return folder_name(self.optimizer, self.lr, self.steps, self.seed)

    @property
    def last(self) -> Errors | None:
        """The error rates after the last step; None if the training diverged."""
        if self.wer is None or self.raw_wer is None or self.cer is None:
            return None
        return Errors(self.steps, self.wer, self.raw_wer, self.cer, self.examples)

    @property
    def best(self) -> Errors | None:
        """The best error rates after a step; None if the training diverged.

        Those before the first step are the same for all optimizers.
        """
        evaluations = [line for line in self.metrics if "wer" in line and line["step"] > 0]
        if self.wer is None or not evaluations:
            return self.last
        line = min(evaluations, key=lambda one: (one["wer"], one["cer"]))
        return Errors(*(line[name] for name in Errors._fields))

    @property
    def unsurpassed(self) -> float | None:
        """The word error rate before the first step, if no checkpoint is better than that."""
        lines = [line for line in self.metrics if "wer" in line]
        is_best = bool(lines) and lines[-1].get("best") == 0
        return float(lines[0]["wer"]) if is_best else None

    @property
    def loss(self) -> float:
        """The last training loss."""
        losses = [line["loss"] for line in self.metrics if line.get("loss") is not None]
        return losses[-1] if losses else math.inf

    @property
    def step_ms(self) -> float:
        """Milliseconds per step, including the data."""
        return 1000.0 * self.seconds / self.steps


@dataclass(frozen=True)
class Comparison:
    """What to compare.

    Args:
        base: Settings that all trainings share, except for optimizer, lr and seed.
        optimizers: Names; the time of the first one is the budget for `same_time`.
        seeds: The number of seeds, counted from the seed of `base`.
        tune: Whether to search for the best learning rate of each, with the first seed.
        same_time: Whether to train those that are faster than the first one again, with as many
            steps as fit into its time.
    """

    base: Settings
    optimizers: Sequence[str]
    seeds: int = 1
    tune: bool = False
    same_time: bool = False

    def __post_init__(self) -> None:
        if not self.optimizers:
            raise ValueError("optimizers must name at least one")
        if len(set(self.optimizers)) < len(self.optimizers):
            raise ValueError(f"optimizers must differ, got {', '.join(self.optimizers)}")
        for name in self.optimizers:
            default_lr(name)  # raises for an unknown name
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")

    def run(self, optimizer: str, lr: float | None, seed: int) -> Run:
        """Return one training of an optimizer."""
        settings = replace(
            self.base,
            optimizer=optimizer,
            lr=lr,
            seed=self.base.seed + seed,
            utterances=self.base.utterance_count,  # the same data also for more steps
        )
        # Always a number, so that a training with the default rate is not repeated in tuning.
        return Run(optimizer, replace(settings, lr=settings.peak_lr))


def read_result(run: Run, folder: Path) -> RunResult | None:
    """Return the stored result of a run, or None if it has not finished."""
    path = folder / run.folder / RESULT
    if not path.exists():
        return None
    check_same(path.parent, run.settings)
    try:
        stored = json.loads(path.read_text())
        known = {
            field.name: stored[field.name] for field in fields(RunResult) if field.name in stored
        }
        return replace(RunResult(**known), label=run.label)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read, {error}; delete it to train again") from error


# ------------------------------------------------------------------------------- ranking
#
# By the best checkpoint after a step. The validation set also chose it, so its error rate is a
# little optimistic, for all optimizers alike.


def finished(results: Iterable[RunResult]) -> list[RunResult]:
    """Return the results that did not diverge."""
    return [one for one in results if one.wer is not None]


def best_errors(results: Iterable[RunResult]) -> list[Errors]:
    """Return the error rates of the best checkpoints of runs that did not diverge."""
    return [one.best for one in results if one.best is not None]


def last_errors(results: Iterable[RunResult]) -> list[Errors]:
    """Return the error rates after the last step of runs that did not diverge."""
    return [one.last for one in results if one.last is not None]


def mean_wer(errors: Sequence[Errors]) -> float:
    """Return the mean word error rate; infinity if there is none."""
    return mean(one.wer for one in errors) if errors else math.inf


def by_label(results: Iterable[RunResult]) -> dict[str, list[RunResult]]:
    """Group results by label: the seeds of each optimizer."""
    groups: dict[str, list[RunResult]] = {}
    for one in results:
        groups.setdefault(one.label, []).append(one)
    return groups


def ranked_labels(
    results: Sequence[RunResult],
    errors: Callable[[Iterable[RunResult]], list[Errors]] = best_errors,
) -> list[str]:
    """Return the labels, the best first: by fewer diverged runs, then the mean word error rate.

    Args:
        results: The results of all labels.
        errors: Which error rates to rank by: `best_errors` or `last_errors`.
    """
    groups = by_label(results)

    def rank(label: str) -> tuple[int, float]:
        group = groups[label]
        return len(group) - len(finished(group)), mean_wer(errors(group))

    return sorted(groups, key=rank)


def best_label(results: Sequence[RunResult]) -> str:
    """Return the label with the best checkpoints."""
    return ranked_labels(results)[0]


def by_quality(result: RunResult) -> tuple[float, float, float]:
    """Return a sort key for single runs, the best first: by the best checkpoint, then the loss."""
    if result.best is None:
        return math.inf, math.inf, math.inf
    return result.best.wer, result.best.cer, result.loss


def best_lr(tried: Sequence[RunResult], optimizer: str) -> float:
    """Return the learning rate of an optimizer's best run; the lowest one if all diverged."""
    own = [one for one in tried if one.optimizer == optimizer]
    if not finished(own):
        return min(one.lr for one in own)
    return min(own, key=by_quality).lr
