"""How new weights are written: rounded, with a noise that repeats."""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import STOCHASTIC
from maxfactor.backends.triton.kernels.tiles import store_tile


@triton.jit
def write_weights(
    pointer,
    w,
    move,
    keep,
    key,
    origin,
    stride,
    rows,
    cols,
    m,
    n,
    flags,
    P_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The end of (4) and (9) for a piece: round, write, return what was written as float32."""
    w = w * keep - move
    if tl.float32 != P_KIND:
        if (flags & STOCHASTIC) != 0:
            w = rounded(w, rows, cols, stride, origin, key, P_KIND)
        else:
            w = w.to(P_KIND).to(tl.float32)
    store_tile(pointer, w, rows, cols, m, n, P_KIND, ALIGNED)
    return w


@triton.jit
def rounded(w, rows, cols, n, start, key, KIND: tl.constexpr):
    """Stochastic rounding of a piece, bit for bit as `rounding.rounded`.

    `start` and `n` place it in the whole tensor: where the first row begins, and the next after it.
    """
    first = start + rows.to(tl.int64) * n  # 64 bits only for what a row shares
    word = first.to(tl.uint32) * 0x9E3779B1 + (first >> 32).to(tl.uint32) * 0x7FEB352D + key
    noise = word[:, None] + (cols.to(tl.uint32) * 0x9E3779B1)[None, :]
    if (start + tl.max(rows, axis=0) * n + n) >> 32 != (start + tl.min(rows, axis=0) * n) >> 32:
        carried = (first & 0xFFFFFFFF)[:, None] + cols[None, :] > 0xFFFFFFFF  # into the high word
        noise += tl.where(carried, 0x7FEB352D, 0).to(tl.uint32)
    noise = (noise ^ (noise >> 16)) * 0x85EBCA6B
    bits = w.to(tl.uint32, bitcast=True)
    if tl.bfloat16 == KIND:
        low = ((bits + (noise >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        normal = ((bits + (noise >> 19)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        share = (noise >> 9).to(tl.float32) * 1.1920928955078125e-07  # 2^-23
        scaled = w * 16777216.0  # spacing 2^-24
        below = tl.floor(scaled)
        above = tl.where(scaled - below + share >= 1.0, 1.0, 0.0)
        tiny = (below + above) * 5.9604644775390625e-08
        low = tl.where(tl.abs(w) < 6.103515625e-05, tiny, normal)
    return tl.where(tl.abs(w) < float("inf"), low, w)


@triton.jit
def mix(x):
    """A bijection of 32 bits; `rounding.mix` in unsigned arithmetic."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_key(seed_keys, group, t):
    """One key for each step of a run; `rounding.noise_key`."""
    return mix(tl.load(seed_keys + group).to(tl.uint32) + t.to(tl.uint32))
