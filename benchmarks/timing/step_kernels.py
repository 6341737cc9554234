"""Where the time of a step goes: milliseconds of each kernel on a GPU, of each operation on a CPU.

    python benchmarks/timing/step_kernels.py --device cuda --out FILE.json
    python benchmarks/timing/step_kernels.py --device cuda --recipes quality --lanes 1 2
    python benchmarks/timing/step_kernels.py --device cuda --recipes quality --batch-mib 197 254
    python benchmarks/timing/step_kernels.py --quick    # a tiny model on the CPU

The model is a Whisper with random weights and random gradients.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from maxfactor.backends.triton import workspace

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import Record, circumstances, milliseconds, write_json
from timing.telemetry import DTYPES, optimizer_of, with_gradients
from timing.training_step import SIZES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

WARM_UP = 5  # steps: kernels are compiled, and launches captured
STEPS = 3  # that are profiled
REPEATS = 10  # steps by the clock
SHOWN = 12  # kernels


def measured(optimizer: Optimizer, device: str) -> list[Record]:
    """The kernels of a step, the longest first."""
    for _ in range(WARM_UP):
        optimizer.step()
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        for _ in range(STEPS):
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
    rows = []
    for each in found.key_averages():
        microseconds = each.self_device_time_total if device == "cuda" else each.self_cpu_time_total
        if microseconds:
            ms = round(microseconds / 1e3 / STEPS, 4)
            rows.append({"kernel": each.key, "ms": ms, "calls": each.count / STEPS})
    return sorted(rows, key=lambda row: -row["ms"])


def main(argv: Sequence[str] | None = None) -> Record:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="large-v3", choices=tuple(SIZES))
    parser.add_argument("--recipes", nargs="+", default=["quality", "fast"])
    parser.add_argument("--lanes", nargs="+", type=int, default=[workspace.LANES])
    parser.add_argument(
        "--batch-mib",
        nargs="+",
        type=int,
        default=[workspace.BATCH_BYTES >> 20],
        help="memory for batches of orthogonal matrices",
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=tuple(DTYPES))
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if options.quick:
        options.model = "quick"
    rows: list[Record] = []
    for name in options.dtypes:
        model = with_gradients(options.model, options.device, DTYPES[name])
        for recipe, lanes, mib in product(options.recipes, options.lanes, options.batch_mib):
            workspace.LANES, workspace.BATCH_BYTES = lanes, mib << 20
            optimizer = optimizer_of(model, recipe)
            found = measured(optimizer, options.device)
            # Less than that of all kernels where they overlap.
            clock = round(milliseconds(optimizer.step, options.device, REPEATS), 2)
            case = {"recipe": recipe, "dtype": name, "lanes": lanes, "batch_mib": mib}
            rows.append({**case, "clock_ms": clock, "kernels": found})
            total, calls = (sum(row[column] for row in found) for column in ("ms", "calls"))
            print(
                f"{recipe} {name}, lanes {lanes}, batches of {mib} MiB: {clock} ms by the clock, "
                f"{calls:.0f} kernels {total:.2f} ms"
            )
            for row in found[:SHOWN]:
                print(f"  {row['ms']:9.3f} ms  {row['calls']:7.1f} calls  {row['kernel'][:80]}")
    report = {**circumstances(options.device), "model": options.model, "rows": rows}
    if options.out is not None:
        write_json(options.out, report)
    return report


if __name__ == "__main__":
    main()
