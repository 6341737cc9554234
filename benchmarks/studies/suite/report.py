"""Test data, looked at once: tables and a heat map of optimizers by task.

Peers are at the rate that development data chose, recipes at their own rate and at the best of a
grid. Every figure is a mean over seeds, but for long trainings, which have one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from measurement import circumstances, write_json
from studies.suite.choice import geometric_mean, ratio
from studies.suite.optimizers import ALL_PEERS
from studies.suite.search import error_of
from studies.suite.tasks import TASKS
from studies.suite.variants import TENFOLD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from measurement import Record
    from studies.suite.search import Known, Search
    from studies.suite.trials import Trial


ADAMW = ["adamw-95", "adamw-98"]
RIVALS = {"quality": ADAMW, "fast": ADAMW, "lean": ["adafactor"]}


def report(
    searches: Sequence[Search], known: Known, test: Known, device: str, results: Path
) -> Record:
    """Write suite.json and the heat map suite.svg."""
    rows = [row for search in searches for row in rows_of(search, known, test)]
    best: dict[str, float] = {}
    for row in rows:
        if row["optimizer"] in ALL_PEERS:
            best[row["task"]] = min(best.get(row["task"], row["error"]), row["error"])
    for row in rows:
        if row["task"] in best:
            row["ratio"] = round(
                ratio(row["error"], best[row["task"]], is_speech=TASKS[row["task"]].is_speech), 4
            )
    record = {
        **circumstances(device),
        "rows": rows,
        "means": means(rows),
        "comparisons": comparisons(rows),
        "scale": scale(rows),
        "tenfold": tenfold(searches, known),
    }
    write_json(results / "suite.json", record)
    draw(rows, results / "suite.svg")
    return record


def rows_of(search: Search, known: Known, test: Known) -> list[Record]:
    """An optimizer on a task: at the best rate, and a recipe at its own rate, too."""
    if not search.tried(known):
        return []
    chosen = {"best": search.best(known)}
    if search.always is not None:
        chosen["default"] = search.at(search.always)
    return [
        row
        for rate, trial in chosen.items()
        if (row := _row(search, trial, rate, known, test)) is not None
    ]


def _row(search: Search, trial: Trial, rate: str, known: Known, test: Known) -> Record | None:
    seeds = [replace(trial, seed=seed).key for seed in search.seeds]
    errors = [error_of(test[key]) for key in seeds if key in test]
    if not errors:
        return None
    record = known[trial.key]
    measured = [test[key] for key in seeds if key in test]
    old = [each[name] for each in measured for name in ("old_wer", "old_nats") if name in each]
    return {
        "task": trial.task,
        "family": TASKS[trial.task].family,
        "optimizer": search.name,
        "rate": rate,
        "lr": trial.lr,
        **({"share": trial.share} if trial.share else {}),
        "error": round(fmean(errors), 4),
        "seeds": errors,
        **({"old": round(fmean(old), 4)} if old else {}),
        "diverged": sum(bool(known[key]["diverged"]) for key in seeds if key in known),
        "ms_per_step": record["ms_per_step"],
        "state_bytes_per_parameter": record["state_bytes_per_parameter"],
    }


def means(rows: Sequence[Record]) -> list[Record]:
    """Geometric mean and worst task of each optimizer's ratio, over speech and over text."""
    found = []
    for name, rate in dict.fromkeys((row["optimizer"], row["rate"]) for row in rows):
        for is_speech, group in ((True, "speech"), (False, "text")):
            own = {
                row["task"]: row["ratio"]
                for row in rows
                if (row["optimizer"], row["rate"]) == (name, rate)
                and TASKS[row["task"]].is_speech == is_speech
                and row.get("ratio", 0.0) > 0.0
                and row["family"] != "scale"
            }
            if own:
                found.append({"optimizer": name, "rate": rate, "group": group, **summary(own)})
    return found


def summary(ratios: dict[str, float]) -> Record:
    """Geometric mean and worst of ratios by task."""
    worst = max(ratios, key=lambda task: ratios[task])
    return {
        "tasks": len(ratios),
        "mean": round(geometric_mean(ratios.values()), 4),
        "worst": round(ratios[worst], 4),
        "worst_task": worst,
    }


def comparisons(rows: Sequence[Record]) -> list[Record]:
    """Recipes at their own rate by some peers at their best, and by themselves at their best."""
    found = []
    for name, others in RIVALS.items():
        for rival in ([name], others):
            for group, tasks in (("speech", True), ("text", False), ("all", None)):
                by_task = {}
                for task in dict.fromkeys(row["task"] for row in rows if row["family"] != "scale"):
                    is_speech = TASKS[task].is_speech
                    own = errors_of(rows, task, [name], "default")
                    best = errors_of(rows, task, rival, "best")
                    if own and best and tasks in (None, is_speech):
                        by_task[task] = ratio(own[0], min(best), is_speech=is_speech)
                if by_task:
                    by = "itself" if rival == [name] else " or ".join(rival)
                    found.append({"optimizer": name, "by": by, "group": group, **summary(by_task)})
    return found


def scale(rows: Sequence[Record]) -> list[Record]:
    """By width and length: the best rate by a recipe's own, and its error by that of AdamW."""
    found = []
    for row in rows:
        if row["family"] != "scale" or row["optimizer"] in ALL_PEERS or row["rate"] != "best":
            continue
        task, is_speech = row["task"], TASKS[row["task"]].is_speech
        own = next(
            other
            for other in rows
            if (other["task"], other["optimizer"], other["rate"])
            == (task, row["optimizer"], "default")
        )
        adamw = errors_of(rows, task, RIVALS["quality"], "best")
        line = {
            "task": task,
            "optimizer": row["optimizer"],
            "best_rate": row["lr"] / own["lr"],
            "by_itself": round(ratio(own["error"], row["error"], is_speech=is_speech), 4),
        }
        if adamw:
            line["by_adamw"] = round(ratio(own["error"], min(adamw), is_speech=is_speech), 4)
        found.append(line)
    return found


def tenfold(searches: Sequence[Search], known: Known) -> list[Record]:
    """How often a recipe became NaN, or ended far above its best, at ten times its own rate."""
    found: dict[str, Record] = {}
    for search in searches:
        if search.always is None:
            continue
        for trial in search.tried(known):
            if math.isclose(trial.lr, TENFOLD * search.always):
                record = known[trial.key]
                none: Record = {"optimizer": search.name, "tasks": 0, "nan": 0, "diverged": 0}
                line = found.setdefault(search.name, none)
                line["tasks"] += 1
                line["nan"] += bool(record["is_nan"])
                line["diverged"] += bool(record["diverged"])
    return list(found.values())


def errors_of(
    rows: Sequence[Record], task: str, optimizers: Sequence[str], rate: str
) -> list[float]:
    """The errors of some optimizers on a task."""
    return [
        row["error"]
        for row in rows
        if row["task"] == task and row["optimizer"] in optimizers and row["rate"] == rate
    ]


def draw(rows: Sequence[Record], path: Path) -> None:
    """A heat map: tasks by optimizers, the ratio to the best peer."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(row["task"] for row in rows if row["family"] != "scale"))
    columns = list(dict.fromkeys((row["optimizer"], row["rate"]) for row in rows))
    values = {
        (row["task"], row["optimizer"], row["rate"]): row.get("ratio", float("nan")) for row in rows
    }
    grid = [[values.get((task, *column), float("nan")) for column in columns] for task in tasks]
    figure, axes = plt.subplots(figsize=(1.0 + 0.62 * len(columns), 1.2 + 0.36 * len(tasks)))
    axes.imshow(grid, cmap="RdYlGn_r", vmin=0.5, vmax=2.0, aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            if value == value:  # not NaN
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
    labels = [name if rate == "best" else f"{name} ({rate})" for name, rate in columns]
    axes.set_xticks(range(len(columns)), labels, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(tasks)), tasks, fontsize=8)
    axes.set_title("Error relative to the best tuned peer (test data; below 1 is better)", size=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
