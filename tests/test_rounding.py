"""Stochastic rounding keeps on average what rounding to nearest loses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from maxfactor import MaxFactor
from maxfactor.rule.rounding import rounded, rounded_fp16
from maxfactor.settings import MaxFactorSettings

STEPS, SIZE = 1_000, 1024


def trained(dtype: torch.dtype, rounding: Any, gradient: float, steps: int = STEPS) -> float:
    """The mean weight after many steps that each change it by a thousandth."""
    param = torch.nn.Parameter(torch.ones(SIZE, dtype=dtype))
    decay = 0.0 if gradient else 1.0
    optimizer = MaxFactor([param], lr=1 / STEPS, weight_decay=decay, rounding=rounding, seed=0)
    param.grad = torch.full_like(param, gradient)
    for _ in range(steps):
        optimizer.step()
    return param.detach().double().mean().item()


@pytest.mark.parametrize("gradient", [1.0, 0.0], ids=["update", "decay"])
def test_a_thousand_small_changes(gradient: float) -> None:
    """Each is a quarter of bfloat16's spacing: nearest never moves, stochastic keeps up."""
    exact = trained(torch.float32, None, gradient)
    assert exact == pytest.approx(math.exp(-1.0), rel=1e-3)
    assert trained(torch.bfloat16, "nearest", gradient, steps=250) == 1.0
    spacing, noise = 2.0**-8, math.sqrt(STEPS / SIZE)
    assert abs(trained(torch.bfloat16, None, gradient) - exact) < 4 * spacing / 2 * noise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, -3.1, 1e-3, 2e-6, 5e-8, 0.0, 60000.0])
def test_the_mean_is_the_value(dtype: torch.dtype, value: float) -> None:
    """Over many positions; both neighbours occur, and nothing else. Subnormal numbers too."""
    rule = MaxFactorSettings(rounding="stochastic", seed=5).rules.matrix
    w = torch.full((1 << 16,), value)
    low = rounded(w, dtype, rule, 7.0).double()
    exact = float(w[0])
    step = (low.max() - low.min()).item()
    assert len(low.unique()) <= 2
    assert low.min() <= exact <= low.max()
    assert low.mean().item() == pytest.approx(exact, abs=max(step, 1e-30) * 0.02)


def test_what_a_16_bit_number_can_hold_stays() -> None:
    rule = MaxFactorSettings(rounding="stochastic", seed=1).rules.matrix
    special = torch.tensor([0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan")])
    for dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(
            rounded(special, dtype, rule, 3.0), special.to(dtype), equal_nan=True
        )


def test_repeatable_from_torchs_seed() -> None:
    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        param = torch.nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16))
        optimizer = MaxFactor([param], lr=1e-3)
        param.grad = torch.ones_like(param)
        for _ in range(5):
            optimizer.step()
        return param.detach()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_positions_continue_across_blocks() -> None:
    """A block that knows where it starts gets the same noise as within the whole."""
    rule = MaxFactorSettings(seed=2**63 + 11).rules.matrix
    w = torch.randn(1000)
    whole = rounded(w, torch.bfloat16, rule, 9.0)
    parts = [rounded(w[s : s + 300], torch.bfloat16, rule, 9.0, s) for s in range(0, 1000, 300)]
    assert torch.equal(whole, torch.cat(parts))
    tensor_time = rounded(w, torch.bfloat16, rule, torch.tensor(9.0))
    assert torch.equal(whole, tensor_time)


# ------------------------------------------------------------------ bit for bit, from the hash


def mixed(x: int) -> int:
    """Two rounds of multiply and shift, of 32 bits."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def noise(seed: int, t: int, position: int) -> int:
    """The 32 random bits of one weight in one step, in integers of any size."""
    key = mixed((mixed(mixed(seed % 2**32) ^ seed >> 32) + t) % 2**32)
    low, high = position % 2**32, position >> 32
    word = (low * 0x9E3779B1 + high * 0x7FEB352D + key) % 2**32
    return (word ^ word >> 16) * 0x85EBCA6B % 2**32


def rounded_by_hand(w: float, dtype: torch.dtype, bits: int) -> float:
    """Up to the next number if the noise fills what is missing to it.

    The noise has as many bits as float32 has below the last place. Subnormal numbers of float16 use
    23, and are rounded up from minus infinity; others away from zero.
    """
    if dtype == torch.float16 and abs(w) < 2.0**-14:
        spacing, used, sign = 2.0**-24, 23, 1.0
    else:
        kept = 8 if dtype == torch.bfloat16 else 11  # significant bits, of 24
        spacing, used, sign = 2.0 ** (math.frexp(w)[1] - kept), 24 - kept, math.copysign(1.0, w)
    below = math.floor(sign * w / spacing)
    is_up = sign * w / spacing - below + (bits >> 32 - used) * 2.0**-used >= 1.0
    return sign * spacing * (below + is_up)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("seed", "t", "start"),
    [
        (5, 7, 0),
        (2**63 + 11, 2**24 + 1, 3),
        (2**40, 1, 2**31 - 20),
        (0xFEDCBA9876543210, 2, 3 * 2**32 - 7),
    ],
)
def test_every_bit_follows_from_the_hash(seed: int, t: int, start: int, dtype: torch.dtype) -> None:
    """Also where positions pass 2^31, and from the list of positions that a shard has."""
    rule = MaxFactorSettings(rounding="stochastic", seed=seed).rules.matrix
    size = np.random.default_rng(0).normal(size=60) * np.repeat([1.0, 4e-5, 1e-7], 20)
    w = torch.from_numpy(size).float().reshape(4, 15)
    pairs = zip(w.flatten().tolist(), range(start, start + 60), strict=True)
    by_hand = [rounded_by_hand(x, dtype, noise(seed, t, place)) for x, place in pairs]
    expected = torch.tensor(by_hand, dtype=dtype).reshape(4, 15)
    positions = torch.arange(start, start + 60)
    for where in (start, positions):
        for time in (t, torch.tensor(t)):
            found = rounded(w, dtype, rule, time, where)
            assert found.shape == w.shape
            assert torch.equal(found, expected)


def test_the_ends_of_float16() -> None:
    """The smallest normal number and its neighbours, on the grid and between."""
    rule = MaxFactorSettings(rounding="stochastic", seed=3).rules.matrix
    exact = torch.tensor([2.0**-14, -(2.0**-14), 2.0**-14 - 2.0**-24, 2.0**-24, 2.0**-14 * 1.5])
    assert torch.equal(rounded(exact, torch.float16, rule, 1.0).float(), exact)
    between = torch.full((4096,), 2.0**-14 * (1 + 2.0**-11))
    found = rounded(between, torch.float16, rule, 1.0).float()
    assert found.unique().tolist() == [2.0**-14, 2.0**-14 * (1 + 2.0**-10)]


def test_noise_that_just_reaches_the_next_number() -> None:
    """A half needs a half: the highest of 32 bits, which is the sign of an int32."""
    w = torch.full((2,), 1.5 * 2.0**-24)
    noise = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
    assert (rounded_fp16(w, noise) / 2.0**-24).tolist() == [2.0, 1.0]


def test_which_weights_are_rounded_so() -> None:
    """Those of 16 bits, if the settings say so; also a transposed one."""
    rule = MaxFactorSettings(rounding="stochastic", seed=3).rules.matrix
    w = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded(w, torch.float32, rule, 1.0), w)
    nearest = MaxFactorSettings(rounding="nearest").rules.matrix
    assert torch.equal(rounded(w, torch.bfloat16, nearest, 1.0), w.to(torch.bfloat16))
    found = rounded(w.T, torch.bfloat16, rule, 1.0)
    assert torch.equal(found, rounded(w.T.contiguous(), torch.bfloat16, rule, 1.0))
