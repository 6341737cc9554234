"""Bad input gets an error that names the value and the remedy, and changes nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cases import arguments
from maxfactor import FAM, Adafactor, AdaptiveSchedule, MaxFactor, Switches, recipe

NAN, INF = math.nan, math.inf

BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("lr", NAN, ValueError, "lr must be finite and not negative, got nan"),
    ("lr", INF, ValueError, "lr must be finite and not negative, got inf"),
    ("lr", -0.1, ValueError, "lr must be finite and not negative, got -0.1"),
    (
        "lr",
        "1e-3",
        TypeError,
        r"lr must be a number, got '1e-3' \(str\); convert it with float\(\)",
    ),
    ("lr", True, TypeError, "lr must be a number, got True"),
    ("lr", torch.tensor([0.1, 0.2]), ValueError, r"0-dimensional .* got shape \(2,\)"),
    ("lr", torch.tensor(1), ValueError, "floating-point tensor, got .* torch.int64"),
    ("lr", torch.tensor(NAN), ValueError, "lr must be finite"),
    ("beta2_decay", 0.8, ValueError, "beta2_decay must be finite and not positive, got 0.8"),
    ("beta2_decay", NAN, ValueError, "beta2_decay"),
    ("beta2_decay", None, TypeError, "beta2_decay must be a number, got None"),
    ("eps", 1e-8, ValueError, r"eps must be a pair such as \(1e-10, 1e-3\), got 1e-08"),
    ("eps", (1e-8,), ValueError, "eps must be a pair"),
    ("eps", (NAN, 1e-3), ValueError, r"eps\[0\] must be finite and not negative, got nan"),
    ("eps", (1e-8, -1.0), ValueError, r"eps\[1\] must be finite and not negative, got -1.0"),
    ("eps", (1e-8, None), TypeError, r"eps\[1\] must be a number, got None"),
    ("weight_decay", -0.1, ValueError, "weight_decay must be finite and not negative, got -0.1"),
    ("weight_decay", NAN, ValueError, "weight_decay"),
    ("weight_decay", [0.1], TypeError, r"weight_decay must be a number, got \[0.1\] \(list\)"),
    ("maximize", 1, TypeError, r"maximize must be True or False, got 1 \(int\)"),
    ("factor", "first", ValueError, "factor must be one of 'auto', 'last', got 'first'"),
    ("factor", None, ValueError, "factor must be one of"),
]
BAD_MAXFACTOR: list[tuple[str, Any, type[Exception], str]] = [
    ("lr", None, TypeError, "lr must be a number, got None"),
    ("d", 0.0, ValueError, "d must be positive, got 0.0"),
    ("d", NAN, ValueError, "d must be positive, got nan"),
    ("gamma", 1.0, ValueError, r"gamma must lie in \[0, 1\), got 1.0"),
    ("gamma", NAN, ValueError, "gamma"),
    ("gamma", "0.9", TypeError, "gamma"),
    ("max_norm", "no", TypeError, "max_norm must be True or False, got 'no'"),
    ("min_lr", -1e-7, ValueError, "min_lr"),
    ("scalar_boost", 0.0, ValueError, "scalar_boost must be finite and positive"),
    ("eps_rms", -1.0, ValueError, "eps_rms"),
    ("mean_eps", NAN, ValueError, "mean_eps"),
    ("full_matrix", None, TypeError, "full_matrix"),
    ("clip_threshold", -1.0, ValueError, "clip_threshold must be finite and not negative"),
    ("kappa_bounds", (0.9, 0.1), ValueError, "kappa_bounds must satisfy 0 <= low <= high <= 1"),
    ("kappa_bounds", 0.5, ValueError, "kappa_bounds must be a pair"),
    (
        "step_rule",
        "fast",
        ValueError,
        "step_rule must be one of 'relative', 'uncapped', 'ramp', got 'fast'",
    ),
    ("decay_by", "w", ValueError, "decay_by must be one of"),
    ("vector_direction", "up", ValueError, "vector_direction must be one of"),
    ("momentum", 1.0, ValueError, r"momentum must lie in \[0, 1\), got 1.0"),
    ("momentum", -0.1, ValueError, r"momentum must lie in \[0, 1\), got -0.1"),
    ("momentum", NAN, ValueError, "momentum must lie in"),
    ("momentum", "0.9", TypeError, r"momentum must be None, a number such as 0.95 or .*'0.9'"),
    ("momentum", True, TypeError, "momentum must be a number, got True"),
    ("momentum", {"beta": 0.9}, ValueError, "FAM has no setting 'beta'; .* beta_min, beta_max"),
    ("momentum", {"mix": 2.0}, ValueError, r"FAM's mix must lie in \[0, 1\], got 2.0"),
    ("nesterov", 1, TypeError, "nesterov must be True or False, got 1"),
    ("nesterov", True, ValueError, "nesterov=True needs a momentum: give one, such as"),
    ("momentum_dtype", "int8", ValueError, "momentum_dtype='int8' needs a momentum to store"),
    ("momentum_dtype", "int4", ValueError, "momentum_dtype must be one of 'int8', 'bf16', 'fp32'"),
    ("momentum_dtype", torch.int8, ValueError, "momentum_dtype must be one of"),
    ("direction", "sign", ValueError, "direction must be one of 'sign_max', 'factored', 'orth"),
    (
        "scale",
        None,
        ValueError,
        "scale must be one of 'current', 'initial', 'usual', 'raised', got None",
    ),
]
BAD_ADAFACTOR: list[tuple[str, Any, type[Exception], str]] = [
    ("clip_threshold", 0.0, ValueError, "clip_threshold must be finite and positive, got 0.0"),
    ("relative_step", "yes", TypeError, "relative_step must be True or False"),
    ("relative_step", False, ValueError, "relative_step=False needs a learning rate: give lr"),
]


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3, 2))


@pytest.mark.parametrize(
    ("cls", "name", "value", "error", "message"),
    [(MaxFactor, *bad) for bad in BAD + BAD_MAXFACTOR]
    + [(Adafactor, *bad) for bad in BAD + BAD_ADAFACTOR],
)
def test_arguments(
    cls: type[Any], name: str, value: Any, error: type[Exception], message: str
) -> None:
    given = arguments({name: value}) if cls is MaxFactor else {name: value}
    with pytest.raises(error, match=message):
        cls([parameter()], **given)
    with pytest.raises(error, match=message):  # in a group of its own
        cls([{"params": [parameter()], **given}])
    optimizer = cls([parameter()])
    with pytest.raises(error, match=message):  # and mid-training
        optimizer.add_param_group({"params": [parameter()], **given})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", [MaxFactor, Adafactor])
def test_a_setting_spoiled_mid_training(cls: type[Any]) -> None:
    """A scheduler that computes NaN is stopped before any group has moved."""
    good, bad = parameter(), parameter()
    optimizer = cls([{"params": [good]}, {"params": [bad]}], lr=0.1)
    good.grad = bad.grad = torch.ones(3, 2)
    optimizer.param_groups[1]["lr"] = NAN
    with pytest.raises(ValueError, match="lr must be finite and not negative, got nan"):
        optimizer.step()
    assert torch.equal(good, torch.ones(3, 2))
    assert not optimizer.state


@pytest.mark.parametrize("cls", [MaxFactor, Adafactor])
@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "params is empty: nothing to optimize; a generator .* only once"),
        (torch.nn.Linear(2, 2), TypeError, "got the module Linear; pass model.parameters()"),
        (torch.ones(2), TypeError, "got Tensor; put it in a list"),
        ({"params": [torch.ones(2)]}, TypeError, "got dict; put it in a list"),
        (3, TypeError, "got int"),
        (["weight"], TypeError, "can only optimize Tensors"),
        ([{"parameters": []}], ValueError, r"needs 'params', got only \['parameters'\]"),
        (
            [torch.zeros(2, dtype=torch.int64)],
            TypeError,
            "'param_0' is torch.int64, .*leave it",
        ),
        (
            [torch.ones(2), torch.zeros(2, dtype=torch.complex64)],
            TypeError,
            "'param_1' is torch.complex64, .*view_as_complex",
        ),
        ([("w", torch.zeros(2, dtype=torch.int8))], TypeError, "parameter 'w' is torch.int8"),
    ],
)
def test_parameters(cls: type[Any], params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cls(params)


@pytest.mark.parametrize("cls", [MaxFactor, Adafactor])
def test_an_unsupported_parameter_added_later_leaves_no_trace(cls: type[Any]) -> None:
    optimizer = cls([("first", parameter())])
    with pytest.raises(TypeError, match=r"parameter 'mask' is torch.int64"):
        optimizer.add_param_group({"params": [("mask", torch.zeros(2, dtype=torch.int64))]})
    with pytest.raises(TypeError, match="must be a dict, got list"):
        optimizer.add_param_group([parameter()])
    assert len(optimizer.param_groups) == 1
    group = {"params": [("second", parameter())], "lr": 0.5}
    optimizer.add_param_group(group)
    assert set(group) == {"params", "lr"}


@pytest.mark.parametrize("cls", [MaxFactor, Adafactor])
def test_sparse_gradients(cls: type[Any]) -> None:
    table, other = torch.nn.Embedding(5, 3, sparse=True), parameter()
    optimizer = cls([("other", other), ("table.weight", table.weight)])
    before = table.weight.detach().clone()
    table(torch.tensor([1, 2])).sum().backward()
    other.grad = torch.ones(3, 2)
    with pytest.raises(RuntimeError, match=r"'table.weight' is sparse .*; build .* sparse=False"):
        optimizer.step()
    assert torch.equal(table.weight, before)
    assert torch.equal(other, torch.ones(3, 2))
    assert not optimizer.state


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"min_lr=0.1 has no meaning with step_rule='ramp'"):
        Switches(step_rule="ramp", min_lr=0.1)


def test_switches() -> None:
    with pytest.raises(ValueError, match="Switches has no setting 'clip'; its settings are factor"):
        MaxFactor([parameter()], switches={"clip": 1.0})
    with pytest.raises(TypeError, match=r"switches must be a Switches or a dict.*, got 'none'"):
        MaxFactor([parameter()], switches="none")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"max_norm is a switch; .*\(max_norm=False\)"):
        MaxFactor([{"params": [parameter()], "max_norm": False}])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"beta_min": 0.9, "beta_max": 0.5}, ValueError, "must not exceed beta_max, got 0.9 and 0"),
        ({"beta_max": 1.0}, ValueError, r"FAM's beta_max must lie in \[0, 1\), got 1.0"),
        ({"start": NAN}, ValueError, "FAM's start must lie in"),
        ({"theta": -0.1}, ValueError, "FAM's theta must lie in"),
        ({"mix": "1"}, TypeError, "FAM's mix must be a number, got '1'"),
        ({"warmup": -1}, ValueError, "FAM's warmup must be at least 0, got -1"),
        ({"warmup": 1.5}, TypeError, "FAM's warmup must be a whole number, got 1.5"),
        ({"bands": 0}, ValueError, "FAM's bands must be from 1 to 64, got 0"),
        ({"bands": 65}, ValueError, "FAM's bands must be from 1 to 64, got 65"),
        ({"bands": True}, TypeError, "FAM's bands must be a whole number, got True"),
    ],
)
def test_fam(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FAM(**given)
    with pytest.raises(error, match=message):  # as a checkpoint or a configuration file holds it
        MaxFactor([parameter()], momentum=given)


def test_nesterov_with_fam() -> None:
    with pytest.raises(ValueError, match=r"FAM looks ahead by its own mix, so set nesterov=False"):
        MaxFactor([parameter()], momentum=FAM(), nesterov=True)


@pytest.mark.parametrize(
    "newer", [{"momentum": 0.9}, {"momentum": FAM()}, {"direction": "factored"}]
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_norm", False),
        ("scalar_boost", 2.0),
        ("clip_threshold", 1.0),
        ("full_matrix", True),
        ("step_rule", "ramp"),
        ("factor", "last"),
    ],
)
def test_switches_of_published_versions(name: str, value: Any, newer: dict[str, Any]) -> None:
    (other,) = newer
    with pytest.raises(ValueError, match=rf"{name}={value!r} cannot be combined with {other}=.*; "):
        MaxFactor([parameter()], **arguments({name: value}, newer))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"momentum": 0.9}),
        ({"momentum": 0.9}, {"momentum": None}),
        ({"momentum": 0.9}, {"momentum_dtype": "fp32"}),
        ({"momentum": 0.9}, {"momentum": FAM()}),
        ({"momentum": FAM()}, {"momentum": FAM(bands=2)}),
        ({}, {"scale": "initial"}),
    ],
)
def test_a_memory_changed_mid_training(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Statistics of another kind are not made up; what needs none may change."""
    param = parameter()
    optimizer = MaxFactor([("w", param)], **before)
    param.grad = torch.ones(3, 2)
    optimizer.step()
    old = param.detach().clone()
    optimizer.param_groups[0].update(after)
    with pytest.raises(ValueError, match=r"setting of parameter .w. was changed after|cycle_mom"):
        optimizer.step()
    assert torch.equal(param, old)
    optimizer.param_groups[0].update({**MaxFactor([param], **before).param_groups[0]})
    optimizer.param_groups[0]["direction"] = "factored"
    optimizer.step()
    assert not torch.equal(param, old)


@pytest.mark.parametrize("name", ["0.4", "", "adam", None, 0.2])
def test_unknown_recipe(name: Any) -> None:
    with pytest.raises(
        ValueError, match=r"unknown recipe .*; known recipes: 'quality', 'fast', 'lean', 'publ"
    ):
        recipe(name)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"initial_lr": NAN}, ValueError, "initial_lr must be finite and positive, got nan"),
        ({"initial_lr": 0.0}, ValueError, "initial_lr"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps must not be negative, got -1"),
        ({"warmup_steps": 1.5}, TypeError, "warmup_steps must be a whole number, got 1.5"),
        ({"decay_factor": 0.0}, ValueError, r"decay_factor must lie in \(0, 1\], got 0.0"),
        ({"decay_factor": 1.5}, ValueError, r"decay_factor must lie in \(0, 1\], got 1.5"),
        ({"decay_factor": NAN}, ValueError, "decay_factor"),
        ({"total_steps": 5, "warmup_steps": 5}, ValueError, "more than warmup_steps=5, got 5"),
    ],
)
def test_schedule(given: dict[str, Any], error: type[Exception], message: str) -> None:
    optimizer = MaxFactor([parameter()], lr=0.02)
    with pytest.raises(error, match=message):
        AdaptiveSchedule(optimizer, **given)
    assert optimizer.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("others", [[], [{"params": [parameter()], "lr": 0.1}]])
def test_schedule_of_an_optimizer_without_a_rate(others: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=r"lr=None.*lr=0.01, relative_step=True"):
        AdaptiveSchedule(Adafactor([{"params": [parameter()]}, *others]))
