"""Frequency-adaptive momentum (FAM): each band's beta follows from how predictable the band is.

For each band of a matrix, from the filter's input x and the bias-corrected momentum M/c before it:

    (11)  A <- theta A + (1 - theta) mean(x M/c)        P <- theta P + (1 - theta) mean(x^2)
          beta = clip(1 - A/P, beta_min, beta_max)      from the sums of the step before

A/P is the coherence: the fraction of a gradient's power that its own past predicts. The bands are
those of a DCT-II of each block of 64 values along a row. With one band there is no transform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.settings import BLOCK, FLOAT32_TINY
from maxfactor.state import as_float

if TYPE_CHECKING:
    from maxfactor.settings import FAM

AGREEMENT, POWER, CORRECTION = 0, 1, 2  # rows of a state's `band_sums`: A, P and c


# -------------------------------------------------------------------------------- the memory


def band_betas(sums: Tensor, t: float | Tensor, fam: FAM) -> Tensor:
    """Equation (11): beta of step t, (..., bands), from the previous sums, (..., 3, bands)."""
    power = sums[..., POWER, :].clamp(min=FLOAT32_TINY)
    adapted = (1 - sums[..., AGREEMENT, :] / power).clamp(fam.beta_min, fam.beta_max)  # (11)
    if isinstance(t, Tensor):  # on the device: not read back
        return torch.where(t <= fam.warmup, fam.start, adapted)
    return torch.full_like(adapted, fam.start) if t <= fam.warmup else adapted


def next_sums(sums: Tensor, beta: Tensor, means: Tensor, fam: FAM) -> Tensor:
    """A and P of (11) and c of (12) after a step, (..., 3, bands).

    `means` are the means of x M and of x^2 over each band, (..., 2, bands).
    """
    before = sums[..., CORRECTION, :]
    guessed = means[..., AGREEMENT, :] / before.clamp(min=FLOAT32_TINY)
    newest = torch.stack((guessed, means[..., POWER, :]), dim=-2)
    averages = fam.theta * sums[..., :CORRECTION, :] + (1 - fam.theta) * newest
    correction = beta * before + (1 - beta)
    return torch.cat((averages, correction.unsqueeze(-2)), dim=-2)


@dataclass(frozen=True)
class Spectrum:
    """FAM's statistics of a parameter, one value for each band, on the parameter's device.

    `rho` is the coherence A/P, `power` the mean of x^2, `beta` the beta of the next step.
    """

    rho: Tensor
    beta: Tensor
    power: Tensor


def spectrum(sums: Tensor, t: float | Tensor, fam: FAM) -> Spectrum:
    """The spectrum from the sums of a parameter after t steps, without a host sync."""
    power = sums[POWER]
    seen = 1 - fam.theta ** as_float(t)  # bias correction of the sums
    seen = seen.clamp(min=FLOAT32_TINY) if isinstance(seen, Tensor) else max(seen, FLOAT32_TINY)
    rho = sums[AGREEMENT] / power.clamp(min=FLOAT32_TINY)
    return Spectrum(rho=rho, beta=band_betas(sums, t + 1, fam), power=power / seen)


# ---------------------------------------------------------------------------------- the bands


def to_bands(x: Tensor) -> Tensor:
    """Orthonormal DCT-II of each block of 64 values along the rows, (..., n), and of the tail."""
    return _blockwise(x, inverse=False)


def from_bands(coefficients: Tensor) -> Tensor:
    """The inverse of `to_bands`."""
    return _blockwise(coefficients, inverse=True)


def _blockwise(x: Tensor, *, inverse: bool) -> Tensor:
    n = x.shape[-1]
    whole = n - n % BLOCK
    parts = []
    if whole:
        basis = dct_basis(BLOCK, x.device)
        blocks = x[..., :whole].unflatten(-1, (-1, BLOCK))
        parts.append((blocks @ (basis.T if inverse else basis)).flatten(-2))
    if n > whole:
        basis = dct_basis(n - whole, x.device)
        parts.append(x[..., whole:] @ (basis.T if inverse else basis))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


@lru_cache(maxsize=256)
def dct_basis(length: int, device: torch.device) -> Tensor:
    """The DCT basis with cosines as columns, (length, length); made on the device, without sync."""
    place, frequency = torch.meshgrid(*[torch.arange(length, device=device)] * 2, indexing="ij")
    # Reduce the angle modulo 2 pi in integers, so that float32 is exact enough.
    quarter = (2 * place + 1) * frequency % (4 * length)
    angle = quarter.to(torch.float32) * (math.pi / (2 * length))
    basis = torch.cos(angle) * math.sqrt(2 / length)
    basis[:, 0] = math.sqrt(1 / length)
    return basis


@lru_cache(maxsize=256)
def band_index(n: int, bands: int, device: torch.device) -> Tensor:
    """The band of each of n columns."""
    column = torch.arange(n, device=device)
    tail = n % BLOCK
    length = torch.where(column < n - tail, BLOCK, tail)
    return column % BLOCK * bands // length


@lru_cache(maxsize=256)
def band_members(n: int, bands: int, device: torch.device) -> Tensor:
    """One-hot bands of the columns, (n, bands). A product with it sums over bands."""
    index = band_index(n, bands, device)
    return (index.unsqueeze(1) == torch.arange(bands, device=device)).to(torch.float32)


def band_totals(x: Tensor, momentum: Tensor, bands: int) -> Tensor:
    """Sums of x M and of x^2 over each band of (..., m, n) tensors, (..., 2, bands)."""
    along = -1 if bands == 1 else -2  # a band is a set of columns, so those are kept apart
    squares = vector_norm(x, dim=along).square()  # no temporary of x's size
    totals = torch.stack(((x * momentum).sum(dim=along), squares), dim=-2)
    if bands == 1:
        return totals.sum(dim=-1, keepdim=True)
    return totals @ band_members(x.shape[-1], bands, x.device)


def band_counts(m: int, n: int, bands: int, device: torch.device) -> Tensor:
    """The number of coefficients in each band, at least 1, (bands)."""
    if bands == 1:
        return torch.full((1,), float(m * n), dtype=torch.float32, device=device)
    return m * band_members(n, bands, device).sum(dim=0).clamp(min=1.0)


def over_columns(values: Tensor, n: int) -> Tensor:
    """Expand values per band, (..., bands), to columns, (..., 1, n); one band to (..., 1, 1)."""
    bands = values.shape[-1]
    if bands == 1:
        return values.unsqueeze(-2)
    return values[..., band_index(n, bands, values.device)].unsqueeze(-2)
