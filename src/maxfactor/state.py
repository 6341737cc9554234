"""Optimizer state: how a tensor is factored, what is kept for it, and what a checkpoint may load.

Keys: `step`, and either `row_var` and `col_var` (a matrix) or `variance` (everything else).
All are float32 whatever the parameter's dtype. The factors keep the parameter's number of
dimensions, with ones where they were averaged, so a shard of the parameter is the same shard of
its factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from maxfactor.hyper import Hyper

State = dict[str, Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Factoring:
    """How a tensor is read as a matrix: (m, n), or (batch, m, n) for a batch of them."""

    matrix: Shape
    row: Shape
    col: Shape


@lru_cache(maxsize=4096)
def factoring(shape: Shape, factor: str) -> Factoring | None:
    """Decide how `shape` is factored; None for vectors and scalars.

    `"auto"` views the tensor as one matrix by the contiguous split with the fewest rows + columns.
    `"last"` takes the last two dimensions and the rest as a batch, as the published code did.

    Example:
        >>> factoring((384, 80, 3), "auto").matrix
        (384, 240)
        >>> factoring((384, 80, 3), "last").matrix
        (384, 80, 3)
    """
    ndim = len(shape)
    if ndim < 2:
        return None
    if factor == "last":
        matrix = shape if ndim == 2 else (math.prod(shape[:-2]), *shape[-2:])
        return Factoring(matrix, row=(*shape[:-1], 1), col=(*shape[:-2], 1, shape[-1]))
    splits = range(1, ndim)
    split = min(splits, key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))  # first of ties
    return Factoring(
        matrix=(math.prod(shape[:split]), math.prod(shape[split:])),
        row=(*shape[:split], *(1,) * (ndim - split)),
        col=(*(1,) * split, *shape[split:]),
    )


def state_shapes(shape: Shape, hyper: Hyper) -> dict[str, Shape]:
    """The shape of each state tensor that a parameter of `shape` has under `hyper`."""
    factors = factoring(shape, hyper.factor)
    if factors is None or hyper.keeps_dense_variance(math.prod(shape)):
        return {"step": (), "variance": shape}
    return {"step": (), "row_var": factors.row, "col_var": factors.col}


def init_state(param: Tensor, hyper: Hyper, *, step_on_device: bool = False) -> State:
    """Make the state of a parameter before its first step.

    The step counter stays on the CPU, as in torch, where reading it does not stall the device;
    the fused backend and CUDA graphs count on the device.
    """
    state = {
        key: torch.zeros(shape, dtype=torch.float32, device=param.device)
        for key, shape in state_shapes(tuple(param.shape), hyper).items()
        if key != "step"
    }
    device = param.device if step_on_device else "cpu"
    return {"step": torch.zeros((), dtype=torch.float32, device=device), **state}


def check_loaded(name: str, param: Tensor, loaded: dict[str, Any], hyper: Hyper) -> None:
    """Refuse a parameter's saved state that does not belong to it."""
    expected = state_shapes(tuple(param.shape), hyper)
    if set(loaded) != set(expected):
        raise ValueError(
            f"the checkpoint holds {sorted(loaded)} for parameter {name!r}, but its shape "
            f"{tuple(param.shape)} needs {sorted(expected)}; it was saved from another model "
            "or another optimizer"
        )
    for key, shape in expected.items():
        found = tuple(loaded[key].shape) if isinstance(loaded[key], Tensor) else loaded[key]
        if found != shape:
            raise ValueError(
                f"the checkpoint's {key} of parameter {name!r} has shape {found}, but the "
                f"parameter's shape {tuple(param.shape)} needs {shape}; load it into the model "
                "it was saved from"
            )


def restored(param: Tensor, loaded: State, *, step_on_device: bool = False) -> State:
    """Copy a checked state for `param`: float32 as saved, which torch would cast to its dtype."""
    devices = {"step": param.device if step_on_device else torch.device("cpu")}
    return {
        key: value.detach().to(
            device=devices.get(key, param.device), dtype=torch.float32, copy=True
        )
        for key, value in loaded.items()
    }
