"""Choose settings on some families of tasks, and look at them on the family that was left out.

A variant's score on a task is its error relative to the best tuned peer, on development data. Its
score on several tasks is the geometric mean. This helps to choose the variant that ships; what a
choice is worth elsewhere is seen on families that had no say.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from studies.suite.optimizers import PEERS
from studies.suite.search import mean_error
from studies.suite.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from studies.suite.search import Known, Search

FEWEST = 0.25  # per cent: differences of fewer words decide nothing

Scores = dict[str, dict[str, float]]  # by candidate and task


class Choice(NamedTuple):
    """The best candidate on all families but one, and how it does on that one."""

    left_out: str
    candidate: str
    score: float
    best_score: float  # of the candidate that is best on the family left out


def ratio(error: float, reference: float, *, is_speech: bool) -> float:
    """Word errors relative to others, or perplexity relative to another: above 1 is worse.

    FEWEST is added to both word error rates: without it, one wrong word in three thousand instead
    of none would be infinitely worse.
    """
    if is_speech:
        return (error + FEWEST) / (reference + FEWEST)
    return math.exp(error - reference)


def scores(searches: Iterable[Search], known: Known) -> Scores:
    """The score of every candidate: a row of a table at one of its rates."""
    rows = list(searches)
    found: Scores = {}
    references = {task: _best_peer(task, rows, known) for task in {s.trial.task for s in rows}}
    for search in rows:
        task, is_speech = search.trial.task, TASKS[search.trial.task].is_speech
        reference = references[task]
        if search.name in PEERS or reference is None:
            continue
        for trial in search.tried(known):
            if not search.has_all_seeds(trial, known):
                continue
            name = f"{search.name} @ {trial.lr:g}"
            value = ratio(mean_error(search, trial, known), reference, is_speech=is_speech)
            found.setdefault(name, {})[task] = value
    return found


def _best_peer(task: str, rows: Sequence[Search], known: Known) -> float | None:
    """The error of the best peer with all seeds: the one that chose a rate has been lucky."""
    peers = [
        (row, row.best(known))
        for row in rows
        if row.trial.task == task and row.name in PEERS and row.tried(known)
    ]
    errors = [mean_error(*each, known) for each in peers if each[0].has_all_seeds(each[1], known)]
    return min(errors, default=None)


def geometric_mean(values: Iterable[float]) -> float:
    """The mean of ratios."""
    return math.exp(fmean(map(math.log, values)))


def choose(found: Scores, families: Sequence[str]) -> tuple[str, list[Choice]]:
    """The candidate that is best on all families, and the choices with one of them left out.

    Only candidates count that were run on every task that any was run on.
    """
    tasks = {task for by_task in found.values() for task in by_task}
    complete = {name: by_task for name, by_task in found.items() if set(by_task) == tasks}
    if not complete:
        raise SystemExit("no candidate was run on all tasks; run more before choosing")

    def score(name: str, wanted: set[str]) -> float:
        # Families count alike, whatever the number of their tasks.
        by_family = [
            geometric_mean(v for task, v in complete[name].items() if TASKS[task].family == family)
            for family in families
            if family in wanted and any(TASKS[task].family == family for task in tasks)
        ]
        return geometric_mean(by_family)

    present = {TASKS[task].family for task in tasks}
    best = min(complete, key=lambda name: score(name, present))
    choices = []
    for left_out in [family for family in families if family in present and len(present) > 1]:
        chosen = min(complete, key=lambda name: score(name, present - {left_out}))
        own = {name: score(name, {left_out}) for name in complete}
        choices.append(Choice(left_out, chosen, own[chosen], min(own.values())))
    return best, choices


def print_choice(found: Scores, families: Sequence[str]) -> None:
    """Every candidate's scores by family, and what was chosen."""
    for name, by_task in sorted(found.items()):
        shown = " ".join(f"{task}:{value:.2f}" for task, value in by_task.items())
        print(f"  {name:32} {geometric_mean(by_task.values()):.3f}  {shown}")
    best, choices = choose(found, families)
    print(f"chosen on all families: {best}")
    for each in choices:
        print(
            f"without {each.left_out}: {each.candidate}, there {each.score:.3f} "
            f"(the best there has {each.best_score:.3f})"
        )
