"""Tables of what is known on development data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from studies.suite.search import error_of, mean_error
from studies.suite.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from studies.suite.search import Known, Search


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
        count = len(search.errors(best, known))
        line = f"  {search.name:24} best {mean_error(search, best, known):.4g} ({count} seeds)"
        if search.always is not None and search.at(search.always).key in known:
            own = search.at(search.always)
            seeds = len(search.errors(own, known))
            line += f", default {mean_error(search, own, known):.4g} ({seeds})"
        print(f"{line}  {rates}", flush=True)
