"""How long a step takes, and how much memory: ours beside torch's optimizers and other packages.

    maxfactor bench                                    # Whisper-tiny on the CPU
    maxfactor bench --device cuda --model whisper-large-v3 --dtype float32 --dtype bfloat16
    maxfactor bench --optimizers "MaxFactor AdamW" --out mine.json

Parameters and gradients are random and fixed. On the CPU the contenders take turns, so that a
busy machine slows all alike; on CUDA each has the memory for itself. Columns:

    gpu ms     a step on the GPU alone: launches queued up beforehand, by CUDA events
    wall ms    a step by the clock, with a wait for the GPU at its end
    host ms    until `step` returns, without that wait
    ratio      gpu ms (CPU: wall ms) over those of torch's fused AdamW with the same dtype
    state      bytes of optimizer state for each parameter
    extra      bytes for each parameter at the peak of a step beyond W, G and the state
    of copy    the bytes that no optimizer can avoid (read G, read W, write W) over the time, as a
               share of the speed of a plain copy; more than 100 % is possible on a CPU, where
               a copy first reads what it will overwrite

All times are medians.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import importlib.metadata
import json
import math
import os
import platform
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

import maxfactor
from maxfactor_speech.bench.shapes import MODELS, Shape, elements, shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BASELINE = "torch AdamW fused"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "torch-optimi",
    "bitsandbytes",
    "torchao",
    "pytorch-optimizer",
    "came-pytorch",
    "lion-pytorch",
)
WARM_UP = 3
RATE = 1e-5  # small: the weights shall look alike from the first step to the last
COPY_ELEMENTS = 1 << 26  # of the copy that bandwidth is compared with: larger than any cache


# ------------------------------------------------------------------------------- contenders


class Steps(Protocol):
    """What is timed."""

    state: Any

    def step(self) -> Any:
        """Take one step."""


@dataclass(frozen=True)
class Contender:
    """An optimizer under the name it has in the table."""

    name: str
    make: Callable[[list[Parameter]], Steps]


class Several:
    """Optimizers that share a model."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.state = {p: s for optimizer in optimizers for p, s in optimizer.state.items()}

    def step(self) -> None:
        """Take one step of each."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.state = {p: s for each in self.optimizers for p, s in each.state.items()}


def ours(name: str, backend: str, label: str = "", **settings: Any) -> Contender:
    """One of this package's optimizers in one of its backends."""
    chosen = {"foreach": backend == "foreach", "fused": backend == "fused", **settings}
    cls = getattr(maxfactor, name)
    label = " ".join(filter(None, (name, label, backend)))
    return Contender(label, lambda params: cls(params, lr=RATE, **chosen))


BACKENDS = ("plain", "foreach", "fused")
FAM = {"momentum": maxfactor.FAM()}
FACTORED = {**FAM, "direction": "factored"}
UNCLIPPED = {**FACTORED, "d": math.inf}
ORTHOGONAL = {"momentum": 0.9, "nesterov": True, "direction": "orthogonal", "scale": "initial"}


def named(label: str, module: str, name: str, **settings: Any) -> Contender:
    """An optimizer of a package that is imported only when its turn comes."""

    def make(params: list[Parameter]) -> Steps:
        optimizer: Steps = getattr(importlib.import_module(module), name)(
            params, **{"lr": RATE, **settings}
        )
        return optimizer

    return Contender(label, make)


def muon(params: list[Parameter]) -> Steps:
    """Muon for matrices and AdamW for the rest, as its authors advise."""
    matrices = [param for param in params if param.dim() == 2]
    others = [param for param in params if param.dim() != 2]
    cls = getattr(torch.optim, "Muon", None)
    if cls is None:
        raise RuntimeError(f"torch {torch.__version__} has no Muon")
    return Several(cls(matrices, lr=RATE), torch.optim.AdamW(others, lr=RATE))


CONTENDERS = (
    *(ours("MaxFactor", backend) for backend in BACKENDS),
    *(ours("MaxFactor", backend, "FAM", **FAM) for backend in BACKENDS),
    *(ours("MaxFactor", backend, "FAM factored", **FACTORED) for backend in BACKENDS),
    *(ours("MaxFactor", backend, "FAM unclipped", **UNCLIPPED) for backend in BACKENDS),
    *(ours("MaxFactor", backend, "orthogonal", **ORTHOGONAL) for backend in BACKENDS),
    *(ours("Adafactor", backend) for backend in BACKENDS),
    named("torch AdamW", "torch.optim", "AdamW"),
    named("torch AdamW foreach", "torch.optim", "AdamW", foreach=True),
    named(BASELINE, "torch.optim", "AdamW", fused=True),
    named("torch Adafactor", "torch.optim", "Adafactor"),
    named("torch Adafactor foreach", "torch.optim", "Adafactor", foreach=True),
    named("torch SGD", "torch.optim", "SGD"),
    named("torch SGD fused", "torch.optim", "SGD", fused=True),
    Contender("torch Muon + AdamW", muon),
    named("optimi AdamW", "optimi", "AdamW"),
    named("optimi Lion", "optimi", "Lion"),
    named("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit"),
    named("bitsandbytes Lion8bit", "bitsandbytes.optim", "Lion8bit"),
    named("torchao AdamW8bit", "torchao.optim", "AdamW8bit"),
    named("pytorch_optimizer AdaFactor", "pytorch_optimizer", "AdaFactor"),
    named("pytorch_optimizer CAME", "pytorch_optimizer", "CAME"),
    named("came_pytorch CAME", "came_pytorch", "CAME"),
    named("lion_pytorch Lion", "lion_pytorch", "Lion"),
)


def chosen(filters: Sequence[str]) -> list[Contender]:
    """The contenders whose name holds one of the words; all of them without any."""
    found = [
        contender
        for contender in CONTENDERS
        if not filters or any(word.lower() in contender.name.lower() for word in filters)
    ]
    if not found:
        names = ", ".join(repr(contender.name) for contender in CONTENDERS)
        raise SystemExit(f"no optimizer has one of {filters} in its name; there are {names}")
    return found


# ---------------------------------------------------------------------------------- measuring


@dataclass
class Times:
    """Seconds of each step."""

    gpu: list[float]
    wall: list[float]
    host: list[float]


@dataclass
class Row:
    """One line of the table; None where a number has no meaning."""

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
        """The time that counts."""
        return self.wall_ms if self.gpu_ms is None else self.gpu_ms


def problem(model: dict[str, Shape], dtype: torch.dtype, device: str) -> list[Parameter]:
    """Random parameters with random gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: Shape, scale: float) -> Tensor:
        x = torch.empty(shape, dtype=torch.float32, device=device)
        return x.normal_(0.0, scale, generator=generator).to(dtype)

    params = [Parameter(random(shape, 0.02)) for shape in model.values()]
    for param in params:
        param.grad = random(tuple(param.shape), 1e-3)
    return params


def started(contender: Contender, params: list[Parameter]) -> Steps | str:
    """The optimizer after its first steps, or why it cannot run here."""
    try:
        optimizer = contender.make(params)
        for _ in range(WARM_UP):
            optimizer.step()
    except Exception as error:  # whatever a package does, the others shall be measured
        text = (str(error).strip() or "no reason given").splitlines()[0]
        return f"{type(error).__name__}: {text}"
    return optimizer


def cpu_times(
    contenders: Sequence[Contender], params: list[Parameter], repeats: int
) -> Iterator[tuple[Contender, Steps | str, Times]]:
    """Time all of them in turns on the same parameters."""
    tensors = [x for param in params for x in (param.detach(), gradient(param))]
    originals = [x.clone() for x in tensors]
    optimizers = []
    for contender in contenders:
        optimizers.append(started(contender, params))
        torch._foreach_copy_(tensors, originals)
    times = [Times([], [], []) for _ in contenders]
    for _ in range(repeats):
        for optimizer, own in zip(optimizers, times, strict=True):
            if isinstance(optimizer, str):
                continue
            torch._foreach_copy_(tensors, originals)  # some optimizers write the gradient
            own.wall.append(seconds(optimizer.step))
    yield from zip(contenders, optimizers, times, strict=True)


def cuda_times(optimizer: Steps, repeats: int) -> Times:
    """Time one optimizer: on the GPU alone, by the clock with a wait, and until it returns."""
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
    """How long a call takes by the clock."""
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def gpu_seconds(optimizer: Steps, steps: int, host: float) -> float:
    """A step's time on the GPU, which is kept busy until the host has launched all steps."""
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
    """Bytes at the peak of a step beyond the state and what was there before the optimizer."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - state_bytes(optimizer)


def copy_speed(device: str, repeats: int = 7) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(COPY_ELEMENTS, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    copy()
    return 2 * source.nbytes / min(seconds(copy) for _ in range(repeats))


def gradient(param: Parameter) -> Tensor:
    """A parameter's gradient, which is there."""
    assert param.grad is not None
    return param.grad


def state_bytes(optimizer: Steps) -> int:
    """Bytes of all tensors in the state, each counted once."""
    storages: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                visit(inner)
        elif hasattr(value, "__tensor_flatten__"):  # a quantized tensor holds others
            for name in value.__tensor_flatten__()[0]:
                visit(getattr(value, name))
        elif isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()

    visit(dict(optimizer.state))
    return sum(storages.values())


def row(
    name: str, dtype: str, optimizer: Steps, times: Times, params: list[Parameter], copy: float
) -> Row:
    """Medians of the times, and the memory; what only CUDA can tell stays None elsewhere."""
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
    """Rows and what could not run."""

    copy_speed: float
    rows: list[Row]
    skipped: dict[str, str]

    def add(self, name: str, dtype: str, result: Row | str) -> None:
        """Add a row, or why there is none, and bring the ratios up to date."""
        if isinstance(result, str):
            self.skipped[f"{name} ({dtype})"] = result
            return
        self.rows.append(result)
        base = next((each.ms for each in self.rows if each.optimizer == BASELINE), None)
        for each in self.rows:
            each.ratio = None if base is None else each.ms / base


def measure(
    contenders: Sequence[Contender], model: dict[str, Shape], dtype: str, device: str, repeats: int
) -> Report:
    """All contenders with one dtype."""
    *_, report = growing(contenders, model, dtype, device, repeats)
    return report


def growing(
    contenders: Sequence[Contender], model: dict[str, Shape], dtype: str, device: str, repeats: int
) -> Iterator[Report]:
    """The report after each contender, so that nothing is lost when there is no time for all."""
    copy = copy_speed(device)
    on_device = _cuda_rows if device == "cuda" else _cpu_rows
    report = Report(copy, [], {})
    for name, result in on_device(contenders, model, dtype, repeats, copy):
        report.add(name, dtype, result)
        yield report


def _cpu_rows(
    contenders: Sequence[Contender], model: dict[str, Shape], dtype: str, repeats: int, copy: float
) -> Iterator[tuple[str, Row | str]]:
    params = problem(model, DTYPES[dtype], "cpu")
    for contender, optimizer, times in cpu_times(contenders, params, repeats):
        if isinstance(optimizer, str):
            yield contender.name, optimizer
        else:
            yield contender.name, row(contender.name, dtype, optimizer, times, params, copy)


def _cuda_rows(
    contenders: Sequence[Contender], model: dict[str, Shape], dtype: str, repeats: int, copy: float
) -> Iterator[tuple[str, Row | str]]:
    for contender in contenders:
        params = problem(model, DTYPES[dtype], "cuda")
        before = torch.cuda.memory_allocated()
        optimizer = started(contender, params)
        if isinstance(optimizer, str):
            yield contender.name, optimizer
        else:
            times = cuda_times(optimizer, repeats)
            own = row(contender.name, dtype, optimizer, times, params, copy)
            count = sum(param.numel() for param in params)
            extra = cuda_extra(optimizer, before) / count
            yield contender.name, replace(own, extra_bytes_per_parameter=extra)
        del params, optimizer
        gc.collect()
        torch.cuda.empty_cache()


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
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


def machine(device: str) -> dict[str, Any]:
    """What it ran on, without the machine's name."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"python": platform.python_version(), "maxfactor": maxfactor.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def circumstances(device: str) -> dict[str, Any]:
    """When, where and with what something was measured."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"date": today, "machine": machine(device), "versions": versions()}


def arguments(argv: Sequence[str] | None, prog: str | None = None) -> argparse.Namespace:
    """The command line, of a command that has its own help where its name is given."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=None if prog is None else f"{prog} [OPTIONS], see {prog} --help",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=MODELS, default="whisper-tiny")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["float32"])
    parser.add_argument("--optimizers", nargs="*", default=[], help="words from their names")
    parser.add_argument("--repeats", type=int, default=11, help="timed steps of each")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--quick", action="store_true", help="a tiny model and three steps")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device; use --device cpu")
    if args.quick:
        args.model, args.repeats = "quick", 3
    return args


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> dict[str, Any]:
    """Measure, print, write."""
    args = arguments(argv, prog)
    model, contenders = shapes(args.model), chosen(args.optimizers)
    print(f"{args.model}: {len(model)} tensors, {elements(model) / 1e6:.1f} M parameters")
    reports: list[Report] = []
    for dtype in args.dtype:
        reports.append(Report(0.0, [], {}))
        for report in growing(contenders, model, dtype, args.device, args.repeats):
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
    """What is written: the rows, and what they were measured with."""
    return {
        **circumstances(args.device),
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
        "tensors": len(model),
        "parameters": elements(model),
        "copy_bytes_per_second": [report.copy_speed for report in reports],
        "rows": [asdict(each) for report in reports for each in report.rows],
        "left_out": {name: why for report in reports for name, why in report.skipped.items()},
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
