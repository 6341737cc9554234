"""`describe()`: rows of groups, with the bytes that the state really takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import SHAPES
from maxfactor import FAM, Adafactor, MaxFactor, for_model, recipe
from maxfactor.optimizer import FactoredOptimizer
from maxfactor.recipes import PUBLISHED

SETTINGS: list[dict[str, Any]] = [
    *(recipe(name) for name in PUBLISHED),
    {"switches": {"full_matrix": True}},
    {"momentum": 0.9, "momentum_dtype": "fp32"},
    {"momentum": 0.9, "momentum_dtype": "bf16", "scale": "initial"},
    {"momentum": FAM(bands=4), "direction": "orthogonal"},
]

TABLE = """\
group  tensors  parameters  state bytes  B/param   lr  decay  direction  momentum  example
0            1       1,200          288    0.240  0.5   0.01  sign_max   none      w (40, 30)
1            1          30          248    8.267  0.5   0.01  sign_max   0.5 fp32  b (30,)
total        2       1,230          536    0.436"""


def parameters(device: str = "cpu") -> list[tuple[str, Tensor]]:
    return [
        (name, nn.Parameter(torch.ones(shape, device=device))) for name, shape in SHAPES.items()
    ]


def real_bytes(optimizer: FactoredOptimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
    )


def step(optimizer: FactoredOptimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn_like(param)
    optimizer.step()


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ",".join(s))
def test_bytes_are_those_of_the_state(settings: dict[str, Any]) -> None:
    optimizer = MaxFactor(parameters(), **settings)
    before = optimizer.describe()
    on_meta = MaxFactor(parameters("meta"), **settings).describe()
    step(optimizer)
    assert before.total.state_bytes == real_bytes(optimizer)
    assert list(optimizer.describe()) == list(before) == list(on_meta)


def test_adafactor() -> None:
    optimizer = Adafactor(parameters())
    (row,) = optimizer.describe()
    step(optimizer)
    assert row.state_bytes == real_bytes(optimizer)
    assert (row.lr, row.direction, row.momentum) == (None, "factored", "none")


def test_rows() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    rows = for_model(model, recipe="quality", lr=0.5).describe()
    assert [row.group for row in rows] == ["hidden", "embedding", "head", "vector"]
    assert [row.tensors for row in rows] == [1, 1, 1, 2]
    assert [row.parameters for row in rows] == [64, 400, 400, 58]
    assert rows[0].examples == ("1.weight (8, 8)",)
    assert rows[3].examples == ("1.bias (8,)", "2.bias (50,)")
    assert rows[0].direction == "orthogonal"
    assert rows[0].momentum == "0.9 nesterov int8"
    assert rows[1].momentum == "FAM int8"
    assert rows[3].momentum == "0.9 fp32"
    assert rows[3].weight_decay == 0.0
    assert rows[0].lr == 0.5
    # codes, one scale a row, two factors, the step and the first RMS
    assert rows[0].state_bytes == 64 + 4 * (8 + 8 + 8 + 1) + 8
    assert rows[0].bytes_per_parameter == rows[0].state_bytes / 64
    assert rows.total.parameters == 922
    assert rows.total.state_bytes == sum(row.state_bytes for row in rows)


def test_table() -> None:
    lr = torch.tensor(0.5)
    optimizer = MaxFactor([("w", nn.Parameter(torch.ones(40, 30)))], lr=lr)
    optimizer.add_param_group({"params": [("b", nn.Parameter(torch.ones(30)))], "momentum": 0.5})
    assert str(optimizer.describe()) == TABLE
    assert repr(optimizer.describe()) == str(optimizer.describe())


def test_a_setting_of_a_group_changed_later_shows() -> None:
    optimizer = MaxFactor([nn.Parameter(torch.ones(4, 3))])
    optimizer.param_groups[0]["lr"] = 0.25
    assert optimizer.describe()[0].lr == 0.25
    assert optimizer.describe()[0].examples == ("param_0 (4, 3)",)
