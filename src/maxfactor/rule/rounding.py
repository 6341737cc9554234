"""Stochastic rounding: small updates of 16-bit parameters are kept on average.

Rounding to nearest drops every change below half a unit in the last place: in bfloat16 an update
of a thousandth of the weight, and all weight decay. Stochastic rounding rounds up with a
probability equal to the fraction that would be cut off, so the expected result is exact.

The noise is a hash of (seed, step, position in the tensor). A run is reproducible bit for bit, in
every backend, for any order of parameters, and for shards, whose positions are global.

References:
    Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from maxfactor.settings import TensorRule

MASK = 0xFFFFFFFF
SIGN_BIT = 0x80000000
HALF = 1 << 31  # positions in a part, whose indices fit into int32
GOLDEN = 0x9E3779B1  # odd multipliers of the hash, up to SCATTER
HIGH_WORD = 0x7FEB352D
SCATTER = 0x85EBCA6B
FP16_SMALLEST_NORMAL = 2.0**-14
FP16_QUANTUM = 2.0**-24  # spacing of subnormal float16


def rounded(
    w: Tensor, dtype: torch.dtype, rule: TensorRule, t: float | Tensor, start: int | Tensor = 0
) -> Tensor:
    """Return `w` in `dtype`, rounded as the rule says.

    `start` is the position of its first element in the parameter, or a tensor of all positions.
    """
    if not rule.is_stochastic(dtype):
        return w.to(dtype)
    noise = position_noise(w, noise_key(rule.seed, t), start)
    low = rounded_bf16(w, noise) if dtype == torch.bfloat16 else rounded_fp16(w, noise)
    return torch.where(w.isfinite(), low, w).to(dtype)


def mix(x: Tensor | int) -> Tensor | int:
    """A bijection of 32 bits in which each input bit changes about half of the output bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def seed_key(seed: int) -> int:
    """Hash a seed of up to 64 bits to 32 bits."""
    return int(mix(mix(seed & MASK) ^ ((seed >> 32) & MASK)))


def noise_key(seed: int, t: float | Tensor) -> Tensor | int:
    """A 32-bit key for each step of a run."""
    step = t.to(torch.int64) if isinstance(t, Tensor) else int(t)
    return mix((seed_key(seed) + step) & MASK)


def position_noise(w: Tensor, key: Tensor | int, start: int | Tensor) -> Tensor:
    """32 random bits for each element of `w`, as int32, whose arithmetic wraps around.

    The hash costs four operations on the GPU. For one element the bits are uniform over the keys.
    """
    if isinstance(start, Tensor):
        word = ((start & MASK) * GOLDEN + (start >> 32) * HIGH_WORD + key) & MASK
        return scattered(as_int32(word).to(torch.int32).view(w.shape))
    end = start + w.numel()
    cuts = [start, *range((start // HALF + 1) * HALF, end, HALF), end]  # int32 in each part
    parts = [part_noise(a, b - a, key, w.device) for a, b in pairwise(cuts)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(w.shape)


def part_noise(start: int, count: int, key: Tensor | int, device: torch.device) -> Tensor:
    """The noise of `count` positions from `start` on."""
    first = as_int32(((start & MASK) * GOLDEN + (start >> 32) * HIGH_WORD + key) & MASK)
    word = torch.arange(count, dtype=torch.int32, device=device).mul_(as_int32(GOLDEN)).add_(first)
    return scattered(word)


def scattered(word: Tensor) -> Tensor:
    """The last stage of the hash, in place."""
    return word.bitwise_xor_(upper_bits(word, 16)).mul_(as_int32(SCATTER))


def as_int32(bits: Any) -> Any:
    """Reinterpret 32 bits, an int or an int64 tensor, as signed int32 values."""
    return (bits ^ SIGN_BIT) - SIGN_BIT


def upper_bits(words: Tensor, count: int) -> Tensor:
    """The highest `count` bits of int32 words, as nonnegative numbers."""
    return (words >> (32 - count)).bitwise_and_((1 << count) - 1)


def rounded_bf16(w: Tensor, noise: Tensor) -> Tensor:
    """Round to bfloat16: add 16 random bits below the last place, then truncate."""
    bits = w.contiguous().view(torch.int32)
    return upper_bits(noise, 16).add_(bits).bitwise_and_(~0xFFFF).view(torch.float32)


def rounded_fp16(w: Tensor, noise: Tensor) -> Tensor:
    """Round to float16, with 13 random bits; subnormal numbers have one fixed spacing."""
    bits = w.contiguous().view(torch.int32)
    normal = upper_bits(noise, 13).add_(bits).bitwise_and_(~0x1FFF).view(torch.float32)
    scaled = w / FP16_QUANTUM
    below = torch.floor(scaled)
    # Not floor(scaled + noise): that sum is rounded, and could change exact float16 values.
    is_above = scaled - below + upper_bits(noise, 23) * 2.0**-23 >= 1.0
    tiny = (below + is_above) * FP16_QUANTUM
    return torch.where(w.abs() < FP16_SMALLEST_NORMAL, tiny, normal)
