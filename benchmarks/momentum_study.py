"""The ablation of momentum, direction and scale, beside AdamW, Adafactor, Lion and Muon.

A small Whisper learns synthesised sentences; what counts is the word error rate on sentences that
it never heard. One command for a table:

    python benchmarks/momentum_study.py main --device cuda --out runs
    python benchmarks/momentum_study.py finetune --device cuda --out runs --minutes 8
    python benchmarks/momentum_study.py check --device cuda --out runs     # graphs against none
    python benchmarks/momentum_study.py report --out runs                  # all tables

Every row of a table is an optimizer with settings. Its learning rates are tried with the first
seed (some rows: three), the best one is run with all seeds, and if that lies at the edge of the
rates, further ones are tried (not where three seeds choose). Trainings run side by side in worker
processes, on CUDA under MPS where it is there. A finished run is one line of OUT/TABLE.jsonl at
once; what is in a file of OUT already is not run again, so the same command goes on where it was
stopped.

Speech comes from espeak-ng: the package espeakng-loader, or the library and the data folder that
MAXFACTOR_ESPEAK_LIBRARY and MAXFACTOR_ESPEAK_DATA name.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maxfactor_speech.bench.step_time import circumstances, write
from momentum_tables import TABLES, Entry, entries_of
from momentum_variants import variant
from side_by_side import Workers, shared_gpu
from speech_runs import (
    FeatureSets,
    Record,
    Run,
    Speech,
    Training,
    base_path,
    english_base,
    new_model,
    prepare,
    run_of,
    told,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "momentum_study.json"
MOST_EXTENSIONS = 2  # rates that are added beyond the edge of those given
HOPELESS = 95.0  # per cent of the words wrong


# -------------------------------------------------------------------------- what is to do


@dataclass
class Results:
    """The runs that are done, in files of one folder."""

    folder: Path
    done: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read every table; a line that was cut off is left out."""
        results = cls(folder)
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                    results.done[record["key"]] = record
                except (ValueError, KeyError, TypeError):
                    continue
        return results

    def add(self, table: str, record: Record) -> None:
        """Keep a finished run, on the disk before anything else happens."""
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


def rates_of(row: Entry, results: Results) -> list[float]:
    """The rates of a row, with those beyond the edge that the best one calls for."""
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
    """The rate with the fewest word errors; None while a run is missing that is to tell."""
    judged = {lr: searched(row, lr, results) for lr in rates}
    if any(len(found) < row.search for found in judged.values()):
        return None
    return min(judged, key=lambda lr: mean_cost(judged[lr]))


def searched(row: Entry, lr: float, results: Results) -> list[Record]:
    """The runs by which a rate is judged."""
    return records(row, lr, results)[: row.search]


def hopeless(run: Run, results: Results) -> bool:
    """Whether a run learnt nothing, so that a rate beyond it is not worth trying."""
    record = results.of(run)
    return record is not None and record["wer"] >= HOPELESS


def mean_cost(found: Sequence[Record]) -> tuple[float, float]:
    """What is to be low: word errors, and among equals the training loss."""
    lost = [math.inf if record["loss"] is None else record["loss"] for record in found]
    return mean(wers(found)), mean(lost)


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


# ------------------------------------------------------------------------------ the command


def main(arguments: list[str] | None = None) -> None:
    """Run a table, the check, or the report."""
    begun = time.monotonic()
    options = parsed(arguments)
    if options.table == "report":
        report(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    cache = options.cache or options.out / "cache"
    if options.table == "check":
        check(cache, options)
        return
    results = Results.read(options.out)
    tables = options.table.split(",")
    if not run_tables(tables, results, cache, options, begun + 60.0 * options.minutes):
        print("not complete; the same command goes on with it", flush=True)
    for table in tables:
        print_table(table, entries_of(table, options.quick), results)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "table", help=f"report, check, or tables with commas between: {', '.join(TABLES)}"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=14, help="small trainings side by side")
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole command")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the results")
    parser.add_argument("--cache", type=Path, help="folder of the speech; OUT/cache")
    parser.add_argument("--stage", choices=("search", "seeds", "all"), default="all")
    parser.add_argument(
        "--only", default="", help="rows, as 'TABLE: NAME', by a regular expression"
    )
    parser.add_argument("--graph", choices=("whole", "half", "eager"), default="whole")
    parser.add_argument(
        "--mps", action=argparse.BooleanOptionalAction, default=True, help="share the GPU by MPS"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the program")
    parser.add_argument("--json", type=Path, default=RESULTS, help="what the report writes")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.table.split(",") if name not in (*TABLES, *COMMANDS)]
    if unknown:
        parser.error(f"unknown table {unknown[0]!r}; known: {', '.join((*TABLES, *COMMANDS))}")
    return options


COMMANDS = ("check", "report")


def run_tables(
    tables: Sequence[str],
    results: Results,
    cache: Path,
    options: argparse.Namespace,
    deadline: float,
) -> bool:
    """Do the runs of some tables that are not done, in their order; return whether all are."""
    begun = time.monotonic()
    rows = {
        table: [
            row
            for row in entries_of(table, options.quick)
            if re.search(options.only, f"{table}: {row.name}")
        ]
        for table in tables
    }
    whose: dict[str, str] = {}

    def pending() -> list[Run]:
        runs: dict[str, Run] = {}
        for table, own in rows.items():
            for run in with_bases(due(own, results, options.stage), cache):
                runs.setdefault(run.key, run)
                whose.setdefault(run.key, table)
        return list(runs.values())

    def keep(record: Record) -> None:
        run = run_of(record)
        results.add(whose[run.key], record)
        print(
            f"{time.monotonic() - begun:6.1f} s  {told(run):<100} WER {record['wer']:6.2f}  "
            f"{record['ms_per_step']:6.2f} ms  {record['mode']} {record['fallback']}",
            flush=True,
        )

    if not pending():
        return True
    with shared_gpu(options.device, options.mps) as works:
        needed = [row.run for own in rows.values() for row in own]
        prepare(speech_of(needed), cache, os.cpu_count() or 1)
        is_shared = works()
        write(options.out / "machine.json", circumstances(options.device.split(":")[0]))
        print(f"speech after {time.monotonic() - begun:.0f} s, MPS: {is_shared}", flush=True)
        workers = Workers(cache, options.device, options.jobs, options.graph)
        is_done = workers.work(pending, deadline, keep)
    if workers.errors:
        with (options.out / "errors.log").open("a") as file:
            file.writelines(json.dumps(error) + "\n" for error in workers.errors)
    return is_done


def with_bases(runs: list[Run], cache: Path) -> list[Run]:
    """Runs that can start, with those before them whose model others are waiting for."""
    bases = {run.size: english_base(run) for run in runs if run.start is not None}
    missing = [base for base in bases.values() if not base_path(base, cache).exists()]
    return [*missing, *(run for run in runs if run.start is None)] if missing else runs


def speech_of(runs: Sequence[Run]) -> list[Speech]:
    """All the speech that runs need, and the models that they start from."""
    bases = [english_base(run) for run in runs if run.start is not None]
    return list(dict.fromkeys(speech for run in (*runs, *bases) for speech in run.speech))


# ----------------------------------------------------------------------------- the check


CHECK_STEPS = 30


def check(cache: Path, options: argparse.Namespace) -> None:
    """Every optimizer alone, with graphs and without: the same losses, and how long a step takes.

    The losses of two trainings drift apart by rounding, so the first few steps tell.
    """
    device = torch.device(options.device)
    rows = [row for row in entries_of("main", options.quick) if re.search(options.only, row.name)]
    rows += [row for row in entries_of("bands", options.quick) if re.search(options.only, row.name)]
    runs = {row.name: replace(row.run, steps=min(CHECK_STEPS, row.run.steps)) for row in rows}
    prepare(speech_of(list(runs.values())), cache, os.cpu_count() or 1)
    sets = FeatureSets(cache, device)
    print(f"{'':<28} {'mode':<6} {'ms':>7} {'eager ms':>8}   loss apart: first third, end")
    for name, run in runs.items():
        modes = [checked(run, cache, device, sets, mode) for mode in ("eager", options.graph)]
        (plain, slow), (graph, fast) = modes
        apart = (graph.losses - plain.losses).abs()
        early = float(apart[: len(apart) // 3].max())
        print(
            f"{name:<28} {graph.mode:<6} {fast:7.2f} {slow:8.2f}   "
            f"{early:.4f}  {float(apart[-1]):.4f} of {float(plain.losses[-1]):.3f} "
            f"{graph.fallback}",
            flush=True,
        )


def checked(
    run: Run, cache: Path, device: torch.device, sets: FeatureSets, mode: str
) -> tuple[Training, float]:
    """A short training, and its ms per step."""
    with variant(run.variant):
        training = Training(run, new_model(run, cache, device), sets(run.training), device)
        training.run(mode)
    return training, 1000 * training.seconds / training.timed


# ---------------------------------------------------------------------------- the report


def report(options: argparse.Namespace) -> None:
    """Print every table that has runs, and write all of it as JSON, the runs line by line."""
    results = Results.read(options.out)
    where = options.out / "machine.json"
    tables = {}
    for table in TABLES:
        rows = [summary(row, results) for row in entries_of(table, options.quick)]
        if any(row["tried"] for row in rows):
            tables[table] = [row for row in rows if row["tried"]]
    written = {
        "command": "python benchmarks/momentum_study.py TABLE --device cuda",
        "machine": json.loads(where.read_text()) if where.exists() else None,
        "tables": tables,
    }
    write(options.json, written)
    lines = [json.dumps(strict(record), allow_nan=False) for record in results.done.values()]
    options.json.with_name(f"{options.json.stem}_runs.jsonl").write_text("\n".join(lines) + "\n")
    for table in tables:
        print_table(table, entries_of(table, options.quick), results)


def strict(value: Any) -> Any:
    """The same with infinity as a word, since JSON has none."""
    if isinstance(value, dict):
        return {key: strict(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def summary(row: Entry, results: Results) -> Record:
    """All that is known of a row: each rate, the best one, and how far a rate may be off."""
    rates = rates_of(row, results)
    tried = {lr: known for lr in rates if (known := records(row, lr, results))}
    found: Record = {"name": row.name, "tried": {f"{lr:g}": wers(tried[lr]) for lr in tried}}
    if not tried:
        return found
    # Rates are judged by the same seeds, also while some are missing.
    common = min(len(found) for found in tried.values())
    judged = {lr: tried[lr][:common] for lr in tried}
    best = min(judged, key=lambda lr: mean_cost(judged[lr]))
    full = {lr: tried[lr] for lr in tried if len(tried[lr]) == row.seeds}
    if best in full:  # and maybe others, and all seeds are a better guide than one
        best = min(full, key=lambda lr: mean_cost(full[lr]))
    chosen, between = tried[best], smooth_range(tried)
    found |= {
        "lr": best,
        "lr_at_edge": best in (rates[0], rates[-1]),
        "complete": best_rate(row, rates, results) is not None and len(chosen) == row.seeds,
        "wer": wers(chosen),
        "wer_mean": round(mean(wers(chosen)), 6),
        "loss": round(mean(finals), 4) if (finals := losses(chosen)) else None,
        "range": round(usable_range(judged if row.search > 1 else tried), 3),
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


def wers(found: Sequence[Record]) -> list[float]:
    """Word error rates in per cent."""
    return [record["wer"] for record in found]


def losses(found: Sequence[Record]) -> list[float]:
    """Final training losses of those that have one."""
    return [record["loss"] for record in found if record["loss"] is not None]


def usable_range(tried: dict[float, list[Record]]) -> float:
    """The factor of learning rates around the best over which the WER is within 25 % of it."""
    rates = sorted(tried)
    means = [mean(wers(tried[lr])) for lr in rates]
    best = min(range(len(rates)), key=means.__getitem__)
    low = high = best
    while low > 0 and means[low - 1] <= 1.25 * means[best]:
        low -= 1
    while high + 1 < len(rates) and means[high + 1] <= 1.25 * means[best]:
        high += 1
    return rates[high] / rates[low]


FAR = 8.0  # times the fewest errors: a rate that has more would bend the curve
FEWEST_RATES = 4


def smooth_range(tried: dict[float, list[Record]]) -> tuple[float, float] | None:
    """The rates between which that holds by a curve, since the lowest of several means is lucky.

    The logarithm of the errors as a parabola in the logarithm of the rate, over the rates tried;
    None where too few rates come near the best, or a run has no error at all.
    """
    lowest = min(mean(wers(found)) for found in tried.values())
    near = {lr: wers(tried[lr]) for lr in tried if mean(wers(tried[lr])) <= FAR * lowest}
    rates = np.log([lr for lr, own in near.items() for _ in own])
    errors = np.concatenate([near[lr] for lr in near])
    if len(near) < FEWEST_RATES or errors.min() <= 0.0:
        return None
    fitted = np.polynomial.Polynomial.fit(rates, np.log(errors), 2)
    grid = np.linspace(rates.min(), rates.max(), 1001)
    curve = fitted(grid)
    inside = grid[curve <= curve.min() + math.log(1.25)]
    return float(np.exp(inside[0])), float(np.exp(inside[-1]))


def print_table(table: str, rows: Sequence[Entry], results: Results) -> None:
    """A table as Markdown, the best of a row's rates in its columns."""
    found = [one for row in rows if (one := summary(row, results))["tried"]]
    is_tuned = any("english_wer" in one for one in found)
    titles = ["", "lr", "WER %", "seeds", *(["English WER %"] if is_tuned else [])]
    titles += ["loss", "within 25 % over (by a curve)", "state B/param", "ms/step", "tried (WER %)"]
    print(f"\n### {table}\n\n| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for one in found:
        tried = ", ".join(f"{lr}: {mean(values):.1f}" for lr, values in one["tried"].items())
        nan = f" (NaN at {', '.join(f'{lr:g}' for lr in one['nan_at'])})" if one["nan_at"] else ""
        cells = [
            one["name"] + ("" if one["complete"] else " *"),
            f"{one['lr']:g}" + (" (edge)" if one["lr_at_edge"] else ""),
            spread(one["wer"]),
            " ".join(f"{value:.1f}" for value in one["wer"]),
            *([spread(one.get("english_wer", []))] if is_tuned else []),
            "" if one["loss"] is None else f"{one['loss']:.3f}",
            f"{one['range']:.2g} x" + by_a_curve(one["smooth_range"]),
            f"{one['state_bytes_per_parameter']:.2f}",
            f"{one['ms_per_step']:.1f}",
            tried + nan,
        ]
        print(f"| {' | '.join(cells)} |")
    if any(not one["complete"] for one in found):
        print("\n\\* not all rates or seeds yet")


def by_a_curve(between: Sequence[float] | None) -> str:
    """How far the rates are apart between which a curve stays low."""
    return f" ({between[1] / between[0]:.2g} x)" if between else ""


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    if not values or any(math.isnan(value) for value in values):
        return ""
    apart = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{apart}"


if __name__ == "__main__":
    main()
