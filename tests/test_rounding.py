"""Stochastic rounding keeps on average what rounding to nearest loses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from maxfactor import MaxFactor
from maxfactor.rule.rounding import rounded
from maxfactor.settings import MaxFactorSettings

STEPS, SIZE = 2_000, 1024


def trained(dtype: torch.dtype, rounding: Any, gradient: float, steps: int = STEPS) -> float:
    """The mean weight after many steps that each change it by a two-thousandth."""
    param = torch.nn.Parameter(torch.ones(SIZE, dtype=dtype))
    decay = 0.0 if gradient else 1.0
    optimizer = MaxFactor([param], lr=1 / STEPS, weight_decay=decay, rounding=rounding, seed=0)
    param.grad = torch.full_like(param, gradient)
    for _ in range(steps):
        optimizer.step()
    return param.detach().double().mean().item()


@pytest.mark.parametrize("gradient", [1.0, 0.0], ids=["update", "decay"])
def test_thousands_of_small_changes(gradient: float) -> None:
    """Each is an eighth of bfloat16's spacing: nearest never moves, stochastic keeps up."""
    exact = trained(torch.float32, None, gradient)
    assert exact == pytest.approx(math.exp(-1.0), rel=1e-3)
    assert trained(torch.bfloat16, "nearest", gradient, steps=500) == 1.0
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
