"""Tasks for what has momentum, or moves in the orthogonal direction: equations (10) to (13).

FilteredStack     tensors of one shape as a batch (k, m, n), as far as a block goes
FilteredMatrix    one matrix larger than a block, in blocks of rows; its last pass makes y anew
                  from the stored momentum, so that nothing of its size is kept meanwhile
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxfactor.backends.torch import tasks
from maxfactor.backends.torch.matrix import MAX_COLUMNS, Matrix, Scratch, Variance
from maxfactor.backends.torch.stack import Stack
from maxfactor.rule import reference as rule
from maxfactor.rule.fam import band_totals
from maxfactor.rule.int8 import dequantized, quantize_
from maxfactor.rule.momentum import memory_of
from maxfactor.rule.newton_schulz import orthogonal
from maxfactor.rule.reference import host_scalar
from maxfactor.settings import FLOAT32_TINY, MaxFactorHyper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from maxfactor.backends.step_io import Work
    from maxfactor.rule.momentum import Memory
    from maxfactor.rule.reference import Scalar
    from maxfactor.state import State


def planned(
    works: Sequence[Work], limit_of: Callable[[torch.device], int], scratch: Scratch
) -> Iterator[tasks.Task]:
    """Sort works into tasks of at most `limit_of(device)` elements at a time."""
    stacked = []
    for work in works:
        shape, limit = tasks.matrix_shape(work), limit_of(work.param.device)
        assert shape is not None
        if work.param.numel() > limit and fits_in_blocks(work, shape):
            yield FilteredMatrix(work, shape, limit, scratch)
        else:
            stacked.append(work)
    for t, alike in tasks.grouped(stacked, lambda work: work.param.shape, by_count=False):
        for chunk in tasks.chunks(alike, limit_of(alike[0].param.device)):
            yield FilteredStack(chunk, counts(chunk) if isinstance(t, Tensor) else t)


def fits_in_blocks(work: Work, shape: tuple[int, int]) -> bool:
    """Whether rows can be worked on by themselves; the orthogonal direction needs them all."""
    assert isinstance(work.hyper, MaxFactorHyper)
    whole = work.param.dim() < 2 or work.hyper.direction == "orthogonal"
    return not whole and tasks.is_contiguous(work) and shape[1] <= MAX_COLUMNS


def counts(works: Sequence[Work]) -> Tensor:
    """The numbers of the next steps, which the device counts, (k, 1, 1)."""
    return torch.stack([work.state["step"] for work in works]).view(-1, 1, 1) + 1


class FilteredStack(Stack):
    """Parameters of one shape as a batch (k, m, n); a vector is one row."""

    hyper: MaxFactorHyper

    def _first_stage(self) -> None:
        """Nothing yet: the batches of a whole model are as large as the model."""

    def sums_of_squares(self) -> Tensor:
        """A pass of its own over the gradients."""
        grads = [work.grad for work in self.works]
        return torch.stack(torch._foreach_norm(grads, 2, torch.float32)).square()

    def finish(self) -> list[Scalar]:
        """Equations (1) to (13)."""
        super()._first_stage()
        sizes = super().finish()
        del self.grad  # not kept while other tasks run
        return sizes

    def _move(self) -> Tensor:
        hyper, whitens = self.hyper, self._is_orthogonal
        square = self.grad.square()
        mean_square = square.mean(dim=(-2, -1), keepdim=True)
        moments = self._moments(square)  # (5)
        mean = rule.mean_moment(moments)  # (k, 1, 1)
        variance = self._variance_of(moments)
        factor = input_scale(mean_square, mean, hyper, whitens=whitens)
        x = self.grad.mul_(factor)
        if not whitens:
            variance.divide_(x)  # (10)
        if hyper.momentum is not None:
            x = self._filtered(x)  # (11) (12) (13)
            x = x if self.is_vector else without_leaks(x, variance, variance.row, hyper)
        if not whitens:
            return self._signed(self._turned(x))  # (7) (8) (9)
        variance.divide_(x.mul_(mean.sqrt()))
        return self._signed(orthogonal(x))  # (9)

    @property
    def _is_orthogonal(self) -> bool:
        return self.hyper.direction == "orthogonal" and not self.is_vector

    def _signed(self, move: Tensor) -> Tensor:
        """Undo the sign of `tasks.downhill`: here G itself was negated, as M remembers it."""
        return move.neg_() if self.hyper.maximize else move

    def _variance_of(self, moments: State) -> Variance:
        """V of (10)."""
        floor = self.hyper.variance_floor
        if self.is_vector:
            return Variance(moments["variance"], torch.ones_like(moments["variance"]), floor)
        return Variance(rule.relative_to_mean(moments["row_var"]), moments["col_var"], floor)

    def _filtered(self, x: Tensor) -> Tensor:
        """Equations (11) to (13); x is used up."""
        sums = self._sums()
        memory = memory_of(self.hyper, self.t, self.n, sums)
        x = memory.enter(x)
        momentum = self._recalled()
        if sums is not None:
            totals = band_totals(x, momentum, memory.bands)
            assert self.hyper.fam is not None
            new = memory.next_sums(sums, totals, (self.m, self.n), self.hyper.fam)
            self._keep("band_sums", new)  # (11)
        absorb_(memory, momentum, x)  # (12)
        self._remember_(momentum)
        return memory.leave(see_(memory, momentum, x))  # (13)

    def _sums(self) -> Tensor | None:
        if "band_sums" not in self.works[0].state:
            return None
        return torch.stack([work.state["band_sums"] for work in self.works])

    def _recalled(self) -> Tensor:
        """A float32 copy of the momentum, (k, m, n)."""
        if "momentum_scale" not in self.works[0].state:
            return self._kept("momentum", self.m, self.n)
        codes = torch.stack([work.state["momentum"] for work in self.works])
        scales = torch.stack([work.state["momentum_scale"] for work in self.works])
        k = len(self.works)
        return dequantized(codes.view(k, self.m, self.n), scales.view(k, self.m, -1))

    def _remember_(self, momentum: Tensor) -> None:
        """Store the momentum, which becomes what was stored."""
        if "momentum_scale" in self.works[0].state:
            codes, scales = quantize_(momentum)
            self._keep("momentum", codes)
            self._keep("momentum_scale", scales)
            return
        self._keep("momentum", momentum)
        if (dtype := self.works[0].state["momentum"].dtype) != torch.float32:
            momentum.copy_(momentum.to(dtype))


class FilteredMatrix(Matrix):
    """A large matrix with momentum, read and written in blocks of rows; never orthogonal."""

    hyper: MaxFactorHyper

    def finish(self) -> list[Scalar]:
        """Equations (1) to (13)."""
        (work,), hyper = self.works, self.hyper
        work.state["step"].add_(1.0)
        alpha, keep = self._rates()  # (2) (3) (4)
        row_var, col_var = self._moments()  # (5)
        mean, mean_square = row_var.mean(), self.row_sum.sum() / self.grad.numel()
        self.variance = Variance(rule.relative_to_mean(row_var), col_var, hyper.variance_floor)
        self.factor = host_scalar(input_scale(mean_square, mean, hyper, whitens=False))
        sums = work.state.get("band_sums")
        self.memory = memory_of(hyper, self.t, col_var.shape[-1], sums)
        row_max, row_norm = self._filter()  # (10) to (13)
        self._move(row_max, row_norm, keep, alpha)  # (7) (8) (9)
        return [alpha]

    def _filter(self) -> tuple[Tensor, Tensor]:
        """The first pass with the momentum; the largest entry and the norm of each row of y."""
        row_max, row_norm = self._new_column(), self._new_column()
        with_norm = tasks.needs_norm(self.hyper)
        totals = None
        for x, momentum, state, row, largest, norm in self._inputs(row_max, row_norm):
            if self.memory.band_beta is not None:
                own = band_totals(x, momentum, self.memory.bands)
                totals = own if totals is None else totals + own
            absorb_(self.memory, momentum, x)  # (12)
            remember_(state, momentum)
            y = self._seen(momentum, x, row)  # (13)
            if with_norm:
                torch.linalg.vector_norm(y, dim=-1, keepdim=True, out=norm)
            torch.amax(y.abs_(), dim=-1, keepdim=True, out=largest)
        if totals is not None:
            sums, fam = self.works[0].state["band_sums"], self.hyper.fam
            assert fam is not None
            shape = (len(self.grad), self.grad.shape[1])
            sums.copy_(self.memory.next_sums(sums, totals, shape, fam))  # (11)
        return row_max, row_norm

    def _move(self, row_max: Tensor, row_norm: Tensor, keep: Scalar, alpha: Scalar) -> None:
        """The last pass: y once more, and W."""
        hyper = self.hyper
        norm = host_scalar(torch.linalg.vector_norm(row_norm)) if tasks.needs_norm(hyper) else 0.0
        largest = host_scalar(row_max.amax())
        scale = tasks.update_scale(hyper, largest, norm, norm / self.grad.numel() ** 0.5)
        by_sign = tasks.moves_by_sign(hyper, is_vector=False)
        coef = row_max if by_sign else torch.ones_like(row_max)
        coef.mul_(scale).mul_(-alpha)
        start = 0
        for x, momentum, _, row, w, c in self._inputs(self.weight, coef):
            y = self._seen(momentum, x, row)
            self._write_block(w, (y.sign_() if by_sign else y).mul_(c), keep, start)  # (4) (9)
            start += w.numel()

    def _seen(self, momentum: Tensor, x: Tensor, row: Tensor) -> Tensor:
        """Equation (13) for a block of rows; the momentum is used up."""
        y = self.memory.leave(see_(self.memory, momentum, x))
        return without_leaks(y, self.variance, row, self.hyper)

    def _inputs(
        self, *others: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, State, Tensor, Tensor, Tensor]]:
        """Blocks of rows: x, the momentum in float32, its state, of V, and of two more tensors."""
        (work,) = self.works
        keys: list[str] = [key for key in ("momentum", "momentum_scale") if key in work.state]
        kept = [work.state[key].view(len(self.grad), -1) for key in keys]
        for out, g, row, *rest in self._blocks(self.variance.row, *others, *kept):
            x = self.variance.normalize(g, row, out)
            if self.variance.separable:
                x.mul_(row)
            x.mul_(self.factor)
            state = dict(zip(keys, rest[2:], strict=True))
            momentum = recalled(state, self.scratch(3, len(g), g))
            yield self.memory.enter(x), momentum, state, row, rest[0], rest[1]


def input_scale(
    mean_square: Tensor, mean: Tensor, hyper: MaxFactorHyper, *, whitens: bool
) -> Tensor:
    """What of (10) is one number for each tensor: the clip s_z, V if it whitens later, the sign."""
    clip = (mean_square / mean.clamp(min=FLOAT32_TINY)).sqrt_().clamp_(min=1.0)
    if whitens:
        clip = clip * mean.clamp(min=hyper.variance_floor).sqrt_()
    return (-1.0 if hyper.maximize else 1.0) / clip


def without_leaks(y: Tensor, variance: Variance, row: Tensor, hyper: MaxFactorHyper) -> Tensor:
    """Zero where there never was a gradient; `row` is the block's part of `variance.row`."""
    if hyper.bands < 2 or variance.separable:  # no leaks, or no such place
        return y
    return rule.without_leaks(y, row * variance.col)


def absorb_(memory: Memory, momentum: Tensor, x: Tensor) -> None:
    """Equation (12) in place."""
    momentum.lerp_(x, 1 - memory.beta)


def see_(memory: Memory, stored: Tensor, x: Tensor) -> Tensor:
    """Equation (13) in place of the momentum."""
    y = stored.mul_((1 - memory.mix) / memory.correction)
    return y.add_(x, alpha=memory.mix) if memory.mix else y


def recalled(state: State, out: Tensor) -> Tensor:
    """A float32 copy of a block of momentum in `out`."""
    if "momentum_scale" in state:
        return dequantized(state["momentum"], state["momentum_scale"], out)
    return out.copy_(state["momentum"])


def remember_(state: State, momentum: Tensor) -> None:
    """Store a block of momentum, which becomes what was stored."""
    if "momentum_scale" in state:
        codes, scales = quantize_(momentum)
        state["momentum"].copy_(codes)
        state["momentum_scale"].copy_(scales)
        return
    state["momentum"].copy_(momentum)
    momentum.copy_(state["momentum"])
