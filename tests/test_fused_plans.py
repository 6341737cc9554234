"""A fused plan that is kept: it sees what others do to parameters, gradients and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from maxfactor import MaxFactor, for_model

pytest.importorskip("triton")
from maxfactor.backends.triton import inputs
from maxfactor.backends.triton.kernels.layout import Column, Size
from maxfactor.backends.triton.local_parameters import local_parameter
from maxfactor.backends.triton.plan import LaunchPlan, keys_of, launch_order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu
SHAPES = [(5, 12), (12,), (5, 12), (6, 6), ()]


def write(params: list[Tensor], optimizer: MaxFactor) -> None:
    with torch.no_grad():
        params[0].mul_(3.0)
        params[3].mul_(0.5)


def move(params: list[Tensor], optimizer: MaxFactor) -> None:
    params[1].data = params[1].data.clone()
    params[3].data = 2.0 * params[3].data


def swap(params: list[Tensor], optimizer: MaxFactor) -> None:
    params[0].data, params[2].data = params[2].data, params[0].data


def turn(params: list[Tensor], optimizer: MaxFactor) -> None:
    params[3].data = params[3].data.t()


def turn_gradient(params: list[Tensor], optimizer: MaxFactor) -> None:
    assert params[0].grad is not None
    params[0].grad = params[0].grad.t().contiguous().t()


def drop_gradient(params: list[Tensor], optimizer: MaxFactor) -> None:
    params[2].grad = None


def replace_state(params: list[Tensor], optimizer: MaxFactor) -> None:
    state = optimizer.state[params[0]]
    state["row_var"] = 4.0 * state["row_var"]


def replace_states(params: list[Tensor], optimizer: MaxFactor) -> None:
    optimizer.state[params[0]] = {k: v.clone() for k, v in optimizer.state[params[2]].items()}


def swap_states(params: list[Tensor], optimizer: MaxFactor) -> None:
    states = optimizer.state
    states[params[0]], states[params[2]] = states[params[2]], states[params[0]]


def other_order(params: list[Tensor], optimizer: MaxFactor) -> None:
    optimizer.state[params[0]] = optimizer.state.pop(params[0])


def change_rate(params: list[Tensor], optimizer: MaxFactor) -> None:
    optimizer.param_groups[0]["lr"] = 0.03


EVENTS: list[Callable[[list[Tensor], MaxFactor], None]] = [
    write, move, swap, turn, turn_gradient, drop_gradient,
    replace_state, replace_states, swap_states, other_order, change_rate,
]  # fmt: skip


def after(event: Callable[[list[Tensor], MaxFactor], None], *, kept: bool) -> list[Tensor]:
    """Weights and states after steps with an event among them, with one plan or new ones."""
    drawn = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=drawn).to(DEVICE) for shape in SHAPES]
    params: list[Tensor] = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = MaxFactor(params, lr=0.01, fused=True)
    for step in range(4):
        for param in params:
            param.grad = torch.randn(param.shape, generator=drawn).to(DEVICE)
        if step == 2:
            event(params, optimizer)
        if not kept:
            optimizer.drop_plans()
        optimizer.step()
    states = [x for param in params for x in optimizer.state[param].values()]
    return [x.detach().clone() for x in (*params, *states)]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_what_others_do_is_seen(
    event: Callable[[list[Tensor], MaxFactor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is that of new plans, whether or not torch has its guards."""
    expected = after(event, kept=False)
    monkeypatch.setattr(inputs, "RUN", 2)  # several runs
    found = [after(event, kept=True)]
    monkeypatch.setattr(inputs, "guard_of", lambda _: None)
    found.append(after(event, kept=True))
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))


def test_one_plan_serves_all_steps() -> None:
    """Gradients in other places, and other rates, need no new plan."""
    params = [torch.nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in SHAPES]
    optimizer = MaxFactor(params, fused=True)
    plans = []
    for step in range(3):
        others = [torch.zeros(64, device=DEVICE)] * step
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.param_groups[0]["lr"] = 0.01 + 0.01 * step
        optimizer.step()
        plans.append(optimizer._fused)
        del others
    assert plans[0] is not None
    assert all(plan is plans[0] for plan in plans)


def test_launch_keys_do_not_depend_on_other_tensors() -> None:
    """Once, three kinds of tensors made all of them unaligned, which was ten times as slow."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(16, 32, 4), torch.nn.Linear(32, 64), torch.nn.Linear(64, 9)
    )
    everyone = [local_parameter(each) for each in for_model(model, "quality").inputs_on_meta()]
    keys = keys_of(everyone)
    assert len({(key.store, key.direct) for key in keys}) == 3
    assert keys == [keys_of([param])[0] for param in everyone]
    by_shape = {tuple(param.param.shape): key for param, key in zip(everyone, keys, strict=True)}
    assert by_shape[64, 32].aligned
    assert by_shape[32, 16, 4].aligned
    assert not by_shape[9,].aligned


def test_only_tensors_without_momentum_have_room_for_peaks() -> None:
    """Wherever they are in the optimizer: the plan has them first."""
    shapes = {"momentum": [(70, 600), (9, 300)], "none": [(33, 520), (40, 8)]}
    params = [torch.nn.Parameter(torch.randn(shape)) for own in shapes.values() for shape in own]
    groups: list[dict[str, Any]] = [
        {"params": params[:1], "momentum": 0.9},
        {"params": params[2:3]},
        {"params": params[1:2], "momentum": 0.9, "direction": "orthogonal"},
        {"params": params[3:]},
    ]
    inputs_ = MaxFactor(groups).inputs_on_meta()
    local = [local_parameter(each) for each in inputs_]
    keys = keys_of(local)
    order = launch_order(local, keys)
    plan = LaunchPlan([local[i] for i in order], [keys[i] for i in order], [0] * len(groups))
    ends = {
        row[Column.ROWS]: row[Column.ROW_PART] + row[Column.STRIPS] * row[Column.ROWS]
        for row in plan.matrices
    }
    without = [rows for rows, _ in shapes["none"]]
    assert max(ends[rows] for rows in without) == plan.sizes.row_peaks
    assert plan.sizes.row_peaks == sum(
        rows * -(-cols // Size.COLUMNS) for rows, cols in shapes["none"]
    )
    assert plan.sizes.row_peaks < plan.sizes.row_part
