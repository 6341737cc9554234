"""Chooses the backend of a step; raises if the requested one cannot run it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from maxfactor.distributed.placement import is_sharded, is_strided, shards_of
from maxfactor.settings import BLOCK
from maxfactor.state import blocks_of, factoring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.backends.step_io import StepInput
    from maxfactor.settings import Execution

Backend = Literal["torch", "compiled", "triton"]

OLDEST_TRITON = (3, 3)  # tuples as arguments of kernels
OLDEST_NUMBA = (0, 60)  # the first one for NumPy 2
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(inputs: Sequence[StepInput], execution: Execution) -> Backend:
    """Return the backend for a step; raise if the requested one cannot run it."""
    has_shards = any(is_sharded(each.param) or is_sharded(each.grad) for each in inputs)
    if has_shards:
        _check_sharded(inputs, execution)
    if execution.capturable:
        _check_devices(inputs)
    if execution.fused is False or execution.foreach:
        return _torch(execution, None)
    if execution.fused and not has_shards and not is_interpreted() and is_on_cpu(inputs):
        if obstacle := compiled_obstacle(inputs):
            raise RuntimeError(f"fused=True cannot be honoured: {obstacle}")
        return "compiled"
    # With sharded parameters all ranks must choose the same backend.
    obstacle = triton_obstacle(inputs) or (shard_obstacle(inputs) if has_shards else None)
    if obstacle is None and (execution.fused or inputs[0].param.is_cuda):
        return "triton"
    if execution.fused:
        raise RuntimeError(f"fused=True cannot be honoured: {obstacle}")
    return _torch(execution, obstacle)


def _torch(execution: Execution, obstacle: str | None) -> Backend:
    """Return "torch", unless it would wait for the device while a graph is captured."""
    if execution.capturable and execution.nonfinite != "ignore":
        reason = "" if obstacle is None else f", but {obstacle}"
        raise RuntimeError(
            f"capturable=True with nonfinite={execution.nonfinite!r} needs the fused backend, "
            "the only one that checks gradients without waiting for the device; "
            f"set nonfinite='ignore'{reason}"
        )
    return "torch"


def shard_obstacle(inputs: Sequence[StepInput]) -> str | None:
    """Why the kernels cannot step these shards, or None. The answer is the same on all ranks."""
    for each in inputs:
        if not (is_sharded(each.param) and shards_of(each.param)):
            continue
        if each.rule.is_stochastic(each.param.dtype) and is_scattered(each):
            return (
                f"parameter {each.name!r} {tuple(each.param.shape)} is placed as "
                f"{each.param.placements}, so its local rows are not consecutive, which "
                "stochastic rounding in the kernels does not support; set rounding='nearest' or "
                "fused=False"
            )
    return None


def is_scattered(each: StepInput) -> bool:
    """Whether, on some rank, the rows or columns of a shard are not consecutive."""
    param = each.param
    assert is_sharded(param)
    layout = factoring(tuple(param.shape), each.rule.factor)
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
            strided = is_strided(param.placements[i])
            if before > 1 or (strided and param.shape[dim] % ranks):
                return True
    return False


def is_on_cpu(inputs: Sequence[StepInput]) -> bool:
    """Whether all parameters are on a CPU."""
    return all(each.param.device.type == "cpu" for each in inputs)


def compiled_obstacle(inputs: Sequence[StepInput]) -> str | None:
    """Why the passes compiled for a CPU cannot run, with the remedy; None if they can."""
    if importlib.util.find_spec("numba") is None:
        return (
            "on a CPU it needs Numba, which is not installed; install it with "
            "`pip install 'numba>=0.60'`, move the model to CUDA, or set fused=False"
        )
    if version_of("numba") < OLDEST_NUMBA:
        return (
            f"Numba {version_text(version_of('numba'))} is older than "
            f"{version_text(OLDEST_NUMBA)}; update it or set fused=False"
        )
    if error := numba_error():
        return (
            f"Numba cannot be used: {error}; if it cannot keep what it compiles, set the variable "
            "NUMBA_CACHE_DIR to a folder for that, else set fused=False"
        )
    for each in inputs:
        rule = each.rule
        for tensor in (each.param, each.grad):
            if tensor.dtype != torch.float32:
                return (
                    f"parameter {each.name!r} or its gradient is {tensor.dtype}, and on a CPU only "
                    "float32 is supported; use float32 or set fused=False"
                )
        if not rule.has_momentum or not has_compiled_passes(each):
            continue
        if rule.momentum_dtype != "int8" or rule.bands > 1:
            return (
                f"the momentum of parameter {each.name!r} is {rule.momentum_dtype} in "
                f"{max(1, rule.bands)} bands, and on a CPU only int8 in one band is supported; set "
                "momentum_dtype='int8' and bands=1, or fused=False"
            )
        if rule.divides_by_peak or rule.needs_norm:
            return (
                f"parameter {each.name!r} has a momentum, and on a CPU that is supported only "
                "without maxima and norms; set direction='factored', d=math.inf and "
                "clip_threshold=0, or fused=False"
            )
    return None


def has_compiled_passes(each: StepInput) -> bool:
    """Whether the compiled passes are for this tensor; others are stepped by torch operations."""
    rule, layout = each.rule, factoring(tuple(each.param.shape), each.rule.factor)
    if layout is None or len(layout.matrix) > 2 or rule.dense or rule.boost is not None:
        return False
    if rule.is_orthogonal or (rule.divides_by_peak and not rule.moves_by_sign):
        return False
    # A pass reads the memory of a tensor, which other types may not have.
    is_plain = type(each.param.data) is Tensor and type(each.grad.data) is Tensor
    return is_plain and each.param.is_contiguous() and each.param.numel() > 0


@lru_cache(maxsize=1)
def numba_error() -> str:
    """Why the compiled passes cannot be loaded; empty if they can."""
    try:
        importlib.import_module("maxfactor.backends.torch.compiled.passes")
    except (ImportError, RuntimeError) as error:  # another NumPy, or no folder for a cache
        return str(error)
    return ""


def triton_obstacle(inputs: Sequence[StepInput]) -> str | None:
    """Why the Triton kernels cannot run, with the remedy; None if they can."""
    if not has_triton():
        return "Triton is not installed; install it with `pip install triton` or set fused=False"
    if version_of("triton") < OLDEST_TRITON:
        return (
            f"Triton {version_text(version_of('triton'))} is older than "
            f"{version_text(OLDEST_TRITON)}; install a newer torch or set fused=False"
        )
    first = inputs[0].param.device
    for each in inputs:
        if each.rule.bands > 1:
            return (
                f"parameter {each.name!r} has FAM with {each.rule.bands} bands, and the kernels "
                "support only one; set bands=1 or fused=False"
            )
        device = each.param.device
        if device.type != "cuda" and not is_interpreted():
            return (
                f"parameter {each.name!r} is on {device}; move the model to CUDA or set fused=False"
            )
        if device != first:
            return (
                f"parameters are on {first} and on {device} ({each.name!r}); "
                "use one optimizer for each device or set fused=False"
            )
        if isinstance(each.lr, Tensor) and not is_readable(each.lr, device):
            return (
                f"lr is a tensor of {each.lr.dtype} on {each.lr.device}; make it float32 on "
                f"{device}, a CPU tensor or a float, or set fused=False"
            )
        for tensor in (each.param, each.grad):
            if tensor.dtype not in TRITON_DTYPES:
                return (
                    f"parameter {each.name!r} or its gradient is {tensor.dtype}; "
                    "use float32, bfloat16 or float16, or set fused=False"
                )
    return None


def is_readable(lr: Tensor, device: torch.device) -> bool:
    """Whether the host or the kernels can read a learning rate."""
    return lr.device.type == "cpu" or (lr.device == device and lr.dtype == torch.float32)


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=2)
def version_of(package: str) -> tuple[int, int]:
    """The installed version of a package, (major, minor)."""
    major, minor = importlib.metadata.version(package).split(".")[:2]
    return int(major), int(minor)


def version_text(version: tuple[int, int]) -> str:
    """A version as it is written."""
    return ".".join(map(str, version))


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _check_devices(inputs: Sequence[StepInput]) -> None:
    for each in inputs:
        if not each.param.is_cuda and not is_interpreted():
            raise RuntimeError(
                f"capturable=True is for CUDA graphs, but parameter {each.name!r} is on "
                f"{each.param.device}; move the model to CUDA or set capturable=False"
            )


def _check_sharded(inputs: Sequence[StepInput], execution: Execution) -> None:
    for name in ("foreach", "capturable"):
        if getattr(execution, name):
            first = next(each.name for each in inputs if is_sharded(each.param))
            raise RuntimeError(
                f"{name}=True does not support sharded parameters, and parameter {first!r} is a "
                f"DTensor; leave {name} out"
            )
    for each in inputs:
        if is_sharded(each.param) != is_sharded(each.grad):
            which = "parameter" if is_sharded(each.param) else "gradient"
            raise RuntimeError(
                f"of parameter {each.name!r} and its gradient only the {which} is a DTensor; make "
                "both DTensors on one device mesh"
            )
        if is_sharded(each.param):
            _check_placements(each)


def _check_placements(each: StepInput) -> None:
    """Refuse placements that no backend supports."""
    param, rule = each.param, each.rule
    assert is_sharded(param)
    if any(placement.is_partial() for placement in param.placements):
        raise RuntimeError(
            f"parameter {each.name!r} is placed as {param.placements}, and Partial is not "
            "supported; redistribute it to Shard or Replicate first"
        )
    layout = factoring(tuple(param.shape), rule.factor)
    in_int8 = rule.has_momentum and rule.momentum_dtype == "int8"
    if layout is None or not (in_int8 or rule.bands > 1):
        return
    cuts = [(i, dim) for i, dim in shards_of(param) if dim in layout.col_dims]
    for i, dim in cuts:
        ranks, inner = param.device_mesh.size(i), math.prod(param.shape[dim + 1 :])
        own = -(-param.shape[dim] // ranks) * inner  # values of a row on the first rank
        in_blocks = own == -(-blocks_of(layout.matrix[-1]) // ranks) * BLOCK
        if len(cuts) > 1 or dim != layout.col_dims[0] or not in_blocks:
            remedy = "momentum_dtype='fp32' or 'bf16'"
            if rule.bands > 1:
                remedy = f"bands=1 and {remedy}"
            raise RuntimeError(
                f"parameter {each.name!r} {tuple(param.shape)} is placed as {param.placements}, "
                f"which splits its rows inside blocks of {BLOCK} values, not between them; set "
                f"{remedy}, or shard it along its rows"
            )
