"""Which backend runs a step, and why an asked-for one cannot."""

from __future__ import annotations

import importlib.util
import math
import os
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxfactor.distributed.placement import is_sharded, shards_of
from maxfactor.rule.int8 import BLOCK, blocks_of
from maxfactor.rule.rounding import is_stochastic
from maxfactor.settings import MaxFactorHyper
from maxfactor.state import factoring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.backends.step_io import Pending
    from maxfactor.settings import Execution

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(works: Sequence[Pending], execution: Execution) -> str:
    """Return "sharded", "fused", "foreach" or "plain", or say why what was asked for cannot be."""
    if any(is_sharded(work.param) or is_sharded(work.grad) for work in works):
        _check_sharded(works, execution)
        return _choose_for_shards(works, execution)
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


def _choose_for_shards(works: Sequence[Pending], execution: Execution) -> str:
    """Return "fused" or "sharded", the same on every rank."""
    if execution.fused is not False:
        obstacle = fused_obstacle(works) or shard_obstacle(works)
        if obstacle is None and (execution.fused or works[0].param.is_cuda):
            return "fused"
        if execution.fused:
            raise RuntimeError(f"fused=True cannot be honoured: {obstacle}")
    return "sharded"


def shard_obstacle(works: Sequence[Pending]) -> str | None:
    """What keeps the fused kernels from stepping shards; it must not differ from rank to rank."""
    for work in works:
        if not (is_sharded(work.param) and shards_of(work.param)):
            continue
        if getattr(work.hyper, "direction", None) == "orthogonal" and work.param.dim() > 1:
            return (
                f"parameter {work.name!r} is cut over several ranks, and its orthogonal direction "
                "needs the whole of it; set fused=False"
            )
        if is_stochastic(work.param.dtype, work.hyper) and is_scattered(work):
            return (
                f"parameter {work.name!r} {tuple(work.param.shape)} is placed as "
                f"{work.param.placements}, which leaves gaps between its rows, and the kernels' "
                "stochastic rounding does not see them; set rounding='nearest' or fused=False"
            )
    return None


def is_scattered(work: Pending) -> bool:
    """Whether the rows of a shard are not one behind the other, or its columns, on some rank."""
    param = work.param
    assert is_sharded(param)
    layout = factoring(tuple(param.shape), work.hyper.factor)
    rows, columns = ((), (0,)) if layout is None else (layout.row_dims, layout.col_dims)
    batch = [d for d in rows if d in columns]
    for part in (
        batch,
        [d for d in rows if d not in batch],
        [d for d in columns if d not in batch],
    ):
        cuts = [(i, dim) for i, dim in shards_of(param) if dim in part]
        for i, dim in cuts:
            before = math.prod(param.shape[d] for d in part if d < dim)
            ranks = math.prod(param.device_mesh.size(j) for j, other in cuts if other == dim)
            strided = hasattr(param.placements[i], "split_factor")
            if before > 1 or (strided and param.shape[dim] % ranks):
                return True
    return False


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


def _check_sharded(works: Sequence[Pending], execution: Execution) -> None:
    for name in ("foreach", "capturable"):
        if getattr(execution, name):
            first = next(work.name for work in works if is_sharded(work.param))
            raise RuntimeError(
                f"{name}=True cannot be honoured: parameter {first!r} is sharded (a DTensor), and "
                f"sharded parameters have a backend of their own; leave {name} out"
            )
    for work in works:
        if is_sharded(work.param) != is_sharded(work.grad):
            which = "parameter" if is_sharded(work.param) else "gradient"
            raise RuntimeError(
                f"of parameter {work.name!r} and its gradient only the {which} is a DTensor; make "
                "both DTensors of one device mesh"
            )
        if is_sharded(work.param):
            _check_placements(work)


def _check_placements(work: Pending) -> None:
    """Refuse shards that the sharded backend cannot step."""
    param, hyper = work.param, work.hyper
    assert is_sharded(param)
    if any(placement.is_partial() for placement in param.placements):
        raise RuntimeError(
            f"parameter {work.name!r} is placed as {param.placements}: a sum that was never taken "
            "cannot be stepped; redistribute it to Shard or Replicate first"
        )
    layout = factoring(tuple(param.shape), hyper.factor)
    store = hyper.momentum_store(is_vector=layout is None)
    if layout is None or not (store == "int8" or hyper.bands > 1):
        return
    cuts = [(i, dim) for i, dim in shards_of(param) if dim in layout.col_dims]
    for i, dim in cuts:
        ranks, inner = param.device_mesh.size(i), math.prod(param.shape[dim + 1 :])
        own = -(-param.shape[dim] // ranks) * inner  # values of a row that the first rank holds
        in_blocks = own == -(-blocks_of(layout.matrix[-1]) // ranks) * BLOCK
        if len(cuts) > 1 or dim != layout.col_dims[0] or not in_blocks:
            remedy = "momentum_dtype='fp32' or 'bf16'"
            if hyper.bands > 1:
                remedy = f"bands=1 and {remedy}"
            raise RuntimeError(
                f"parameter {work.name!r} {tuple(param.shape)} is placed as {param.placements}, "
                f"which cuts its rows within blocks of {BLOCK} values that belong together; set "
                f"{remedy}, or shard it along its rows"
            )
