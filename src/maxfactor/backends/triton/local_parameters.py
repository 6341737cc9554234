"""What this rank holds of each parameter, and which matrices that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from maxfactor.backends.triton.kernels.layout import Column, Flag, Size
from maxfactor.backends.triton.settings_rows import flags_of
from maxfactor.distributed.placement import first_index, local, local_tensor, shards_of
from maxfactor.state import block_shape, factoring

if TYPE_CHECKING:
    from torch import Tensor

    from maxfactor.backends.step_io import StepInput
    from maxfactor.backends.triton.settings_rows import Shape
    from maxfactor.settings import TensorRule
    from maxfactor.state import State


class Matrix(NamedTuple):
    """A matrix of a local tensor."""

    rows: int
    cols: int
    start: int  # position of the first element in the local tensor


@dataclass(frozen=True)
class LocalParameter:
    """What this rank holds of a parameter, its gradient and state: all, if it is not sharded.

    The gradient may still have another placement than the parameter: only its dtype is used here.
    """

    param: Tensor
    grad: Tensor
    rule: TensorRule
    group: int  # index of the parameter's group
    window: int  # no batch crosses it
    state: State
    whole: Shape
    first: Shape  # index in the whole parameter of the first local element
    is_cut: bool  # several ranks have shards of it

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.whole)

    @cached_property
    def flags(self) -> Flag:
        """What its rule does differently."""
        return flags_of(self.rule, self.whole, self.param.dtype)

    @cached_property
    def matrices(self) -> list[Matrix]:
        """The matrices of the local tensor, which may have no rows or no columns.

        A vector becomes full rows of one tile's width, and a shorter row for the rest.
        """
        if self.numel == 0:
            return []
        layout = factoring(self.whole, self.rule.factor)
        if layout is not None:
            *batch, m, n = layout.of_shard(tuple(self.param.shape)).matrix
            return [Matrix(m, n, index * m * n) for index in range(math.prod(batch))]
        numel, width = self.param.numel(), int(Size.COLUMNS)
        whole = numel // width * width
        pieces = [Matrix(whole // width, width, 0), Matrix(1, numel - whole, whole)]
        return [piece for piece in pieces if piece.rows * piece.cols > 0]

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of the blocks that are orthogonalised one by one."""
        return block_shape(self.whole, self.rule)

    @property
    def is_aligned(self) -> bool:
        """Whether 16 bytes at a time may be moved everywhere in the tensor."""
        rows_fit = all(n % 8 == 0 and start % 8 == 0 for _, n, start in self.matrices)
        return rows_fit and not (self.param.data_ptr() | self.grad.data_ptr()) & 15

    def place_in_whole(self, matrix: Matrix, batch: int) -> dict[Column, int]:
        """The whole matrix that a local one is a shard of, and where in the tensor it begins."""
        layout = factoring(self.whole, self.rule.factor)
        if layout is None:
            m, n, origin = matrix.rows, matrix.cols, sum(self.first) + matrix.start
        else:
            m, n = layout.matrix[-2:]
            strides = [math.prod(self.whole[d + 1 :]) for d in range(len(self.whole))]
            first = sum(at * stride for at, stride in zip(self.first, strides, strict=True))
            origin = first + batch * m * n
        place = {Column.ALL_ROWS: m, Column.ALL_COLS: n}
        return {**place, Column.ORIGIN: origin, Column.STRIDE: n}


def local_parameter(step_io: StepInput) -> LocalParameter:
    """The tensors that the kernels get."""
    param, rule = step_io.param, step_io.rule
    state = {key: local(value) for key, value in step_io.state.items()}
    whole = tuple(param.shape)
    first = (0,) * len(whole)
    is_cut = bool(shards_of(param))
    if is_cut and rule.is_stochastic(param.dtype):
        first = first_index(param)
    grad = local_tensor(step_io.grad)
    return LocalParameter(
        local_tensor(param), grad, rule, step_io.group, step_io.window, state, whole, first, is_cut
    )
