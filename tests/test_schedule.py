"""AdaptiveSchedule: the curve, its independence of the optimizer, chaining and resuming."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, SequentialLR

from maxfactor import Adafactor, AdaptiveSchedule, MaxFactor


def make(**arguments: Any) -> tuple[torch.nn.Parameter, MaxFactor, AdaptiveSchedule]:
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = MaxFactor([param], lr=arguments.pop("lr", 0.01))
    return param, optimizer, AdaptiveSchedule(optimizer, **arguments)


def advance(
    param: torch.nn.Parameter, optimizer: torch.optim.Optimizer, schedule: Any, steps: int
) -> list[float]:
    """Train `steps` steps; return the cap that each of them used."""
    caps = []
    for t in range(steps):
        param.grad = torch.full_like(param, math.sin(t))
        caps.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return caps


def test_the_cap_survives_real_training() -> None:
    """The published schedule fed the optimizer's own rate back, so the cap could only fall."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    optimizer = MaxFactor(model.parameters(), lr=0.01)
    schedule = AdaptiveSchedule(optimizer, warmup_steps=500)
    caps = []
    for _ in range(1000):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        caps.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert caps[0] == pytest.approx(0.01 * 0.001)
    assert caps[250] == pytest.approx(0.01 * (0.001 + 0.999 * 0.5))
    assert caps[500:] == [0.01] * 500
    assert schedule.get_last_lr() == [0.01]
    effective = schedule.effective_lr()[0]
    assert effective == optimizer.effective_lr()[0]
    assert 0.0 < effective != 0.01


def test_warmup_then_cosine_then_flat() -> None:
    _, _, schedule = make(warmup_steps=10, total_steps=30, decay_factor=0.1)
    curve = [schedule.factor(step) for step in range(40)]
    assert curve[0] == 0.001
    assert curve[:11] == sorted(curve[:11])
    differences = [b - a for a, b in pairwise(curve[:11])]
    assert differences == pytest.approx([0.0999] * 10)
    assert curve[10] == 1.0
    assert curve[20] == pytest.approx(0.55)
    assert curve[10:31] == sorted(curve[10:31], reverse=True)
    assert curve[30:] == pytest.approx([0.1] * 10)


def test_ends_of_the_decay() -> None:
    """A tenth if nothing is said; a factor of 1 is no decay."""
    assert make(total_steps=1)[2].factor(1) == pytest.approx(0.1)
    assert make(total_steps=1, decay_factor=1.0)[2].factor(1) == 1.0


def test_no_decay_without_total_steps() -> None:
    *_, schedule = make(warmup_steps=3, decay_factor=0.5)
    assert [schedule.factor(step) for step in (3, 100, 10**9)] == [1.0] * 3


def test_initial_lr_overrides_the_base() -> None:
    param, optimizer, schedule = make(initial_lr=0.2, warmup_steps=4)
    assert advance(param, optimizer, schedule, 6)[4:] == [0.2, 0.2]
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_each_group_keeps_its_own_base() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": [params[0]], "lr": 0.1}, {"params": [params[1]]}]
    optimizer = MaxFactor(groups, lr=0.3)
    schedule = AdaptiveSchedule(optimizer, warmup_steps=2)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [0.1, 0.3]


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_a_group_that_comes_later(lr: float | torch.Tensor) -> None:
    """Its own rate is its base, as of those that were there, also after a resume."""
    param, optimizer, schedule = make(lr=0.2, warmup_steps=0, total_steps=4)
    advance(param, optimizer, schedule, 1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": lr})
    advance(param, optimizer, schedule, 1)
    factor = schedule.factor(2)
    assert [float(x) for x in schedule.get_last_lr()] == pytest.approx([0.2 * factor, 0.5 * factor])
    again = AdaptiveSchedule(optimizer, warmup_steps=0, total_steps=4)
    again.load_state_dict(schedule.state_dict())
    advance(param, optimizer, again, 1)
    factor = schedule.factor(3)
    assert [float(x) for x in again.get_last_lr()] == pytest.approx([0.2 * factor, 0.5 * factor])


def test_base_rates_of_a_loaded_schedule_count() -> None:
    """As in torch's own schedules; a group that comes later has its own."""
    _, optimizer, schedule = make(lr=0.2, warmup_steps=0)
    schedule.load_state_dict({**schedule.state_dict(), "base_lrs": [0.05]})
    assert schedule.get_lr() == [0.05]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.5})
    assert schedule.get_lr() == [0.05, 0.5]


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_resume_in_the_middle_gives_the_same_curve(lr: float | torch.Tensor) -> None:
    settings: dict[str, Any] = {"warmup_steps": 5, "total_steps": 20, "decay_factor": 0.2}

    def fresh() -> tuple[torch.nn.Parameter, MaxFactor, AdaptiveSchedule]:
        return make(lr=lr.clone() if isinstance(lr, torch.Tensor) else lr, **settings)

    whole = advance(*fresh(), 20)
    param, optimizer, schedule = fresh()
    first = advance(param, optimizer, schedule, 8)
    saved = optimizer.state_dict(), schedule.state_dict()
    param, optimizer, schedule = fresh()
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    assert first + advance(param, optimizer, schedule, 12) == whole


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # torch 2.6, of itself
def test_chaining_by_sequential_lr() -> None:
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = MaxFactor([param], lr=0.01)
    parts = [
        ConstantLR(optimizer, factor=0.5, total_iters=100),
        AdaptiveSchedule(optimizer, warmup_steps=4, total_steps=10, decay_factor=0.5),
    ]
    chain = SequentialLR(optimizer, parts, milestones=[3])
    caps = advance(param, optimizer, chain, 16)
    assert caps[:3] == pytest.approx([0.005] * 3)
    expected = [0.01 * parts[1].factor(step) for step in range(13)]  # type: ignore[attr-defined]
    assert caps[3:] == pytest.approx(expected)


def test_any_optimizer_may_be_scheduled() -> None:
    param = torch.nn.Parameter(torch.ones(3, 2))
    for optimizer in (
        torch.optim.AdamW([param], lr=0.01),
        Adafactor([param], lr=0.01, relative_step=True),
    ):
        schedule = AdaptiveSchedule(optimizer, warmup_steps=4)
        assert advance(param, optimizer, schedule, 6)[4:] == [0.01, 0.01]
    adamw = AdaptiveSchedule(torch.optim.AdamW([param], lr=0.01))
    assert adamw.effective_lr() == [0.01]
