"""Storing a momentum in eight bits: 64 values share one float32 scale.

A block is 64 consecutive values along a row of the matrix view; the last of a row may be shorter.
Its scale is its largest magnitude over 127, so a stored value is off by at most half a scale.
Nothing is random: the error of one step is part of the next step's average and dies away with it.

References:
    Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from maxfactor.settings import BLOCK, FLOAT32_TINY

LARGEST_CODE = 127


class Quantized(NamedTuple):
    """Codes of the values' shape (..., n), and scales (..., blocks)."""

    codes: Tensor
    scales: Tensor


def quantize(values: Tensor) -> Quantized:
    """Round float32 values to int8, ties to even; a block of zeros has the scale 0.

    Example:
        >>> quantize(torch.tensor([[0.0, 0.5, -1.27]])).codes
        tensor([[   0,   50, -127]], dtype=torch.int8)
    """
    return quantize_(values.clone())


def quantize_(values: Tensor) -> Quantized:
    """The same, and the values become what their codes stand for."""
    found = []
    for part in parts(values):
        largest = part.abs().amax(dim=-1, keepdim=True)  # vector_norm is slow for maxima on a CPU
        found.append(largest / LARGEST_CODE)
        # Where a scale is 0, or too small to divide by, the codes are 0 or small.
        part.div_(found[-1].clamp(min=FLOAT32_TINY)).round_()
    codes = values.to(torch.int8)
    for part, scales in zip(parts(values), found, strict=True):
        part.mul_(scales)
    return Quantized(codes, torch.cat(found, dim=-2).squeeze(-1))


def dequantize(codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """The values that the codes stand for, float32; written to `out` where that is given."""
    values = codes.to(torch.float32) if out is None else out.copy_(codes)
    for part, own in zip(parts(values), parts_of_scales(scales, codes.shape[-1]), strict=True):
        part.mul_(own)
    return values


def parts(values: Tensor) -> list[Tensor]:
    """The whole blocks and the short one of each row, as views (..., blocks, length)."""
    n = values.shape[-1]
    whole = n - n % BLOCK
    found = [values[..., :whole].unflatten(-1, (-1, BLOCK))] if whole else []
    return found + ([values[..., whole:].unsqueeze(-2)] if n > whole else [])


def parts_of_scales(scales: Tensor, n: int) -> list[Tensor]:
    """The scales (..., blocks) of the parts of rows of n values, as views (..., blocks, 1)."""
    whole = n // BLOCK
    found = [scales[..., :whole], scales[..., whole:]]
    return [part.unsqueeze(-1) for part in found if part.shape[-1]]
