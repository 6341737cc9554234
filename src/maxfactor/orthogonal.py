"""The orthogonal direction: all singular values of an update made nearly equal.

Five steps of a quintic Newton-Schulz iteration push the singular values of a matrix of norm 1 into
about [0.7, 1.2]. The coefficients give up exactness for slope at 0, so five steps are enough.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.linalg import vector_norm

FLOAT32_TINY = torch.finfo(torch.float32).tiny
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(y: Tensor) -> Tensor:
    """O of equation (9): y (..., m, n) with like singular values, and RMS 1; zeros stay zeros."""
    o = newton_schulz(y).to(torch.float32)
    norm: Tensor = vector_norm(o, dim=(-2, -1), keepdim=True)
    rms = norm / math.sqrt(o.shape[-2] * o.shape[-1])
    return o / rms.clamp(min=FLOAT32_TINY)


def newton_schulz(y: Tensor) -> Tensor:
    """The iteration on matrices (..., m, n), in bfloat16 on a GPU, in y's own precision elsewhere.

    Example:
        >>> newton_schulz(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor([[0.7530, 0.0000],
                [0.0000, 1.1337]])
    """
    a, b, c = COEFFICIENTS
    x = unit_norm(y)
    if x.is_cuda:
        x = x.to(torch.bfloat16)
    if is_tall := x.shape[-2] > x.shape[-1]:  # the products are of the smaller side
        x = x.mT
    for _ in range(STEPS):
        square = x @ x.mT  # A = X X'
        x = plus(x, plus(square, square, square, b, c), x, a, 1.0)
    return x.mT if is_tall else x


def plus(x: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """Return beta * x + alpha * left @ right in one call."""
    if x.dim() == 2:
        return torch.addmm(x, left, right, beta=beta, alpha=alpha)
    return torch.baddbmm(x, left, right, beta=beta, alpha=alpha)


def unit_norm(y: Tensor) -> Tensor:
    """Divide by the Frobenius norm, by way of the largest entry: its square must not underflow."""
    largest = y.abs().amax(dim=(-2, -1), keepdim=True)  # vector_norm is slow for it on a CPU
    x = y / largest.clamp(min=FLOAT32_TINY)
    norm: Tensor = vector_norm(x, dim=(-2, -1), keepdim=True)
    return x / norm.clamp(min=1.0)
