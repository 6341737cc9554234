"""The memories in checkpoints and copies, by group and by name."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import (
    MOMENTUM_RUNS,
)
from maxfactor import FAM, MaxFactor, rule
from maxfactor.rule import MaxFactorSettings


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(70, 5), torch.nn.Conv1d(4, 3, 5)).to(dtype)


def train(optimizer: MaxFactor, model: torch.nn.Module, steps: range) -> None:
    for t in steps:
        generator = torch.Generator().manual_seed(t)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", MOMENTUM_RUNS)
def test_resume_through_a_file_is_exact(run: str, dtype: torch.dtype) -> None:
    """Saved, loaded with weights_only=True into other settings, trained on: the same bits."""
    straight, broken, resumed = net(dtype), net(dtype), net(dtype)
    one = MaxFactor(straight.parameters(), **MOMENTUM_RUNS[run])
    two = MaxFactor(broken.parameters(), **MOMENTUM_RUNS[run])
    train(one, straight, range(8))
    train(two, broken, range(4))
    file = io.BytesIO()
    torch.save({"model": broken.state_dict(), "optimizer": two.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    resumed.load_state_dict(checkpoint["model"])
    three = MaxFactor(resumed.parameters(), lr=0.5)
    three.load_state_dict(checkpoint["optimizer"])
    assert three.param_groups[0]["momentum"] == one.param_groups[0]["momentum"]
    train(three, resumed, range(4, 8))
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in one.state[a].items():
            assert value.dtype == three.state[b][key].dtype
            assert torch.equal(value, three.state[b][key])


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
)
@pytest.mark.parametrize("run", MOMENTUM_RUNS)
def test_copies_go_on_alike(run: str, duplicate: Any) -> None:
    model = net()
    optimizer = MaxFactor(model.parameters(), **MOMENTUM_RUNS[run])
    train(optimizer, model, range(3))
    other_model, other = duplicate((model, optimizer))
    train(optimizer, model, range(3, 6))
    train(other, other_model, range(3, 6))
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_goes_from_backend_to_backend() -> None:
    model, other = net(), net()
    one = MaxFactor(model.parameters(), foreach=True, **MOMENTUM_RUNS["fam int8"])
    two = MaxFactor(other.parameters(), foreach=False, **MOMENTUM_RUNS["fam int8"])
    train(one, model, range(4))
    other.load_state_dict(model.state_dict())
    two.load_state_dict(one.state_dict())
    train(one, model, range(4, 6))
    train(two, other, range(4, 6))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_codes_cannot_be_cast() -> None:
    model = net()
    optimizer = MaxFactor(model.named_parameters(), **MOMENTUM_RUNS["fam int8"])
    train(optimizer, model, range(2))
    saved = optimizer.state_dict()
    saved["state"][0] = {**saved["state"][0], "momentum": saved["state"][0]["momentum"].float()}
    with pytest.raises(ValueError, match=r"momentum of parameter '0.weight' is torch.float32, but"):
        optimizer.load_state_dict(saved)


def test_a_checkpoint_from_before_momentum() -> None:
    model = net()
    saved_from = MaxFactor(model.parameters())
    train(saved_from, model, range(2))
    saved = saved_from.state_dict()
    for name in ("momentum", "nesterov", "momentum_dtype", "direction", "scale"):
        del saved["param_groups"][0][name]
    optimizer = MaxFactor(model.parameters())
    optimizer.load_state_dict(saved)
    train(optimizer, model, range(2, 4))


def test_shapes_and_bytes_of_the_state() -> None:
    for shape, scales in {
        (384, 80, 3): (384, 4, 1),
        (5, 2, 3, 3): (5, 2, 1, 1),
        (130, 65): (130, 2),
    }.items():
        state = rule.init_state(torch.zeros(shape), MaxFactorSettings(momentum=FAM(bands=3)))
        assert state["momentum"].shape == shape
        assert state["momentum"].dtype == torch.int8
        assert state["momentum_scale"].shape == scales
        assert state["band_sums"].shape == (3, 3)
    large = rule.init_state(torch.zeros(1280, 1280), MaxFactorSettings(momentum=FAM()))
    assert sum(x.numel() * x.element_size() for x in large.values()) <= 1.07 * 1280 * 1280


def test_groups_with_memories_of_their_own() -> None:
    """A group's FAM is plain numbers, which any checkpoint may hold."""
    params: list[Tensor] = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    first, second, third = params
    groups: list[dict[str, Any]] = [
        {"params": [first], "momentum": FAM(bands=2)},
        {"params": [second], "momentum": None},
        {"params": [third]},
    ]
    optimizer = MaxFactor(groups, momentum=0.9)
    assert optimizer.param_groups[0]["momentum"]["bands"] == 2
    for param in (first, second, third):
        param.grad = torch.randn(4, 6)
    optimizer.step()
    assert [sorted(optimizer.state[p]) for p in (first, second, third)] == [
        ["band_sums", "col_var", "momentum", "momentum_scale", "row_var", "step"],
        ["col_var", "row_var", "step"],
        ["col_var", "momentum", "momentum_scale", "row_var", "step"],
    ]


def test_spectrum() -> None:
    fam = FAM(warmup=2, theta=0.5, bands=4)
    shapes = [(6, 70), (9,), (3, 4), (5, 8)]
    params: list[Tensor] = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    matrix, vector, other, late = params
    groups: list[dict[str, Any]] = [
        {"params": [matrix, vector, late]},
        {"params": [other], "momentum": 0.9},
    ]
    optimizer = MaxFactor(groups, momentum=fam)
    assert optimizer.spectrum() == {}
    for t in range(1, 5):
        for param in (matrix, vector, other):
            param.grad = torch.randn(param.shape)
        optimizer.step()
        (found,) = optimizer.spectrum().values()
        assert optimizer.spectrum().keys() == {"param_0"}
        a, p, _ = optimizer.state[matrix]["band_sums"]
        assert found.rho.shape == found.beta.shape == found.power.shape == (4,)
        torch.testing.assert_close(found.rho, a / p)
        torch.testing.assert_close(found.power, p / (1 - 0.5**t))
        expected = torch.full((4,), 0.9) if t < 2 else (1 - a / p).clamp(0.5, 0.98)
        torch.testing.assert_close(found.beta, expected)
