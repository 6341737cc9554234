"""Sums of squares that neither overflow nor underflow, whatever float32 values are squared.

The square of a float32 beyond 1.8e19 is infinite, and that of one below 1e-19 loses its digits. So
a sum of squares has three parts, in the last dimension, each of which adds up over blocks and over
ranks:

    USUAL   the plain sum
    LARGE   of large tensors, in units of 2^168: the squares of 2^-84 x
    SMALL   of small tensors, in units of 2^-168: the squares of 2^84 x

Factors are powers of two, so nothing is rounded by them: for usual values the plain sum, bit for
bit, is the only part that is not 0.

References:
    Blue, "A Portable Fortran Program to Find the Euclidean Norm of a Vector", 1978: several
        accumulators, each for values of one size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

UNIT = 2.0**84  # of the values behind LARGE, and its inverse behind SMALL
LOW, HIGH = 2.0**-40, 2.0**50  # norms between them are usual
LIMIT = 2.0**40  # powers of two from 1 / LIMIT to LIMIT are usual


class Root(NamedTuple):
    """The root of a sum of squares, as a factor and its unit, a power of two."""

    factor: Tensor
    unit: Tensor | float


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that does not exceed x > 0; 1/2 for x = 0."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)


def in_parts(norm: Tensor, unit: Tensor) -> Tensor:
    """The square of norm * unit as parts, (..., 3), from (...); `unit` is a power of two."""
    large, small = unit > LIMIT, unit < 1.0 / LIMIT
    own = torch.where(large, unit / UNIT, torch.where(small, unit * UNIT, unit))
    square = (norm * own).square()
    nothing = torch.zeros_like(square)
    usual = torch.where(large | small, nothing, square)
    parts = (usual, torch.where(large, square, nothing), torch.where(small, square, nothing))
    return torch.stack(parts, dim=-1)


def usual_parts(square: Tensor) -> Tensor:
    """A plain sum of squares as parts, (..., 3), from (...)."""
    return pad(square.unsqueeze(-1), (0, 2))


def parts_by_row(x: Tensor, factor: Tensor | None = None, *, may_read: bool) -> Tensor:
    """The sums of (factor * x)^2 of each row as parts, (..., m, 3), from (..., m, n).

    Args:
        x: Values of any floating-point dtype.
        factor: One positive number for each row, (..., m, 1), or None for 1.
        may_read: Whether reading a value is free. Then usual values take one pass, else several.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    of_row = None if factor is None else factor.squeeze(-1)
    if may_read:
        norm: Tensor = vector_norm(x, dim=-1, dtype=wide)
        product = norm if of_row is None else norm * of_row
        if is_usual(norm) and (of_row is None or is_usual(product)):
            return usual_parts(product.square().to(torch.float32))
    unit = power_of_two(vector_norm(x, ord=torch.inf, dim=-1, dtype=wide))
    scaled: Tensor = vector_norm(x / unit.unsqueeze(-1), dim=-1)
    if of_row is not None:
        power = power_of_two(of_row)
        scaled, unit = scaled * (of_row / power), unit * power
    return in_parts(scaled.to(torch.float32), unit.to(torch.float32))


def is_usual(norms: Tensor) -> bool:
    """Whether the largest of some norms is usual, so that smaller ones need no care; or NaN.

    Reads a value, which is free on the CPU.
    """
    largest = norms.amax().item() if norms.numel() else 1.0  # asked for only on the CPU
    return not (largest < LOW or largest > HIGH)


def are_usual(norms: Tensor, tensors: Tensor) -> bool:
    """Whether the norm of each tensor of a batch is usual, or 0 because the tensor is.

    Reads values, which is free on the CPU.

    Args:
        norms: Of each tensor, (k,), or of all together, ().
        tensors: (k, m, n).
    """
    if not is_usual(norms):
        return False
    if not norms.amin().item() < LOW:  # asked for only on the CPU; NaN is usual
        return True
    is_zero, is_low = norms == 0, norms < LOW
    return bool((is_zero == is_low).all() and not tensors[is_zero].any())


def root_of(parts: Tensor) -> Root:
    """The root of a sum from its parts, (...), from (..., 3)."""
    usual, large, small = parts.unbind(-1)
    if parts.device.type == "cpu" and not parts[..., 1:].any():  # reading it is free
        return Root(usual.sqrt(), 1.0)
    is_small, is_large = usual == 0, large > 0
    total = usual + small / UNIT / UNIT
    total = torch.where(is_small, small, total)
    total = torch.where(is_large, large + usual / UNIT / UNIT, total)
    # Of two numbers `where` would make a tensor of torch's default dtype.
    unit = torch.where(is_small, torch.full_like(usual, 1.0 / UNIT), 1.0)
    return Root(total.sqrt(), torch.where(is_large, UNIT, unit))


def norm_of(x: Tensor) -> Root:
    """The norm of a whole tensor; row by row first, as one long float32 sum would lose digits."""
    unit = power_of_two(vector_norm(x, ord=torch.inf))
    norm: Tensor = vector_norm(vector_norm(x / unit, dim=-1))
    return Root(norm, unit)
