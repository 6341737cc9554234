"""What it costs to record a step: times with and without, and whether the weights are the same.

    python benchmarks/timing/telemetry.py --device cuda --out benchmarks/results/telemetry_h200.json
    python benchmarks/timing/telemetry.py --quick        # a tiny model on the CPU

The model is a Whisper with random weights and random gradients, in float32 and in bfloat16. Every
step of the second measurement is recorded, as with `record_metrics(every=1)`. The first and the
third are without, and their mean is the time that it is compared with. Reading the metrics is
measured by itself: it waits for the device.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

import maxfactor

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import Record, circumstances, milliseconds, write_json
from timing.training_step import SIZES, whisper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

RECIPES = ("published-1.0", "lean", "fast", "quality")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STEPS = 3  # after which the weights are compared


def with_gradients(size: str, device: str, dtype: torch.dtype) -> nn.Module:
    """A Whisper whose gradients are noise."""
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = whisper(size).to(dtype)
        for param in model.parameters():
            param.requires_grad_(True)
            param.grad = torch.randn_like(param).mul_(1e-3)
    return model


def optimizer_of(model: nn.Module, recipe: str) -> maxfactor.MaxFactor:
    """The optimizer of a recipe, with the backend that the device gets; noise is reproducible."""
    return maxfactor.for_model(model, recipe, seed=0)  # type: ignore[arg-type]  # one of RECIPES


def same_weights(model: nn.Module, recipe: str) -> bool:
    """Whether recorded steps lead to the weights of other steps, bit for bit."""
    start = [param.detach().to("cpu", copy=True) for param in model.parameters()]
    ends: list[list[Any]] = []
    for records in (False, True):
        with torch.no_grad():
            for param, first in zip(model.parameters(), start, strict=True):
                param.copy_(first)
        optimizer = optimizer_of(model, recipe)
        if records:
            optimizer.record_metrics(every=1)
        for _ in range(STEPS):
            optimizer.step()
        ends.append([param.detach().to("cpu", copy=True) for param in model.parameters()])
    return all(map(torch.equal, *ends))


def measure(model: nn.Module, recipe: str, device: str, repeats: int) -> Record:
    """The times of one recipe."""
    optimizer = optimizer_of(model, recipe)
    before = milliseconds(optimizer.step, device, repeats)
    optimizer.record_metrics(every=1)
    recorded = milliseconds(optimizer.step, device, repeats)
    begun = time.perf_counter()
    optimizer.metrics().summary()
    reading = 1e3 * (time.perf_counter() - begun)
    optimizer.record_metrics(every=0)
    after = milliseconds(optimizer.step, device, repeats)
    usual = mean((before, after))
    return {
        "recipe": recipe,
        "step_ms": usual,
        "step_ms_before_and_after": [before, after],
        "recorded_ms": recorded,
        "extra": recorded / usual - 1.0,
        "reading_ms": reading,
    }


def main(argv: Sequence[str] | None = None) -> Record:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="large-v3", choices=tuple(SIZES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one repeat")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if options.quick:
        options.model, options.repeats = "quick", 1
    rows: list[Record] = []
    settings = {"model": options.model, "repeats": options.repeats}
    report = {**circumstances(options.device), "settings": settings, "rows": rows}
    for name, dtype in DTYPES.items():
        model = with_gradients(options.model, options.device, dtype)
        for recipe in RECIPES:
            row = {"dtype": name, **measure(model, recipe, options.device, options.repeats)}
            rows.append({**row, "same_weights": same_weights(model, recipe)})
            print(
                f"{name:9} {recipe:14} {row['step_ms']:8.2f} ms  "
                f"recorded {row['recorded_ms']:8.2f} ms ({row['extra']:+.1%})  "
                f"same weights: {rows[-1]['same_weights']}"
            )
            if options.out is not None:
                write_json(options.out, report)  # what there is, if time is over before the end
    return report


if __name__ == "__main__":
    main()
