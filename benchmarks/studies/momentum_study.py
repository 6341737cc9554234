"""The study: recipes, peers and variants by settings, on speech and on a language model.

A small Whisper learns synthesised sentences; what counts is the word error rate on sentences that
it never heard. The table `digits` has another speech task, `language` a small Llama.

    python benchmarks/studies/momentum_study.py main --device cuda --out runs
    python benchmarks/studies/momentum_study.py finetune --device cuda --out runs --minutes 8
    python benchmarks/studies/momentum_study.py digits --jobs 2 --minutes 150 --out runs
    python benchmarks/studies/momentum_study.py check --device cuda --out runs  # graphs or none
    python benchmarks/studies/momentum_study.py report --out runs               # write results
    python benchmarks/studies/momentum_study.py report                          # print tables

Every row of a table is an optimizer with settings. Its learning rates are tried with the first
seed (some rows: three), the best one is run with all seeds, and if that is the lowest or highest
rate, further ones are tried (not where three seeds choose). Trainings run side by side in worker
processes, on CUDA under MPS if available. A finished run is appended to OUT/TABLE.jsonl at once and
not run again, so the same command resumes after an interruption.

Speech comes from espeak-ng: the package espeakng-loader, or the library and the data folder that
MAXFACTOR_ESPEAK_LIBRARY and MAXFACTOR_ESPEAK_DATA name.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import RESULTS, Record, circumstances, write_json
from studies.momentum_tables import FILES, TABLES, entries_of
from studies.runs import Run, strict
from studies.side_by_side import Workers, shared_gpu
from studies.speech_task import FeatureSets, base_path, english_base
from studies.summary import Results, due, keys_of, markdown, merged, read_runs, summary
from studies.training import Training, prepare_speech, task_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from studies.entries import Entry


def main(arguments: Sequence[str] | None = None) -> None:
    """Run tables, the check, or the report."""
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
        print("not complete; run the same command again to continue", flush=True)
    for table in tables:
        print_table(table, known_rows(table, results, options))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "table", help=f"report, check, or tables separated by commas: {', '.join(TABLES)}"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=14, help="small trainings side by side")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for results")
    parser.add_argument("--cache", type=Path, help="folder for synthesised speech [OUT/cache]")
    parser.add_argument("--stage", choices=("search", "seeds", "all"), default="all")
    parser.add_argument("--only", default="", help="regular expression for rows, as 'TABLE: NAME'")
    parser.add_argument("--graph", choices=("whole", "half", "eager"), default="whole")
    parser.add_argument(
        "--mps", action=argparse.BooleanOptionalAction, default=True, help="share the GPU by MPS"
    )
    parser.add_argument(
        "--decay",
        choices=("stored", "recipe"),
        default="stored",
        help="weight decay of stored rows (before 0.2.0), or of the recipes as they are",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the program")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the report")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.table.split(",") if name not in (*TABLES, *COMMANDS)]
    if unknown:
        parser.error(f"unknown table {unknown[0]!r}; known: {', '.join((*TABLES, *COMMANDS))}")
    return options


COMMANDS = ("check", "report")


def rows_of(table: str, options: argparse.Namespace) -> list[Entry]:
    """The rows of a table that the command line selects."""
    rows = entries_of(table, is_quick=options.quick, recipe_decay=options.decay == "recipe")
    return [row for row in rows if re.search(options.only, f"{table}: {row.name}")]


def run_tables(
    tables: Sequence[str],
    results: Results,
    cache: Path,
    options: argparse.Namespace,
    deadline: float,
) -> bool:
    """Do the missing runs of some tables, in their order; return whether all are done."""
    begun = time.monotonic()
    rows = {table: rows_of(table, options) for table in tables}
    whose: dict[str, str] = {}

    def pending() -> list[Run]:
        runs: dict[str, Run] = {}
        for table, own in rows.items():
            for run in with_bases(due(own, results, options.stage), cache):
                runs.setdefault(run.key, run)
                whose.setdefault(run.key, table)
        return list(runs.values())

    def keep(record: Record) -> None:
        run = Run(**record["run"])
        results.add(whose[run.key], record)
        error = f"{run.measure} {record[run.measure]:6.2f}"
        print(
            f"{time.monotonic() - begun:6.1f} s  {run!s:<100} {error}  "
            f"{record['ms_per_step']:6.2f} ms  {record['mode']} {record['fallback']}",
            flush=True,
        )

    if not pending():
        return True
    with shared_gpu(options.device, options.mps) as works:
        needed = [row.run for own in rows.values() for row in own]
        prepare_speech(needed, cache, os.cpu_count() or 1)
        is_shared = works()
        write_json(options.out / "machine.json", circumstances(options.device.split(":")[0]))
        print(f"speech after {time.monotonic() - begun:.0f} s, MPS: {is_shared}", flush=True)
        workers = Workers(cache, options.device, options.jobs, options.graph)
        is_done = workers.work(pending, deadline, keep)
    if workers.errors:
        with (options.out / "errors.log").open("a") as file:
            file.writelines(json.dumps(error) + "\n" for error in workers.errors)
    return is_done


def with_bases(runs: list[Run], cache: Path) -> list[Run]:
    """Runs that can start; first the training of models that fine-tuning starts from."""
    bases = {run.size: english_base(run) for run in runs if run.start is not None}
    missing = [base for base in bases.values() if not base_path(base, cache).exists()]
    return [*missing, *(run for run in runs if run.start is None)] if missing else runs


# ----------------------------------------------------------------------------- the check


CHECK_STEPS = 30


def check(cache: Path, options: argparse.Namespace) -> None:
    """Every optimizer alone, with graphs and without: the same losses, and the time of a step.

    Rounding makes the losses of two trainings drift apart, so the first few steps decide.
    """
    device = torch.device(options.device)
    rows = [*rows_of("main", options), *rows_of("bands", options)]
    runs = {row.name: replace(row.run, steps=min(CHECK_STEPS, row.run.steps)) for row in rows}
    prepare_speech(list(runs.values()), cache, os.cpu_count() or 1)
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
    training = Training(run, task_of(run, cache, device, sets), device)
    training.run(mode)
    return training, 1000 * training.seconds / training.timed


# ---------------------------------------------------------------------------- the report


def report(options: argparse.Namespace) -> None:
    """Merge the runs in OUT into the results files, and print every table.

    Rows without a run in OUT stay as they are. Without any, nothing is written.
    """
    results = Results.read(options.out)
    for file, tables in FILES.items():
        path = options.results / f"{file}.json"
        written = json.loads(path.read_text()) if path.exists() else {"tables": {}}
        new = {table: known_rows(table, results, options) for table in tables}
        rows = dict(written["tables"])
        for table, own in new.items():
            rows[table] = merged(rows.get(table, []), own)
        if any(new.values()):
            filled = {table: own for table, own in rows.items() if own}
            write_json(path, {**written, **heading(written, options.out), "tables": filled})
            write_runs(path.with_name(f"{file}_runs.jsonl"), tables, results, options)
        for table, own in rows.items():
            print_table(table, own)


def heading(written: Record, out: Path) -> Record:
    """The command and the machine, that of OUT if it is known."""
    machine = out / "machine.json"
    return {
        "command": "python benchmarks/studies/momentum_study.py TABLE",
        "machine": json.loads(machine.read_text()) if machine.exists() else written.get("machine"),
    }


def write_runs(
    path: Path, tables: Sequence[str], results: Results, options: argparse.Namespace
) -> None:
    """Write the runs of some tables line by line, after those already in the file."""
    stored = read_runs(path) if path.exists() else {}
    rows = [row for table in tables for row in rows_of(table, options)]
    used = {key for row in rows for key in keys_of(row, results)}
    stored |= {key: record for key, record in results.done.items() if key in used}
    lines = [json.dumps(strict(record), allow_nan=False) for record in stored.values()]
    path.write_text("\n".join(lines) + "\n")


def known_rows(table: str, results: Results, options: argparse.Namespace) -> list[Record]:
    """Summaries of the rows that have a run."""
    rows = [summary(row, results) for row in rows_of(table, options)]
    return [row for row in rows if row["tried"]]


def print_table(table: str, rows: Sequence[Record]) -> None:
    """Print a table as Markdown."""
    if rows:
        print(f"\n### {table}\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
