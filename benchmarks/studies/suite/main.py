"""The suite: recipes at their own rates against peers at their best, on tasks in five families.

    python benchmarks/studies/suite/main.py all --device cuda --minutes 9 --jobs 14 --out runs
    python benchmarks/studies/suite/main.py choice --device cuda --minutes 9 --jobs 14 --out runs
    python benchmarks/studies/suite/main.py ours --optimizers "quality heads one by one" --out runs
    python benchmarks/studies/suite/main.py show --out runs       # development data
    python benchmarks/studies/suite/main.py choose --out runs     # by families left out
    python benchmarks/studies/suite/main.py preview --out runs    # tables and picture of that
    python benchmarks/studies/suite/main.py report --out runs     # test data, looked at once
    python benchmarks/studies/suite/main.py all --tasks unseen --out runs     # small, on a CPU
    python benchmarks/studies/suite/main.py report --tasks unseen --out runs

`all` is what `report` needs: `peers` and `ours` on all tasks, `more` peers on some, and `ours` and
AdamW on models of several widths and in trainings of several lengths. These are tables, too.
Families of tasks may be named as tasks are. The family `unseen` has small models of other kinds, on
which nothing was chosen but the rates of peers. It has a report of its own.
A variant that is named for `ours` is run with all seeds, for `choice` with one, or with --seeds.

Errors on development data go to OUT/trials.jsonl and choose rates and settings. Errors on test data
go to OUT/test.jsonl, which only `report` reads. The seed that chooses a rate is not reported: the
best of several rates with one seed has also been lucky with it. Trainings of 8 000 steps and more
have one seed, which chooses and is reported. A finished trial is not run again, so the same command
resumes after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).resolve().parents[2]))  # benchmarks/

from measurement import RESULTS
from studies.side_by_side import Workers, shared_gpu
from studies.suite import speech_data
from studies.suite.choice import print_choice, scores
from studies.suite.optimizers import MORE_PEERS, OURS, PEERS
from studies.suite.report import report
from studies.suite.search import (
    CHOOSING,
    SEEDS,
    Durations,
    Search,
    peer_search,
    read_records,
    seeds_of,
)
from studies.suite.show import print_rows
from studies.suite.tasks import FAMILIES, MAIN, SCALE, TASKS, UNSEEN, base_path, tasks_in
from studies.suite.training import serve
from studies.suite.trials import Trial, base_trial
from studies.suite.variants import VARIANTS, own_search, variant_search

if TYPE_CHECKING:
    from collections.abc import Sequence

    from measurement import Record
    from studies.suite.search import Known

TABLES = ("all", "peers", "more", "ours", "choice")
PICTURES = RESULTS.parents[1] / "docs" / "pictures"
FEWER_PEERS = ("adamw-98", "muon-matched", "soap", "adafactor")  # of the family `unseen`
SOME = ("whisper-half", "llama", "german-few")  # tasks of `more`
# Nothing is known of a training that was cut off.
LONGEST_FIRST = sorted(tasks_in(SCALE), key=lambda name: -TASKS[name].steps)
PARTS = (  # of `all`, in the order in which they are run
    ("ours", LONGEST_FIRST, None),
    ("peers", LONGEST_FIRST, "adamw-98"),
    ("peers", MAIN, None),
    ("ours", MAIN, None),
    ("more", SOME, None),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run trials, or show what is known."""
    begun = time.monotonic()
    options = parsed(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    searches = searches_of(options)
    if options.table in TABLES:
        is_done = run(searches, options, begun + 60.0 * options.minutes)
        if not is_done:
            print("not complete; run the same command again to continue", flush=True)
    known = read_records(options.out / "trials.jsonl")
    if options.table in ("report", "preview"):
        write_tables(searches, known, options)
        return
    print_rows(searches, known)
    if options.table == "choose":
        print_choice(scores(searches, known), FAMILIES)


def write_tables(searches: Sequence[Search], known: Known, options: argparse.Namespace) -> None:
    """Write the tables and the picture on development data, or on test data."""
    is_test = options.table == "report"
    if is_test:  # before test data are read
        refuse_unfinished(searches, known)
    prefix = f"suite_{UNSEEN}" if options.tasks == UNSEEN else "suite"
    name = f"{prefix}_test" if is_test else f"{prefix}_development"
    is_shown = options.optimizers is None and options.tasks in (None, UNSEEN)  # in documents
    folder = options.results or (RESULTS if is_shown else options.out)
    picture = PICTURES / f"{prefix}.svg"
    if options.picture or options.results or not is_shown:
        picture = options.picture or folder / f"{name}.svg"
    measured = read_records(options.out / "test.jsonl") if is_test else known
    out = folder / f"{name}.json"
    found = report(searches, known, measured, options.device, out, picture)
    for line in found["means"]:
        print(json.dumps(line))
    for line in found["missing"]:
        what = "its best rate may be another" if line["row"] else "not in the tables"
        print(f"missing: {line['optimizer']} on {line['task']} at its {line['rate']} rate, {what}")


def refuse_unfinished(searches: Sequence[Search], known: Known) -> None:
    """Peers at rates that may not be their best would make ours look better than they are."""
    peers = [search for search in searches if search.always is None]
    left = [f"{each.name} on {each.trial.task}" for each in peers if not each.is_complete(known)]
    if left:
        raise SystemExit(f"not read yet, as peers are not at their best: {', '.join(left)}")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=(*TABLES, "show", "choose", "preview", "report"))
    parser.add_argument("--tasks", help="separated by commas; default: those of the table")
    parser.add_argument("--optimizers", help="separated by commas; default: all of the table")
    parser.add_argument("--seeds", type=int, default=1, help="of variants in `choice` [1]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--cache", type=Path, help="of data; default: OUT/cache")
    parser.add_argument(
        "--results", type=Path, help="folder of tables [of all: benchmarks/results; of some: OUT]"
    )
    parser.add_argument(
        "--picture", type=Path, help="where it is drawn [of all: docs/pictures; of some: --results]"
    )
    parser.add_argument("--quick", action="store_true", help="tiny, to test the program")
    return parser.parse_args(arguments)


def searches_of(options: argparse.Namespace) -> list[Search]:
    """The rows of a table on the tasks that were asked for."""
    is_whole = options.tasks is None and options.optimizers is None
    if is_whole and options.table in ("all", "preview", "report"):
        given = [
            {"table": table, "tasks": ",".join(tasks), "optimizers": names}
            for table, tasks, names in PARTS
        ]
        parts = [argparse.Namespace(**{**vars(options), **part}) for part in given]
        return [search for part in parts for search in searches_of(part)]
    tasks = tasks_of((options.tasks or ",".join(MAIN)).split(","))

    def trial(task: str, optimizer: str, lr: float) -> Trial:
        return Trial(task, optimizer, lr, quick=options.quick)

    names = {
        "all": [*PEERS, *OURS],
        "peers": PEERS,
        "more": MORE_PEERS,
        "ours": OURS,
        "choice": VARIANTS,
        "show": [*PEERS, *MORE_PEERS, *OURS],
        "choose": [*PEERS, *VARIANTS],
        "preview": [*PEERS, *MORE_PEERS, *OURS],
        "report": [*PEERS, *MORE_PEERS, *OURS],
    }[options.table]
    if options.tasks == UNSEEN and options.table in ("all", "show", "preview", "report"):
        names = [*OURS, *FEWER_PEERS]
    if options.optimizers:
        names = options.optimizers.split(",")
    for name in names:
        if not any(name in known for known in (PEERS, MORE_PEERS, VARIANTS)):
            raise SystemExit(f"unknown optimizer {name!r}; variants: {', '.join(VARIANTS)}")
    chosen = (CHOOSING, *SEEDS)[: options.seeds]
    searches = []
    for name in names:  # one after another on all tasks, so that time is shared by the tasks
        for task in tasks:
            if name in PEERS or name in MORE_PEERS:
                # A variant is compared with peers that had the same seeds.
                of_peer = chosen if options.table == "choose" else None
                searches.append(peer_search(name, task, trial, of_peer))
            elif name in OURS and options.table not in ("choice", "choose"):
                searches.append(own_search(name, task, trial))
            else:
                of_variant = chosen if options.table in ("choice", "choose") else seeds_of(task)
                search = variant_search(name, task, trial, of_variant)
                searches += [] if search is None else [search]
    return searches


def tasks_of(names: Sequence[str]) -> list[str]:
    """Names of tasks; those of a family stand for all of its tasks."""
    found = []
    for name in names:
        own = [name] if name in TASKS else tasks_in(name)
        if not own:
            known = ", ".join((*TASKS, *dict.fromkeys(each.family for each in TASKS.values())))
            raise SystemExit(f"unknown task {name!r}; known tasks and families: {known}")
        found += own
    return found


def run(searches: Sequence[Search], options: argparse.Namespace, deadline: float) -> bool:
    """Run what is due until the deadline; return whether everything was done."""
    cache = options.cache or options.out / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    path, sealed = options.out / "trials.jsonl", options.out / "test.jsonl"
    tested = read_records(sealed)
    known = {key: record for key, record in read_records(path).items() if key in tested}
    durations = Durations(known.values())
    with shared_gpu(options.device) as works:
        heard = set[str]().union(*(TASKS[search.trial.task].hears for search in searches))
        speech_data.synthesise(cache, os.cpu_count() or 1, options.quick, sorted(heard))
        print(f"data: {time.monotonic() - deadline + 60 * options.minutes:.0f} s", flush=True)
        if options.device.startswith("cuda"):
            print(f"MPS: {works()}", flush=True)

        def waiting() -> list[Trial]:
            due = {trial.key: trial for search in searches for trial in search.due(known)}
            bases = {
                base.key: base
                for trial in due.values()
                if (base := needed_base(trial, cache)) is not None
            }
            ready = [trial for trial in due.values() if needed_base(trial, cache) is None]
            first = [base for key, base in bases.items() if key not in due]
            ready.sort(key=lambda trial: not trial.is_base)
            return [*first, *ready]

        offered: set[str] = set()

        def pending() -> list[Trial]:
            left = deadline - time.monotonic()
            found = [trial for trial in waiting() if durations.of(trial) < left]
            offered.update(trial.key for trial in found)
            return found

        def keep(record: Record) -> None:
            test = record.pop("test")
            known[record["key"]] = record
            durations.add(record)
            for target, line in ((path, record), (sealed, test)):
                with target.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            shown = Trial(**record["trial"])
            error = record.get("wer", record.get("nats"))
            print(f"{shown}: {error} ({record['seconds']} s, {record['graph']})", flush=True)

        workers = Workers(cache, options.device, options.jobs, serve=serve)
        workers.work(pending, deadline, keep)
        if not offered and (left := waiting()):
            shortest = min(map(durations.of, left))
            print(f"the shortest trial that is left takes {shortest:.0f} s: raise --minutes")
    return all(search.is_complete(known) for search in searches)


def needed_base(trial: Trial, cache: Path) -> Trial | None:
    """The trial that has to be run before, if its model is not stored yet."""
    base = TASKS[trial.task].base
    if base is None or base_path(cache, base, trial.quick).exists():
        return None
    return base_trial(base, trial.quick)


if __name__ == "__main__":
    main()
