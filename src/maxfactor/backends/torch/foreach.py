"""The foreach backend: each operation over a list of tensors, as in torch's own optimizers.

The works are sorted into lists with the same settings, and the lists into chunks that bound the
temporaries. Nothing is read from the device but, with the check, one answer for all gradients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.backends.torch import filtered, tasks
from maxfactor.backends.torch.matrix import Scratch
from maxfactor.rule.rounding import rounded
from maxfactor.settings import FLOAT32_TINY, MaxFactorHyper

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from maxfactor.backends.step_io import Outcome, Work
    from maxfactor.rule.reference import Scalar

CHUNK = 1 << 24  # elements: each float32 temporary takes at most 64 MiB, or one parameter


def step(works: Sequence[Work], *, check: bool) -> Outcome:
    """Take one step for each parameter; with `check`, none at all if a gradient is not finite."""
    return tasks.run(planned(works), works, check=check)


def planned(works: Sequence[Work]) -> Iterator[tasks.Task]:
    """Sort the works into chunks; what is rare takes the simple way."""
    usual, with_memory = [], []
    for work in works:
        if tasks.matrix_shape(work) is None:
            yield tasks.Other(work)
        elif tasks.is_filtered(work):
            with_memory.append(work)
        elif tasks.is_contiguous(work):
            usual.append(work)
        else:
            yield tasks.Other(work)
    for t, alike in tasks.grouped(usual, lambda work: work.param.dim() < 2):
        make = Vectors if alike[0].param.dim() < 2 else Matrices
        yield from (make(chunk, t) for chunk in tasks.chunks(alike, CHUNK))
    yield from filtered.planned(with_memory, lambda _: CHUNK, Scratch())


class Chunk:
    """What lists of matrices and lists of vectors have in common."""

    is_vector: bool

    def __init__(self, works: Sequence[Work], t: Scalar) -> None:
        self.works, self.hyper, self.t = works, works[0].hyper, t

    def _gradients(self) -> list[Tensor]:
        """In float32, as matrices or vectors."""
        return [self._shaped(work, work.grad).to(torch.float32) for work in self.works]

    def _shaped(self, work: Work, x: Tensor) -> Tensor:
        shape = tasks.matrix_shape(work)
        assert shape is not None
        return x.view(-1) if self.is_vector else x.view(shape)

    def _variances(self, grads: list[Tensor]) -> list[Tensor]:
        """Equations (5) and (6): new tensors of the gradients' shapes."""
        raise NotImplementedError

    def finish(self) -> list[Scalar]:
        """Equations (2) to (9)."""
        hyper, k = self.hyper, len(self.works)
        torch._foreach_add_([work.state["step"] for work in self.works], 1.0)
        weights = [self._shaped(work, work.param).to(torch.float32) for work in self.works]
        sizes = tasks.weight_sizes(
            self.works,
            self.t,
            lambda: torch.stack(torch._foreach_div(norms(weights), self._roots())),
        )
        alpha, keep = tasks.rates(sizes, self.t, hyper)  # (2) (3) (4)
        grads = self._gradients()
        updates = self._normalized(grads)  # (7)
        moves = self._moves(updates, grads, tasks.downhill(alpha, hyper))  # (8) (9)
        if isinstance(keep, Tensor) or keep != 1.0:
            torch._foreach_mul_(weights, each(keep, k))  # (4)
        torch._foreach_add_(weights, moves)
        self._write(weights)
        return list(each(alpha, k))

    def _normalized(self, grads: list[Tensor]) -> list[Tensor]:
        """U = G / sqrt(V)."""
        variances = self._variances(grads)
        torch._foreach_clamp_min_(variances, tasks.variance_floor(self.hyper))
        torch._foreach_sqrt_(variances)
        return list(torch._foreach_div(grads, variances))

    def _moves(self, updates: list[Tensor], grads: list[Tensor], alpha: Scalar) -> list[Tensor]:
        """What is added to W; the updates are used up."""
        hyper, k = self.hyper, len(grads)
        norm, rms = self._norms(updates)
        by_sign = tasks.moves_by_sign(hyper, is_vector=self.is_vector)
        row_max = []
        if by_sign:
            torch._foreach_abs_(updates)
            row_max = [update.amax(dim=-1, keepdim=True) for update in updates]
        largest = torch.stack(torch._foreach_norm(row_max or updates, math.inf))
        scale = tasks.update_scale(hyper, largest, norm, rms)  # (7) (8)
        factors = row_max if by_sign else updates
        torch._foreach_mul_(factors, each(scale, k))
        torch._foreach_mul_(factors, each(alpha, k))
        if not by_sign:
            return updates
        signs = list(torch._foreach_sign(grads))  # (9); sign(U) = sign(G)
        torch._foreach_mul_(signs, row_max)
        return signs

    def _norms(self, updates: list[Tensor]) -> tuple[Scalar, Scalar]:
        """||U|| and RMS(U) of each, or zeros where nobody asks."""
        if not tasks.needs_norm(self.hyper):
            return 0.0, 0.0
        found = norms(updates)
        return torch.stack(found), torch.stack(torch._foreach_div(found, self._roots()))

    def _roots(self) -> list[float]:
        return [math.sqrt(work.param.numel()) for work in self.works]

    def _write(self, weights: list[Tensor]) -> None:
        hyper = self.hyper
        params = [self._shaped(work, work.param) for work in self.works]
        if params[0].dtype != torch.float32:  # else the weights are views of the parameters
            low = [rounded(w, p.dtype, hyper, self.t) for w, p in zip(weights, params, strict=True)]
            torch._foreach_copy_(params, low)


class Vectors(Chunk):
    """A list of vectors."""

    is_vector = True

    def sums_of_squares(self) -> Tensor:
        """A pass of its own over the gradients, which are short."""
        return torch.stack(torch._foreach_norm(self._gradients())).square()

    def _variances(self, grads: list[Tensor]) -> list[Tensor]:
        hyper = self.hyper
        variances = [work.state["variance"].view(-1) for work in self.works]
        if isinstance(hyper, MaxFactorHyper):
            torch._foreach_mul_(variances, hyper.gamma)  # (5')
            torch._foreach_addcmul_(variances, grads, grads, value=1 - hyper.gamma)
        else:
            squares = list(torch._foreach_mul(grads, grads))
            torch._foreach_add_(squares, hyper.eps1)
            lerp_(variances, squares, tasks.statistic_weight(self.t, hyper))
        return [variance.clone() for variance in variances]


class Matrices(Chunk):
    """A list of factored matrices."""

    is_vector = False

    def __init__(self, works: Sequence[Work], t: Scalar) -> None:
        super().__init__(works, t)
        grads = self._gradients()
        self.row_norms = [vector_norm(g, dim=-1, keepdim=True) for g in grads]  # (m, 1)
        self.col_norms = [vector_norm(g, dim=-2, keepdim=True) for g in grads]  # (1, n)

    def sums_of_squares(self) -> Tensor:
        """From the rows' norms."""
        return torch.stack(torch._foreach_norm(self.row_norms)).square()

    def _variances(self, grads: list[Tensor]) -> list[Tensor]:
        rows = self._averaged("row_var", self.row_norms, [g.shape[1] for g in grads])
        cols = self._averaged("col_var", self.col_norms, [g.shape[0] for g in grads])
        rows = self._relative(rows)  # (6)
        return [row * col for row, col in zip(rows, cols, strict=True)]

    def _averaged(self, key: str, norms: list[Tensor], counts: list[int]) -> list[Tensor]:
        """Equation (5), of the rows or of the columns."""
        hyper, kappa = self.hyper, tasks.statistic_weight(self.t, self.hyper)  # (1)
        means = list(torch._foreach_mul(norms, norms))
        if isinstance(hyper, MaxFactorHyper):
            torch._foreach_div_(means, [count + hyper.count_eps for count in counts])
        else:
            torch._foreach_div_(means, [float(count) for count in counts])
            torch._foreach_add_(means, hyper.eps1)
        pairs = zip(self.works, means, strict=True)
        averages = [work.state[key].view_as(mean) for work, mean in pairs]
        lerp_(averages, means, kappa)
        return averages

    def _relative(self, rows: list[Tensor]) -> list[Tensor]:
        """The rows' factors of V: R over its largest entry, or over its mean."""
        hyper = self.hyper
        if isinstance(hyper, MaxFactorHyper) and hyper.direction != "factored":
            if not hyper.max_norm:
                return rows
            divisors = list(torch._foreach_norm(rows, math.inf))  # R >= 0: its largest entry
            torch._foreach_clamp_min_(divisors, hyper.floor)
        else:
            divisors = [row.mean() for row in rows]
            torch._foreach_clamp_min_(divisors, FLOAT32_TINY)
        return list(torch._foreach_div(rows, divisors))


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The L2 norm of each tensor."""
    if tensors[0].device.type == "cpu":  # where one long sum loses digits: 0.1 % at 20 M elements
        tensors = [vector_norm(x, dim=-1) for x in tensors]
    return list(torch._foreach_norm(tensors))


def each(x: Scalar, k: int) -> list[Any]:
    """One number for each of k tensors, without reading any."""
    if isinstance(x, Tensor):
        return list(x.expand(k).unbind())
    return [x] * k


def lerp_(averages: list[Tensor], newest: list[Tensor], weight: Scalar) -> None:
    """Move each average by a share of its way; a weight on the device is not read."""
    if isinstance(weight, Tensor):
        torch._foreach_lerp_(averages, newest, [weight] * len(averages))
    else:
        torch._foreach_lerp_(averages, newest, weight)
