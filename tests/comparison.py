"""Backends against the rule: momentum, directions and scales, step by step from the same start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Problem, arguments, group_of
from maxfactor import MaxFactor, rule
from maxfactor.backends.step_io import StepInput
from maxfactor.rule import MaxFactorSettings
from maxfactor.settings import Settings


def inputs_of(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    settings: Settings,
) -> list[StepInput]:
    """What the optimizer would hand to a backend."""
    return [
        StepInput(
            f"p{i}", param, grad, settings.rules.of(tuple(param.shape)), settings.rate, 0, state
        )
        for i, (param, grad, state) in enumerate(zip(params, grads, states, strict=True))
    ]


BF16_ITERATION = 0.2  # how far values of an orthogonal direction may be off on a GPU, 2 % even more


def compare_with_rule(
    settings: dict[str, Any], cases: list[Problem], backend: str, device: str = "cpu"
) -> None:
    """All parameters in one optimizer; each step of each from the same start by the rule."""
    params: list[Tensor] = [torch.nn.Parameter(case.weight.to(device, copy=True)) for case in cases]
    chosen: dict[str, Any] = {"foreach": backend == "foreach", "fused": backend == "fused"}
    groups, others = group_of(params, arguments(settings))
    optimizer = MaxFactor(groups, **chosen, **others)
    checked = MaxFactorSettings(**arguments(settings))
    noise = 2e-5  # in units of the step size
    if checked.direction == "orthogonal":  # the iteration is in bfloat16 on a GPU
        noise = 5e-4 if device == "cpu" else BF16_ITERATION
    states = [rule.init_state(case.weight, checked) for case in cases]
    for t in range(len(cases[0].grads)):
        expected = []
        for param, case, state in zip(params, cases, states, strict=True):
            param.grad = case.grads[t].to(device, copy=True)
            expected.append(rule.step(param.detach().cpu(), case.grads[t], state, checked))
        optimizer.step()
        for i, (param, case) in enumerate(zip(params, cases, strict=True)):
            assert param.grad is not None
            assert torch.equal(param.grad.cpu(), case.grads[t]), "the gradient belongs to the user"
            states[i] = {k: v.to("cpu", copy=True) for k, v in optimizer.state[param].items()}
            what = f"{tuple(param.shape)} at {t}"
            untouched = torch.stack(case.grads[: t + 1]).abs().sum(dim=0) == 0.0
            same_step(param.detach().cpu(), untouched, states[i], expected[i], checked, noise, what)
    mean = sum(float(result.step_size) for result in expected) / len(expected)
    assert optimizer.effective_lr() == pytest.approx([mean], rel=1e-6)


def same_step(
    param: Tensor,
    untouched: Tensor,
    state: dict[str, Tensor],
    expected: rule.Result,
    checked: Settings,
    noise: float,
    what: str,
) -> None:
    """The same but for a few values that were on the edge of rounding, or of a sign."""
    assert state.keys() == expected.state.keys()
    tipped = 0
    for key, value in state.items():
        theirs = expected.state[key]
        assert value.dtype == theirs.dtype, f"{key} of {what}"
        size = max(1e-30, float(theirs.abs().max()) if theirs.numel() else 0.0)
        if key == "momentum" and value.dtype != torch.float32:
            off = (value.double() - theirs.double()).abs()
            step = (
                1.0 if value.dtype == torch.int8 else 2.0**-7 * theirs.double().abs() + 1e-6 * size
            )
            assert bool((off <= step).all()), f"{key} of {what}"
            tipped = int((off > 0).sum())
            assert tipped <= 2 + 0.002 * value.numel(), f"{key} of {what}"
        elif not torch.equal(value, theirs):  # as it mostly is, and faster to see
            loose = 5e-6 * size if key.startswith(("momentum", "band")) else 1e-37
            torch.testing.assert_close(value, theirs, rtol=4e-6, atol=loose)
    alpha = float(expected.step_size)
    off = (param.double() - expected.param.double()).abs()
    ulp = 0.0 if param.dtype == torch.float32 else torch.finfo(param.dtype).eps
    largest = max(1e-30, float(expected.param.abs().max()) if param.numel() else 0.0)
    allowed = (
        ulp * expected.param.double().abs() + 1e-6 * largest + (0.2 if tipped else noise) * alpha
    )
    if checked.rules.matrix.bands > 1:
        off[untouched] = 0.0  # zero but for the rounding of two transforms, and then its sign
    wrong = int((off > allowed).sum())
    share = 0.02 if noise == BF16_ITERATION else 0.001
    assert wrong <= share * param.numel() + (2 if tipped else 0), f"parameter {what}: {wrong}"
    assert bool((off <= allowed + 2.0 * alpha).all()), f"parameter {what}"
