"""What is tried: the learning rates, shares and seeds of every optimizer on every task."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING

from studies.suite.optimizers import ALL_PEERS
from studies.suite.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from measurement import Record
    from studies.suite.trials import Trial

CHOOSING = 0  # the seed that chooses rates and shares: its errors are too good, so not reported
SEEDS = (1, 2, 3)  # that are reported
LONG = 8_000  # steps from which on one seed has to do
EXTENSIONS = 4  # rates beyond the lowest or highest one
Known = dict[str, "Record"]


@dataclass(frozen=True)
class Search:
    """An optimizer on a task: rates with one seed, then shares, then other seeds at the best.

    Args:
        name: Of the row in a table.
        trial: Task, optimizer and settings.
        rates: Learning rates that are tried.
        shares: AdamW's shares of the rate: the first with every rate, the others at the best.
        extends: Whether the search goes on beyond the lowest and highest rate if that is the best.
        seeds: At the best rate.
        always: A rate that gets all seeds whether it is the best or not: a recipe's own.
    """

    name: str
    trial: Trial
    rates: tuple[float, ...]
    shares: tuple[float, ...] = (0.0,)
    extends: bool = True
    seeds: tuple[int, ...] = SEEDS
    always: float | None = None

    def due(self, known: Known) -> list[Trial]:
        """The trials that have to be run next, with what is known by now."""
        first = [self.at(rate) for rate in self.rates]
        missing = [trial for trial in first if trial.key not in known]
        own = [] if self.always is None else [self.at(self.always, seed=s) for s in self.seeds]
        if missing:
            return [*missing, *(trial for trial in own if trial.key not in known)]
        rates = self._extended(known)
        due = [self.at(rate) for rate in rates if self.at(rate).key not in known]
        if not due:
            best = self.best(known)
            shared = [self.at(best.lr, share) for share in self.shares]
            due = [trial for trial in shared if trial.key not in known]
        if not due:
            best = self.best(known)
            seeds = [replace(best, seed=seed) for seed in self.seeds]
            due = [trial for trial in (*own, *seeds) if trial.key not in known]
        return list({trial.key: trial for trial in due}.values())

    def at(self, lr: float, share: float | None = None, seed: int = CHOOSING) -> Trial:
        """The trial at a rate."""
        return replace(
            self.trial, lr=lr, share=self.shares[0] if share is None else share, seed=seed
        )

    def _extended(self, known: Known) -> list[float]:
        """The rates, with further ones beyond an end that is the best."""
        rates = sorted(self.rates)
        if not self.extends:
            return rates
        for _ in range(EXTENSIONS):
            tried = [rate for rate in rates if self.at(rate).key in known]
            best = min(tried, key=lambda rate: error_of(known[self.at(rate).key]))
            if best == rates[0]:
                rates.insert(0, float(f"{rates[0] / 2:.4g}"))
            elif best == rates[-1]:
                rates.append(float(f"{rates[-1] * 2:.4g}"))
            else:
                break
            if self.at(rates[0]).key not in known or self.at(rates[-1]).key not in known:
                break
        return rates

    def tried(self, known: Known) -> list[Trial]:
        """Trials with the seed that chooses that have been run."""
        rates = set(self.rates)
        if self.extends:
            lowest, highest = min(rates), max(rates)
            for power in range(1, EXTENSIONS + 1):
                rates |= {float(f"{lowest / 2**power:.4g}"), float(f"{highest * 2**power:.4g}")}
        trials = [self.at(rate, share) for rate in sorted(rates) for share in self.shares]
        return [trial for trial in trials if trial.key in known]

    def best(self, known: Known) -> Trial:
        """The trial with the smallest error on development data."""
        return min(self.tried(known), key=lambda trial: error_of(known[trial.key]))

    def errors(self, trial: Trial, known: Known) -> list[float]:
        """The errors of a trial's seeds that have been run."""
        seeds = [replace(trial, seed=seed) for seed in self.seeds]
        return [error_of(known[each.key]) for each in seeds if each.key in known]

    def has_all_seeds(self, trial: Trial, known: Known) -> bool:
        """Whether all seeds of a trial have been run."""
        return len(self.errors(trial, known)) == len(self.seeds)

    def is_complete(self, known: Known) -> bool:
        """Whether nothing is left to run."""
        return not self.due(known)


class Durations:
    """How long trials take, by what is known of others."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._known: dict[tuple[str, bool], dict[tuple[str, str], float]] = {}  # by task
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Take in a finished trial; some early records lack their time."""
        if seconds := record.get("seconds"):
            trial = record["trial"]
            of_task = self._known.setdefault((trial["task"], trial.get("quick", False)), {})
            kind = trial["optimizer"], trial.get("iteration", "")
            of_task[kind] = max(of_task.get(kind, 0.0), seconds)

    def of(self, trial: Trial) -> float:
        """The longest in seconds, or that of all other optimizers; 0 if nothing is known."""
        of_task = self._known.get((trial.task, trial.quick), {})
        own = of_task.get((trial.optimizer, trial.iteration))
        return own or max(of_task.values(), default=0.0)


def error_of(record: Record) -> float:
    """What a record is judged by."""
    return float(record["wer"] if "wer" in record else record["nats"])


def mean_error(search: Search, trial: Trial, known: Known) -> float:
    """The mean over seeds."""
    return mean(search.errors(trial, known))


def peer_search(
    name: str, task: str, trial: Callable[..., Trial], seeds: tuple[int, ...] | None = None
) -> Search:
    """A peer on a task, with the seeds that are reported or with others."""
    peer = ALL_PEERS[name]
    rates = peer.rates_for(TASKS[task].family)
    made = trial(task, name, rates[0])
    return Search(name, made, rates, peer.shares, seeds=seeds or seeds_of(task))


def seeds_of(task: str) -> tuple[int, ...]:
    """The seeds that are reported: of long trainings the one that chose."""
    return (CHOOSING,) if TASKS[task].steps >= LONG else SEEDS


def read_records(path: Path) -> Known:
    """Records by their keys; the last of equal keys counts."""
    if not path.exists():
        return {}
    records: Iterable[Record] = map(json.loads, path.read_text().splitlines())
    return {record["key"]: record for record in records}
