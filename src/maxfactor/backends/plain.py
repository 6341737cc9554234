"""The plain backend: the equations of `rule.py` without temporaries of a parameter's size.

A step has two stages. The first reads every gradient once, for its sums of squares; they also
tell whether it is finite, before anything has changed. The second does the rest. There are three
kinds of task:

    Matrix    one factored matrix, in blocks of rows that stay in the cache
    Vectors   all vectors of one length, as the rows of one matrix: one call for all of them
    Other     whatever is rare, by `rule.step` itself
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor import rule
from maxfactor.hyper import FLOAT32_TINY, AdafactorHyper, Hyper, MaxFactorHyper
from maxfactor.rounding import is_stochastic, rounded
from maxfactor.rule import Scalar, host_scalar, larger, smaller
from maxfactor.state import factoring
from maxfactor.work import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from maxfactor.work import Work

THREAD_BLOCK = 1 << 17  # elements: a core's share of a block stays in its second-level cache
CPU_BLOCK = 1 << 20  # at most, however many threads there are
DEVICE_BLOCK = 1 << 24  # elsewhere a block only has to be small beside the memory
MAX_COLUMNS = 1 << 20  # a block is at least one row
SMALL = 1 << 14  # elements below which looking for a shorter way costs more than it saves


def step(works: Sequence[Work], *, check: bool) -> Outcome:
    """Take one step for each parameter; with `check`, none at all if a gradient is not finite."""
    tasks: Iterable[Task] = planned(works)
    if check:  # without it each task is finished while its gradient is still in the cache
        tasks = list(tasks)
        if bad := nonfinite(tasks):
            return Outcome(nonfinite=[work.name for work in works if id(work) in bad])
    sizes: dict[int, Scalar] = {}
    for task in tasks:
        sizes.update(zip(map(id, task.works), task.finish(), strict=True))
    return Outcome([sizes[id(work)] for work in works])


def nonfinite(tasks: Sequence[Task]) -> set[int]:
    """The ids of the works whose gradient has a sum of squares that is not finite."""
    works = [work for task in tasks for work in task.works]
    sums = [task.sums_of_squares() for task in tasks]
    finite = torch.cat([each.to(sums[0].device) for each in sums]).isfinite()
    # The one wait for the device: nothing may be written before this is known.
    return {id(work) for work, good in zip(works, finite.tolist(), strict=True) if not good}


# --------------------------------------------------------------------------------- tasks


class Task(Protocol):
    """Parameters that are stepped together. Making the task is its first stage."""

    works: Sequence[Work]

    def sums_of_squares(self) -> Tensor:
        """One for each gradient."""

    def finish(self) -> Sequence[Scalar]:
        """The second stage: write parameters and state, return the step sizes."""


def planned(works: Sequence[Work]) -> Iterator[Task]:
    """Sort the works into tasks; the first stage of each runs when it is asked for."""
    scratch = Scratch()
    vectors: dict[object, list[Work]] = defaultdict(list)
    for work in works:
        if is_vector(work):
            vectors[group_key(work), work.param.shape].append(work)
        elif is_matrix(work):
            yield Matrix(work, scratch)
        else:
            yield Other(work)
    yield from map(Vectors, vectors.values())


def is_vector(work: Work) -> bool:
    """Whether a parameter is a vector without a rule of its own."""
    if work.param.dim() > 1 or not _is_usual(work):
        return False
    hyper = work.hyper
    return not (isinstance(hyper, MaxFactorHyper) and hyper.is_boosted_scalar(work.param.numel()))


def is_matrix(work: Work) -> bool:
    """Whether a parameter is a single factored matrix that can be read in blocks of rows."""
    if "row_var" not in work.state or not _is_usual(work):
        return False
    layout = factoring(tuple(work.param.shape), work.hyper.factor)
    if layout is None or len(layout.matrix) > 2 or layout.matrix[1] > MAX_COLUMNS:
        return False
    return work.param.is_contiguous() and work.grad.is_contiguous()


def _is_usual(work: Work) -> bool:
    return work.param.dtype != torch.float64 and work.param.numel() > 0


def group_key(work: Work) -> tuple[object, ...]:
    """What works must have in common to be stepped by the same numbers."""
    t = host_scalar(work.state["step"])
    when = id(work) if isinstance(t, Tensor) else t  # a counter on the device is not read
    return id(work.hyper), work.param.dtype, work.grad.dtype, work.param.device, when


class Other:
    """A parameter that takes the simple way."""

    def __init__(self, work: Work) -> None:
        self.works = [work]

    def sums_of_squares(self) -> Tensor:
        """A pass of its own over the gradient."""
        norm: Tensor = vector_norm(self.works[0].grad, dtype=torch.float32)
        return norm.reshape(1)

    def finish(self) -> list[Scalar]:
        """One step of `rule`."""
        (work,) = self.works
        result = rule.step(work.param, work.grad, work.state, work.hyper)
        work.param.copy_(result.param)
        for key, value in result.state.items():
            work.state[key].copy_(value)  # in place: a checkpoint or a graph may hold the tensor
        return [result.step_size]


class Vectors:
    """Vectors of one length and one step count, as the rows of a matrix (k, n)."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works, self.hyper = works, works[0].hyper
        self.t = host_scalar(works[0].state["step"]) + 1
        self.grad = _stacked([work.grad for work in works])

    def sums_of_squares(self) -> Tensor:
        """One for each row."""
        norm: Tensor = vector_norm(self.grad, dim=-1)
        return norm.square()

    def finish(self) -> list[Scalar]:
        """Equations (2) to (9), with (5') for (5)."""
        hyper, (k, n) = self.hyper, self.grad.shape
        torch._foreach_add_([work.state["step"] for work in self.works], 1.0)
        weight = _stacked([work.param for work in self.works])
        size = vector_norm(weight, dim=-1, keepdim=True) / math.sqrt(n)  # (k, 1)
        alpha, keep = rates(size, self.t, hyper)  # (2) (3) (4)
        update = self.grad * self._variance().clamp(min=variance_floor(hyper)).rsqrt()  # (7)
        largest = update.abs().amax(dim=-1, keepdim=True)
        norm = vector_norm(update, dim=-1, keepdim=True) if needs_norm(hyper) else None
        scale = update_scale(hyper, n, largest, norm)  # (7) (8)
        move = update.sign() * largest if moves_by_sign(hyper, is_vector=True) else update
        self._write(weight * keep + move * (scale * towards(alpha, hyper)))  # (4) (9)
        return list(alpha.expand(k, 1).unbind()) if isinstance(alpha, Tensor) else [alpha] * k

    def _variance(self) -> Tensor:
        """Equation (5'), or Adafactor's running mean."""
        hyper, kept = self.hyper, [work.state["variance"] for work in self.works]
        variance = _stacked(kept)
        if isinstance(hyper, MaxFactorHyper):
            variance.mul_(hyper.gamma).addcmul_(self.grad, self.grad, value=1 - hyper.gamma)
        else:
            square = self.grad.square().add_(hyper.eps1)
            variance.lerp_(square, statistic_weight(self.t, hyper))
        torch._foreach_copy_(kept, variance.view(len(kept), *kept[0].shape).unbind())
        return variance

    def _write(self, weight: Tensor) -> None:
        params = [work.param for work in self.works]
        rows = weight.view(len(params), *params[0].shape).unbind()
        if is_stochastic(params[0].dtype, self.hyper):  # the noise starts anew in every vector
            rows = tuple(rounded(row, params[0].dtype, self.hyper, self.t) for row in rows)
        torch._foreach_copy_(params, rows)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """A float32 copy, one row for each."""
    return torch.stack(list(tensors)).reshape(len(tensors), -1).to(torch.float32)


class Matrix:
    """A factored matrix, read and written in blocks of rows."""

    def __init__(self, work: Work, scratch: Scratch) -> None:
        self.works, self.hyper, self.scratch = [work], work.hyper, scratch
        self.t = host_scalar(work.state["step"]) + 1
        layout = factoring(tuple(work.param.shape), work.hyper.factor)
        assert layout is not None
        m, n = layout.matrix
        self.weight, self.grad = work.param.view(m, n), work.grad.view(m, n)
        self.rows = min(m, max(1, block_size(work.param.device) // n))
        self.row_sum, self.col_sum = self._row_and_column_sums()

    def sums_of_squares(self) -> Tensor:
        """The sum over the rows."""
        return self.row_sum.sum().reshape(1)

    def _row_and_column_sums(self) -> tuple[Tensor, Tensor]:
        """Sums of squares, (m, 1) and (1, n), in one pass over the gradient."""
        row_norm = _new_column(self.grad)
        squares = self.scratch(0, self.rows, self.grad)  # an entry sums one row of every block
        for first, (g, out) in zip(self._starts(), ..., strict=True):
            vector_norm(g, dim=-1, keepdim=True, out=out)
        return row_norm.square_(), squares.sum(dim=0, keepdim=True)
