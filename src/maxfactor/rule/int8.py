"""Momentum in int8: blocks of 64 values share one float32 scale.

A block is 64 consecutive values along a row of the matrix view. The last block of a row may be
shorter. The scale is the largest magnitude / 127, so the error of a value is at most half a scale.
Rounding is deterministic: an error enters the next step's average and decays with it.

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
    """Codes in the shape of the values, (..., n), and scales, (..., blocks)."""

    codes: Tensor
    scales: Tensor


def quantize(values: Tensor) -> Quantized:
    """Round float32 values to int8, ties to even. A block of zeros has scale 0.

    Example:
        >>> quantize(torch.tensor([[0.0, 0.5, -1.27]])).codes
        tensor([[   0,   50, -127]], dtype=torch.int8)
    """
    return quantize_(values.clone())


def quantize_(values: Tensor) -> Quantized:
    """Like `quantize`; overwrites `values` with the dequantized values."""
    found = []
    for part in parts(values):
        largest = part.abs().amax(dim=-1, keepdim=True)  # vector_norm is slow for maxima on a CPU
        found.append(largest / LARGEST_CODE)
        # A scale of 0, or a subnormal one, gives codes of 0, or small ones.
        part.div_(found[-1].clamp(min=FLOAT32_TINY)).round_()
    codes = values.to(torch.int8)
    for part, scales in zip(parts(values), found, strict=True):
        part.mul_(scales)
    return Quantized(codes, torch.cat(found, dim=-2).squeeze(-1))


def dequantize(codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the float32 values of the codes; writes to `out` if given."""
    values = codes.to(torch.float32) if out is None else out.copy_(codes)
    for part, own in zip(parts(values), parts_of_scales(scales, codes.shape[-1]), strict=True):
        part.mul_(own)
    return values


def parts(values: Tensor) -> list[Tensor]:
    """Views of the full blocks and of the short last block of each row, (..., blocks, length)."""
    n = values.shape[-1]
    whole = n - n % BLOCK
    found = [values[..., :whole].unflatten(-1, (-1, BLOCK))] if whole else []
    return found + ([values[..., whole:].unsqueeze(-2)] if n > whole else [])


def parts_of_scales(scales: Tensor, n: int) -> list[Tensor]:
    """Views (..., blocks, 1) of the scales (..., blocks), split as `parts` splits n values."""
    whole = n // BLOCK
    found = [scales[..., :whole], scales[..., whole:]]
    return [part.unsqueeze(-1) for part in found if part.shape[-1]]
