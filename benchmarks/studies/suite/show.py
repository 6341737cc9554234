"""Tables of what is known on development data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from studies.suite.search import error_of, mean_error
from studies.suite.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from studies.suite.search import Known, Search
    from studies.suite.trials import Trial


def print_rows(searches: Sequence[Search], known: Known) -> None:
    """One line for each optimizer on each task: errors by rate, and the mean at the best."""
    task = ""
    for search in sorted(searches, key=lambda search: list(TASKS).index(search.trial.task)):
        tried = search.tried(known)
        if not tried:
            continue
        if search.trial.task != task:
            task = search.trial.task
            print(f"\n{task}")
        best = search.best(known)
        rates = " ".join(
            f"{trial.lr:g}{'/' + format(trial.share, 'g') if trial.share else ''}:"
            f"{error_of(known[trial.key]):.4g}{'!' if known[trial.key]['diverged'] else ''}"
            for trial in tried
        )
        line = f"  {search.name:24} best {shown_mean(search, best, known)}"
        if search.always is not None and search.at(search.always).key in known:
            line += f", default {shown_mean(search, search.at(search.always), known)}"
        print(f"{line}  {rates}", flush=True)


def shown_mean(search: Search, trial: Trial, known: Known) -> str:
    """The mean over the seeds that have been run; until then, the error of the one that chose."""
    count = len(search.errors(trial, known))
    if not count:
        return f"{error_of(known[trial.key]):.4g} (the seed that chose)"
    return f"{mean_error(search, trial, known):.4g} ({count} seeds)"
