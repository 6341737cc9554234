"""What used to raise an error of torch or Python: it works, or is refused in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from maxfactor import Adafactor, AdaptiveSchedule, MaxFactor, for_model, release_gradients

by_fused = pytest.mark.parametrize("fused", [False, True])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def in_two_groups(own: nn.Sequential, **given: Any) -> MaxFactor:
    named = list(own.named_parameters())
    return MaxFactor([{"params": named[:2]}, {"params": named[2:]}], **given)


def train(own: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@by_fused
@pytest.mark.parametrize("index", [0, 1])
def test_a_removed_group(fused: bool, index: int) -> None:
    """The others go on, are saved and loaded; the removed one stays as it is."""
    own = model()
    optimizer = in_two_groups(own, fused=fused)
    train(own, optimizer)
    optimizer.param_groups.pop(index)
    gone = [param.detach().clone() for param in own[index].parameters()]
    train(own, optimizer)
    saved = optimizer.state_dict()
    assert len(saved["state"]) == 2
    optimizer.load_state_dict(saved)
    train(copy.deepcopy(own), optimizer)
    assert len(optimizer.describe()) == 1
    assert len(optimizer.effective_lr()) == 1
    for param, before in zip(own[index].parameters(), gone, strict=True):
        assert torch.equal(param, before)


def test_a_schedule_follows_a_removed_group() -> None:
    own = model()
    optimizer = in_two_groups(own)
    optimizer.param_groups[1]["lr"] = 0.5
    schedule = AdaptiveSchedule(optimizer)
    train(own, optimizer)
    optimizer.param_groups.pop(0)
    schedule.step()
    assert schedule.get_last_lr() == [0.5]


def test_a_schedule_follows_a_replaced_group() -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = MaxFactor([{"params": [first], "lr": 1e-2}, {"params": [second], "lr": 1e-3}])
    schedule = AdaptiveSchedule(optimizer, warmup_steps=0, total_steps=10)
    del optimizer.param_groups[0]
    optimizer.add_param_group({"params": [third], "lr": 5e-2})
    assert schedule.get_lr() == [1e-3, 5e-2]


def test_settings_follow_a_removed_group() -> None:
    """Group 1 becomes group 0, whose momentum was no number."""
    first, second = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "momentum": 0.9}]
    optimizer = MaxFactor(groups)
    for _ in range(2):
        for param in (first, second):
            param.grad = torch.ones_like(param)
        optimizer.step()
        del optimizer.param_groups[:-1]
    assert int(optimizer.state[second]["step"]) == 2


def test_released_gradients_follow_a_removed_group() -> None:
    own, other = model(), model()
    optimizer, plain = in_two_groups(own), in_two_groups(other)
    with release_gradients(own, optimizer):
        for net, each in ((own, optimizer), (other, plain)):
            train(net, each)
            each.param_groups.pop()
            train(net, each)
            train(net, each)
    for a, b in zip(own.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_parameter_removed_without_its_name() -> None:
    own = model()
    optimizer = in_two_groups(own)
    optimizer.param_groups[0]["params"].pop()
    own(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"group 0 has 1 parameters in 'params' and 2 names"):
        optimizer.step()


def test_a_group_inserted_by_hand_is_saved_as_ours() -> None:
    own = model()
    optimizer = MaxFactor(own[0].parameters())
    optimizer.param_groups.append({"params": list(own[1].parameters()), "lr": 0.1})
    train(own, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())


@by_fused
@pytest.mark.parametrize("cls", [MaxFactor, Adafactor])
def test_meta_parameters_are_refused(cls: type[Any], fused: bool) -> None:
    here, away = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.empty(4, 3, device="meta"))
    optimizer = cls([("here", here), ("away", away)], fused=fused)
    here.grad, away.grad = torch.ones(2, 2), torch.empty_like(away)
    with pytest.raises(RuntimeError, match=r"'away' is on the meta device.*model.to_empty"):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(here, torch.ones(2, 2))


def test_a_state_left_on_another_device() -> None:
    own = nn.Linear(3, 2)
    optimizer = MaxFactor(own.named_parameters())
    train(own, optimizer)
    optimizer.state[own.weight]["row_var"] = torch.empty(2, 1, device="meta")
    with pytest.raises(RuntimeError, match=r"'weight' is on cpu, but its row_var .* is on meta; "):
        train(own, optimizer)
    assert [int(state["step"]) for state in optimizer.state.values()] == [1, 1]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded rows": lambda x: x[:1].expand(4, 6),
    "expanded columns": lambda x: x[:, :1].expand(4, 6),
    "windows": lambda x: x.flatten().unfold(0, 6, 2)[:4],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("given", [{}, {"momentum": 0.9}])
def test_overlapping_parameters_are_refused(view: str, given: dict[str, Any]) -> None:
    param = nn.Parameter(VIEWS[view](torch.ones(4, 6)))
    with pytest.raises(ValueError, match=r"elements of parameter 'w' \(4, 6\) share .*clone\(\)"):
        MaxFactor([("w", param)], **given)
    optimizer = MaxFactor([("v", nn.Parameter(torch.ones(2)))], **given)
    with pytest.raises(ValueError, match="share one place"):
        optimizer.add_param_group({"params": [("w", param)]})
    assert len(optimizer.param_groups) == 1


def test_a_parameter_that_overlaps_later_is_refused_before_any_counter_moves() -> None:
    first, param = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4, 6))
    optimizer = MaxFactor([first, param], momentum=0.9)
    for _ in range(2):
        first.grad, param.grad = torch.ones(2), torch.ones(4, 6)
        if optimizer.state:
            param.data = torch.ones(1, 6).expand(4, 6)
            with pytest.raises(ValueError, match=r"'param_1' .* share one place"):
                optimizer.step()
        else:
            optimizer.step()
    assert [int(state["step"]) for state in optimizer.state.values()] == [1, 1]


@pytest.mark.parametrize(
    "strided",
    [
        torch.ones(4, 6).t(),
        torch.ones(8, 6)[::2],
        torch.ones(4, 12)[:, ::2],
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(1, 6).expand(1, 6),
        torch.ones(0, 6),
    ],
)
def test_other_strides_are_stepped(strided: torch.Tensor) -> None:
    param = nn.Parameter(strided)
    optimizer = MaxFactor([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert (param < 1.0).all()


def test_for_model_refuses_an_expanded_parameter() -> None:
    own = nn.Linear(3, 2)
    own.weight = nn.Parameter(torch.ones(1, 3).expand(2, 3))
    with pytest.raises(ValueError, match=r"elements of parameter 'weight' \(2, 3\) share"):
        for_model(own)
