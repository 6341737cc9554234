"""Several optimizers on the same data, seeds and budget.

Every training has a folder of its own and runs in a process of its own, so that what it takes in
memory can be told, several can share a GPU, and a comparison that was stopped goes on.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from maxfactor.speech.audio import InputError
from maxfactor.speech.metrics import read_metrics
from maxfactor.speech.optimizers import default_lr
from maxfactor.speech.preparation import prepare
from maxfactor.speech.settings import Settings, check_same
from maxfactor.speech.shards import write_whole
from maxfactor.speech.train import train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from maxfactor.speech.trainer import Trainer

RESULT = "result.json"
GRID = (0.25, 0.5, 1.0, 2.0, 4.0)  # shares of an optimizer's own rate that are tried
SAME_TIME = "same time"


RUNS = "runs"  # the folder of the trainings


@dataclass(frozen=True)
class Run:
    """One training of a comparison."""

    label: str  # what its curve is called
    settings: Settings

    @property
    def folder(self) -> str:
        """A name that no other run of the comparison has."""
        one = self.settings
        rate = default_lr(one.optimizer) if one.lr is None else one.lr
        return folder_name(one.optimizer, rate, one.steps, one.seed)


def folder_name(optimizer: str, lr: float, steps: int, seed: int) -> str:
    """Where a run is kept among those of a comparison."""
    return f"{optimizer}-lr{lr:g}-steps{steps}-seed{seed}"


@dataclass(frozen=True)
class Outcome:
    """What a run came to, and its curves."""

    label: str
    optimizer: str
    lr: float
    seed: int
    steps: int
    wer: float
    cer: float
    seconds: float  # of training, evaluations left out
    parameters: int
    state_bytes: int
    peak_bytes: int  # of GPU memory, or of the process where there is none
    examples: list[dict[str, str]]
    metrics: list[dict[str, Any]]

    @property
    def folder(self) -> str:
        """The run's folder among those of the comparison."""
        return folder_name(self.optimizer, self.lr, self.steps, self.seed)

    @property
    def step_ms(self) -> float:
        """Milliseconds per step, data and all."""
        return 1000.0 * self.seconds / self.steps


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Args:
        base: Settings that all share; their optimizer, lr and seed are left aside.
        optimizers: Names; the first is the one that others get as much time as.
        seeds: How many of them, from the base's own on.
        tune: Whether to look for the best rate of each, with the first seed.
        same_time: Whether to give those that are faster than the first as many more steps.
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
            default_lr(name)  # refuses a name that there is not
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")

    def run(self, optimizer: str, lr: float | None, seed: int) -> Run:
        """One training of an optimizer."""
        chosen = replace(
            self.base,
            optimizer=optimizer,
            lr=lr,
            seed=self.base.seed + seed,
            utterances=self.base.utterance_count,  # the same for those that take more steps
        )
        return Run(optimizer, chosen)


def compare(
    plan: Plan,
    out: Path,
    jobs: int = 1,
    cache: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Train every optimizer of a plan; what is in the folder already is not done again.

    Args:
        plan: What to compare.
        out: Folder, with one of its own for each training.
        jobs: Trainings at the same time.
        cache: Where synthesised speech is kept.
        say: Is told a line for each training that ends.
    """
    folder = out / RUNS
    prepare(plan.base, cache)  # once, before many want it at once; wrong inputs show here

    def run_all(runs: Iterable[Run]) -> list[Outcome]:
        return _run_all(list(runs), folder, jobs, cache, say)

    rates: dict[str, float | None] = dict.fromkeys(plan.optimizers, plan.base.lr)
    if plan.tune:
        tried = run_all(
            plan.run(name, share * default_lr(name), 0)
            for name in plan.optimizers
            for share in GRID
        )
        rates = {name: _best_rate(tried, name) for name in plan.optimizers}
        say("best rates: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items()))
    outcomes = run_all(
        plan.run(name, rates[name], seed) for name in plan.optimizers for seed in range(plan.seeds)
    )
    if plan.same_time:
        outcomes += run_all(_with_as_much_time(plan, outcomes, rates))
    return outcomes


def _best_rate(tried: Sequence[Outcome], name: str) -> float:
    return min((one for one in tried if one.optimizer == name), key=lambda one: one.wer).lr


def _with_as_much_time(
    plan: Plan, outcomes: Sequence[Outcome], rates: dict[str, float | None]
) -> list[Run]:
    """Runs of the faster ones, with as many steps as fit into the first one's time."""
    seconds = {
        name: mean(one.seconds for one in outcomes if one.optimizer == name)
        for name in plan.optimizers
    }
    allowed = seconds[plan.optimizers[0]]
    runs = []
    for name in plan.optimizers[1:]:
        steps = int(plan.base.steps * allowed / seconds[name])
        if steps > plan.base.steps:
            for seed in range(plan.seeds):
                run = plan.run(name, rates[name], seed)
                longer = replace(run.settings, steps=steps)
                runs.append(Run(f"{name}, {SAME_TIME}", longer))
    return runs


def _run_all(
    runs: Sequence[Run], folder: Path, jobs: int, cache: Path | None, say: Callable[[str], None]
) -> list[Outcome]:
    """Outcomes in the order of the runs, each from a fresh process unless it is there already."""
    found = {run.folder: _read(run, folder) for run in runs}
    missing = [run for run in runs if found[run.folder] is None]
    work = partial(_train_one, folder=folder, cache=cache)
    # One process for each training: what one took in memory must not be counted for the next.
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        for number, (name, outcome) in enumerate(pool.imap_unordered(work, missing), 1):
            found[name] = outcome
            say(
                f"{number} of {len(missing)}: {outcome.label}, lr {outcome.lr:g}, seed "
                f"{outcome.seed}: WER {outcome.wer:.1%} in {outcome.seconds:.0f} s"
            )
    return [outcome for outcome in (found[run.folder] for run in runs) if outcome is not None]


def _train_one(run: Run, folder: Path, cache: Path | None) -> tuple[str, Outcome]:
    """Train in this process, going on with what is there."""
    out = folder / run.folder
    settings = run.settings
    prepared = prepare(settings, cache, 1)
    result = train(settings, out, resume=(out / "settings.json").exists(), prepared=prepared)
    if result.evaluation is None:
        raise InputError(f"{out}: stopped; the same command goes on")
    trainer = result.trainer
    outcome = Outcome(
        label=run.label,
        optimizer=settings.optimizer,
        lr=default_lr(settings.optimizer) if settings.lr is None else settings.lr,
        seed=settings.seed,
        steps=settings.steps,
        wer=result.evaluation.wer,
        cer=result.evaluation.cer,
        seconds=result.seconds,
        parameters=sum(one.numel() for one in trainer.model.parameters() if one.requires_grad),
        state_bytes=state_bytes(trainer.optimizers),
        peak_bytes=_peak_bytes(trainer),
        examples=[example._asdict() for example in result.evaluation.examples],
        metrics=read_metrics(out),
    )
    write_whole(out / RESULT, json.dumps(asdict(outcome), indent=1).encode())
    return run.folder, outcome


def state_bytes(optimizers: Sequence[Optimizer]) -> int:
    """What the tensors of optimizers' states take."""
    return sum(
        value.numel() * value.element_size()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _peak_bytes(trainer: Trainer) -> int:
    if trainer.device.type == "cuda":
        return torch.cuda.max_memory_allocated(trainer.device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used


def _read(run: Run, folder: Path) -> Outcome | None:
    """The outcome of a run that ended before."""
    path = folder / run.folder / RESULT
    if not path.exists():
        return None
    check_same(path.parent, run.settings)
    try:
        return replace(Outcome(**json.loads(path.read_text())), label=run.label)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read, {error}; delete it to train anew") from error
