"""Every version, and Adafactor, against the float64 oracle: parameters and all state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from arrays import assert_close
from cases import (
    ADAFACTOR_VARIANTS,
    SHAPES,
    STEPS,
    VARIANTS,
    Problem,
    arguments,
    problem,
    published,
)
from maxfactor import Adafactor, MaxFactor, rule
from maxfactor.optimizer import FactoredOptimizer

VERSIONS = ["0.1", "0.2", "0.3", "1.0"]


def run(optimizer: FactoredOptimizer, param: Tensor, case: Problem) -> list[dict[str, Tensor]]:
    """Step through the injected gradients; return copies of parameter and state of each step."""
    history = []
    for grad in case.grads:
        param.grad = grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, grad), "the gradient belongs to the user"
        seen = {"param": param, **optimizer.state[param]}
        history.append({key: value.detach().clone() for key, value in seen.items()})
    return history


def run_reference(optimizer: FactoredOptimizer, case: Problem) -> list[dict[str, Tensor]]:
    """The same by the functional form, with the optimizer's settings."""
    weight, settings_ = case.weight, optimizer._settings(0)
    state, history = rule.init_state(weight, settings_), []
    for grad in case.grads:
        weight, state, _ = rule.step(weight, grad, state, settings_)
        history.append({"param": weight, **state})
    return history


def compare(
    history: list[dict[str, Tensor]], expected: list[oracle.Snapshot], rtol: float = 1e-6
) -> None:
    """Parameters relative to their largest entry (they cross zero), statistics entry by entry."""
    for t, (ours, theirs) in enumerate(zip(history, expected, strict=True), start=1):
        assert set(ours) == {"param", *theirs.state}
        scale = max(1e-30, float(np.abs(theirs.param).max(initial=0.0)))
        assert_close(
            ours["param"].double().numpy(),
            theirs.param,
            rtol=rtol,
            atol=rtol * scale,
            err_msg=f"parameter at step {t}",
        )
        for key, value in theirs.state.items():
            assert ours[key].dtype == (torch.int64 if key == "step" else torch.float32)
            assert_close(
                ours[key].double().numpy(), value, rtol=2e-6, atol=1e-37, err_msg=f"{key} at {t}"
            )


def maxfactor_pair(
    case: Problem, version: str, variant: dict[str, Any]
) -> tuple[list[dict[str, Tensor]], list[oracle.Snapshot]]:
    param = torch.nn.Parameter(case.weight.clone())
    optimizer = MaxFactor([param], **arguments(published(version), variant))
    weight, grads = case.arrays()
    return run(optimizer, param, case), oracle.maxfactor(weight, grads, version, **variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_maxfactor(shape: str, version: str, variant: str) -> None:
    compare(*maxfactor_pair(problem(SHAPES[shape]), version, VARIANTS[variant]))


@pytest.mark.parametrize("variant", ADAFACTOR_VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_adafactor(shape: str, variant: str) -> None:
    case, chosen = problem(SHAPES[shape]), ADAFACTOR_VARIANTS[variant]
    param = torch.nn.Parameter(case.weight.clone())
    history = run(Adafactor([param], **chosen), param, case)
    weight, grads = case.arrays()
    compare(history, oracle.adafactor(weight, grads, **chosen))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["0-d", "1-d", "tall", "3-d"])
def test_the_reference(shape: str, version: str, variant: str) -> None:
    case, chosen = problem(SHAPES[shape]), VARIANTS[variant]
    made = MaxFactor([case.weight.clone()], **arguments(published(version), chosen))
    weight, grads = case.arrays()
    compare(run_reference(made, case), oracle.maxfactor(weight, grads, version, **chosen))


@pytest.mark.parametrize("variant", ADAFACTOR_VARIANTS)
@pytest.mark.parametrize("shape", ["0-d", "1-d", "tall", "3-d"])
def test_the_reference_of_adafactor(shape: str, variant: str) -> None:
    case, chosen = problem(SHAPES[shape]), ADAFACTOR_VARIANTS[variant]
    made = Adafactor([case.weight.clone()], **chosen)
    weight, grads = case.arrays()
    compare(run_reference(made, case), oracle.adafactor(weight, grads, **chosen))


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e-6, 1e6, 1e15])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["1-d", "tall", "3-d"])
def test_floors_and_ranges(shape: str, version: str, scale: float) -> None:
    """Gradients so small that the floors act, and so large that a product would overflow."""
    case = problem(SHAPES[shape], scale=scale)
    history, expected = maxfactor_pair(case, version, {})
    if scale == 1e-30:  # squares underflow float32: only the moves can be compared
        for ours in history:
            assert all(bool(value.isfinite().all()) for value in ours.values())
    else:
        compare(history, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["0-d", "1-d", "wide", "4-d"])
def test_other_dtypes(shape: str, version: str, dtype: torch.dtype) -> None:
    """Statistics as exact as in float32; weights within half a unit of rounding per step."""
    case = problem(SHAPES[shape], dtype=dtype)
    history, expected = maxfactor_pair(case, version, {})
    by_reference = run_reference(MaxFactor([case.weight.clone()], **published(version)), case)
    rounding = max(1e-6, STEPS * torch.finfo(dtype).eps)
    for each in (history, by_reference):
        assert each[0]["param"].dtype == dtype
        compare(each, expected, rtol=rounding)


@pytest.mark.parametrize("version", VERSIONS)
def test_non_contiguous(version: str) -> None:
    """A transposed parameter with strided gradients is the same matrix."""
    case = problem((31, 7))
    param = torch.nn.Parameter(case.weight.t().contiguous().t())
    assert not param.is_contiguous()
    optimizer = MaxFactor([param], **published(version))
    strided = Problem(case.weight, [grad.t().contiguous().t() for grad in case.grads])
    weight, grads = case.arrays()
    compare(run(optimizer, param, strided), oracle.maxfactor(weight, grads, version))


@pytest.mark.parametrize("version", VERSIONS)
def test_changing_lr(version: str) -> None:
    """A scheduler writes a new lr every step, 0 among them, as a float or into a tensor."""
    rates = [0.0, 0.1, 0.02, 0.3, 0.0, 0.01, 0.5, 0.001, 0.2, 0.4, 0.05, 0.6]
    case = problem((8, 5), steps=len(rates))
    weight, grads = case.arrays()
    expected = oracle.maxfactor(weight, grads, version, lr=rates)
    for as_tensor in (False, True):
        param = torch.nn.Parameter(case.weight.clone())
        settings_ = published(version) | {"lr": torch.tensor(0.7) if as_tensor else 0.7}
        optimizer = MaxFactor([param], **settings_)
        history = []
        for rate, grad in zip(rates, case.grads, strict=True):
            if as_tensor:
                optimizer.param_groups[0]["lr"].fill_(rate)
            else:
                optimizer.param_groups[0]["lr"] = rate
            history += run(optimizer, param, Problem(case.weight, [grad]))
        compare(history, expected)
        assert history[3]["param"].ne(history[4]["param"]).sum() == 0, "lr = 0 moves nothing"


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple),
    version=st.sampled_from(VERSIONS),
    factor=st.sampled_from(["auto", "last"]),
    seed=st.integers(0, 10_000),
)
def test_any_shape(shape: tuple[int, ...], version: str, factor: str, seed: int) -> None:
    compare(*maxfactor_pair(problem(shape, steps=4, seed=seed), version, {"factor": factor}))
