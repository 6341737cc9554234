"""From finished runs to the rows of a table: which runs are missing, and the table itself."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from statistics import mean, median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from measurement import Record
    from studies.entries import Entry
    from studies.runs import Run

MOST_EXTENSIONS = 2  # rates that are added beyond the ends of those given
HOPELESS = 95.0  # per cent of the words wrong
NEAR = 1.25  # times the lowest error: a learning rate that does nearly as well


@dataclass
class Results:
    """The finished runs, in files of one folder."""

    folder: Path
    done: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read every table."""
        results = cls(folder)
        for path in sorted(folder.glob("*.jsonl")):
            results.done |= read_runs(path)
        return results

    def add(self, table: str, record: Record) -> None:
        """Add a finished run, on the disk before anything else happens."""
        self.done[record["key"]] = record
        path = self.folder / f"{table}.jsonl"
        is_cut_off = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
        with path.open("a") as file:
            file.write("\n" * bool(is_cut_off) + json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, run: Run) -> Record | None:
        """What is known of a run."""
        return self.done.get(run.key)


def read_runs(path: Path) -> dict[str, Record]:
    """The runs of a file by their keys; a line that was cut off is ignored."""
    found = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
            found[record["key"]] = record
        except (ValueError, KeyError, TypeError):
            continue
    return found


def rates_of(row: Entry, results: Results) -> list[float]:
    """The learning rates of a row, extended where the best one is the lowest or the highest."""
    rates = sorted(row.rates)
    if row.search > 1 or len(rates) < 3:
        return rates
    for _ in range(MOST_EXTENSIONS):
        best = best_rate(row, rates, results)
        if best is None or best not in (rates[0], rates[-1]) or hopeless(row.at(best), results):
            break
        at_top = best == rates[-1]
        rates.insert(
            len(rates) if at_top else 0,
            float(f"{best * (2.0 if at_top else 0.5):.4g}"),
        )
    return rates


def best_rate(row: Entry, rates: Sequence[float], results: Results) -> float | None:
    """The rate with the lowest error; None while a run that decides is missing."""
    judged = {lr: searched(row, lr, results) for lr in rates}
    if any(len(found) < row.search for found in judged.values()):
        return None
    return min(judged, key=lambda lr: cost(judged[lr], row.run.measure))


def searched(row: Entry, lr: float, results: Results) -> list[Record]:
    """The runs by which a rate is judged."""
    return records(row, lr, results)[: row.search]


def hopeless(run: Run, results: Results) -> bool:
    """Whether a run learnt nothing, so that a rate beyond it is not worth trying."""
    record = results.of(run)
    return record is not None and record.get("wer", 0.0) >= HOPELESS


def cost(found: Sequence[Record], measure: str) -> tuple[float, float]:
    """What is minimised: the error, and among equals the training loss."""
    lost = [math.inf if record["loss"] is None else record["loss"] for record in found]
    return mean(errors(found, measure)), mean(lost)


def due(rows: Sequence[Entry], results: Results, stage: str) -> list[Run]:
    """The runs that can be started now, most important first."""
    wanted: dict[str, Run] = {}
    for row in rows:
        rates = rates_of(row, results)
        if stage != "seeds":
            runs = [row.at(lr, seed) for seed in range(row.search) for lr in rates]
            wanted.update({run.key: run for run in runs})
        best = best_rate(row, rates, results)
        if stage != "search" and best is not None:
            runs = [row.at(best, seed) for seed in range(row.seeds)]
            wanted.update({run.key: run for run in runs})
    return [run for key, run in wanted.items() if key not in results.done]


def summary(row: Entry, results: Results) -> Record:
    """Everything known of a row: each rate, the best one, and the range of good rates."""
    measure, rates = row.run.measure, rates_of(row, results)
    tried = {lr: known for lr in rates if (known := records(row, lr, results))}
    found: Record = {
        "name": row.name,
        "tried": {f"{lr:g}": errors(tried[lr], measure) for lr in tried},
    }
    if not tried:
        return found
    # Rates are compared on the same seeds, also while some runs are missing.
    common = min(len(found) for found in tried.values())
    judged = {lr: tried[lr][:common] for lr in tried}
    best = min(judged, key=lambda lr: cost(judged[lr], measure))
    full = {lr: tried[lr] for lr in tried if len(tried[lr]) == row.seeds}
    if best in full:  # all seeds are a better guide than one
        best = min(full, key=lambda lr: cost(full[lr], measure))
    chosen = tried[best]
    by_rate = {lr: errors(own, measure) for lr, own in tried.items()}
    searched_by_rate = {lr: errors(own, measure) for lr, own in judged.items()}
    between = smooth_range(by_rate)
    found |= {
        "lr": best,
        "lr_at_edge": best in (rates[0], rates[-1]),
        "complete": best_rate(row, rates, results) is not None and len(chosen) == row.seeds,
        measure: by_rate[best],
        f"{measure}_mean": round(mean(by_rate[best]), 6),
        "loss": round(mean(finals), 4) if (finals := losses(chosen)) else None,
        "range": round(usable_range(searched_by_rate if row.search > 1 else by_rate), 3),
        "smooth_range": between and [float(f"{lr:.3g}") for lr in between],
        "nan_at": [lr for lr in tried if any(record["nan"] for record in tried[lr])],
        "ms_per_step": median(record["ms_per_step"] for record in chosen),
        "state_bytes_per_parameter": chosen[0]["state_bytes_per_parameter"],
    }
    if "english_wer" in chosen[0]:
        found["english_wer"] = [record["english_wer"] for record in chosen]
    return found


def records(row: Entry, lr: float, results: Results) -> list[Record]:
    """The runs of a row at a rate, by seed."""
    found = (results.of(row.at(lr, seed)) for seed in range(row.seeds))
    return [record for record in found if record is not None]


def keys_of(row: Entry, results: Results) -> set[str]:
    """The keys of a row's runs, finished or not."""
    rates = rates_of(row, results)
    return {row.at(lr, seed).key for lr in rates for seed in range(row.seeds)}


def errors(found: Sequence[Record], measure: str) -> list[float]:
    """Word error rates in per cent, or bits per byte."""
    return [record[measure] for record in found]


def losses(found: Sequence[Record]) -> list[float]:
    """Final training losses of those that have one."""
    return [record["loss"] for record in found if record["loss"] is not None]


def usable_range(tried: dict[float, list[float]]) -> float:
    """The factor of learning rates around the best over which the error is within 25 % of it."""
    rates = sorted(tried)
    means = [mean(tried[lr]) for lr in rates]
    best = min(range(len(rates)), key=means.__getitem__)
    low = high = best
    while low > 0 and means[low - 1] <= NEAR * means[best]:
        low -= 1
    while high + 1 < len(rates) and means[high + 1] <= NEAR * means[best]:
        high += 1
    return rates[high] / rates[low]


FAR = 8.0  # times the lowest error: a rate with more would bend the curve
FEWEST_RATES = 4


def smooth_range(tried: dict[float, list[float]]) -> tuple[float, float] | None:
    """The rates between which a fitted curve is within 25 %, since the lowest mean is lucky.

    The curve is the logarithm of the error as a parabola in the logarithm of the rate. None if too
    few rates come near the best, or a run has no error at all.
    """
    lowest = min(mean(own) for own in tried.values())
    near = {lr: own for lr, own in tried.items() if mean(own) <= FAR * lowest}
    rates = np.log([lr for lr, own in near.items() for _ in own])
    values = np.concatenate([near[lr] for lr in near])
    if len(near) < FEWEST_RATES or values.min() <= 0.0:
        return None
    fitted = np.polynomial.Polynomial.fit(rates, np.log(values), 2)
    grid = np.linspace(rates.min(), rates.max(), 1001)
    curve = fitted(grid)
    inside = grid[curve <= curve.min() + math.log(NEAR)]
    return float(np.exp(inside[0])), float(np.exp(inside[-1]))


# -------------------------------------------------------------------------------- the tables


def merged(stored: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """The rows of a table, new ones in place of stored ones of the same name."""
    rows = {row["name"]: row for row in (*stored, *new)}
    return list(rows.values())


def markdown(rows: Sequence[Record]) -> str:
    """A table as Markdown, without columns that are empty in every row."""
    lines = [_cells(row) for row in rows]
    titles = [title for title in lines[0] if any(line[title] for line in lines)]
    table = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    table += ["| " + " | ".join(line[title] for title in titles) + " |" for line in lines]
    table[0] = table[0].replace("| name |", "| |", 1)
    if any(not row["complete"] for row in rows):
        table.append("\n\\* not all rates or seeds yet")
    if commits := {row["commit"] for row in rows if "commit" in row}:
        table.append(f"\n† its code is in commit {', '.join(sorted(commits))} only")
    return "\n".join(table)


def _cells(row: Record) -> dict[str, str]:
    measure, unit, digits = ("bits", "bits per byte", 3) if "bits" in row else ("wer", "WER %", 2)
    best = f"{row['lr']:g}"
    others = {lr: own for lr, own in row["tried"].items() if lr != best}
    english, factor, size = (
        row.get(key) for key in ("english_wer", "range", "state_bytes_per_parameter")
    )
    nan = ", ".join(f"{lr:g}" for lr in row.get("nan_at", ()))
    return {
        "name": row["name"] + " †" * ("commit" in row) + " *" * (not row["complete"]),
        "learning rate": best,
        f"{unit}, mean (seeds)": _with_seeds(row[measure], digits),
        "at the other rates": ", ".join(
            f"{lr}: {mean(own):.{digits}f}" for lr, own in others.items()
        ),
        "NaN at": nan,
        "on English afterwards": f"{mean(english):.0f}" if english else "",
        "within 25 % over a factor of": f"{factor:g}" if factor else "",
        "by a curve": _between(row.get("smooth_range")),
        "state, B/parameter": "" if size is None else f"{size:.2f}",
    }


def _with_seeds(values: Sequence[float], digits: int) -> str:
    seeds = ", ".join(f"{value:.{digits}f}" for value in values)
    return f"{mean(values):.{digits}f} ({seeds})" if len(values) > 1 else seeds


def _between(rates: Sequence[float] | None) -> str:
    return f"{rates[1] / rates[0]:.2g}" if rates else ""
