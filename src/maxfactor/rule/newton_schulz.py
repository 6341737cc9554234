"""The orthogonal direction: all singular values of an update made nearly equal.

Five steps of a quintic Newton-Schulz iteration, X <- P X with P = aI + bA + cA² and A = X Xᵀ, push
the singular values of a matrix of norm 1 into about [0.7, 1.2]. The coefficients give up exactness
for slope at 0, so five steps are enough.

A wide matrix takes the last three steps at a time: the A after a step is P A P, so X is multiplied
only once for them. The first two lift the small singular values. In A those are squared, and
bfloat16 would lose them there; so these steps look at X.

References:
    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024: coefficients.
    Bjorck and Bowie, "An iterative algorithm for computing the best estimate of an orthogonal
        matrix", 1971; Higham, "Functions of Matrices", 2008: the iteration.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.settings import FLOAT32_TINY

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c
AT_A_TIME, AT_A_TIME_IF_WIDE = (1, 1, 1, 1, 1), (1, 1, 3)  # steps
WIDE = 2  # times as long as short: from 1.5 on fewer products


def orthogonal(y: Tensor) -> Tensor:
    """O of equation (9): y (..., m, n) with like singular values, and RMS 1; zeros stay zeros."""
    o = newton_schulz(y).to(torch.float32)
    return o / rms_of(o)


def orthogonalize_(y: Tensor) -> None:
    """Put O in the place of y, in y's precision, without a float32 copy of it."""
    o = newton_schulz(y)
    torch.div(o, rms_of(o), out=y)


def rms_of(o: Tensor) -> Tensor:
    """RMS of each matrix, in float32, to divide by."""
    norm: Tensor = vector_norm(o, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    return (norm / math.sqrt(o.shape[-2] * o.shape[-1])).clamp(min=FLOAT32_TINY)


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
    for steps in steps_at_a_time(*x.shape[-2:]):
        square = x @ x.mT  # A = X Xᵀ
        if steps == 1:
            x = plus(x, plus(square, square, square, b, c), x, a, 1.0)
        else:
            x = product_of_steps(square, steps) @ x
    return x.mT if is_tall else x


def steps_at_a_time(short: int, long: int) -> tuple[int, ...]:
    """How many steps are taken between two products with the whole matrix."""
    return AT_A_TIME_IF_WIDE if long >= WIDE * short else AT_A_TIME


def product_of_steps(square: Tensor, steps: int) -> Tensor:
    """What X is multiplied with in some steps, from A = X Xᵀ alone."""
    factor = product = polynomial(square)
    for _ in range(steps - 1):
        square = factor @ square @ factor
        factor = polynomial(square)
        product = factor @ product
    return product


def polynomial(square: Tensor) -> Tensor:
    """P = aI + bA + cA²."""
    a, b, c = COEFFICIENTS
    p = plus(square, square, square, b, c)
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p


def plus(x: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """Return beta * x + alpha * left @ right in one call."""
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    return add_product(x, left, right, beta=beta, alpha=alpha)


def unit_norm(y: Tensor) -> Tensor:
    """Divide by the Frobenius norm, by way of the largest entry: its square must not underflow."""
    matrix = (-2, -1)
    if y.is_cuda:
        largest: Tensor = vector_norm(y, math.inf, matrix, keepdim=True)
    else:  # where that is slow
        largest = y.abs().amax(matrix, keepdim=True)
    x = y / largest.clamp(min=FLOAT32_TINY)
    norm: Tensor = vector_norm(x, dim=matrix, keepdim=True)
    return x.div_(norm.clamp(min=1.0))
