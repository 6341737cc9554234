"""The ablation of momentum, direction and scale, beside AdamW, Adafactor, Lion and Muon.

A small Whisper learns synthesised sentences; what counts is the word error rate on sentences that
it never heard. One command for a table:

    python benchmarks/momentum_study.py main --device cuda --out runs
    python benchmarks/momentum_study.py finetune --device cuda --out runs --minutes 8
    python benchmarks/momentum_study.py check --device cuda --out runs     # graphs against none
    python benchmarks/momentum_study.py report --out runs                  # all tables

Every row of a table is an optimizer with settings. Its learning rates are tried with the first
seed, the best one is run with all seeds, and if that lies at the edge of the rates, further ones
are tried. Trainings run side by side in worker processes, on CUDA under MPS where it is there.
A finished run is one line of OUT/TABLE.jsonl at once; what is in a file of OUT already is not run
again, so the same command goes on where it was stopped.

Speech comes from espeak-ng: the package espeakng-loader, or the library and the data folder that
MAXFACTOR_ESPEAK_LIBRARY and MAXFACTOR_ESPEAK_DATA name.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

import torch

import maxfactor
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
    quick,
    run_of,
    serve,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.process import BaseProcess

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "momentum_study.json"
SEEDS = (0, 1, 2)
MOST_EXTENSIONS = 2  # rates that are added beyond the edge of those given
HOPELESS = 95.0  # per cent of the words wrong
ATTEMPTS = 2  # at a run that fails; the second without graphs
STOPPED_WITHIN = 5.0  # seconds that a worker has to end
PACKAGES = ("torch", "triton", "transformers", "numpy")


# ------------------------------------------------------------------------------ the tables


@dataclass(frozen=True)
class Entry:
    """A row of a table: a run, but for its rate and seed."""

    name: str
    run: Run
    rates: tuple[float, ...]
    every_rate: bool = False  # all seeds at all rates, not only at the best

    def at(self, lr: float, seed: int = 0) -> Run:
        """The run with a rate and a seed."""
        return replace(self.run, lr=lr, seed=seed)


def entry(
    name: str, optimizer: str, rates: Sequence[float], every_rate: bool = False, **settings: Any
) -> Entry:
    """A row; `settings` are fields of Run, and anything else is an argument of `for_model`."""
    fields = {key: settings.pop(key) for key in list(settings) if key in Run.__dataclass_fields__}
    run = Run(optimizer, lr=rates[0], **fields)
    return Entry(
        name, replace(run, settings={**run.settings, **settings}), tuple(rates), every_rate
    )


def fam(**settings: Any) -> dict[str, Any]:
    """FAM's settings as a parameter group holds them, all of them, so that a key is complete."""
    return asdict(maxfactor.FAM(**settings))


ADAMW = (5e-4, 1e-3, 2e-3, 4e-3)
OURS = (0.005, 0.01, 0.02, 0.04)


def main_table() -> list[Entry]:
    """Peers and recipes."""
    return [
        entry("muon + adamw", "muon", (0.005, 0.01, 0.02, 0.04)),
        entry("speech", "speech", (0.01, 0.02, 0.04, 0.08)),
        entry("adamw, clip 1", "adamw", ADAMW, clip=1.0),
        entry("adafactor (torch)", "adafactor", (0.01, 0.02, 0.04, 0.08)),
        entry("fam", "fam", OURS),
        entry("adamw", "adamw", ADAMW),
        entry("lean", "lean", (0.02, 0.04, 0.08, 0.16)),
        entry("lion", "lion", (5e-5, 1e-4, 2e-4, 4e-4)),
    ]


def vectors_table() -> list[Entry]:
    """What `speech` does with everything but the hidden matrices."""
    rates = (0.01, 0.02, 0.04)
    found = [
        entry(
            f"others {direction}, {scale} scale, share {share:g}",
            "speech",
            rates,
            by_kind={"others": {"direction": direction, "scale": scale, "lr_share": share}},
        )
        for scale in ("current", "initial")
        for direction in ("sign_max", "factored")
        for share in (1.0, 0.5)
    ]
    floors = [
        entry(
            f"others sign_max, initial scale, share {share:g}, vectors' eps2 {eps2:g}",
            "speech",
            rates,
            by_kind={
                "others": {"direction": "sign_max", "scale": "initial", "lr_share": share},
                "vector": {"eps": [1e-10, eps2]},
            },
        )
        for eps2 in (0.01, 0.1)
        for share in (1.0, 0.5)
    ]
    mixed = entry(
        "others sign_max, initial scale, share 1, vectors current",
        "speech",
        rates,
        by_kind={
            "others": {"direction": "sign_max", "scale": "initial", "lr_share": 1.0},
            "vector": {"scale": "current"},
        },
    )
    return [*found, mixed, *floors]


def momenta(**settings: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and settings of momentum: FAM, and fixed memories."""
    yield "FAM", {"momentum": fam(), **settings}
    for beta in (0.95, 0.9, 0.98, 0.8):
        yield f"EMA {beta:g}", {"momentum": beta, **settings}


def momentum_table() -> list[Entry]:
    """None, fixed memories, FAM; all with sign_max."""
    found = [entry(name, "fam", OURS, **settings) for name, settings in momenta()]
    found += [
        entry("FAM, 8 bands", "fam", OURS, momentum=fam(bands=8)),
        entry("none", "fam", OURS, momentum=None),
    ]
    for beta in (0.9, 0.95):
        pinned = fam(beta_min=beta, beta_max=beta, start=beta)
        found.append(entry(f"EMA {beta:g} with FAM's mix", "fam", OURS, momentum=pinned))
    found.append(entry("EMA 0.95, nesterov", "fam", OURS, momentum=0.95, nesterov=True))
    return found


def batch_table() -> list[Entry]:
    """FAM and fixed memories at three batch sizes."""
    sizes = ((8, 1500, (0.005, 0.01, 0.02)), (48, 1500, OURS), (192, 1000, (0.01, 0.02, 0.04)))
    return [
        entry(f"batch {batch}: {name}", "fam", rates, batch=batch, steps=steps, **settings)
        for batch, steps, rates in sizes
        for name, settings in momenta()
    ]


def range_table() -> list[Entry]:
    """How far a learning rate may be off, up to ten times the usual one."""
    ours = (0.005, 0.01, 0.02, 0.04, 0.08, 0.2)
    found = [
        entry(f"{recipe}, {scale} scale", recipe, ours, every_rate=True, scale=scale)
        for recipe in ("speech", "fam")
        for scale in ("initial", "current")
    ]
    adamw = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 2e-2)
    return [*found, entry("adamw, clip 1", "adamw", adamw, every_rate=True, clip=1.0)]


def stores_table() -> list[Entry]:
    """How the momentum is kept."""
    return [
        entry(f"{recipe}, {store}", recipe, (0.01, 0.02), every_rate=True, momentum_dtype=store)
        for recipe in ("speech", "fam")
        for store in ("int8", "fp32", "bf16")
    ]


def directions_table() -> list[Entry]:
    """Directions with and without momentum, and what they scale by.

    Orthogonal is for hidden matrices; the others then stay with FAM and sign_max.
    """
    momentums: dict[str, dict[str, Any]] = {
        "none": {"momentum": None, "nesterov": False},
        "FAM": {"momentum": fam(), "nesterov": False},
        "EMA 0.95, nesterov": {"momentum": 0.95, "nesterov": True},
    }
    found = []
    for name, momentum in momentums.items():
        for scale in ("current", "initial"):
            label = f"{name}, {scale} scale"
            hidden = {"hidden": {"direction": "orthogonal", **momentum}}
            found.append(entry(f"orthogonal, {label}", "speech", OURS, by_kind=hidden, scale=scale))
            found += [
                entry(f"{kind}, {label}", "fam", OURS, direction=kind, scale=scale, **momentum)
                for kind in ("sign_max", "factored")
            ]
    return found


def clip_table() -> list[Entry]:
    """The clip of FAM's input: from sums of squares, or by its own RMS."""
    rates = (0.01, 0.02)
    return [
        entry(f"{recipe}, {name}", recipe, rates, every_rate=True, variant=variant)
        for recipe in ("fam", "speech")
        for name, variant in (("from sums of squares", None), ("its own RMS", "exact_clip"))
    ]


def bands_table() -> list[Entry]:
    """What a memory of FAM belongs to."""
    rates = (0.01, 0.02)
    rows = (
        ("1 band", 1, None),
        ("8 bands of a DCT", 8, None),
        ("8 bands of a random basis", 8, "random_basis"),
        ("6 groups of rows (heads)", 6, "row_groups"),
        ("48 groups of rows", 48, "row_groups"),
    )
    return [
        entry(name, "fam", rates, True, momentum=fam(bands=bands), variant=variant)
        for name, bands, variant in rows
    ]


def finetune_table() -> list[Entry]:
    """A model that learnt English with AdamW learns another language in 500 steps."""
    rates: dict[str, tuple[float, ...]] = {
        "muon": (0.002, 0.005, 0.01, 0.02, 0.04),
        "speech": (0.002, 0.005, 0.01, 0.02, 0.04),
        "adamw": (1e-4, 3e-4, 1e-3, 2e-3, 4e-3),
        "fam": (0.002, 0.005, 0.01, 0.02, 0.04),
        "adafactor": (0.005, 0.01, 0.02, 0.04, 0.08),
        "lion": (2e-5, 5e-5, 1e-4, 2e-4, 4e-4),
        "lean": (0.005, 0.01, 0.02, 0.04, 0.08),
    }
    names = {"de": "German", "es": "Spanish"}
    return [
        entry(
            f"{names[language]}: {name}",
            name,
            own,
            clip=1.0 if name == "adamw" else None,
            steps=500,
            language=language,
            start="english",
            train=12_000,
        )
        for language in ("de", "es")
        for name, own in rates.items()
    ]


def large_table() -> list[Entry]:
    """A larger model: width 384, four layers each, batch 64, 2500 steps."""
    large: dict[str, Any] = {"size": "large", "batch": 64, "steps": 2500}
    return [
        entry("muon + adamw", "muon", (0.005, 0.01, 0.02), **large),
        entry("speech", "speech", (0.005, 0.01, 0.02), **large),
        entry("adamw, clip 1", "adamw", (5e-4, 1e-3, 2e-3), clip=1.0, **large),
        entry("fam", "fam", (0.01, 0.02), **large),
        entry("adamw", "adamw", (5e-4, 1e-3, 2e-3), **large),
    ]


TABLES: dict[str, Callable[[], list[Entry]]] = {
    "main": main_table,
    "vectors": vectors_table,
    "finetune": finetune_table,
    "range": range_table,
    "momentum": momentum_table,
    "batch": batch_table,
    "large": large_table,
    "stores": stores_table,
    "clip": clip_table,
    "bands": bands_table,
    "directions": directions_table,
}


def entries_of(table: str, is_quick: bool = False) -> list[Entry]:
    """The rows of a table, most important first."""
    rows = TABLES[table]()
    return [replace(row, run=quick(row.run)) for row in rows] if is_quick else rows


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
                    results.done[run_of(record).key] = record
                except (ValueError, KeyError, TypeError):
                    continue
        return results

    def add(self, table: str, record: Record) -> None:
        """Keep a finished run, on the disk before anything else happens."""
        self.done[run_of(record).key] = record
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
    if row.every_rate or len(rates) < 3:
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
    """The rate with the fewest word errors with the first seed; None while one is missing."""
    found = [(lr, results.of(row.at(lr))) for lr in rates]
    known = [(*cost(record), lr) for lr, record in found if record is not None]
    return min(known)[2] if len(known) == len(rates) else None


def hopeless(run: Run, results: Results) -> bool:
    """Whether a run learnt nothing, so that a rate beyond it is not worth trying."""
    record = results.of(run)
    return record is not None and record["wer"] >= HOPELESS


def cost(record: Record) -> tuple[float, float]:
    """What is to be low: word errors, and among equals the training loss."""
    return record["wer"], math.inf if record["loss"] is None else record["loss"]


def due(rows: Sequence[Entry], results: Results, stage: str) -> list[Run]:
    """The runs that can be started now, most important first."""
    wanted: dict[str, Run] = {}
    for row in rows:
        rates = rates_of(row, results)
        if stage != "seeds":
            wanted.update({run.key: run for run in (row.at(lr) for lr in rates)})
        best = best_rate(row, rates, results)
        if stage != "search" and best is not None:
            chosen = rates if row.every_rate else [best]
            runs = [row.at(lr, seed) for lr in chosen for seed in SEEDS]
            wanted.update({run.key: run for run in runs})
    return [run for key, run in wanted.items() if key not in results.done]


# ------------------------------------------------------------------------- side by side


@dataclass
class Worker:
    """A process that does one run after another."""

    process: BaseProcess
    connection: Connection
    task: Run | None = None


class Workers:
    """Runs side by side, until there are none or the time is over.

    Args:
        cache: Where features are kept.
        device: What to train on.
        jobs: How many small runs at a time; a large one counts for several.
        graph: The most that a CUDA graph may hold: "whole", "half" or "eager".
    """

    def __init__(self, cache: Path, device: str, jobs: int, graph: str = "whole") -> None:
        self._cache, self._device, self._jobs, self._graph = cache, device, jobs, graph
        self._workers: list[Worker] = []
        self._failures: Counter[str] = Counter()
        self.errors: list[Record] = []

    def work(
        self,
        pending: Callable[[], list[Run]],
        deadline: float,
        keep: Callable[[Record], None],
    ) -> bool:
        """Do what is pending, which may grow with what is kept; return whether all was done."""
        try:
            while True:
                self._hand_out(pending())
                busy = [worker for worker in self._workers if worker.task is not None]
                if not busy:
                    return not self.errors
                left = deadline - time.monotonic()
                if left <= 0.0:
                    return False
                for connection in wait([worker.connection for worker in busy], min(left, 5.0)):
                    [worker] = [one for one in busy if one.connection is connection]
                    self._receive(worker, keep)
        finally:
            self._stop()

    def _hand_out(self, runs: list[Run]) -> None:
        running = {worker.task.key for worker in self._workers if worker.task is not None}
        used = sum(worker.task.jobs for worker in self._workers if worker.task is not None)
        for run in runs:
            if run.key in running or self._failures[run.key] >= ATTEMPTS:
                continue
            if used and used + run.jobs > self._jobs:
                break
            worker = self._free()
            worker.task = run
            worker.connection.send((run, "eager" if self._failures[run.key] else self._graph))
            used += run.jobs

    def _free(self) -> Worker:
        for worker in self._workers:
            if worker.task is None:
                return worker
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(theirs, self._cache, self._device), daemon=True
        )
        process.start()
        theirs.close()  # else its end is never seen
        self._workers.append(Worker(process, ours))
        return self._workers[-1]

    def _receive(self, worker: Worker, keep: Callable[[Record], None]) -> None:
        run = worker.task
        assert run is not None
        try:
            record = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(STOPPED_WITHIN)
            code = worker.process.exitcode
            record = {"run": asdict(run), "error": f"the worker ended with status {code}"}
        worker.task = None
        if "error" not in record:
            keep({**record, "jobs": self._jobs})
            return
        self._failures[run.key] += 1
        print(f"FAILED {told(run)}\n{record['error']}", flush=True)
        if self._failures[run.key] >= ATTEMPTS:
            self.errors.append(record)
        self._workers.remove(worker)
        _end([worker])

    def _stop(self) -> None:
        for worker in self._workers:
            if worker.task is None:
                worker.connection.send(None)
            else:
                worker.process.terminate()
        _end(self._workers)
        self._workers = []


def _end(workers: Sequence[Worker]) -> None:
    deadline = time.monotonic() + STOPPED_WITHIN
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()


@contextmanager
def shared_gpu(device: str) -> Iterator[Callable[[], bool]]:
    """CUDA's multi-process service for the processes that are started inside, if it is there.

    Yields a function that says whether it works, and takes it back if it does not; the question
    is asked at once and answered in the background.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if not device.startswith("cuda") or control is None:
        yield lambda: False
        return
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        os.environ.update(dict.fromkeys(names, folder))
        started = subprocess.run([control, "-d"], capture_output=True, timeout=30)
        probe = subprocess.Popen(
            [sys.executable, "-c", "import torch; torch.ones(9, device='cuda').sum().item()"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def works() -> bool:
            try:
                good = started.returncode == 0 and probe.wait(90) == 0
            except subprocess.TimeoutExpired:
                good = False
            if not good:
                for name in names:
                    os.environ.pop(name, None)
            return good

        try:
            yield works
        finally:
            if probe.poll() is None:
                probe.kill()
            environment = {**os.environ, **dict.fromkeys(names, folder)}
            subprocess.run(
                [control], input=b"quit\n", env=environment, capture_output=True, timeout=30
            )
            for name in names:
                os.environ.pop(name, None)


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
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--graph", choices=("whole", "half", "eager"), default="whole")
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
        table: [row for row in entries_of(table, options.quick) if options.only in row.name]
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
    with shared_gpu(options.device) as works:
        needed = [row.run for own in rows.values() for row in own]
        prepare(speech_of(needed), cache, os.cpu_count() or 1)
        is_shared = works()
        (options.out / "machine.json").write_text(json.dumps(machine(options.device), indent=1))
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


def told(run: Run) -> str:
    """A run in a line: what is not as usual."""
    usual = asdict(Run(run.optimizer, run.lr))
    odd = {key: value for key, value in asdict(run).items() if value != usual[key]}
    extra = json.dumps({key: odd[key] for key in odd if key != "seed"}) if odd else ""
    return f"{run.optimizer} lr {run.lr:g} seed {run.seed} {extra}"


def machine(device: str) -> Record:
    """Where and with what; nothing that names a person or a machine."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    versions = {"python": platform.python_version(), "maxfactor": maxfactor.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"date": today, "device": name, "cores": os.cpu_count(), "versions": versions}


# ----------------------------------------------------------------------------- the check


CHECK_STEPS = 30


def check(cache: Path, options: argparse.Namespace) -> None:
    """Every optimizer alone, with graphs and without: the same losses, and how long a step takes.

    The losses of two trainings drift apart by rounding, so the first few steps tell.
    """
    device = torch.device(options.device)
    rows = [row for row in entries_of("main", options.quick) if options.only in row.name]
    rows += [row for row in entries_of("bands", options.quick) if options.only in row.name]
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
    from momentum_variants import variant

    with variant(run.variant):
        training = Training(run, new_model(run, cache, device), sets(run.training), device)
        training.run(mode)
    return training, 1000 * training.seconds / training.timed


# ---------------------------------------------------------------------------- the report


def report(options: argparse.Namespace) -> None:
    """Print every table that has runs, and write all of it as JSON."""
    results = Results.read(options.out)
    where = options.out / "machine.json"
    tables = {}
    for table in TABLES:
        rows = [summary(row, results) for row in entries_of(table, options.quick)]
        if any(row["tried"] for row in rows):
            tables[table] = [row for row in rows if row["tried"]]
            print_table(table, entries_of(table, options.quick), results)
    written = {
        "command": "python benchmarks/momentum_study.py TABLE --device cuda",
        "machine": json.loads(where.read_text()) if where.exists() else None,
        "tables": tables,
        "runs": list(results.done.values()),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(written, indent=1) + "\n")


def summary(row: Entry, results: Results) -> Record:
    """All that is known of a row: each rate, the best one, and how far a rate may be off."""
    rates = rates_of(row, results)
    tried = {lr: known for lr in rates if (known := records(row, lr, results))}
    found: Record = {"name": row.name, "tried": {f"{lr:g}": wers(tried[lr]) for lr in tried}}
    if not tried:
        return found
    # A rate is chosen by the first seed, unless all rates have all seeds.
    judged = {lr: tried[lr] if row.every_rate else tried[lr][:1] for lr in tried}
    best = min(tried, key=lambda lr: [mean(x) for x in zip(*map(cost, judged[lr]), strict=True)])
    chosen = tried[best]
    found |= {
        "lr": best,
        "lr_at_edge": best in (rates[0], rates[-1]),
        "complete": len(tried) == len(rates) and len(chosen) == len(SEEDS),
        "wer": wers(chosen),
        "wer_mean": round(mean(wers(chosen)), 3),
        "loss": round(mean(finals), 4) if (finals := losses(chosen)) else None,
        "range": round(usable_range(tried), 3),
        "nan_at": [lr for lr in tried if any(record["nan"] for record in tried[lr])],
        "ms_per_step": median(record["ms_per_step"] for record in chosen),
        "state_bytes_per_parameter": chosen[0]["state_bytes_per_parameter"],
    }
    if "english_wer" in chosen[0]:
        found["english_wer"] = [record["english_wer"] for record in chosen]
    return found


def records(row: Entry, lr: float, results: Results) -> list[Record]:
    """The runs of a row at a rate, by seed."""
    found = (results.of(row.at(lr, seed)) for seed in SEEDS)
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


def print_table(table: str, rows: Sequence[Entry], results: Results) -> None:
    """A table as Markdown, the best of a row's rates in its columns."""
    found = [one for row in rows if (one := summary(row, results))["tried"]]
    is_tuned = any("english_wer" in one for one in found)
    titles = ["", "lr", "WER %", "seeds", *(["English WER %"] if is_tuned else [])]
    titles += ["loss", "within 25 % over", "state B/param", "ms/step", "tried (WER %)"]
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
            f"{one['range']:.2g} x",
            f"{one['state_bytes_per_parameter']:.2f}",
            f"{one['ms_per_step']:.1f}",
            tried + nan,
        ]
        print(f"| {' | '.join(cells)} |")
    if any(not one["complete"] for one in found):
        print("\n\\* not all rates or seeds yet")


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    if not values or any(math.isnan(value) for value in values):
        return ""
    apart = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{apart}"


if __name__ == "__main__":
    main()
