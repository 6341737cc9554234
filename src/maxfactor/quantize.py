"""Storing a momentum in eight bits: 64 values share one float32 scale.

A block is 64 consecutive values along a row of the matrix view; the last of a row may be shorter.
Its scale is its largest magnitude over 127, so a stored value is off by at most half a scale.
Nothing is random: the error of one step is part of the next step's average and dies away with it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

FLOAT32_TINY = torch.finfo(torch.float32).tiny
BLOCK = 64
LARGEST_CODE = 127


class Quantized(NamedTuple):
    """Codes of the values' shape (..., n), and scales (..., blocks)."""

    codes: Tensor
    scales: Tensor


def blocks_of(n: int) -> int:
    """How many blocks a row of n values has."""
    return -(-n // BLOCK)


def quantized(values: Tensor) -> Quantized:
    """Round float32 values to int8, ties to even; a block of zeros has the scale 0.

    Example:
        >>> quantized(torch.tensor([[0.0, 0.5, -1.27]])).codes
        tensor([[   0,   50, -127]], dtype=torch.int8)
    """
    scales = torch.cat([largest(part) for part in parts(values)], dim=-1) / LARGEST_CODE
    # Where a scale is 0, or too small to divide by, the codes are 0 or small.
    steps = spread(scales.clamp(min=FLOAT32_TINY), values.shape[-1])
    return Quantized((values / steps).round_().to(torch.int8), scales)


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    """The values that the codes stand for, float32."""
    return spread(scales, codes.shape[-1]) * codes


def parts(values: Tensor) -> list[Tensor]:
    """The whole blocks and the short one, as views (..., blocks, length)."""
    n = values.shape[-1]
    whole = n - n % BLOCK
    found = [values[..., :whole].unflatten(-1, (-1, BLOCK))] if whole else []
    return found + ([values[..., whole:].unsqueeze(-2)] if n > whole or n == 0 else [])


def largest(part: Tensor) -> Tensor:
    """The largest magnitude of each block."""
    norm: Tensor = vector_norm(part, math.inf, dim=-1)  # no temporary of the part's size
    return norm


def spread(scales: Tensor, n: int) -> Tensor:
    """Each value's own scale, (..., n)."""
    wide = scales.unsqueeze(-1).expand(*scales.shape, BLOCK).flatten(-2)
    return wide[..., :n]
