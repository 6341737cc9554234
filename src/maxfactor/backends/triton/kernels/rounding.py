"""How new weights are written: with stochastic rounding, or rounded to nearest.

Stochastic rounding as in Gupta et al., "Deep Learning with Limited Numerical Precision" (2015),
https://arxiv.org/abs/1502.02551. The noise is a hash of seed, step and position, so a run repeats
bit for bit on any grid and for any shard.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import FLAG, MEASURE, SCALAR
from maxfactor.backends.triton.kernels.tiles import store_tile


@triton.jit
def write_weights(target, w, move, piece, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Decay, move, round and write a piece of W; return what was written as float32.

    The result is computed in float32 and rounded once.
    """
    w = w * target.keep - move  # (4)
    if tl.float32 != DTYPE:
        if (target.noise.flags & FLAG.STOCHASTIC) != 0:
            w = rounded(w, piece.rows, piece.cols, target.noise, DTYPE)
        else:
            w = w.to(DTYPE).to(tl.float32)
    store_tile(target.pointer, w, piece, DTYPE, ALIGNED)
    return w


@triton.jit
def change_of(target, before, move, after, piece, DTYPE: tl.constexpr):
    """The sum of squares of a piece's change, and how much of it nearest rounding drops.

    Both by column: (W after - W before)², and the number of changes that would be lost.
    """
    inside = (piece.rows < target.m)[:, None] & (piece.cols < target.n)[None, :]
    change = tl.where(inside, after - before, 0.0)
    lost = tl.zeros_like(change)
    if tl.float32 != DTYPE:
        wanted = before * target.keep - move
        dropped = (wanted.to(DTYPE).to(tl.float32) == before) & (wanted != before)
        lost = tl.where(inside & dropped, 1.0, 0.0)
    return tl.sum(change * change, axis=0), tl.sum(lost, axis=0)


@triton.jit
def store_measures(target, changes, weights, lost):
    """Store a tile's sums of a recorded step, given by column."""
    tl.store(target.measures + MEASURE.CHANGES, tl.sum(changes, axis=0))
    tl.store(target.measures + MEASURE.WEIGHTS, tl.sum(weights, axis=0))
    tl.store(target.measures + MEASURE.LOST, tl.sum(lost, axis=0))


@triton.jit
def rounded(w, rows, cols, noise, DTYPE: tl.constexpr):
    """Round a piece to bfloat16 or float16, bit for bit as `maxfactor.rule.rounding.rounded`.

    Random bits are added below the last one that is kept, and the rest is cut off. Subnormal
    float16 has one fixed spacing. Infinities and NaN stay.
    """
    start, n = noise.origin, noise.stride
    first = start + rows.to(tl.int64) * n  # 64 bits only for what a row shares
    word = first.to(tl.uint32) * 0x9E3779B1 + (first >> 32).to(tl.uint32) * 0x7FEB352D + noise.key
    bits = word[:, None] + (cols.to(tl.uint32) * 0x9E3779B1)[None, :]
    if (start + tl.max(rows, axis=0) * n + n) >> 32 != (start + tl.min(rows, axis=0) * n) >> 32:
        carried = (first & 0xFFFFFFFF)[:, None] + cols[None, :] > 0xFFFFFFFF  # into the high word
        bits += tl.where(carried, 0x7FEB352D, 0).to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    of_w = w.to(tl.uint32, bitcast=True)
    if tl.bfloat16 == DTYPE:
        low = ((of_w + (bits >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        normal = ((of_w + (bits >> 19)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        share = (bits >> 9).to(tl.float32) * 1.1920928955078125e-07  # 2^-23
        scaled = w * 16777216.0  # spacing 2^-24
        below = tl.floor(scaled)
        above = tl.where(scaled - below + share >= 1.0, 1.0, 0.0)
        tiny = (below + above) * 5.9604644775390625e-08
        low = tl.where(tl.abs(w) < 6.103515625e-05, tiny, normal)
    return tl.where(tl.abs(w) < float("inf"), low, w)


@triton.jit
def mix(x):
    """A bijection of 32 bits; `maxfactor.rule.rounding.mix` in unsigned arithmetic."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_key(seed_keys, group, scalar):
    """One key per step of a run; `maxfactor.rule.rounding.noise_key`."""
    count = tl.load(scalar + SCALAR.COUNT_BITS).to(tl.uint32, bitcast=True)
    return mix(tl.load(seed_keys + group).to(tl.uint32) + count)
