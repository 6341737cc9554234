"""Several optimizers on the same data, seeds and budget.

Every training has a folder of its own and runs in a process of its own, so that what it takes in
memory can be told, several can share a GPU, and a comparison that was stopped goes on.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from maxfactor_speech.data.audio import InputError
from maxfactor_speech.data.shards import write_whole
from maxfactor_speech.processes import in_processes
from maxfactor_speech.training.loop import DivergedError, Result, train
from maxfactor_speech.training.metrics import read_metrics
from maxfactor_speech.training.optimizers import default_lr
from maxfactor_speech.training.preparation import prepare
from maxfactor_speech.training.progress import Lines
from maxfactor_speech.training.settings import SETTINGS, Settings, check_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from maxfactor_speech.training.preparation import Prepared
    from maxfactor_speech.training.trainer import Trainer

RESULT = "result.json"
GRID = (0.25, 0.5, 1.0, 2.0, 4.0)  # shares of an optimizer's own rate that are tried
SAME_TIME = "same time"
RUNS = "runs"  # the folder of the trainings


@dataclass(frozen=True)
class Run:
    """One training of a comparison."""

    label: str  # what its curve is called
    settings: Settings

    def __str__(self) -> str:
        return f"{self.label}, lr {self.settings.rate:g}, seed {self.settings.seed}"

    @property
    def folder(self) -> str:
        """A name that no other run of the comparison has."""
        one = self.settings
        return folder_name(one.optimizer, one.rate, one.steps, one.seed)


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
    wer: float | None  # None where the training diverged
    cer: float | None
    seconds: float  # of training, evaluations left out
    parameters: int
    state_bytes: int
    peak_bytes: int  # of GPU memory, or of the process where there is none
    examples: list[dict[str, str]]
    metrics: list[dict[str, Any]]
    jobs: int = 1  # trainings that ran side by side, and slowed each other down

    @property
    def folder(self) -> str:
        """The run's folder among those of the comparison."""
        return folder_name(self.optimizer, self.lr, self.steps, self.seed)

    @property
    def loss(self) -> float:
        """The last training loss that is known."""
        losses = [line["loss"] for line in self.metrics if line.get("loss") is not None]
        return losses[-1] if losses else math.inf

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
            # Always a number: what is tried in tuning and what is not are the same training.
            lr=default_lr(optimizer) if lr is None else lr,
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
        say: Is told a line for each training that begins or ends.
    """
    try:
        with _sigterm_as_ctrl_c():
            return _compare(plan, out, jobs, cache, say)
    except KeyboardInterrupt:
        say("stopped; what was trained is saved, and the same command goes on with it")
        raise


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """What `kill` and schedulers send stops a comparison as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # which alone may do this
        yield
        return
    before: Any = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _compare(
    plan: Plan, out: Path, jobs: int, cache: Path | None, say: Callable[[str], None]
) -> list[Outcome]:
    folder = out / RUNS
    if plan.base.data is not None:
        say(f"looking at {plan.base.data} …")
    # Once, before many want it at once; wrong inputs show here.
    prepare(plan.base, cache, None, _Told(say))

    def run_all(runs: Iterable[Run]) -> list[Outcome]:
        return _run_all(list(runs), folder, jobs, cache, say)

    rates: dict[str, float | None] = dict.fromkeys(plan.optimizers, plan.base.lr)
    if plan.tune:
        outcomes = run_all(_grid(plan))
        rates = {name: _best_rate(outcomes, name) for name in plan.optimizers}
        say("best rates: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items()))
    outcomes = run_all(
        plan.run(name, rates[name], seed) for name in plan.optimizers for seed in range(plan.seeds)
    )
    if plan.same_time:
        outcomes += run_all(_with_as_much_time(plan, outcomes, rates))
    return outcomes


def _grid(plan: Plan) -> list[Run]:
    """The trainings that look for the best rates."""
    if not plan.tune:
        return []
    return [
        plan.run(name, share * default_lr(name), 0) for name in plan.optimizers for share in GRID
    ]


def tried(plan: Plan, out: Path) -> list[Outcome]:
    """What the rates came to that a comparison has tried, in a folder where it has ended."""
    found = (_read(run, out / RUNS) for run in _grid(plan))
    return [outcome for outcome in found if outcome is not None]


def described(plan: Plan, prepared: Prepared) -> str:
    """What all trainings of a comparison had in common, in one line."""
    base, device = plan.base, plan.base.torch_device
    parameters = sum(one.numel() for one in prepared.model.parameters() if one.requires_grad)
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    batch = f"batches of {base.batch_size}"
    return ", ".join(
        [
            f"model {base.model} ({parameters / 1e6:.2f} M parameters)",
            batch if base.grad_accum == 1 else f"{base.grad_accum} {batch} to a step",
            f"{len(prepared.train)} utterances to train and {len(prepared.validation)} to validate",
            f"{base.schedule} schedule with {base.warmup:.0%} warm-up",
            base.dtype + (", SpecAugment" if base.spec_augment else ""),
            named,
        ]
    )


class _Told(Lines):
    """Tells in lines how the synthesis goes, from its beginning on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Say what begins."""
        super().begin(what, total, done)
        self.say(f"{what}: {total} utterances, but for those that are there …")

    def say(self, line: str) -> None:
        """Pass it on."""
        self._say(line)


def finished(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that did not diverge."""
    return [one for one in outcomes if one.wer is not None]


def mean_wer(outcomes: Iterable[Outcome]) -> float:
    """The mean word error rate of those that did not diverge; infinite where all did."""
    rates = [one.wer for one in outcomes if one.wer is not None]
    return mean(rates) if rates else math.inf


def by_label(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """The trainings of each label, which are those of its seeds."""
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(one.label, []).append(one)
    return groups


def best_label(outcomes: Sequence[Outcome]) -> str:
    """What is best in the mean over the seeds; who has diverged is behind who has not."""
    groups = by_label(outcomes)

    def order(label: str) -> tuple[int, float]:
        group = groups[label]
        return len(group) - len(finished(group)), mean_wer(group)

    return min(groups, key=order)


def by_quality(outcome: Outcome) -> tuple[float, float, float]:
    """Order of single trainings, the best first."""
    if outcome.wer is None or outcome.cer is None:
        return math.inf, math.inf, math.inf
    return outcome.wer, outcome.cer, outcome.loss


def _best_rate(tried: Sequence[Outcome], name: str) -> float:
    own = [one for one in tried if one.optimizer == name]
    if not finished(own):
        return min(one.lr for one in own)  # the least hopeless
    return min(own, key=by_quality).lr


def _with_as_much_time(
    plan: Plan, outcomes: Sequence[Outcome], rates: dict[str, float | None]
) -> list[Run]:
    """Runs of the faster ones, with as many steps as fit into the first one's time."""
    taken: dict[str, list[float]] = {}
    for one in finished(outcomes):
        taken.setdefault(one.optimizer, []).append(one.seconds)
    seconds = {name: mean(times) for name, times in taken.items()}
    if plan.optimizers[0] not in seconds:
        return []
    allowed = seconds[plan.optimizers[0]]
    runs = []
    for name in plan.optimizers[1:]:
        if name not in seconds:
            continue
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
    waiting = iter(enumerate(missing, 1))

    def begin() -> None:
        for number, run in islice(waiting, 1):
            say(f"training {number} of {len(missing)}: {run}, {run.settings.steps} steps …")

    work = partial(_train_one, folder=folder, cache=cache, jobs=jobs)
    for _ in range(jobs):  # the first ones; each that ends makes room for another
        begin()
    # One process for each training: what one took in memory must not be counted for the next.
    with closing(in_processes(work, missing, jobs)) as outcomes:
        for outcome in outcomes:
            found[outcome.folder] = outcome
            say(_told(outcome))
            begin()
    return [outcome for outcome in (found[run.folder] for run in runs) if outcome is not None]


def _told(outcome: Outcome) -> str:
    came_to = "diverged"
    if outcome.wer is not None:
        came_to = f"WER {outcome.wer:.1%} in {outcome.seconds:.0f} s"
    return f"{outcome.label}, lr {outcome.lr:g}, seed {outcome.seed}: {came_to}"


def _share_cores(device: torch.device, jobs: int) -> None:
    """Take a share of the cores: all of them for each of several trainings is far slower."""
    if device.type == "cpu" and jobs > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // jobs))


def _train_one(run: Run, folder: Path, cache: Path | None, jobs: int) -> Outcome:
    """Train in this process, going on with what is there."""
    _share_cores(run.settings.torch_device, jobs)
    return _trained(run, folder / run.folder, cache, jobs)


def _trained(run: Run, out: Path, cache: Path | None, jobs: int) -> Outcome:
    settings = run.settings
    prepared = prepare(settings, cache, 1)
    parameters = sum(one.numel() for one in prepared.model.parameters() if one.requires_grad)
    outcome = Outcome(
        label=run.label,
        optimizer=settings.optimizer,
        lr=settings.rate,
        seed=settings.seed,
        steps=settings.steps,
        wer=None,
        cer=None,
        seconds=0.0,
        parameters=parameters,
        state_bytes=0,
        peak_bytes=0,
        examples=[],
        metrics=[],
        jobs=jobs,
    )
    try:
        result = train(settings, out, resume=(out / SETTINGS).exists(), prepared=prepared)
    except DivergedError:  # a result like another: the other trainings go on
        outcome = replace(outcome, metrics=read_metrics(out))
    else:
        outcome = _with_result(outcome, result, out)
    write_whole(out / RESULT, json.dumps(asdict(outcome), indent=1).encode())
    return outcome


def _with_result(outcome: Outcome, result: Result, out: Path) -> Outcome:
    if result.evaluation is None:
        raise InputError(f"{out}: stopped; the same command goes on")
    return replace(
        outcome,
        wer=result.evaluation.wer,
        cer=result.evaluation.cer,
        seconds=result.seconds,
        state_bytes=state_bytes(result.trainer.optimizers),
        peak_bytes=_peak_bytes(result.trainer),
        examples=[example._asdict() for example in result.evaluation.examples],
        metrics=read_metrics(out),
    )


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
