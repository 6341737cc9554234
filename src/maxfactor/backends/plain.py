"""The plain backend: the equations of `rule.py` without temporaries of a parameter's size.

A step has two stages. The first reads every gradient once, for its sums of squares; they also
tell whether it is finite, before anything has changed. The second does the rest. There are three
kinds of task:

    Matrix    one large matrix, in blocks of rows that stay in the cache
    Stack     small matrices, or vectors, of one shape: one call for all of them
    Other     whatever is rare, by `rule.step` itself
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor import rule
from maxfactor.hyper import FLOAT32_TINY, AdafactorHyper, Hyper, MaxFactorHyper
from maxfactor.rounding import is_stochastic, rounded
from maxfactor.rule import Scalar, host_scalar, larger
from maxfactor.state import factoring
from maxfactor.work import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from maxfactor.work import Work

FLOAT32_MAX = torch.finfo(torch.float32).max

CPU_BLOCK = 1 << 19  # elements: two float32 buffers of this size stay in a processor's cache
DEVICE_BLOCK = 1 << 24  # elsewhere a block only has to be small beside the memory
MAX_COLUMNS = 1 << 20  # a block is at least one row
SMALL = 1 << 15  # elements up to which a call costs more than the copy into a stack


def step(works: Sequence[Work], *, check: bool) -> Outcome:
    """Take one step for each parameter; with `check`, none at all if a gradient is not finite."""
    return run(planned(works), works, check=check)


def run(tasks: Iterable[Task], works: Sequence[Work], *, check: bool) -> Outcome:
    """Finish the tasks into which the works were sorted, unless a gradient forbids it."""
    if check:  # without it each task is finished while its gradient is still in the cache
        tasks = list(tasks)
        if bad := nonfinite(tasks):
            return Outcome(nonfinite=[work.name for work in works if id(work) in bad])
    sizes: dict[int, Scalar] = {}
    for task in tasks:
        sizes.update(zip(map(id, task.works), task.finish(), strict=True))
    return Outcome([sizes[id(work)] for work in works])


def nonfinite(tasks: Sequence[Task]) -> set[int]:
    """The ids of the works whose gradient has a sum of squares that is not finite.

    A finite gradient can have one, too: its statistics would be lost for good.
    """
    works = [work for task in tasks for work in task.works]
    sums = [task.sums_of_squares() for task in tasks]
    finite = torch.cat([each.to(sums[0].device) for each in sums]).isfinite()
    # The one wait for the device: nothing may be written before this is known.
    return {id(work) for work, good in zip(works, finite.tolist(), strict=True) if not good}


# ----------------------------------------------------------------------------------- tasks


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
    small = []
    for work in works:
        shape = matrix_shape(work)
        if shape is None:
            yield Other(work)
        elif work.param.dim() < 2 or work.param.numel() <= SMALL:
            small.append(work)
        elif is_contiguous(work) and shape[1] <= MAX_COLUMNS:
            yield Matrix(work, shape, scratch)
        else:
            yield Other(work)
    for t, alike in grouped(small, lambda work: work.param.shape):
        for chunk in chunks(alike, block_size(alike[0].param.device)):
            yield Stack(chunk, t)


def matrix_shape(work: Work) -> tuple[int, int] | None:
    """(m, n) of one factored matrix, (1, n) of a vector; None for what is rare."""
    param, hyper = work.param, work.hyper
    if param.dtype == torch.float64 or param.numel() == 0:
        return None
    if isinstance(hyper, MaxFactorHyper) and (
        hyper.momentum is not None or hyper.direction != "sign_max" or hyper.keeps_initial_rms
    ):
        return None
    layout = factoring(tuple(param.shape), hyper.factor)
    if layout is None:
        boosted = isinstance(hyper, MaxFactorHyper) and hyper.is_boosted_scalar(param.numel())
        return None if boosted else (1, param.numel())
    if "row_var" not in work.state or len(layout.matrix) > 2:
        return None
    return layout.matrix[0], layout.matrix[1]


def is_contiguous(work: Work) -> bool:
    """Whether parameter and gradient can be viewed as a matrix."""
    return work.param.is_contiguous() and work.grad.is_contiguous()


def grouped(
    works: Sequence[Work], key: Callable[[Work], object]
) -> Iterator[tuple[Scalar, list[Work]]]:
    """The next step's number, and the works with one key that are stepped by the same numbers."""
    groups: dict[object, tuple[Scalar, list[Work]]] = {}
    for work in works:
        t = host_scalar(work.state["step"])
        when = id(work) if isinstance(t, Tensor) else t  # a counter on the device is not read
        alike = (key(work), id(work.hyper), work.param.dtype, work.grad.dtype, work.param.device)
        groups.setdefault((alike, when), (t + 1, []))[1].append(work)
    yield from groups.values()


def chunks(works: Sequence[Work], limit: int) -> Iterator[list[Work]]:
    """Cut a list into parts of at most `limit` elements, but at least one tensor."""
    chunk: list[Work] = []
    elements = 0
    for work in works:
        elements += work.param.numel()
        if chunk and elements > limit:
            yield chunk
            chunk, elements = [], work.param.numel()
        chunk.append(work)
    yield chunk


class Other:
    """A parameter that takes the simple way."""

    def __init__(self, work: Work) -> None:
        self.works: Sequence[Work] = [work]

    def sums_of_squares(self) -> Tensor:
        """A pass of its own over the gradient."""
        norm: Tensor = vector_norm(self.works[0].grad.to(torch.float32))
        return norm.square().reshape(1)

    def finish(self) -> list[Scalar]:
        """One step of `rule`."""
        (work,) = self.works
        result = rule.step(work.param, work.grad, work.state, work.hyper)
        work.param.copy_(result.param)
        for key, value in result.state.items():
            work.state[key].copy_(value)  # in place: a checkpoint or a graph may hold the tensor
        return [result.step_size]


class Stack:
    """Parameters of one shape and one step count as a batch (k, m, n); a vector is one row."""

    def __init__(self, works: Sequence[Work], t: Scalar) -> None:
        self.works, self.hyper, self.t = works, works[0].hyper, t
        shape = matrix_shape(works[0])
        assert shape is not None
        self.m, self.n = shape
        self.grad = self._stacked([work.grad for work in works], self.m, self.n)

    def sums_of_squares(self) -> Tensor:
        """One for each parameter."""
        return self._norms(self.grad).square().reshape(-1)

    def finish(self) -> list[Scalar]:
        """Equations (1) to (9)."""
        hyper, k, root = self.hyper, len(self.works), math.sqrt(self.m * self.n)
        torch._foreach_add_([work.state["step"] for work in self.works], 1.0)
        weight = self._stacked([work.param for work in self.works], self.m, self.n)
        alpha, keep = rates(self._norms(weight) / root, self.t, hyper)  # (2) (3) (4)
        update = self.grad * self._variance().clamp(min=variance_floor(hyper)).rsqrt_()  # (7)
        row_max = update.abs().amax(dim=-1, keepdim=True)  # (k, m, 1)
        largest = row_max.amax(dim=-2, keepdim=True)  # (k, 1, 1)
        norm = self._norms(update) if needs_norm(hyper) else 0.0
        scale = update_scale(hyper, largest, norm, norm / root)  # (7) (8)
        if moves_by_sign(hyper, is_vector=self.is_vector):
            move = update.sign_().mul_(row_max * scale)  # (9)
        else:
            move = update.mul_(scale)
        self._write(weight.mul_(keep).add_(move.mul_(downhill(alpha, hyper))))  # (4) (9)
        return list(alpha.expand(k, 1, 1).unbind()) if isinstance(alpha, Tensor) else [alpha] * k

    @property
    def is_vector(self) -> bool:
        """Whether the parameters themselves have less than two dimensions."""
        return self.works[0].param.dim() < 2

    def _variance(self) -> Tensor:
        """Equations (5) and (6), or (5'); (k, m, n)."""
        hyper = self.hyper
        square = self.grad.square()
        if self.is_vector:
            variance = self._kept("variance", 1, self.n)
            if isinstance(hyper, MaxFactorHyper):
                variance.mul_(hyper.gamma).add_(square, alpha=1 - hyper.gamma)  # (5')
            else:
                variance.lerp_(square.add_(hyper.eps1), statistic_weight(self.t, hyper))
            self._keep("variance", variance)
            return variance
        sums = square.sum(dim=-1, keepdim=True), square.sum(dim=-2, keepdim=True)
        row_mean, col_mean = means_of_squares(*sums, hyper)
        kappa = statistic_weight(self.t, hyper)  # (1)
        row_var = self._kept("row_var", self.m, 1).lerp_(row_mean, kappa)  # (5)
        col_var = self._kept("col_var", 1, self.n).lerp_(col_mean, kappa)
        self._keep("row_var", row_var)
        self._keep("col_var", col_var)
        return relative_rows(row_var, hyper) * col_var  # (6)

    def _stacked(self, tensors: list[Tensor], m: int, n: int) -> Tensor:
        """A float32 copy, (k, m, n)."""
        return torch.stack(tensors).reshape(len(tensors), m, n).to(torch.float32)

    def _kept(self, key: str, m: int, n: int) -> Tensor:
        return self._stacked([work.state[key] for work in self.works], m, n)

    def _keep(self, key: str, batch: Tensor) -> None:
        kept = [work.state[key] for work in self.works]
        torch._foreach_copy_(kept, batch.view(len(kept), *kept[0].shape).unbind())

    def _write(self, weight: Tensor) -> None:
        params = [work.param for work in self.works]
        new = weight.view(len(params), *params[0].shape).unbind()
        if is_stochastic(params[0].dtype, self.hyper):  # the noise starts anew in every tensor
            new = tuple(rounded(each, params[0].dtype, self.hyper, self.t) for each in new)
        torch._foreach_copy_(params, new)

    def _norms(self, batch: Tensor) -> Tensor:
        """The L2 norm of each tensor, (k, 1, 1)."""
        norm: Tensor = vector_norm(batch.view(len(self.works), -1), dim=-1)
        return norm.view(-1, 1, 1)


class Matrix:
    """A factored matrix, read and written in blocks of rows."""

    def __init__(self, work: Work, shape: tuple[int, int], scratch: Scratch) -> None:
        self.works: Sequence[Work] = [work]
        self.hyper, self.scratch = work.hyper, scratch
        self.t = host_scalar(work.state["step"]) + 1
        self.weight, self.grad = work.param.view(shape), work.grad.view(shape)
        self.rows = min(shape[0], max(1, block_size(work.param.device) // shape[1]))
        self.row_sum, self.col_sum = self._row_and_column_sums()

    def sums_of_squares(self) -> Tensor:
        """The sum over the rows."""
        return self.row_sum.sum().reshape(1)

    def finish(self) -> list[Scalar]:
        """Equations (1) to (9)."""
        (work,), hyper = self.works, self.hyper
        work.state["step"].add_(1.0)
        root = math.sqrt(self.grad.numel())
        # By rows, as the norm of a whole tensor is taken by one thread alone.
        norms = vector_norm(self.weight, dim=-1, dtype=torch.float32)
        # Numbers of one matrix are Python's own on the CPU; on a device they stay there.
        size = host_scalar(vector_norm(norms)) / root
        alpha, keep = rates(size, self.t, hyper)  # (2) (3) (4)
        variance = self._variance()  # (5) (6)
        row_max, row_norm = self._measure(variance)
        norm = host_scalar(vector_norm(row_norm)) if needs_norm(hyper) else 0.0
        scale = update_scale(hyper, host_scalar(row_max.amax()), norm, norm / root)  # (7) (8)
        if moves_by_sign(hyper, is_vector=False):
            self._write(keep, row_max.mul_(scale).mul_(downhill(alpha, hyper)))
        else:
            coef = (variance.row_factor() * scale).mul_(downhill(alpha, hyper))
            # A gradient of zeros with a floor of zero: the largest number, as 0 * inf is NaN.
            self._write(keep, coef.clamp_(-FLOAT32_MAX, FLOAT32_MAX), variance)
        return [alpha]

    def _blocks(self, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Blocks of rows: of a buffer, of the gradient in float32, and of the given tensors."""
        buffer = self.scratch(0, self.rows, self.grad)
        for g, *rest in zip(*map(self._split, (self.grad, *others)), strict=True):
            wide = g if g.dtype == torch.float32 else self.scratch(1, len(g), g).copy_(g)
            yield (buffer if len(g) == self.rows else buffer[: len(g)], wide, *rest)

    def _split(self, x: Tensor) -> Sequence[Tensor]:
        return x.split(self.rows) if self.rows < len(x) else (x,)

    def _row_and_column_sums(self) -> tuple[Tensor, Tensor]:
        """Sums of squares, (m, 1) and (1, n), in one pass over the gradient."""
        row_norm = self._new_column()
        sums = self.scratch(0, self.rows, self.grad)  # an entry sums one row of every block
        for index, (squares, g, norm) in enumerate(self._blocks(row_norm)):
            vector_norm(g, dim=-1, keepdim=True, out=norm)
            if index == 0:
                torch.mul(g, g, out=squares)
            else:
                squares.addcmul_(g, g)
        return row_norm.square_(), sums.sum(dim=0, keepdim=True)

    def _variance(self) -> Variance:
        """Equations (5) and (6)."""
        (work,), hyper = self.works, self.hyper
        kappa = statistic_weight(self.t, hyper)  # (1)
        row_mean, col_mean = means_of_squares(self.row_sum, self.col_sum, hyper)
        row_var = work.state["row_var"].view_as(row_mean).lerp_(row_mean, kappa)  # (5)
        col_var = work.state["col_var"].view_as(col_mean).lerp_(col_mean, kappa)
        return Variance(relative_rows(row_var, hyper), col_var, variance_floor(hyper))  # (6)

    def _measure(self, variance: Variance) -> tuple[Tensor, Tensor]:
        """The largest entry and the norm of each row of G / sqrt(V); zeros where not needed."""
        row_max, row_norm = self._new_column(), self._new_column()
        with_max, with_norm = isinstance(self.hyper, MaxFactorHyper), needs_norm(self.hyper)
        for out, g, row, largest, norm in self._blocks(variance.row, row_max, row_norm):
            update = variance.normalize(g, row, out)  # (7)
            if with_norm:
                vector_norm(update, dim=-1, keepdim=True, out=norm)
            if with_max:
                torch.amax(update.abs_(), dim=-1, keepdim=True, out=largest)
        if variance.separable:
            row_max.mul_(variance.row)
            row_norm.mul_(variance.row)
        return row_max, row_norm

    def _write(self, keep: Scalar, coef: Tensor, variance: Variance | None = None) -> None:
        """W <- keep * W + coef * (G / sqrt(V), or without V the sign of G): (4) and (9)."""
        row = coef if variance is None else variance.row
        start = 0
        for out, g, w, c, r in self._blocks(self.weight, coef, row):
            # sign(U) = sign(G): the last pass over a gradient needs no V.
            update = torch.sign(g, out=out) if variance is None else variance.normalize(g, r, out)
            self._write_block(w, update.mul_(c), keep, start)
            start += w.numel()

    def _write_block(self, w: Tensor, move: Tensor, keep: Scalar, start: int) -> None:
        is_wide = w.dtype == torch.float32
        wide = w if is_wide else self.scratch(2, len(w), w).copy_(w)
        if isinstance(keep, Tensor):  # on a device, where it is not read
            wide.mul_(keep).add_(move)
        else:
            torch.add(move, wide, alpha=keep, out=wide)  # one pass for both
        if not is_wide:
            w.copy_(rounded(wide, w.dtype, self.hyper, self.t, start))

    def _new_column(self) -> Tensor:
        return torch.zeros((len(self.grad), 1), dtype=torch.float32, device=self.grad.device)


class Variance:
    """V = max(row * col, floor); where no floor is active 1 / sqrt(V) is a product, too."""

    def __init__(self, row: Tensor, col: Tensor, floor: float) -> None:
        self.floor = floor
        # The CPU's memory can be read without waiting.
        self.separable = row.device.type == "cpu" and float(row.amin() * col.amin()) >= floor
        self.row = row.rsqrt() if self.separable else row
        self.col = col.rsqrt() if self.separable else col

    def normalize(self, g: Tensor, row: Tensor, out: Tensor) -> Tensor:
        """G / sqrt(V) but for `row_factor`, for a block of rows."""
        if self.separable:
            return torch.mul(g, self.col, out=out)
        return torch.mul(row, self.col, out=out).clamp_(min=self.floor).rsqrt_().mul_(g)

    def row_factor(self) -> Tensor:
        """What `normalize` leaves out, (m, 1)."""
        return self.row if self.separable else torch.ones_like(self.row)


class Scratch:
    """Buffers for one block, used again for every block of every matrix of a step."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, index: int, rows: int, like: Tensor) -> Tensor:
        """Buffer `index` as float32 (rows, columns of `like`), with arbitrary content."""
        size, key = rows * like.shape[1], (index, like.device)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=torch.float32, device=like.device)
        return self._buffers[key][:size].view(rows, like.shape[1])


def block_size(device: torch.device) -> int:
    """Elements to work on at a time."""
    return CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK


# -------------------------------------------------- equations of either rule, of one W or of many


def rates(size: Scalar, t: Scalar, hyper: Hyper) -> tuple[Scalar, Scalar]:
    """The step size (2) (3), and what decay leaves of W (4); `size` is RMS(W)."""
    if isinstance(hyper, AdafactorHyper):
        alpha, decay = rule.adafactor_rates(size, t, hyper)
    else:
        assert isinstance(hyper, MaxFactorHyper)
        lr = host_scalar(hyper.lr)
        alpha = rule.step_size(size, t, lr, hyper)
        decay = (lr if hyper.decay_by == "lr" else alpha) * hyper.weight_decay
    return alpha, 1.0 if hyper.weight_decay == 0.0 else 1 - decay


def downhill(alpha: Scalar, hyper: Hyper) -> Scalar:
    """The step size with the sign of the move."""
    return alpha if hyper.maximize else -alpha


def statistic_weight(t: Scalar, hyper: Hyper) -> Scalar:
    """Equation (1)."""
    if isinstance(hyper, MaxFactorHyper):
        return rule.statistic_weight(t, hyper)
    return t**hyper.beta2_decay


def means_of_squares(row_sum: Tensor, col_sum: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """What (5) averages, from the sums of squares (..., m, 1) and (..., 1, n)."""
    m, n = row_sum.shape[-2], col_sum.shape[-1]
    if isinstance(hyper, MaxFactorHyper):
        return row_sum / (n + hyper.count_eps), col_sum / (m + hyper.count_eps)
    return row_sum / n + hyper.eps1, col_sum / m + hyper.eps1


def relative_rows(row_var: Tensor, hyper: Hyper) -> Tensor:
    """Equation (6): the rows' factor of V, (..., m, 1)."""
    if not isinstance(hyper, MaxFactorHyper):
        return row_var / row_var.mean(dim=-2, keepdim=True).clamp(min=FLOAT32_TINY)
    if not hyper.max_norm:
        return row_var
    return row_var / row_var.amax(dim=-2, keepdim=True).clamp(min=hyper.floor)


def variance_floor(hyper: Hyper) -> float:
    """The smallest V."""
    return hyper.variance_floor if isinstance(hyper, MaxFactorHyper) else FLOAT32_TINY


def needs_norm(hyper: Hyper) -> bool:
    """Whether ||U|| plays a part: with d >= 1 equation (8) is idle, as RMS(U) <= max|U| = 1."""
    if isinstance(hyper, MaxFactorHyper):
        return hyper.d < 1.0 or hyper.clip_threshold > 0.0
    return True


def update_scale(hyper: Hyper, largest: Scalar, norm: Scalar, rms: Scalar) -> Scalar:
    """What U = G / sqrt(V) is multiplied by, from max|U|, ||U|| and RMS(U)."""
    if isinstance(hyper, AdafactorHyper):
        return 1.0 / larger(rms / hyper.clip_threshold, 1.0)
    assert isinstance(hyper, MaxFactorHyper)
    scale = 1.0 / larger(largest, hyper.floor)  # (7)
    if hyper.clip_threshold > 0.0:
        scale = scale * (hyper.clip_threshold / larger(norm * scale, hyper.clip_threshold))
    if hyper.d < 1.0:
        scale = scale / larger(rms * scale / hyper.d, 1.0)  # (8)
    return scale


def moves_by_sign(hyper: Hyper, *, is_vector: bool) -> bool:
    """Equation (9): whether a row moves by sign(U) times its largest entry, or by U itself."""
    if not isinstance(hyper, MaxFactorHyper):
        return False
    return hyper.vector_direction == "sign_max" if is_vector else hyper.max_norm
