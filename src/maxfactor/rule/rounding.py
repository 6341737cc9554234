"""Writing a float32 result into a 16-bit parameter without losing what is small.

Rounding to nearest drops every change below half a unit in the last place: in bfloat16 an update
of a thousandth of the weight, and all weight decay with it. Stochastic rounding keeps them on
average: it goes up with a probability equal to the part that would be cut off.

The noise is a hash of (seed, step, position in the tensor), so a run repeats bit for bit, in any
backend, in any order of parameters, and for any shard that knows its positions.

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
HALF = 1 << 31  # positions that an int32 can count
GOLDEN = 0x9E3779B1  # odd multipliers that spread a position over 32 bits
HIGH_WORD = 0x7FEB352D
SCATTER = 0x85EBCA6B
FP16_SMALLEST_NORMAL = 2.0**-14
FP16_QUANTUM = 2.0**-24  # spacing of float16 below that


def rounded(
    w: Tensor, dtype: torch.dtype, rule: TensorRule, t: float | Tensor, start: int | Tensor = 0
) -> Tensor:
    """Return `w` in `dtype`.

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
    """A seed of any size in 32 bits."""
    return int(mix(mix(seed & MASK) ^ ((seed >> 32) & MASK)))


def noise_key(seed: int, t: float | Tensor) -> Tensor | int:
    """One 32-bit key for each step of a run."""
    step = t.to(torch.int64) if isinstance(t, Tensor) else int(t)
    return mix((seed_key(seed) + step) & MASK)


def position_noise(w: Tensor, key: Tensor | int, start: int | Tensor) -> Tensor:
    """32 random bits for each element of `w`, as int32, whose arithmetic is that of 32 bits.

    A light hash, four operations on the GPU. For one element the bits are uniform over the keys.
    """
    if isinstance(start, Tensor):
        word = ((start & MASK) * GOLDEN + (start >> 32) * HIGH_WORD + key) & MASK
        return scattered(as_int32(word).to(torch.int32).view(w.shape))
    end = start + w.numel()
    cuts = [start, *range((start // HALF + 1) * HALF, end, HALF), end]  # one high word in each part
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
    """32 bits, of an int or of int64s, as the signed numbers that int32 takes them for."""
    return (bits ^ SIGN_BIT) - SIGN_BIT


def upper_bits(words: Tensor, count: int) -> Tensor:
    """The highest `count` bits of int32s as numbers that are not negative."""
    return (words >> (32 - count)).bitwise_and_((1 << count) - 1)


def rounded_bf16(w: Tensor, noise: Tensor) -> Tensor:
    """Add 16 random bits below bfloat16's last one, then cut them off."""
    bits = w.contiguous().view(torch.int32)
    return upper_bits(noise, 16).add_(bits).bitwise_and_(~0xFFFF).view(torch.float32)


def rounded_fp16(w: Tensor, noise: Tensor) -> Tensor:
    """The same with 13 bits; below the normal range float16 has one fixed spacing."""
    bits = w.contiguous().view(torch.int32)
    normal = upper_bits(noise, 13).add_(bits).bitwise_and_(~0x1FFF).view(torch.float32)
    scaled = w / FP16_QUANTUM
    below = torch.floor(scaled)
    # Not floor(scaled + noise): the sum is rounded, and what float16 can hold might move.
    is_above = scaled - below + upper_bits(noise, 23) * 2.0**-23 >= 1.0
    tiny = (below + is_above) * FP16_QUANTUM
    return torch.where(w.abs() < FP16_SMALLEST_NORMAL, tiny, normal)
