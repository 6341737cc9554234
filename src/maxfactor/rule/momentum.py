"""Momentum: one filter over time for a fixed memory and for FAM, and how M is kept.

    (11)  beta: fixed, or adapted to each band (see `fam.py`)
    (12)  M <- stored(beta M + (1 - beta) x)           c <- beta c + 1 - beta
    (13)  y = (1 - mu) M/c + mu x                      M as it was stored

All functions take matrices (..., m, n), one or a batch; a vector is one row. With several bands x,
M and y are coefficients, and only what enters and leaves the filter is transformed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxfactor.rule.fam import (
    CORRECTION,
    FAM,
    band_betas,
    band_counts,
    from_bands,
    next_sums,
    over_columns,
    to_bands,
)
from maxfactor.rule.int8 import dequantized, quantized
from maxfactor.state import MOMENTUM_STORES, State

if TYPE_CHECKING:
    from maxfactor.settings import MaxFactorHyper

Scalar = float | Tensor


@dataclass(frozen=True)
class Memory:
    """What one step's filter needs beside x and M; each a number, or one for each column."""

    beta: Scalar
    correction: Scalar  # c after this step
    mix: float
    bands: int = 1
    band_beta: Tensor | None = None  # (..., bands), where they are adapted

    def absorbed(self, momentum: Tensor, x: Tensor) -> Tensor:
        """Equation (12) before it is stored."""
        return self.beta * momentum + (1 - self.beta) * x

    def seen(self, stored: Tensor, x: Tensor) -> Tensor:
        """Equation (13)."""
        return stored * ((1 - self.mix) / self.correction) + self.mix * x

    def enter(self, x: Tensor) -> Tensor:
        """The input as the filter sees it."""
        return x if self.bands == 1 else to_bands(x)

    def leave(self, y: Tensor) -> Tensor:
        """The output as the update sees it."""
        return y if self.bands == 1 else from_bands(y)

    def next_sums(self, sums: Tensor, totals: Tensor, shape: tuple[int, int], fam: FAM) -> Tensor:
        """The state's `band_sums` after this step, from `band_totals` over the m x n of `shape`."""
        assert self.band_beta is not None
        means = totals / band_counts(*shape, self.bands, sums.device)
        return next_sums(sums, self.band_beta, means, fam)


def memory_of(hyper: MaxFactorHyper, t: Scalar, n: int, sums: Tensor | None = None) -> Memory:
    """The filter of step t; `sums` are a matrix's `band_sums`, (..., 3, bands), where FAM has them.

    A step counter on the device is one number, or one for each of a batch (k, 1, 1).
    """
    fam = hyper.fam
    if fam is None or sums is None:
        return Memory(hyper.fixed_beta, fixed_correction(hyper.fixed_beta, t), hyper.mix)
    when = t.reshape(-1, 1) if isinstance(t, Tensor) and t.dim() else t
    beta = band_betas(sums, when, fam)
    correction = beta * sums[..., CORRECTION, :] + (1 - beta)
    wide = over_columns(beta, n), over_columns(correction, n)
    return Memory(*wide, fam.mix, fam.bands, beta)


def fixed_correction(beta: float, t: Scalar) -> Scalar:
    """The c of (12), 1 - beta^t; by expm1, as a long memory would cancel most digits in float32."""
    if beta == 0.0:
        return 1.0
    exponent = t * math.log(beta)
    return -torch.expm1(exponent) if isinstance(exponent, Tensor) else -math.expm1(exponent)


def kept(values: Tensor, store: str) -> State:
    """New state tensors for a momentum: `momentum`, and `momentum_scale` for int8."""
    if store == "int8":
        codes, scales = quantized(values)
        return {"momentum": codes, "momentum_scale": scales}
    return {"momentum": values.to(MOMENTUM_STORES[store])}


def recalled(state: State, shape: tuple[int, ...]) -> Tensor:
    """The momentum as it was stored, float32 in the given shape."""
    momentum = state["momentum"].view(shape)
    if "momentum_scale" not in state:
        return momentum.to(torch.float32)
    return dequantized(momentum, state["momentum_scale"].view(*shape[:-1], -1))
