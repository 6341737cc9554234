"""Which backend runs a step, and why an asked-for one cannot."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxfactor.hyper import MaxFactorHyper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.hyper import Execution
    from maxfactor.work import Pending

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(works: Sequence[Pending], execution: Execution) -> str:
    """Return "fused", "foreach" or "plain", or say why what was asked for cannot be."""
    if execution.capturable:
        _check_capturable(works, execution)
    if execution.fused or (execution.fused is None and not execution.foreach):
        obstacle = fused_obstacle(works)
        if obstacle is None and (execution.fused or works[0].param.is_cuda):
            return "fused"
        if execution.fused:
            raise RuntimeError(f"fused=True cannot be honoured: {obstacle}")
    if execution.foreach is None:
        return "foreach" if all(work.param.is_cuda for work in works) else "plain"
    return "foreach" if execution.foreach else "plain"


def fused_obstacle(works: Sequence[Pending]) -> str | None:
    """What keeps the fused kernels from running, with the remedy; None if nothing does."""
    if not has_triton():
        return "Triton is not installed; install it with `pip install triton` or set fused=False"
    first = works[0].param.device
    for work in works:
        if isinstance(work.hyper, MaxFactorHyper) and work.hyper.bands > 1:
            return (
                f"parameter {work.name!r} has a FAM of {work.hyper.bands} bands, and the kernels "
                "have only one; set bands=1 or fused=False"
            )
        device = work.param.device
        if device.type != "cuda" and not is_interpreted():
            return (
                f"parameter {work.name!r} is on {device}; move the model to CUDA or set fused=False"
            )
        if device != first:
            return (
                f"parameters are on {first} and on {device} ({work.name!r}); "
                "use one optimizer for each device or set fused=False"
            )
        lr = getattr(work.hyper, "lr", None)
        if isinstance(lr, Tensor) and not fits_kernels(lr, device):
            return (
                f"lr is a tensor of {lr.dtype} on {lr.device}; make it float32 on {device}, "
                "a CPU tensor or a float, or set fused=False"
            )
        for tensor in (work.param, work.grad):
            if tensor.dtype not in FUSED_DTYPES:
                return (
                    f"parameter {work.name!r} or its gradient is {tensor.dtype}; "
                    "use float32, bfloat16 or float16, or set fused=False"
                )
    return None


def fits_kernels(lr: Tensor, device: torch.device) -> bool:
    """Whether the host or the kernels can read a learning rate."""
    return lr.device.type == "cpu" or (lr.device == device and lr.dtype == torch.float32)


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether the compiler of the fused kernels is installed."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _check_capturable(works: Sequence[Pending], execution: Execution) -> None:
    for work in works:
        if not work.param.is_cuda and not is_interpreted():
            raise RuntimeError(
                f"capturable=True is for CUDA graphs, but parameter {work.name!r} is on "
                f"{work.param.device}; move the model to CUDA or set capturable=False"
            )
    if (execution.foreach or execution.fused is False) and execution.nonfinite != "ignore":
        raise RuntimeError(
            f"capturable=True with nonfinite={execution.nonfinite!r} needs the fused backend, "
            "the only one that checks without reading back; set nonfinite='ignore'"
        )
