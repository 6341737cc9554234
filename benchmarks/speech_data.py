"""How fast speech is synthesised, and what a corpus takes in memory while it is read.

    python benchmarks/speech_data.py --utterances 1000 10000 100000 --cache /tmp/speech

The first run with a cache measures the synthesis. Memory is that of a fresh process that takes
batches of 48 from all over the corpus: what it allocated itself (anonymous memory) must not grow
with the corpus; what it mapped from files is the system's to take back.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxfactor_speech.audio import SAMPLE_RATE
from maxfactor_speech.bench.step_time import circumstances, write
from maxfactor_speech.data import Order, training_batches
from maxfactor_speech.preparation import task_codec
from maxfactor_speech.synth import Script, synthesise

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH = 48


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write."""
    args = arguments(argv)
    rows = []
    for count in args.utterances:
        row = {**synthesis(count, args), **reading(count, args.cache, args.batches)}
        print("  ".join(f"{name} {value}" for name, value in row.items()))
        rows.append(row)
    result = {
        **circumstances("cpu"),
        "workers": args.workers,
        "rows": rows,
    }
    if args.out is not None:
        write(args.out, result)
    return result


def synthesis(count: int, args: argparse.Namespace) -> dict[str, Any]:
    """Synthesise what is not in the cache yet, and say how fast that was."""
    there = set(args.cache.glob("*.safetensors"))
    start = _cpu_seconds()
    data = synthesise(Script("sentences"), count, args.cache, args.workers)
    seconds = _cpu_seconds() - start  # of all workers, whatever else the machine did
    made = [path for path in data.paths if path not in there]
    speech = sum(path.stat().st_size for path in made) / 2 / SAMPLE_RATE
    return {
        "utterances": count,
        "hours_of_speech": round(float(data.lengths.sum()) / SAMPLE_RATE / 3600, 2),
        "hours_made": round(speech / 3600, 2),
        "times_real_time_per_core": round(speech / seconds),
    }


def _cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def reading(count: int, cache: Path, batches: int) -> dict[str, Any]:
    """Memory of a process that reads batches, beyond what it had before it knew the corpus."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_read, (count, cache, batches))


def _read(count: int, cache: Path, batches: int) -> dict[str, Any]:
    script = Script("sentences")
    few = synthesise(script, min(count, 256), cache, 1)
    _take(few, 20)  # whatever is loaded once
    before = _memory()
    data = synthesise(script, count, cache, 1)
    start = time.perf_counter()
    _take(data, batches)
    rate = BATCH * batches / (time.perf_counter() - start)
    after = _memory()
    return {
        "own_megabytes": round(after["RssAnon"] - before["RssAnon"], 1),
        "mapped_megabytes": round(after["RssFile"] - before["RssFile"], 1),
        "utterances_per_second": round(rate),
    }


def _take(data: Any, batches: int) -> None:
    order = Order(data.lengths, BATCH, seed=0)
    taken = training_batches(data, task_codec("sentences"), order, 0)
    for _ in range(batches):
        next(taken)
    taken.close()


def _memory() -> dict[str, float]:
    """Megabytes that Linux counts for this process."""
    status = Path("/proc/self/status").read_text()
    return {name: int(size) / 1024 for name, size in re.findall(r"(Rss\w+):\s+(\d+) kB", status)}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("--utterances", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batches", type=int, default=300, help="read for each size")
    parser.add_argument("--cache", type=Path, default=Path("speech-cache"))
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    return parser.parse_args(argv)


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    main()
