"""Small tensors of one shape as a batch: one call for all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.backends.torch import tasks
from maxfactor.rule.reference import Scalar, host_scalar
from maxfactor.rule.rounding import is_stochastic, rounded
from maxfactor.settings import MaxFactorHyper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.backends.step_io import Work
    from maxfactor.state import State


class Stack:
    """Parameters of one shape and one step count as a batch (k, m, n); a vector is one row."""

    def __init__(self, works: Sequence[Work], t: Scalar) -> None:
        self.works, self.hyper, self.t = works, works[0].hyper, t
        shape = tasks.matrix_shape(works[0])
        assert shape is not None
        self.m, self.n = shape
        self._first_stage()

    def _first_stage(self) -> None:
        self.grad = self._stacked([work.grad for work in self.works], self.m, self.n)

    def sums_of_squares(self) -> Tensor:
        """One for each parameter."""
        return self._norms(self.grad).square().reshape(-1)

    def finish(self) -> list[Scalar]:
        """Equations (1) to (9)."""
        hyper, k = self.hyper, len(self.works)
        torch._foreach_add_([work.state["step"] for work in self.works], 1.0)
        weight = self._stacked([work.param for work in self.works], self.m, self.n)
        size = tasks.weight_sizes(self.works, self.t, lambda: self._rms(weight).flatten())
        alpha, keep = tasks.rates(size.view(-1, 1, 1), self.t, hyper)  # (2) (3) (4)
        move = self._move().mul_(tasks.downhill(alpha, hyper))
        self._write(self._moved(weight, keep, move))  # (4) (9)
        return list(alpha.expand(k, 1, 1).unbind()) if isinstance(alpha, Tensor) else [alpha] * k

    def _moved(self, weight: Tensor, keep: Scalar, move: Tensor) -> Tensor:
        """W after decay and move, in its own place."""
        return weight.mul_(keep).add_(move)

    def _move(self) -> Tensor:
        """What W moves against, but for the step size; a new tensor (k, m, n)."""
        hyper = self.hyper
        variance = self._variance().clamp(min=tasks.variance_floor(hyper))
        return self._turned(self.grad * variance.rsqrt_())  # (7)

    def _turned(self, update: Tensor) -> Tensor:
        """Equations (7) to (9) of an update that is used up."""
        hyper = self.hyper
        row_max = update.abs().amax(dim=-1, keepdim=True)  # (k, m, 1)
        largest = row_max.amax(dim=-2, keepdim=True)  # (k, 1, 1)
        norm = self._norms(update) if tasks.needs_norm(hyper) else 0.0
        rms = norm / math.sqrt(self.m * self.n)
        scale = tasks.update_scale(hyper, largest, norm, rms)  # (7) (8)
        if tasks.moves_by_sign(hyper, is_vector=self.is_vector):
            return update.sign_().mul_(row_max * scale)  # (9)
        return update.mul_(scale)

    @property
    def is_vector(self) -> bool:
        """Whether the parameters themselves have less than two dimensions."""
        return self.works[0].param.dim() < 2

    def _variance(self) -> Tensor:
        """Equations (5) and (6), or (5'); (k, m, n)."""
        moments = self._moments(self.grad.square())
        if self.is_vector:
            return moments["variance"]
        return tasks.relative_rows(moments["row_var"], self.hyper) * moments["col_var"]  # (6)

    def _moments(self, square: Tensor) -> State:
        """Equation (5) or (5'), written to the states; `square`, that of G, is used up."""
        hyper = self.hyper
        if self.is_vector:
            variance = self._kept("variance", 1, self.n)
            if isinstance(hyper, MaxFactorHyper):
                variance.mul_(hyper.gamma).add_(square, alpha=1 - hyper.gamma)  # (5')
            else:
                variance.lerp_(square.add_(hyper.eps1), tasks.statistic_weight(self.t, hyper))
            moments = {"variance": variance}
        else:
            sums = square.sum(dim=-1, keepdim=True), square.sum(dim=-2, keepdim=True)
            row_mean, col_mean = tasks.means_of_squares(*sums, hyper)
            kappa = tasks.statistic_weight(self.t, hyper)  # (1)
            row_var = self._kept("row_var", self.m, 1).lerp_(row_mean, kappa)  # (5)
            col_var = self._kept("col_var", 1, self.n).lerp_(col_mean, kappa)
            moments = {"row_var": row_var, "col_var": col_var}
        for key, moment in moments.items():
            self._keep(key, moment)
        return moments

    def _stacked(self, tensors: list[Tensor], m: int, n: int) -> Tensor:
        """A contiguous float32 copy, (k, m, n); a stack of channels_last tensors is not."""
        stacked = torch.stack(tensors).reshape(len(tensors), m, n)
        return stacked.to(torch.float32).contiguous()

    def _rms(self, batch: Tensor) -> Tensor:
        return self._norms(batch) / math.sqrt(self.m * self.n)

    def _kept(self, key: str, m: int, n: int) -> Tensor:
        return self._stacked([work.state[key] for work in self.works], m, n)

    def _keep(self, key: str, batch: Tensor) -> None:
        kept = [work.state[key] for work in self.works]
        torch._foreach_copy_(kept, batch.view(len(kept), *kept[0].shape).unbind())

    def _write(self, weight: Tensor) -> None:
        params = [work.param for work in self.works]
        new = weight.view(len(params), *params[0].shape).unbind()
        if is_stochastic(params[0].dtype, self.hyper):  # the noise starts anew in every tensor
            times = (
                self.t.expand(len(new), 1, 1) if isinstance(self.t, Tensor) else [self.t] * len(new)
            )
            new = tuple(
                rounded(each, params[0].dtype, self.hyper, host_scalar(t))
                for each, t in zip(new, times, strict=True)
            )
        torch._foreach_copy_(params, new)

    def _norms(self, batch: Tensor) -> Tensor:
        """The L2 norm of each tensor, (k, 1, 1)."""
        norm: Tensor = vector_norm(batch.view(len(self.works), -1), dim=-1)
        return norm.view(-1, 1, 1)
