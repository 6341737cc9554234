"""Tables and a heat map of optimizers by task, on development data or on test data.

Test data are read only once. Peers are at the rate that development data chose, recipes at their
own rate and, where all rates have been run, at the best of a grid. Every figure is a mean over
seeds, but for long trainings, which have one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from measurement import circumstances, write_json
from studies.suite.choice import geometric_mean, ratio
from studies.suite.optimizers import ALL_PEERS, OURS
from studies.suite.search import error_of
from studies.suite.tasks import SCALE, TASKS
from studies.suite.variants import TENFOLD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from measurement import Record
    from studies.suite.search import Known, Search
    from studies.suite.trials import Trial


ADAMW = ["adamw-95", "adamw-98"]
LABELS = {  # of peers, in the order of the heat map
    "soap": "SOAP",
    "normuon": "NorMuon",
    "muon": "Muon, original",
    "muon-matched": "Muon, match RMS",
    "adamw-95": "AdamW (.9, .95)",
    "adamw-98": "AdamW (.9, .98)",
    "adafactor": "Adafactor",
    "schedule-free": "Schedule-Free",
    "mars": "MARS",
    "ademamix": "AdEMAMix",
    "nadamw": "NAdamW",
    "came": "CAME",
    "lion": "Lion",
}
CAPTION = "Word errors (+ .25 %), or perplexity for text, divided by those of the best peer"
DARK = 1.3  # logarithm from which on a cell needs light text
GROUPS = {"speech": True, "text": False, "all": None}  # text is whatever is measured in nats
RIVALS = {"quality": ADAMW, "fast": ADAMW, "lean": ["adafactor"]}


def report(
    searches: Sequence[Search], known: Known, measured: Known, device: str, out: Path, picture: Path
) -> Record:
    """Write the tables as JSON, and the heat map as SVG.

    Args:
        searches: The rows.
        known: Records on development data, which choose the rates.
        measured: The errors that are reported: those records again, or those on test data.
        device: Where this runs; records say where they were trained.
        out: The JSON file.
        picture: The SVG file.
    """
    tasks = {search.trial.task for search in searches}
    record = {
        **circumstances(device),
        "data": "development" if measured is known else "test",
        "trained_on": sorted(
            {
                each["machine"]
                for each in known.values()
                if "machine" in each and each["trial"]["task"] in tasks
            }
        ),
        **tables(searches, known, measured),
    }
    write_json(out, record)
    draw(record["rows"], record["data"], picture)
    return record


def tables(searches: Sequence[Search], known: Known, measured: Known) -> Record:
    """The rows, with ratios to the best peer, and what follows from them."""
    rows = [row for search in searches for row in rows_of(search, known, measured)]
    best: dict[str, float] = {}
    for row in rows:
        if row["optimizer"] in ALL_PEERS:
            best[row["task"]] = min(best.get(row["task"], row["error"]), row["error"])
    for row in rows:
        if row["task"] in best:
            row["ratio"] = round(
                ratio(row["error"], best[row["task"]], is_speech=TASKS[row["task"]].is_speech), 4
            )
    return {
        "rows": rows,
        "means": means(rows),
        "comparisons": comparisons(rows),
        "scale": scale(rows),
        "tenfold": tenfold(searches, known),
        "missing": [line for search in searches for line in missing(search, known, measured)],
    }


def rows_of(search: Search, known: Known, measured: Known) -> list[Record]:
    """An optimizer on a task: at the best rate, and a recipe at its own rate, too."""
    if not search.tried(known):
        return []
    chosen = {}
    if search.always is not None:
        chosen["default"] = search.at(search.always)
    if "best" in rates_of(search) and (search.always is None or search.is_complete(known)):
        chosen["best"] = search.best(known)
    return [
        row
        for rate, trial in chosen.items()
        if (row := _row(search, trial, rate, known, measured)) is not None
    ]


def rates_of(search: Search) -> list[str]:
    """The rates that a row is for."""
    own = [] if search.always is None else ["default"]
    has_grid = search.always is None or len(search.rates) > 1
    return [*own, *(["best"] if has_grid else [])]


def missing(search: Search, known: Known, measured: Known) -> list[Record]:
    """The rows that cannot be made yet, and those whose search for the best rate goes on."""
    found = {row["rate"]: row for row in rows_of(search, known, measured)}
    return [
        {"task": search.trial.task, "optimizer": search.name, "rate": rate, "row": rate in found}
        for rate in rates_of(search)
        if rate not in found or (rate == "best" and not search.is_complete(known))
    ]


def _row(search: Search, trial: Trial, rate: str, known: Known, measured: Known) -> Record | None:
    seeds = [replace(trial, seed=seed).key for seed in search.seeds]
    found = [measured[key] for key in seeds if key in measured]
    if len(found) < len(seeds):
        return None
    errors = [error_of(each) for each in found]
    record = known[seeds[0]]
    old = [each[name] for each in found for name in ("old_wer", "old_nats") if name in each]
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
        "diverged": sum(bool(known[key]["diverged"]) for key in seeds),
        "ms_per_step": record["ms_per_step"],
        "state_bytes_per_parameter": record["state_bytes_per_parameter"],
    }


def means(rows: Sequence[Record]) -> list[Record]:
    """Geometric mean and worst task of each optimizer's ratio: of speech, of text, of all."""
    found = []
    for name, rate in dict.fromkeys((row["optimizer"], row["rate"]) for row in rows):
        for group, is_speech in GROUPS.items():
            own = {
                row["task"]: row["ratio"]
                for row in rows
                if (row["optimizer"], row["rate"]) == (name, rate)
                and is_speech in (None, TASKS[row["task"]].is_speech)
                and row.get("ratio", 0.0) > 0.0
                and row["family"] != SCALE
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
            for group, in_group in GROUPS.items():
                by_task = {}
                for task in dict.fromkeys(row["task"] for row in rows if row["family"] != SCALE):
                    is_speech = TASKS[task].is_speech
                    own = errors_of(rows, task, [name], "default")
                    best = errors_of(rows, task, rival, "best")
                    if own and best and in_group in (None, is_speech):
                        by_task[task] = ratio(own[0], min(best), is_speech=is_speech)
                if by_task:
                    by = "itself" if rival == [name] else " or ".join(rival)
                    found.append({"optimizer": name, "by": by, "group": group, **summary(by_task)})
    return found


def scale(rows: Sequence[Record]) -> list[Record]:
    """By width and length: the best rate by a recipe's own, and its error by that of AdamW."""
    found = []
    for own in rows:
        if own["family"] != SCALE or own["rate"] != "default":
            continue
        task, name, is_speech = own["task"], own["optimizer"], TASKS[own["task"]].is_speech
        line = {"task": task, "optimizer": name}
        best = [row for row in rows if (row["task"], row["optimizer"]) == (task, name)]
        for row in (row for row in best if row["rate"] == "best"):
            line["best_rate"] = row["lr"] / own["lr"]
            line["by_itself"] = round(ratio(own["error"], row["error"], is_speech=is_speech), 4)
        if adamw := errors_of(rows, task, RIVALS["quality"], "best"):
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


def draw(rows: Sequence[Record], data: str, path: Path) -> None:
    """A heat map: tasks by optimizers, the ratio to the best peer; ours at their own rates."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "suite"  # the same picture has the same bytes
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row["family"] != SCALE and "ratio" in row]
    shown = [row for row in shown if (row["rate"] == "default") == (row["optimizer"] in OURS)]
    found = dict.fromkeys(row["optimizer"] for row in shown)
    columns = [name for name in dict.fromkeys((*OURS, *LABELS, *found)) if name in found]
    tasks = list(dict.fromkeys(row["task"] for row in shown))
    values = {(row["task"], row["optimizer"]): row["ratio"] for row in shown}
    grid = [[values.get((task, name), math.nan) for name in columns] for task in tasks]
    figure, axes = plt.subplots(figsize=(1.6 + 0.58 * len(columns), 1.5 + 0.34 * len(tasks)))
    # By the logarithm, so that half and twice the errors are equally far from white.
    logarithms = [[math.log2(value) for value in line] for line in grid]
    axes.imshow(logarithms, cmap="PiYG_r", vmin=-2.0, vmax=2.0, aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            if not math.isnan(value):
                text = f"{value:.2f}" if value < 10.0 else f"{value:.0f}"
                color = "white" if abs(logarithms[y][x]) > DARK else "black"
                axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=color)
    axes.xaxis.tick_top()
    labels = [f"{name} (ours)" if name in OURS else LABELS.get(name, name) for name in columns]
    axes.set_xticks(range(len(columns)), labels, rotation=40, ha="left", fontsize=8)
    axes.set_yticks(range(len(tasks)), tasks, fontsize=8)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.text(
        0.5, 0.02, f"{CAPTION}, {data} data. Below 1 is better.",
        ha="center", fontsize=8,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None}, facecolor="white")
    plt.close(figure)
