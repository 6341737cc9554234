"""What momentum_study.py compares our rule with, and which is not a setting of the optimizer.

exact_clip     the input is clipped by its own RMS, as in FAM's first form, not by sums of squares
random_basis   a random orthogonal basis of 64 in place of the DCT: is it frequency that counts?
row_groups     FAM's memories belong to groups of rows, such as attention heads, not to bands

Each replaces a part of the foreach backend for as long as its context lasts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from maxfactor import fam
from maxfactor.backends import filtered
from maxfactor.fam import CORRECTION, band_betas, next_sums
from maxfactor.momentum import Memory

BASIS_SEED = 0


def variant(name: str | None) -> AbstractContextManager[Any]:
    """The context in which an optimizer steps by a variant; None changes nothing."""
    if name is None:
        return nullcontext()
    if name == "random_basis":
        return mock.patch.object(fam, "dct_basis", random_basis)
    stacks = {"exact_clip": ExactClip, "row_groups": RowGroups}
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
