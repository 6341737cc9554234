"""Five optimizers on the touch tones of examples/touch_tones.py.

Each optimizer tries four learning rates on two seeds, and is then trained on three other seeds at
the rate with the lowest mean held-out error. All get the same first weights, calls, steps, warm-up
and cosine, on one CPU thread. They take turns, so that a busy machine slows all alike.

    python benchmarks/touch_tones_study.py          # about 20 minutes
    python benchmarks/touch_tones_study.py --quick --out /tmp/study

Writes benchmarks/results/touch_tones.json and docs/touch_tones.svg.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

import maxfactor

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))

from touch_tones import (  # noqa: E402
    LINE,
    Contestant,
    Plan,
    Point,
    Run,
    Transcriber,
    held_out_calls,
    train,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]  # a part of the JSON file

RELATIVE_RATES = (0.01, 0.03, 0.1, 0.3)  # shares of a weight's RMS
ABSOLUTE_RATES = (0.001, 0.003, 0.009, 0.027)
RECIPE = maxfactor.recipe("1.0")


@dataclass(frozen=True)
class Entry:
    """An optimizer, the rates it may choose from, and its colour in the picture."""

    contestant: Contestant
    rates: tuple[float, ...]
    colour: str


ENTRIES = (
    Entry(
        Contestant("MaxFactor 1.0", maxfactor.MaxFactor, lr=0.01, settings=RECIPE),
        RELATIVE_RATES,
        "#d55e00",
    ),
    Entry(
        Contestant(
            "MaxFactor 1.0, no decay",
            maxfactor.MaxFactor,
            lr=0.01,
            settings={**RECIPE, "weight_decay": 0.0},
        ),
        RELATIVE_RATES,
        "#e69f00",
    ),
    Entry(
        Contestant(
            "maxfactor.Adafactor",
            maxfactor.Adafactor,
            lr=0.01,
            settings={"relative_step": True},
        ),
        RELATIVE_RATES,
        "#009e73",
    ),
    Entry(
        Contestant("torch.optim.Adafactor", torch.optim.Adafactor, lr=0.01),
        RELATIVE_RATES,
        "#56b4e9",
    ),
    Entry(
        Contestant("torch.optim.AdamW", torch.optim.AdamW, lr=0.001, clip=1.0),
        ABSOLUTE_RATES,
        "#333333",
    ),
)


@dataclass(frozen=True)
class Study:
    """How much of it to do."""

    plan: Plan
    rates: int  # how many of each grid
    search_seeds: tuple[int, ...] = (0, 4)  # with one, chance picks the rate
    seeds: tuple[int, ...] = (1, 2, 3)


FULL = Study(Plan(steps=300, held_out=1024, report_every=25), rates=4)
QUICK = Study(Plan(steps=20, batch=4, held_out=8, report_every=10), 1, (0,), (1,))


def main(arguments: list[str] | None = None) -> None:
    """Run the study and write its two files."""
    parser = argparse.ArgumentParser(description="Compare optimizers on touch tones.")
    parser.add_argument("--quick", action="store_true", help="a smoke test of a few seconds")
    parser.add_argument("--out", type=Path, help="folder for both files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = {**circumstances(options.quick), **run_study(QUICK if options.quick else FULL)}
    results = options.out or ROOT / "benchmarks" / "results"
    pictures = options.out or ROOT / "docs"
    for folder in (results, pictures):
        folder.mkdir(parents=True, exist_ok=True)
    (results / "touch_tones.json").write_text(to_json(record))
    draw(record, pictures / "touch_tones.svg")
    print_summary(record)


# ------------------------------------------------------------------------------- the runs


def run_study(study: Study) -> Record:
    """Search the rates, then train every optimizer on every seed."""
    searches = [search(entry, study) for entry in ENTRIES]
    best = [best_rate(runs) for runs in searches]
    finals: list[list[Record]] = [[] for _ in ENTRIES]
    for seed in study.seeds:
        for entry, lr, runs in zip(ENTRIES, best, finals, strict=True):
            runs.append(run_once(entry, lr, replace(study.plan, seed=seed)))
    parts = zip(ENTRIES, searches, best, finals, strict=True)
    return {
        "task": task(study.plan),
        "search_seeds": study.search_seeds,
        "seeds": study.seeds,
        "optimizers": [summary(*part, study) for part in parts],
    }


def search(entry: Entry, study: Study) -> list[Record]:
    """A run for each rate and search seed, with fewer evaluations on the way."""
    plan = replace(study.plan, report_every=4 * study.plan.report_every)
    return [
        run_once(entry, lr, replace(plan, seed=seed))
        for lr in entry.rates[-study.rates :]
        for seed in study.search_seeds
    ]


def best_rate(runs: list[Record]) -> float:
    """The rate with the lowest mean error, or among equals with the lowest mean loss."""

    def cost(lr: float) -> tuple[float, float]:
        same = [run for run in runs if run["lr"] == lr]
        return mean(run["error"] for run in same), mean(run["loss"] for run in same)

    rates: list[float] = [run["lr"] for run in runs]
    return min(rates, key=cost)


def run_once(entry: Entry, lr: float, plan: Plan) -> Record:
    """Train, tell how it went, and return it for the JSON file."""
    run = train(replace(entry.contestant, lr=lr), plan, report=lambda _: None)
    last = run.curve[-1]
    print(
        f"{entry.contestant.name:<24} lr {lr:<8g} seed {plan.seed}  "
        f"error {last.error:6.2%}  loss {last.loss:.3f}  {last.seconds:5.1f} s",
        flush=True,
    )
    return {
        "lr": lr,
        "seed": plan.seed,
        "error": round(last.error, 5),
        "loss": round(last.loss, 4),
        "steps_to_5_percent": next((at.step for at in run.curve if at.error <= 0.05), None),
        "seconds": round(last.seconds, 2),
        "state_bytes_per_parameter": round(run.state_bytes, 4),
        "curve": curve_of(run),
    }


def curve_of(run: Run) -> Record:
    """A list for each quantity, to four significant digits."""
    columns = zip(*run.curve, strict=True)
    return {
        name: [float(f"{value:.4g}") for value in column]
        for name, column in zip(Point._fields, columns, strict=True)
    }


def summary(
    entry: Entry, searched: list[Record], lr: float, runs: list[Record], study: Study
) -> Record:
    """All that is known of one optimizer."""
    errors = [run["error"] for run in runs]
    grid = entry.rates[-study.rates :]
    contestant = entry.contestant
    return {
        "name": contestant.name,
        "settings": {key: x for key, x in contestant.settings.items() if key != "lr"},
        "clip": contestant.clip,
        "grid": grid,
        "lr": lr,
        "lr_at_edge_of_grid": lr in (grid[0], grid[-1]),
        "error_mean": round(mean(errors), 5),
        "error_min": min(errors),
        "error_max": max(errors),
        "steps_to_5_percent": [run["steps_to_5_percent"] for run in runs],
        "seconds_min": min(run["seconds"] for run in runs),
        "seconds_max": max(run["seconds"] for run in runs),
        "state_bytes_per_parameter": runs[0]["state_bytes_per_parameter"],
        "search": searched,
        "runs": runs,
    }


def task(plan: Plan) -> Record:
    """The sizes of the training."""
    return {
        **{name: value for name, value in asdict(plan).items() if name != "seed"},
        "held_out_digits": int(held_out_calls(plan).lengths.sum()),
        "parameters": sum(param.numel() for param in Transcriber().parameters()),
        "line": asdict(LINE),
    }


def circumstances(quick: bool) -> Record:
    """When, where and with what; nothing that names a person or a machine."""
    return {
        "command": "python benchmarks/touch_tones_study.py" + " --quick" * quick,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "threads_used": 1},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "maxfactor": maxfactor.__version__,
        },
    }


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ---------------------------------------------------------------------------- the results


def to_json(record: Record) -> str:
    """JSON with every list of numbers on a line of its own."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda match: re.sub(r"\n *", " ", match[0]), text) + "\n"


def print_summary(record: Record) -> None:
    """A line for each optimizer; the seconds are those of the least disturbed run."""
    line = "{:<24} {:>8} {:>7} {:>12} {:>14} {:>8} {:>6}"
    titles = ("optimizer", "lr", "error", "min-max", "steps to 5 %", "seconds", "bytes")
    print("\n" + line.format(*titles))
    for row in record["optimizers"]:
        values = (
            f"{row['lr']:g}",
            f"{row['error_mean']:.2%}",
            f"{100 * row['error_min']:.2f}-{100 * row['error_max']:.2f}",
            "/".join(map(str, row["steps_to_5_percent"])),
            f"{row['seconds_min']:.1f}",
            f"{row['state_bytes_per_parameter']:.2f}",
        )
        print(line.format(row["name"], *values))


def draw(record: Record, path: Path) -> None:
    """Error rate against step: the mean of the seeds, and their range as a band."""
    # A fixed salt and no date: the same study gives the same file.
    style: dict[Any, Any] = {"font.size": 11, "svg.hashsalt": "touch tones"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for entry, row in zip(ENTRIES, record["optimizers"], strict=True):
            draw_curve(axes, row, entry.colour)
        axes.set_yscale("log")
        axes.set_yticks(ticks := [1, 2, 5, 10, 20, 50, 100], [f"{tick} %" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(0, record["task"]["steps"])
        axes.set_xlabel("step")
        seeds = len(record["seeds"])
        axes.set_title(f"Digit error rate on held-out calls, mean and range of {seeds} seeds")
        axes.grid(color="#e5e5e5", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        # Below the axes: a curve may pass through any corner.
        figure.legend(frameon=False, loc="outside lower center", ncols=2)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_curve(axes: Axes, row: Record, colour: str) -> None:
    """One optimizer's line, band and label, which ends with the error after the last step."""
    steps = row["runs"][0]["curve"]["step"]
    errors = list(zip(*(run["curve"]["error"] for run in row["runs"]), strict=True))
    low, middle, high = ([100 * f(at) for at in errors] for f in (min, mean, max))
    label = f"{row['name']}, lr {row['lr']:g}: {100 * row['error_mean']:.1f} %"
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(steps, middle, color=colour, linewidth=1.8, label=label)


if __name__ == "__main__":
    main()
