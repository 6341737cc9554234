"""How busy `maxfactor train` keeps a GPU: Whisper-tiny on synthesised sentences.

    python benchmarks/timing/gpu_busy.py --device cuda --cache speech-cache --out FILE.json
    python benchmarks/timing/gpu_busy.py --quick    # a small model on the CPU, where busy is null

The loop is that of `maxfactor train`, without evaluations and checkpoints; the cache of speech is
filled first. Steps are timed; then the same steps, with the same batches, are repeated under
torch's profiler to measure the time in which at least one kernel runs. "busy" is that time divided
by the time of the steps without the profiler, which slows the host down but not the kernels;
"busy_profiled" divides by the time with it, a lower bound. If nvidia-smi is found, its utilisation
(the share of time in which some kernel ran) is sampled while the steps are timed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import Record, circumstances, write_json
from speech_application import (
    LOG_EVERY,
    SAMPLE_RATE,
    Order,
    Prepared,
    Settings,
    Trainer,
    prepare,
    train_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SAMPLE_MS = 100  # between two samples of nvidia-smi


def main(argv: Sequence[str] | None = None) -> Record:
    """Measure, print, write."""
    args = arguments(argv)
    rows: list[Record] = []
    result = {
        **circumstances(args.device),
        "arguments": {k: v for k, v in vars(args).items() if k not in ("out", "cache", "trace")},
        "rows": rows,
    }
    for batch_size, optimizer, graphs in product(args.batch_size, args.optimizers, args.graphs):
        settings = settings_of(args, optimizer, batch_size, graphs == "yes")
        rows.append(measured(settings, args))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        if args.out is not None:
            write_json(args.out, result)
    return result


def settings_of(
    args: argparse.Namespace, optimizer: str, batch_size: int, graphs: bool
) -> Settings:
    """The settings of `maxfactor train`."""
    return Settings(
        task=args.task,
        model=args.model,
        optimizer=optimizer,
        batch_size=batch_size,
        steps=args.warmup + args.steps,
        utterances=args.utterances,
        validation_utterances=1,
        dtype=args.dtype,
        device=args.device,
        spec_augment=True,
        cuda_graphs=graphs,
    )


def measured(settings: Settings, args: argparse.Namespace) -> Record:
    """One training: a warm-up, steps by the clock, then profiled steps."""
    prepared = prepare(settings, args.cache, args.workers)
    trainer = Trainer(settings, prepared)
    advance(trainer, args.warmup)
    with utilisation(settings.device) as samples:
        seconds = advance(trainer, args.steps)
    audio = audio_seconds(prepared, settings, args.warmup, args.steps)
    if args.trace is not None:
        traced(trainer, args.warmup, args.trace)
    row = {
        "optimizer": settings.optimizer,
        "batch_size": settings.batch_size,
        "dtype": settings.dtype,
        "cuda_graphs": settings.cuda_graphs,
        "parameters": sum(one.numel() for one in trainer.model.parameters()),
        "steps_per_second": round(args.steps / seconds, 2),
        "audio_seconds_per_second": round(audio / seconds, 1),
        "nvidia_smi_percent": round(mean(samples), 1) if samples else None,
    }
    return row | busy(trainer, args.warmup, args.window)


TRACED = 4  # steps


def traced(trainer: Trainer, first: int, path: Path) -> None:
    """Repeat a few steps and write a trace of host and GPU for chrome://tracing."""
    trainer.step = first
    with torch.profiler.profile() as profile:
        advance(trainer, TRACED)
    profile.export_chrome_trace(str(path))


def advance(trainer: Trainer, steps: int) -> float:
    """Train some steps as `maxfactor train` does, and return the seconds."""
    batches = trainer.batches()
    until = trainer.step + steps
    try:
        start = time.perf_counter()
        while trainer.step < until:
            train_until(trainer, batches, min(until, trainer.step + LOG_EVERY))
        return time.perf_counter() - start
    finally:
        batches.close()


def audio_seconds(prepared: Prepared, settings: Settings, first: int, steps: int) -> float:
    """Seconds of audio in some steps, without padding."""
    order = Order(prepared.train.lengths, settings.batch_size, settings.seed)
    samples = sum(int(prepared.train.lengths[order[n]].sum()) for n in range(first, first + steps))
    return samples / SAMPLE_RATE


# --------------------------------------------------------------------------------- kernels


def busy(trainer: Trainer, first: int, window: int) -> Record:
    """The share of time in which kernels run, in repeated steps; null on a CPU."""
    names = ("busy", "busy_profiled", "kernels_per_step", "kernel_ms_per_step", "ms_per_step")
    if trainer.device.type != "cuda":
        return dict.fromkeys(names)
    trainer.step = first  # which decides the batches
    seconds = advance(trainer, window)
    trainer.step = first
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        slowed = advance(trainer, window)
    kernels = kernels_of(profile)
    if not kernels:  # a machine may forbid profiling
        return dict.fromkeys(names) | {"ms_per_step": round(1e3 * seconds / window, 3)}
    ran = covered(kernels)
    values = (
        ran / seconds,
        ran / slowed,
        len(kernels) / window,
        1e3 * ran / window,
        1e3 * seconds / window,
    )
    return {name: round(value, 3) for name, value in zip(names, values, strict=True)}


def kernels_of(profile: torch.profiler.profile) -> list[tuple[float, float]]:
    """Start and end of each kernel, in seconds; copies and annotations are left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [
        (1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"]))
        for event in events
        if event.get("cat") == "kernel"
    ]


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextmanager
def utilisation(device: str) -> Iterator[list[float]]:
    """Percentages from nvidia-smi during the block; none without it or on a CPU."""
    samples: list[float] = []
    program = shutil.which("nvidia-smi")
    if device != "cuda" or program is None:
        yield samples
        return
    command = [program, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0"]
    command += ["-lms", str(SAMPLE_MS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield samples
        finally:
            process.terminate()
            output, _ = process.communicate()
            samples += [float(line) for line in output.splitlines() if line.strip().isdecimal()]


# ---------------------------------------------------------------------------- command line


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--task", default="sentences")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--optimizers", nargs="+", default=["quality", "adamw"])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--graphs", nargs="+", default=["yes", "no"], choices=("yes", "no"))
    parser.add_argument("--dtype", help="[bf16 on cuda, fp32 on the CPU]")
    parser.add_argument("--utterances", type=int, default=12_000, help="synthesised once")
    parser.add_argument(
        "--warmup", type=int, default=300, help="steps that are not timed: graphs are captured"
    )
    parser.add_argument("--steps", type=int, default=200, help="timed ones")
    parser.add_argument("--window", type=int, default=60, help="profiled ones")
    parser.add_argument("--workers", type=int, help="processes that synthesise [one per core]")
    parser.add_argument("--cache", type=Path, help="folder that caches synthesised speech")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--trace", type=Path, help="write a trace of the last training")
    parser.add_argument("--quick", action="store_true", help="nano on digits, a few steps")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device; use --device cpu")
    if args.quick:
        args.task, args.model, args.batch_size, args.optimizers = "digits", "nano", [2], ["adamw"]
        args.graphs = ["no"]
        args.utterances, args.warmup, args.steps, args.window, args.workers = 12, 1, 2, 1, 1
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    return args


if __name__ == "__main__":
    main()
