"""Steps on a CPU by code that numba compiles, against torch operations and torch's fused AdamW.

    python benchmarks/timing/cpu_compiled.py --out benchmarks/results/cpu_compiled.json
    python benchmarks/timing/cpu_compiled.py --one-thread --out cpu_compiled_one_thread.json
    python benchmarks/timing/cpu_compiled.py --quick        # small matrices, three repeats

Shapes of Whisper-tiny in float32, random weights and gradients. Each optimizer has weights of its
own, and all share the gradients. They take turns in one process, so whatever else the machine does
meets all of them. The ratio of an optimizer is the median of its ratios to AdamW in the same turn.
The ratio of the least times is beside it. Needs the extra `cpu`.

By the clock the machine must be idle otherwise: an operation that waits for a thread without a core
takes many times as long. With `--one-thread` the time is that of the processor, of one thread,
which other programs disturb far less.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

import maxfactor

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import Record, circumstances, elements, shapes, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from measurement import Shape

    Make = Callable[[list[Parameter]], torch.optim.Optimizer]

# Those of `lean` and of `fast` for hidden layers, here for all of them.
SETTINGS: dict[str, dict[str, Any]] = {
    "published-1.0": {},
    "lean": {"direction": "factored", "scale": "initial", "weight_decay": 0.0},
    "fast": {
        "momentum": maxfactor.FAM(beta_max=0.84),
        "direction": "factored",
        "d": math.inf,
        "scale": "initial",
        "switches": maxfactor.Switches(decay_by="relative_step"),
    },
}
QUICK: dict[str, Shape] = {"a": (300, 128), "b": (64, 700), "c": (20, 16), "d": (128,)}
WARM_UP = 3  # turns
RATE = 1e-3  # small, so that the weights hardly change


def contenders() -> dict[str, Make]:
    """What is measured, by its name; AdamW comes first."""

    def ours(settings: dict[str, Any], fused: bool | None) -> Make:
        return lambda params: maxfactor.MaxFactor(params, lr=RATE, fused=fused, **settings)

    found: dict[str, Make] = {
        "torch AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-5, fused=True)
    }
    for name, settings in SETTINGS.items():
        found[f"{name}, compiled"] = ours(settings, None)
        found[f"{name}, torch operations"] = ours(settings, False)
    return found


def measure(
    model: dict[str, Shape], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[Record]:
    """Let all contenders take turns."""
    torch.manual_seed(0)
    weights = [torch.randn(shape) * 0.02 for shape in model.values()]
    grads: list[Tensor] = [torch.randn(shape) * 1e-3 for shape in model.values()]
    optimizers = {}
    for name, make in contenders().items():
        params = [Parameter(weight.clone()) for weight in weights]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizers[name] = make(params)
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(WARM_UP + repeats):
        for name, optimizer in optimizers.items():
            begun = clock()
            optimizer.step()
            times[name].append(1e3 * (clock() - begun))
    base, *_ = ([*own[WARM_UP:]] for own in times.values())
    rows = []
    for name, own in times.items():
        timed = own[WARM_UP:]
        ratios = [mine / theirs for mine, theirs in zip(timed, base, strict=True)]
        rows.append(
            {
                "optimizer": name,
                "median_ms": median(timed),
                "least_ms": min(timed),
                "ratio": median(ratios),
                "ratio_of_least": min(timed) / min(base),
                "first_ms": own[0],  # with the compilation, or the reading of its cache
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> Record:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--one-thread", action="store_true", help="processor time of one thread")
    parser.add_argument("--quick", action="store_true", help="small matrices, three repeats")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    model = QUICK if options.quick else shapes("whisper-tiny")
    clock, threads = time.perf_counter, torch.get_num_threads()
    if options.one_thread:
        clock = time.thread_time
        torch.set_num_threads(1)
    try:
        rows = measure(model, 3 if options.quick else options.repeats, clock)
        found = circumstances("cpu")
    finally:
        torch.set_num_threads(threads)
    for row in rows:
        print(
            f"{row['optimizer']:32} {row['median_ms']:8.1f} ms, least {row['least_ms']:8.1f} ms, "
            f"ratio {row['ratio']:6.2f}, of least {row['ratio_of_least']:6.2f}"
        )
    report = {
        **found,
        "time_of": "one thread of the processor" if options.one_thread else "the clock",
        "tensors": len(model),
        "parameters": elements(model),
        "rows": rows,
    }
    if options.out is not None:
        write_json(options.out, report)
    return report


if __name__ == "__main__":
    main()
