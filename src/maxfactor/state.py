"""Optimizer state: how a tensor is factored, and the state tensors that it has.

Keys: `step`, and `row_var` and `col_var` (a matrix) or `variance` (everything else). With momentum
`momentum`, with int8 `momentum_scale`, with FAM a matrix's `band_sums`. With scale="initial"
`initial_rms`. All are float32 for any dtype of the parameter, except `momentum`, which has the
dtype of the settings, and `step`, an int64, because float32 cannot count past 2^24. Factors and
scales have the parameter's number of dimensions, with size 1 where they are averaged, so they are
sharded along the same dimensions as the parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from maxfactor.distributed.placement import from_local, is_sharded, kept_on, local
from maxfactor.settings import BLOCK, FLOAT32_MAX

if TYPE_CHECKING:
    from maxfactor.settings import TensorRule

State = dict[str, Tensor]
Shape = tuple[int, ...]

MOMENTUM_DTYPES = {"int8": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}


class Bounds(NamedTuple):
    """The values that a state tensor may hold, both ends included; never NaN."""

    low: float
    high: float = FLOAT32_MAX
    is_whole: bool = False

    def __str__(self) -> str:
        kind = "whole numbers" if self.is_whole else "finite values"
        if self.low <= -FLOAT32_MAX:
            return kind
        if self.high >= FLOAT32_MAX:
            return f"{kind} of at least {self.low:g}"
        return f"{kind} from {self.low:g} to {self.high:g}"


NOT_NEGATIVE = Bounds(0.0)
# The last row of `band_sums` is the correction c of (12): 1 at most, but for rounding.
BAND_BOUNDS = (Bounds(-FLOAT32_MAX), NOT_NEGATIVE, Bounds(0.0, 1.00001))


def bounds_of(key: str, dtype: torch.dtype) -> tuple[Bounds, ...]:
    """What a state tensor of this dtype may hold: one entry, or one for each of its rows."""
    if key == "band_sums":
        return BAND_BOUNDS
    if key == "momentum":
        return (Bounds(-127.0, 127.0) if dtype == torch.int8 else Bounds(-FLOAT32_MAX),)
    return (Bounds(0.0, is_whole=True) if key == "step" else NOT_NEGATIVE,)


@dataclass(frozen=True)
class Factoring:
    """How a tensor is viewed as a matrix (m, n), or as a batch of matrices (batch, m, n)."""

    matrix: Shape
    row: Shape
    col: Shape
    scale: Shape  # one for each block of 64 values of a row
    row_dims: Shape  # dimensions of the tensor that R has
    col_dims: Shape  # dimensions of the tensor that C has

    def of_shard(self, shape: Shape) -> Factoring:
        """The same view of a shard, whose own shape could give another one by `factoring`."""
        if len(self.matrix) > 2:
            return _as_batch(shape)
        return _split_at(shape, len(self.row_dims))


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
    if factor == "last" and ndim > 2:
        return _as_batch(shape)
    splits = range(1, ndim)
    split = min(splits, key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))  # first of ties
    return _split_at(shape, split)


def _split_at(shape: Shape, split: int) -> Factoring:
    ndim = len(shape)
    m, n = math.prod(shape[:split]), math.prod(shape[split:])
    return Factoring(
        matrix=(m, n),
        row=(*shape[:split], *(1,) * (ndim - split)),
        col=(*(1,) * split, *shape[split:]),
        scale=(*shape[:split], blocks_of(n), *(1,) * (ndim - split - 1)),
        row_dims=tuple(range(split)),
        col_dims=tuple(range(split, ndim)),
    )


def _as_batch(shape: Shape) -> Factoring:
    last = len(shape) - 1
    return Factoring(
        matrix=(math.prod(shape[:-2]), *shape[-2:]),
        row=(*shape[:-1], 1),
        col=(*shape[:-2], 1, shape[-1]),
        scale=(*shape[:-1], blocks_of(shape[-1])),
        row_dims=tuple(range(last)),
        col_dims=(*range(last - 1), last),
    )


def block_shape(shape: Shape, rule: TensorRule, name: str = "") -> tuple[int, int] | None:
    """Rows and columns of the blocks that are orthogonalised one by one; None for the whole matrix.

    Raises:
        ValueError: If the matrix has no whole number of them. It tells the parameter's `name`.
    """
    layout = factoring(shape, rule.factor)
    if layout is None:
        return None
    m, n = layout.matrix[-2:]
    block = rule.block_rows or m, rule.block_cols or n
    for side, length, size in (("rows", m, block[0]), ("columns", n, block[1])):
        if size and length % size:
            whose = f"parameter {name!r} {shape}" if name else f"a parameter {shape}"
            raise ValueError(
                f"blocks=({side!r}, {size}) does not divide the {length} {side} of {whose} as a "
                f"matrix {m} x {n}; give a number that divides {length}, or put the parameter in "
                "a group without blocks"
            )
    return None if block == (m, n) else block


def blocks_of(n: int) -> int:
    """The number of int8 blocks, each with one scale, in a row of n values."""
    return -(-n // BLOCK)


def state_shapes(shape: Shape, rule: TensorRule) -> dict[str, Shape]:
    """The shape of each state tensor that a parameter of `shape` has under `rule`."""
    layout = factoring(shape, rule.factor)
    found: dict[str, Shape] = {"step": ()}
    if layout is None or rule.dense:
        found["variance"] = shape
    else:
        found |= {"row_var": layout.row, "col_var": layout.col}
    if rule.has_momentum:
        found["momentum"] = shape
        if rule.momentum_dtype == "int8" and layout is not None:
            found["momentum_scale"] = layout.scale
        if rule.bands and layout is not None:
            found["band_sums"] = (3, rule.bands)
    if rule.keeps_initial_rms:
        found["initial_rms"] = ()
    return found


def state_dtypes(shape: Shape, rule: TensorRule) -> dict[str, torch.dtype]:
    """The dtype of each state tensor: float32, except for the counter and the momentum."""
    found = dict.fromkeys(state_shapes(shape, rule), torch.float32)
    found["step"] = torch.int64
    if "momentum" in found:
        found["momentum"] = MOMENTUM_DTYPES[rule.momentum_dtype]
    return found


def init_state(param: Tensor, rule: TensorRule, *, step_on_device: bool = False) -> State:
    """Create the state of a parameter before its first step.

    The step counter is on the CPU, as in torch, where reading it needs no host sync. The fused
    backend and CUDA graphs count on the device.
    """
    dtypes = state_dtypes(tuple(param.shape), rule)
    state = {
        key: _zeros(param, key, shape, dtypes[key], rule)
        for key, shape in state_shapes(tuple(param.shape), rule).items()
        if key != "step"
    }
    if rule.keeps_initial_rms:
        state["initial_rms"].fill_(size_from_shape(tuple(param.shape), rule))
    device = param.device if step_on_device else "cpu"
    return {"step": torch.zeros((), dtype=dtypes["step"], device=device), **state}


def as_float(t: float | Tensor) -> float | Tensor:
    """The number of a step as the equations take it; on the device, float32."""
    return t.to(torch.float32) if isinstance(t, Tensor) else t


NEAR_ZERO = 0.01  # of the size from its shape: a matrix that begins below counts as zero
LARGEST_RAISED = 0.1  # to which scale="raised" raises the size of matrices with few inputs


def size_from_shape(shape: Shape, rule: TensorRule) -> float:
    """The size that takes the place of a matrix's own RMS, if that is near zero or too small.

    It is the RMS with which torch.nn.Linear begins, whose weights are uniform within
    1 / sqrt(fan_in). With scale="raised" it is that of He's initialisation, within a bound. 0 for
    a vector, whose shape says nothing about its size.
    """
    if len(shape) < 2 or math.prod(shape) == 0:
        return 0.0
    inputs = fan_in(shape, transposed=rule.transposed)
    if rule.raises_small:
        return min(LARGEST_RAISED, math.sqrt(2.0 / inputs))
    return 1.0 / math.sqrt(3.0 * inputs)


def fan_in(shape: Shape, *, transposed: bool) -> int:
    """The number of inputs that each output of a layer with such a weight has."""
    return shape[0] if transposed else math.prod(shape[1:])


def _zeros(param: Tensor, key: str, shape: Shape, dtype: torch.dtype, rule: TensorRule) -> Tensor:
    if not is_sharded(param):
        return torch.zeros(shape, dtype=dtype, device=param.device)
    part = torch.zeros(shard_shape(param, key, shape, rule), dtype=dtype, device=param.device)
    placements = kept_on(param.placements, shared_dims(param, key, rule))
    return from_local(part, param.device_mesh, placements, shape)


def shared_dims(param: Tensor, key: str, rule: TensorRule) -> Shape:
    """The dimensions along which a state tensor is sharded as its parameter."""
    layout = factoring(tuple(param.shape), rule.factor)
    if layout is None or key in ("variance", "momentum"):
        return tuple(range(param.dim())) if key in ("variance", "momentum") else ()
    # Rows are sharded only between blocks of 64 values, so scales are sharded as columns are.
    of_scale = (*layout.row_dims, layout.col_dims[0])
    dims = {"row_var": layout.row_dims, "col_var": layout.col_dims, "momentum_scale": of_scale}
    return dims.get(key, ())


def shard_shape(param: Tensor, key: str, shape: Shape, rule: TensorRule) -> Shape:
    """The local shape of a state tensor."""
    layout, part = factoring(tuple(param.shape), rule.factor), tuple(local(param).shape)
    if key in ("variance", "momentum"):
        return part
    if layout is None:
        return shape
    own = layout.of_shard(part)
    return {"row_var": own.row, "col_var": own.col, "momentum_scale": own.scale}.get(key, shape)
