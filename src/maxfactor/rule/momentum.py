"""Momentum: an average over time with a fixed beta or FAM's, and the storage of M.

    (11)  beta: fixed, or adapted to each band (see `fam.py`)
    (12)  M <- stored(beta M + (1 - beta) x)           c <- beta c + 1 - beta
    (13)  y = (1 - mu) M/c + mu x                      with the stored M

All functions take matrices (..., m, n), one or a batch; a vector is one row. With several bands x,
M and y are DCT coefficients: x is transformed before (11), and y back after (13).

References:
    Dozat, "Incorporating Nesterov Momentum into Adam", 2016: the look-ahead of (13).
    Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014: the bias correction c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxfactor.rule import fam as bands_of
from maxfactor.rule.int8 import dequantize, quantize
from maxfactor.state import MOMENTUM_DTYPES, State, as_float

if TYPE_CHECKING:
    from maxfactor.settings import FAM, TensorRule

Scalar = float | Tensor


@dataclass(frozen=True)
class Memory:
    """The coefficients of (12) and (13) in one step: numbers, or one value for each column."""

    beta: Scalar
    correction: Scalar  # c after this step
    mix: float
    bands: int = 1
    band_beta: Tensor | None = None  # (..., bands), with FAM
    fam: FAM | None = None

    def averaged(self, momentum: Tensor, x: Tensor) -> Tensor:
        """Equation (12), before M is stored."""
        return self.beta * momentum + (1 - self.beta) * x  # (12)

    def average_(self, momentum: Tensor, x: Tensor) -> None:
        """Equation (12); overwrites `momentum`."""
        momentum.lerp_(x, 1 - self.beta)

    def lookahead(self, stored: Tensor, x: Tensor) -> Tensor:
        """Equation (13)."""
        return stored * ((1 - self.mix) / self.correction) + self.mix * x  # (13)

    def lookahead_(self, stored: Tensor, x: Tensor) -> Tensor:
        """Equation (13); overwrites `stored`."""
        y = stored.mul_((1 - self.mix) / self.correction)
        return y.add_(x, alpha=self.mix) if self.mix else y

    def to_bands(self, x: Tensor) -> Tensor:
        """Transform the input x to bands, if there are several."""
        return x if self.bands == 1 else bands_of.to_bands(x)

    def from_bands(self, y: Tensor) -> Tensor:
        """Transform the output y back from bands."""
        return y if self.bands == 1 else bands_of.from_bands(y)

    def next_sums(self, sums: Tensor, totals: Tensor, shape: tuple[int, int]) -> Tensor:
        """The new `band_sums`, from the `band_totals` of matrices of `shape` (m, n)."""
        assert self.band_beta is not None
        assert self.fam is not None
        means = totals / bands_of.band_counts(*shape, self.bands, sums.device)
        return bands_of.next_sums(sums, self.band_beta, means, self.fam)


def memory_of(rule: TensorRule, t: Scalar, n: int, sums: Tensor | None = None) -> Memory:
    """The coefficients of step t. `sums` is a matrix's `band_sums`, (..., 3, bands), with FAM.

    `t` may be a tensor on the device: a scalar, or (k, 1, 1) for a batch.
    """
    fam = rule.fam
    if fam is None or sums is None:
        return Memory(rule.beta, fixed_correction(rule.beta, t), rule.mix)
    when = t.reshape(-1, 1) if isinstance(t, Tensor) and t.dim() else t
    beta = bands_of.band_betas(sums, when, fam)
    correction = beta * sums[..., bands_of.CORRECTION, :] + (1 - beta)
    wide = bands_of.over_columns(beta, n), bands_of.over_columns(correction, n)
    return Memory(*wide, fam.mix, fam.bands, beta, fam)


def fixed_correction(beta: float, t: Scalar) -> Scalar:
    """The c of (12), 1 - beta^t; by expm1: cancellation loses digits in float32 for beta near 1."""
    if beta == 0.0:
        return 1.0
    exponent = as_float(t) * math.log(beta)
    return -torch.expm1(exponent) if isinstance(exponent, Tensor) else -math.expm1(exponent)


def encode_momentum(values: Tensor, dtype: str) -> State:
    """Return the state tensors of a momentum: `momentum`, and `momentum_scale` for int8."""
    if dtype == "int8":
        codes, scales = quantize(values)
        return {"momentum": codes, "momentum_scale": scales}
    return {"momentum": values.to(MOMENTUM_DTYPES[dtype])}


def decode_momentum(state: State, shape: tuple[int, ...]) -> Tensor:
    """Return the stored momentum in float32 and the given shape."""
    momentum = state["momentum"].view(shape)
    if "momentum_scale" not in state:
        return momentum.to(torch.float32)
    return dequantize(momentum, state["momentum_scale"].view(*shape[:-1], -1))
