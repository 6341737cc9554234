"""What momentum_study.py compares our rule with, and which is not a setting of the optimizer.

exact_clip     the input is clipped by its own RMS, as in FAM's first form, not by sums of squares
random_basis   a random orthogonal basis of 64 in place of the DCT: is it frequency that counts?
row_groups     FAM's memories belong to groups of rows, such as attention heads, not to bands
cautious       only entries move whose momentum and gradient have the same sign
calm_decay     weights decay only where the step goes to zero, too
unwhitened     the orthogonal direction of the momentum itself
half_whitened  of the momentum divided by the fourth root of V
equal_values   with Newton-Schulz coefficients that make singular values nearly 1, in float32
even_rows      the rows of the orthogonal direction get the same size, as in NorMuon

Each replaces a part of the foreach backend for as long as its context lasts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from maxfactor import fam
from maxfactor.backends.torch import filtered
from maxfactor.rule.fam import CORRECTION, band_betas, next_sums
from maxfactor.rule.momentum import Memory
from maxfactor.rule.newton_schulz import unit_norm

if TYPE_CHECKING:
    from maxfactor.rule.reference import Scalar

BASIS_SEED = 0


def variant(name: str | None) -> AbstractContextManager[Any]:
    """The context in which an optimizer steps by a variant; None changes nothing."""
    if name is None:
        return nullcontext()
    if name == "random_basis":
        return mock.patch.object(fam, "dct_basis", random_basis)
    stacks = {
        "exact_clip": ExactClip,
        "row_groups": RowGroups,
        "cautious": Cautious,
        "calm_decay": CalmDecay,
        "unwhitened": Unwhitened,
        "half_whitened": HalfWhitened,
        "equal_values": EqualValues,
        "even_rows": EvenRows,
    }
    if name not in stacks:
        raise ValueError(f"variant must be random_basis, {', '.join(stacks)} or None, got {name!r}")
    return mock.patch.object(filtered, "FilteredStack", stacks[name])


@lru_cache(maxsize=256)
def random_basis(length: int, device: torch.device) -> Tensor:
    """An orthogonal matrix without any order in its columns, the same every time."""
    generator = torch.Generator().manual_seed(BASIS_SEED + length)
    basis: Tensor = torch.linalg.qr(torch.randn(length, length, generator=generator))[0]
    return basis.to(device)


class ExactClip(filtered.FilteredStack):
    """Equation (10) with max(1, RMS(x)) in place of s_z, at the price of a pass over x."""

    def _move(self) -> Tensor:
        if self._is_orthogonal:  # where V is one number, and both clips are the same
            return super()._move()
        variance = self._variance_of(self._moments(self.grad.square()))
        variance.divide_(self.grad)
        x = self.grad.div_(self._rms(self.grad).clamp_(min=1.0))
        return self._turned(self._filtered(x))


class RowGroups(filtered.FilteredStack):
    """FAM with one memory for each group of rows; `FAM.bands` is the number of groups."""

    def _filtered(self, x: Tensor) -> Tensor:
        sums, settings = self._sums(), self.hyper.fam
        if sums is None or settings is None:  # vectors, and a fixed memory
            return super()._filtered(x)
        t = self.t.reshape(-1, 1) if isinstance(self.t, Tensor) else self.t
        beta = band_betas(sums, t, settings)  # (k, groups)
        correction = beta * sums[..., CORRECTION, :] + (1 - beta)
        members = row_members(self.m, settings.bands, x.device)  # (m, groups)
        memory = Memory(
            (beta @ members.T).unsqueeze(-1), (correction @ members.T).unsqueeze(-1), settings.mix
        )
        momentum = self._recalled()
        rows = torch.stack([(x * y).sum(dim=-1) for y in (momentum, x)], dim=-2)  # (k, 2, m)
        means = rows @ members / (members.sum(dim=0).clamp(min=1.0) * self.n)
        self._keep("band_sums", next_sums(sums, beta, means, settings))  # (11)
        filtered.absorb_(memory, momentum, x)  # (12)
        self._remember_(momentum)
        return filtered.see_(memory, momentum, x)  # (13)


@lru_cache(maxsize=256)
def row_members(m: int, groups: int, device: torch.device) -> Tensor:
    """1 where a row (m) belongs to a group (groups)."""
    group = torch.arange(m, device=device) * groups // m
    return (group.unsqueeze(1) == torch.arange(groups, device=device)).to(torch.float32)


class Cautious(filtered.FilteredStack):
    """Entries whose gradient disagrees with the momentum stay; the others take their share."""

    def _filtered(self, x: Tensor) -> Tensor:
        sign = x.sign()
        y = super()._filtered(x)
        agrees = (y * sign > 0).to(torch.float32)
        return y.mul_(agrees / agrees.mean(dim=(-2, -1), keepdim=True).clamp(min=0.1))


class CalmDecay(filtered.FilteredStack):
    """Weight decay where the step takes a weight towards zero, and nowhere else."""

    def _moved(self, weight: Tensor, keep: Scalar, move: Tensor) -> Tensor:
        decay = (weight * move < 0) * (keep - 1) * weight
        return weight.add_(decay).add_(move)


class Unwhitened(filtered.FilteredStack):
    """y is orthogonalised as it is."""

    power = 0.0  # of 1 / sqrt(V)

    def _variance_of(self, moments: Any) -> Any:
        variance = super()._variance_of(moments)
        if self._is_orthogonal:
            variance.row = variance.row**self.power
            variance.col = variance.col**self.power
            variance.floor = 1e-30
        return variance


class HalfWhitened(Unwhitened):
    """y is divided by the fourth root of V."""

    power = 0.5


class EqualValues(filtered.FilteredStack):
    """Singular values near 1, not between .7 and 1.2."""

    def _move(self) -> Tensor:
        with mock.patch.object(filtered, "orthogonal", equal_values):
            return super()._move()


class EvenRows(filtered.FilteredStack):
    """The rows of O get the same size over time."""

    def _move(self) -> Tensor:
        move = super()._move()
        if not self._is_orthogonal:
            return move
        mean = move.square().mean(dim=-1, keepdim=True)
        kept = []
        for work, own in zip(self.works, mean, strict=True):
            param: Any = work.param  # the state has no place for it
            if not hasattr(param, "even_rows"):
                param.even_rows = torch.ones_like(own)
            kept.append(param.even_rows)
        new = torch.stack(kept).lerp_(mean, 0.05)
        torch._foreach_copy_(kept, list(new.unbind()))
        move = move * new.clamp(min=1e-12).rsqrt()
        return move / move.square().mean(dim=(-2, -1), keepdim=True).sqrt().clamp(min=1e-12)


# a, b and c of each step: the least largest error over what the step before leaves of [0.001, 1].
EXACT = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
    (1.8887, -1.2652, 0.3765),
    (1.8750, -1.2500, 0.3750),
)


def equal_values(y: Tensor) -> Tensor:
    """O with singular values of 1, in float32, and RMS 1."""
    x = unit_norm(y) / 1.01
    if is_tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    for a, b, c in EXACT:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    o = x.mT if is_tall else x
    return o / o.square().mean(dim=(-2, -1), keepdim=True).sqrt().clamp(min=1e-30)
