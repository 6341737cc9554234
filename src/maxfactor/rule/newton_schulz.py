"""The orthogonal direction: makes all singular values of an update nearly equal.

Five steps of a quintic Newton-Schulz iteration, X <- P X with P = aI + bA + cA² and A = X Xᵀ, push
the singular values of a matrix of norm 1 into about [0.7, 1.2]. The coefficients trade exact
convergence for a steep slope at 0, so that five steps are enough.

For a wide matrix the last three steps are merged: A becomes P A P after a step, so their factors P
follow from A alone, and X is multiplied only once. The first two steps raise the small singular
values. A holds their squares, which bfloat16 would lose, so these steps are not merged.

The fused backend has the same iteration with fewer multiplications: see `backends.triton.workspace`
for how it merges steps.

References:
    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024: coefficients.
    Bjorck and Bowie, "An iterative algorithm for computing the best estimate of an orthogonal
        matrix", 1971; Higham, "Functions of Matrices", 2008: the iteration.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.settings import FLOAT32_TINY

if TYPE_CHECKING:
    from collections.abc import Sequence

    Coefficients = tuple[float, float, float]

COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5  # a, b, c of each step
AT_A_TIME, AT_A_TIME_IF_WIDE = (1, 1, 1, 1, 1), (1, 1, 3)  # steps merged into one product
WIDE = 2  # least ratio of the sides of a wide matrix; from 1.5 on merging saves FLOPs


def orthogonal(y: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """O of equation (14): y (..., m, n), orthogonalised and scaled to RMS 1. Zeros stay zeros.

    Args:
        y: One or several matrices.
        block: Rows and columns of the blocks that are orthogonalised one by one, each scaled to
            RMS 1; None for the whole matrix.

    Example:
        >>> y = torch.tensor([[3.0, 0.0, 5.0], [0.0, 3.0, 0.0]])
        >>> orthogonal(y, (1, 3))  # each row by itself: to RMS 1
        tensor([[0.8911, 0.0000, 1.4852],
                [0.0000, 1.7321, 0.0000]])
    """
    parts = to_blocks(y, block)
    o = newton_schulz(parts)
    return from_blocks(o / rms_of(o), tuple(y.shape))  # (14), in float32


def to_blocks(y: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Cut matrices (..., m, n) into blocks, row by row of them: (blocks, rows, columns)."""
    if block is None:
        return y
    rows, cols = block
    grid = y.reshape(-1, rows, y.shape[-1] // cols, cols)
    return grid.transpose(1, 2).reshape(-1, rows, cols)


def from_blocks(parts: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo `to_blocks`: put the blocks together to matrices of `shape`."""
    rows, cols = parts.shape[-2:]
    grid = parts.reshape(-1, shape[-1] // cols, rows, cols)
    return grid.transpose(1, 2).reshape(shape)


def rms_of(o: Tensor) -> Tensor:
    """RMS of each matrix in float32, clamped above 0 as a divisor."""
    norm: Tensor = vector_norm(o, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    return (norm / math.sqrt(o.shape[-2] * o.shape[-1])).clamp(min=FLOAT32_TINY)


def newton_schulz(y: Tensor) -> Tensor:
    """The iteration on matrices (..., m, n), in bfloat16 on CUDA and in y's own dtype elsewhere.

    Example:
        >>> newton_schulz(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor([[0.7530, 0.0000],
                [0.0000, 1.1337]])
    """
    x = unit_norm(y)
    if x.is_cuda:
        x = x.to(torch.bfloat16)
    if is_tall := x.shape[-2] > x.shape[-1]:  # so that A has the size of the smaller side
        x = x.mT
    for own in by_product(steps_at_a_time(*x.shape[-2:])):
        square = x @ x.mT  # A = X Xᵀ
        if len(own) == 1:
            a, b, c = own[0]
            x = plus(x, plus(square, square, square, b, c), x, a, 1.0)
        else:
            x = product_of_steps(square, own) @ x
    return x.mT if is_tall else x


def steps_at_a_time(short: int, long: int) -> tuple[int, ...]:
    """The number of steps that each product with X takes."""
    return AT_A_TIME_IF_WIDE if long >= WIDE * short else AT_A_TIME


def by_product(at_a_time: Sequence[int]) -> list[list[Coefficients]]:
    """The coefficients of the steps that each product with X takes."""
    left = iter(COEFFICIENTS)
    return [list(islice(left, steps)) for steps in at_a_time]


def product_of_steps(square: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    """The product of the factors P of several steps, from A = X Xᵀ alone."""
    factor = product = polynomial(square, coefficients[0])
    for each in coefficients[1:]:
        square = factor @ square @ factor
        factor = polynomial(square, each)
        product = factor @ product
    return product


def polynomial(square: Tensor, coefficients: Coefficients) -> Tensor:
    """P = aI + bA + cA²."""
    a, b, c = coefficients
    p = plus(square, square, square, b, c)
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p


def plus(x: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """Return beta * x + alpha * left @ right in one call."""
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    return add_product(x, left, right, beta=beta, alpha=alpha)


def unit_norm(y: Tensor) -> Tensor:
    """Divide by the Frobenius norm; by the largest entry first, so that no square underflows."""
    matrix = (-2, -1)
    if y.is_cuda:
        largest: Tensor = vector_norm(y, math.inf, matrix, keepdim=True)
    else:  # vector_norm is slow for maxima on a CPU
        largest = y.abs().amax(matrix, keepdim=True)
    x = y / largest.clamp(min=FLOAT32_TINY)
    norm: Tensor = vector_norm(x, dim=matrix, keepdim=True)
    return x.div_(norm.clamp(min=1.0))
