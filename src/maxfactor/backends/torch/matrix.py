"""One large matrix, in blocks of rows that stay in the cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.backends.torch import tasks
from maxfactor.rule.reference import Scalar, host_scalar
from maxfactor.rule.rounding import rounded
from maxfactor.settings import MaxFactorHyper

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from maxfactor.backends.step_io import Work

MAX_COLUMNS = 1 << 20  # a block is at least one row
FLOAT32_MAX = torch.finfo(torch.float32).max


class Matrix:
    """A factored matrix, read and written in blocks of rows."""

    def __init__(self, work: Work, shape: tuple[int, int], limit: int, scratch: Scratch) -> None:
        self.works: Sequence[Work] = [work]
        self.hyper, self.scratch = work.hyper, scratch
        self.t = host_scalar(work.state["step"]) + 1
        self.weight, self.grad = work.param.view(shape), work.grad.view(shape)
        self.rows = min(shape[0], max(1, limit // shape[1]))  # of a block
        self.row_sum, self.col_sum = self._row_and_column_sums()

    def sums_of_squares(self) -> Tensor:
        """The sum over the rows."""
        return self.row_sum.sum().reshape(1)

    def finish(self) -> list[Scalar]:
        """Equations (1) to (9)."""
        (work,), hyper = self.works, self.hyper
        work.state["step"].add_(1.0)
        root = math.sqrt(self.grad.numel())
        alpha, keep = self._rates()  # (2) (3) (4)
        variance = self._variance()  # (5) (6)
        row_max, row_norm = self._measure(variance)
        norm = host_scalar(vector_norm(row_norm)) if tasks.needs_norm(hyper) else 0.0
        scale = tasks.update_scale(hyper, host_scalar(row_max.amax()), norm, norm / root)  # (7) (8)
        if tasks.moves_by_sign(hyper, is_vector=False):
            self._write(keep, row_max.mul_(scale).mul_(tasks.downhill(alpha, hyper)))
        else:
            coef = (variance.row_factor() * scale).mul_(tasks.downhill(alpha, hyper))
            # A gradient of zeros with a floor of zero: the largest number, as 0 * inf is NaN.
            self._write(keep, coef.clamp_(-FLOAT32_MAX, FLOAT32_MAX), variance)
        return [alpha]

    def _rates(self) -> tuple[Scalar, Scalar]:
        """Equations (2) to (4)."""
        # Numbers of one matrix are Python's own on the CPU; on a device they stay there.
        size = host_scalar(tasks.weight_sizes(self.works, self.t, self._rms))
        return tasks.rates(size, self.t, self.hyper)

    def _rms(self) -> Tensor:
        """RMS(W), by rows first, as the norm of a whole tensor is taken by one thread alone."""
        norms = vector_norm(self.weight, dim=-1, dtype=torch.float32)
        norm: Tensor = vector_norm(norms) / math.sqrt(self.weight.numel())
        return norm.reshape(1)

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
        row_var, col_var = self._moments()
        row = tasks.relative_rows(row_var, self.hyper)
        return Variance(row, col_var, tasks.variance_floor(self.hyper))

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Equation (5), written to the state: R (m, 1) and C (1, n)."""
        (work,), hyper = self.works, self.hyper
        kappa = tasks.statistic_weight(self.t, hyper)  # (1)
        row_mean, col_mean = tasks.means_of_squares(self.row_sum, self.col_sum, hyper)
        row_var = work.state["row_var"].view_as(row_mean).lerp_(row_mean, kappa)  # (5)
        col_var = work.state["col_var"].view_as(col_mean).lerp_(col_mean, kappa)
        return row_var, col_var

    def _measure(self, variance: Variance) -> tuple[Tensor, Tensor]:
        """The largest entry and the norm of each row of G / sqrt(V); zeros where not needed."""
        row_max, row_norm = self._new_column(), self._new_column()
        with_max, with_norm = isinstance(self.hyper, MaxFactorHyper), tasks.needs_norm(self.hyper)
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
        self.separable = row.device.type == "cpu" and smallest_product(row, col) >= floor
        self.row = row.rsqrt() if self.separable else row
        self.col = col.rsqrt() if self.separable else col

    def normalize(self, g: Tensor, row: Tensor, out: Tensor) -> Tensor:
        """G / sqrt(V) but for `row_factor`, for a block of rows."""
        if self.separable:
            return torch.mul(g, self.col, out=out)
        return torch.mul(row, self.col, out=out).clamp_(min=self.floor).rsqrt_().mul_(g)

    def divide_(self, x: Tensor) -> Tensor:
        """Divide by sqrt(V) in place, whole matrices or a batch of them."""
        if self.separable:
            return x.mul_(self.row).mul_(self.col)
        return x.mul_((self.row * self.col).clamp_(min=self.floor).rsqrt_())

    def row_factor(self) -> Tensor:
        """What `normalize` leaves out, (m, 1)."""
        return self.row if self.separable else torch.ones_like(self.row)


def smallest_product(row: Tensor, col: Tensor) -> float:
    """The smallest entry of row * col, not negative, in any matrix of a batch."""
    return float((row.amin(dim=-2, keepdim=True) * col.amin(dim=-1, keepdim=True)).amin())


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
