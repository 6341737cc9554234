"""Step times and memory of optimizers: MaxFactor, torch's optimizers, and other packages.

    maxfactor bench                                    # Whisper-tiny on the CPU
    maxfactor bench --device cuda --model whisper-large-v3 --dtype float32 --dtype bfloat16
    maxfactor bench --optimizers "quality,adamw,torch AdamW fused" --out mine.json

Parameters and gradients are random and fixed. On a CPU the optimizers take turns, so that a busy
machine slows all of them alike; on CUDA, each one has all the memory. Columns:

    gpu ms     time of a step on the GPU, by CUDA events, with all launches queued in advance
    wall ms    time of a step by the clock, including a wait for the GPU
    host ms    time until `step` returns, without that wait
    ratio      gpu ms (CPU: wall ms) divided by that of torch's fused AdamW with the same dtype, or
               of adamw if the fused one is not measured
    state      bytes of optimizer state per parameter
    extra      peak bytes per parameter during a step, beyond weights, gradients and state
    of copy    the bytes that no optimizer can avoid (read G, read W, write W) per second, as a
               percentage of the speed of a plain copy; it can exceed 100 % on a CPU, where a copy
               first reads the memory that it overwrites

All times are medians.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from maxfactor_speech.bench.contenders import ALL, BASELINE, DEFAULT, Contender, Steps, chosen
from maxfactor_speech.bench.results import circumstances, write
from maxfactor_speech.bench.shapes import MODELS, Shape, elements, shapes, with_layers
from maxfactor_speech.errors import InputError
from maxfactor_speech.state_size import state_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARM_UP = 3  # steps before measuring
COPY_ELEMENTS = 1 << 26  # of the copy that bandwidth is compared with: larger than any cache


# ---------------------------------------------------------------------------------- measuring


@dataclass
class Times:
    """Seconds of each step."""

    gpu: list[float]
    wall: list[float]
    host: list[float]


@dataclass
class Row:
    """A row of the table; None for numbers that do not apply."""

    optimizer: str
    dtype: str
    gpu_ms: float | None
    wall_ms: float
    host_ms: float | None
    state_bytes_per_parameter: float
    extra_bytes_per_parameter: float | None
    share_of_copy: float
    ratio: float | None = None

    @property
    def ms(self) -> float:
        """The time that is compared: on the GPU, or by the clock on a CPU."""
        return self.wall_ms if self.gpu_ms is None else self.gpu_ms


def problem(model: dict[str, Shape], dtype: torch.dtype, device: str) -> Module:
    """Return a model with random parameters and random gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: Shape, scale: float) -> Tensor:
        x = torch.empty(shape, dtype=torch.float32, device=device)
        return x.normal_(0.0, scale, generator=generator).to(dtype)

    params = {name: Parameter(random(shape, 0.02)) for name, shape in model.items()}
    for param in params.values():
        param.grad = random(tuple(param.shape), 1e-3)
    return with_layers(params)


def started(contender: Contender, model: Module) -> Steps | str:
    """Return the optimizer after its first steps, or the reason why it cannot run here."""
    try:
        optimizer = contender.make(model)
        for _ in range(WARM_UP):
            optimizer.step()
    except Exception as error:  # of any kind: the other optimizers are still measured
        text = (str(error).strip() or "no reason given").splitlines()[0]
        return f"{type(error).__name__}: {text}"
    return optimizer


def cpu_times(
    contenders: Sequence[Contender], model: Module, repeats: int
) -> Iterator[tuple[Contender, Steps | str, Times]]:
    """Time all contenders in turns, on the same parameters."""
    tensors = [x for param in model.parameters() for x in (param.detach(), gradient(param))]
    originals = [x.clone() for x in tensors]
    optimizers = []
    for contender in contenders:
        optimizers.append(started(contender, model))
        torch._foreach_copy_(tensors, originals)
    times = [Times([], [], []) for _ in contenders]
    for _ in range(repeats):
        for optimizer, own in zip(optimizers, times, strict=True):
            if isinstance(optimizer, str):
                continue
            torch._foreach_copy_(tensors, originals)
            optimizer.step()  # as in a training, it is the last one that wrote the weights
            torch._foreach_copy_(tensors[1::2], originals[1::2])  # some overwrite the gradient
            own.wall.append(seconds(optimizer.step))
    yield from zip(contenders, optimizers, times, strict=True)


def cuda_times(optimizer: Steps, repeats: int) -> Times:
    """Time one optimizer: on the GPU, by the clock, and on the host."""
    times = Times([], [], [])
    for _ in range(repeats):
        torch.cuda.synchronize()
        times.host.append(seconds(optimizer.step))
    times.gpu += [gpu_seconds(optimizer, steps=3, host=max(times.host)) for _ in range(repeats)]

    def step_and_wait() -> None:
        optimizer.step()
        torch.cuda.synchronize()

    times.wall += [seconds(step_and_wait) for _ in range(repeats)]
    return times


def seconds(call: Callable[[], Any]) -> float:
    """Return the time of a call by the clock."""
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def gpu_seconds(optimizer: Steps, steps: int, host: float) -> float:
    """Return the time of a step on the GPU, which sleeps until the host has launched all steps."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9 * (2 * steps * host + 0.001)))  # in clock cycles, about 2 GHz
    start.record()
    for _ in range(steps):
        optimizer.step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / steps


def cuda_extra(optimizer: Steps, before: int) -> int:
    """Return the peak bytes of a step, beyond the state and the memory used `before`."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - state_bytes(optimizer)


def copy_speed(device: str, repeats: int = 7) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.ones(COPY_ELEMENTS, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    copy()
    return 2 * source.nbytes / min(seconds(copy) for _ in range(repeats))


def gradient(param: Parameter) -> Tensor:
    """Return the gradient of a parameter; assert that it exists."""
    assert param.grad is not None
    return param.grad


def row(name: str, dtype: str, optimizer: Steps, times: Times, model: Module, copy: float) -> Row:
    """Return the medians of the times, and the memory; on a CPU, the GPU columns are None."""
    params = list(model.parameters())
    count = sum(param.numel() for param in params)
    moved = sum(gradient(param).nbytes + 2 * param.nbytes for param in params)
    return Row(
        optimizer=name,
        dtype=dtype,
        gpu_ms=1e3 * median(times.gpu) if times.gpu else None,
        wall_ms=1e3 * median(times.wall),
        host_ms=1e3 * median(times.host) if times.host else None,
        state_bytes_per_parameter=state_bytes(optimizer) / count,
        extra_bytes_per_parameter=None,
        share_of_copy=moved / median(times.gpu or times.wall) / copy,
    )


# ---------------------------------------------------------------------------------- the run


@dataclass
class Report:
    """The rows, and the optimizers that could not run."""

    copy_speed: float
    rows: list[Row]
    skipped: dict[str, str]

    def add(self, name: str, dtype: str, result: Row | str) -> None:
        """Add a row, or the reason why there is none, and update the ratios."""
        if isinstance(result, str):
            self.skipped[f"{name} ({dtype})"] = result
            return
        self.rows.append(result)
        ms = {each.optimizer: each.ms for each in self.rows}
        base = ms.get(BASELINE, ms.get("adamw"))
        for each in self.rows:
            each.ratio = None if base is None else each.ms / base


def measure(
    contenders: Sequence[Contender], model: dict[str, Shape], dtype: str, device: str, repeats: int
) -> Report:
    """Measure all contenders with one dtype."""
    *_, report = growing(contenders, model, dtype, device, repeats)
    return report


def growing(
    contenders: Sequence[Contender], model: dict[str, Shape], dtype: str, device: str, repeats: int
) -> Iterator[Report]:
    """Yield the report after each contender, so that results survive an interruption."""
    copy = copy_speed(device)
    on_device = _cuda_rows if device == "cuda" else _cpu_rows
    report = Report(copy, [], {})
    for name, result in on_device(contenders, model, dtype, repeats, copy):
        report.add(name, dtype, result)
        yield report


def _cpu_rows(
    contenders: Sequence[Contender], model: dict[str, Shape], dtype: str, repeats: int, copy: float
) -> Iterator[tuple[str, Row | str]]:
    filled = problem(model, DTYPES[dtype], "cpu")
    for contender, optimizer, times in cpu_times(contenders, filled, repeats):
        if isinstance(optimizer, str):
            yield contender.name, optimizer
        else:
            yield contender.name, row(contender.name, dtype, optimizer, times, filled, copy)


def _cuda_rows(
    contenders: Sequence[Contender], model: dict[str, Shape], dtype: str, repeats: int, copy: float
) -> Iterator[tuple[str, Row | str]]:
    for contender in contenders:
        filled = problem(model, DTYPES[dtype], "cuda")
        before = torch.cuda.memory_allocated()
        optimizer = started(contender, filled)
        if isinstance(optimizer, str):
            yield contender.name, optimizer
        else:
            times = cuda_times(optimizer, repeats)
            own = row(contender.name, dtype, optimizer, times, filled, copy)
            extra = cuda_extra(optimizer, before) / elements(model)
            yield contender.name, replace(own, extra_bytes_per_parameter=extra)
        del filled, optimizer
        gc.collect()
        torch.cuda.empty_cache()


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    head = ["optimizer", "dtype", "gpu ms", "wall ms", "host ms", "ratio", "state", "extra"]
    lines = [[*head, "of copy"], *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{line[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def _cells(each: Row) -> list[str]:
    def number(x: float | None, digits: int) -> str:
        return "-" if x is None else f"{x:.{digits}f}"

    return [
        each.optimizer,
        each.dtype,
        number(each.gpu_ms, 2),
        number(each.wall_ms, 2),
        number(each.host_ms, 2),
        number(each.ratio, 2),
        number(each.state_bytes_per_parameter, 3),
        number(each.extra_bytes_per_parameter, 3),
        f"{100 * each.share_of_copy:.0f} %",
    ]


def arguments(argv: Sequence[str] | None, prog: str | None = None) -> argparse.Namespace:
    """Parse the command line; `prog` is the name of a command that prints its own help."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=None if prog is None else f"{prog} [OPTIONS], see {prog} --help",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=MODELS, default="whisper-tiny")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["float32"])
    parser.add_argument(
        "--optimizers", default=",".join(DEFAULT), help=f"names, separated by commas, or {ALL}"
    )
    parser.add_argument("--repeats", type=int, default=11, help="timed steps per optimizer")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument(
        "--quick", action="store_true", help="tiny model and three steps, as a test"
    )
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device; use --device cpu")
    if args.quick:
        args.model, args.repeats = "quick", 3
    names = [name.strip() for name in args.optimizers.split(",") if name.strip()]
    try:
        args.contenders = chosen(names)
    except InputError as error:
        parser.error(f"--optimizers: {error}")
    args.optimizers = names
    return args


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> dict[str, Any]:
    """Measure, print and write."""
    args = arguments(argv, prog)
    model = shapes(args.model)
    print(f"{args.model}: {len(model)} tensors, {elements(model) / 1e6:.1f} M parameters")
    reports: list[Report] = []
    for dtype in args.dtype:
        reports.append(Report(0.0, [], {}))
        for report in growing(args.contenders, model, dtype, args.device, args.repeats):
            reports[-1] = report
            if args.out is not None:
                write(args.out, as_result(args, model, reports))
    result = as_result(args, model, reports)
    print(table([each for report in reports for each in report.rows]))
    for name, reason in result["left_out"].items():
        print(f"left out: {name}: {reason}")
    return result


def as_result(
    args: argparse.Namespace, model: dict[str, Shape], reports: Sequence[Report]
) -> dict[str, Any]:
    """Return what is written: the rows, the arguments and the circumstances."""
    unstored = ("out", "contenders")
    return {
        **circumstances(args.device),
        "arguments": {name: value for name, value in vars(args).items() if name not in unstored},
        "tensors": len(model),
        "parameters": elements(model),
        "copy_bytes_per_second": [report.copy_speed for report in reports],
        "rows": [asdict(each) for report in reports for each in report.rows],
        "left_out": {name: why for report in reports for name, why in report.skipped.items()},
    }


if __name__ == "__main__":
    main()
