"""What the stateful property tests do to an optimizer: copies, bad calls, and what they compare."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from maxfactor import MaxFactor
from maxfactor.optimizer import FactoredOptimizer

# ------------------------------------------------------------------------------------- snapshots


def parameters_of(optimizer: FactoredOptimizer) -> list[Tensor]:
    """All parameters, in their order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def snapshot(optimizer: FactoredOptimizer) -> dict[str, Any]:
    """Copies of everything that a refused call must leave as it is."""
    params = parameters_of(optimizer)
    return {
        "params": [param.detach().clone() for param in params],
        "grads": [None if param.grad is None else param.grad.clone() for param in params],
        "states": [copy.deepcopy(dict(optimizer.state.get(param, {}))) for param in params],
        "known": [param in optimizer.state for param in params],
        "groups": [
            copy.deepcopy({key: value for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ],
        "lengths": [len(group["params"]) for group in optimizer.param_groups],
        "defaults": {  # torch's copies have one more
            key: value for key, value in optimizer.defaults.items() if key != "differentiable"
        },
        "skipped": optimizer.skipped,
    }


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equal, bit for bit, in dicts, lists and tensors; NaN equals NaN."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, where
        if one.layout == torch.strided:
            assert bool(((one == other) | (one.isnan() & other.isnan())).all()), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where} {key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, theirs, f"{where} {index}")
    elif not (isinstance(one, float) and math.isnan(one) and math.isnan(other)):
        assert one == other, where


# ---------------------------------------------------------------------------------------- copies


def saved(optimizer: FactoredOptimizer) -> dict[str, Any]:
    """The checkpoint after a way through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def rebuilt(optimizer: FactoredOptimizer, state_dict: dict[str, Any]) -> FactoredOptimizer:
    """A new optimizer of copied parameters, into which a checkpoint is loaded."""
    groups = []
    for group in optimizer.param_groups:
        params = [param.detach().clone().requires_grad_() for param in group["params"]]
        groups.append({"params": params})
    of_groups = ("blocks", "transposed", "differentiable")  # no arguments of an optimizer
    defaults = {key: own for key, own in optimizer.defaults.items() if key not in of_groups}
    made = type(optimizer)(groups, **defaults)
    made.load_state_dict(state_dict)
    return made


COPIES: dict[str, Callable[[FactoredOptimizer], FactoredOptimizer]] = {
    "state_dict": lambda optimizer: rebuilt(optimizer, optimizer.state_dict()),
    "torch.save": lambda optimizer: rebuilt(optimizer, saved(optimizer)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


# ------------------------------------------------------------------------------------- bad calls

Call = Callable[[], object]


def fill_gradients(optimizer: FactoredOptimizer, value: float = 1.0) -> None:
    """Give every parameter a gradient."""
    for param in parameters_of(optimizer):
        param.grad = torch.full_like(param, value, requires_grad=False)


def spoiled_rate(optimizer: FactoredOptimizer) -> Call:
    """A scheduler wrote a rate that is not finite."""
    fill_gradients(optimizer)
    optimizer.param_groups[-1]["lr"] = math.nan
    return optimizer.step


def sparse_gradient(optimizer: FactoredOptimizer) -> Call:
    """The last gradient is sparse."""
    fill_gradients(optimizer)
    param = parameters_of(optimizer)[-1]
    param.grad = torch.ones_like(param, requires_grad=False).to_sparse()
    return optimizer.step


def other_setting(optimizer: FactoredOptimizer) -> Call:
    """A setting that the state depends on has changed."""
    fill_gradients(optimizer)
    optimizer.step()
    group = optimizer.param_groups[-1]
    if isinstance(optimizer, MaxFactor):
        group["scale"] = "initial" if group["scale"] == "current" else "current"
    else:
        group["clip_threshold"] = -1.0
    return optimizer.step


def foreign_checkpoint(optimizer: FactoredOptimizer) -> Call:
    """A checkpoint of SGD."""
    others = [{"params": list(group["params"])} for group in optimizer.param_groups]
    state_dict = torch.optim.SGD(others, lr=0.5).state_dict()
    return lambda: optimizer.load_state_dict(state_dict)


def missing_group(optimizer: FactoredOptimizer) -> Call:
    """A checkpoint with fewer groups."""
    state_dict = optimizer.state_dict()
    state_dict["param_groups"] = state_dict["param_groups"][:-1]
    return lambda: optimizer.load_state_dict(state_dict)


def damaged_settings(optimizer: FactoredOptimizer) -> Call:
    """A checkpoint whose last group has an impossible setting, and whose first has another rate."""
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][0]["lr"] = 0.123
    state_dict["param_groups"][-1]["beta2_decay"] = "slow"
    return lambda: optimizer.load_state_dict(state_dict)


def stepped_checkpoint(optimizer: FactoredOptimizer) -> dict[str, Any]:
    """A checkpoint with states, of another rate."""
    fill_gradients(optimizer)
    optimizer.step()
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][0]["lr"] = 0.123
    return state_dict


def other_shape(optimizer: FactoredOptimizer) -> Call:
    """A checkpoint whose last state has another shape."""
    state_dict = stepped_checkpoint(optimizer)
    *_, last = state_dict["state"].values()
    key = "variance" if "variance" in last else "col_var"
    last[key] = torch.zeros(3, *last[key].shape)
    return lambda: optimizer.load_state_dict(state_dict)


def missing_key(optimizer: FactoredOptimizer) -> Call:
    """A checkpoint whose last state lacks its counter."""
    state_dict = stepped_checkpoint(optimizer)
    *_, last = state_dict["state"].values()
    del last["step"]
    return lambda: optimizer.load_state_dict(state_dict)


def impossible_state(optimizer: FactoredOptimizer) -> Call:
    """A checkpoint whose last state has a NaN."""
    state_dict = stepped_checkpoint(optimizer)
    *_, last = state_dict["state"].values()
    last["step"] = torch.tensor(math.nan)
    return lambda: optimizer.load_state_dict(state_dict)


def late_failure(optimizer: FactoredOptimizer) -> Call:
    """A checkpoint whose last counter cannot be copied."""
    state_dict = stepped_checkpoint(optimizer)
    *_, last = state_dict["state"].values()
    last["step"] = torch.zeros((), device="meta")
    return lambda: optimizer.load_state_dict(state_dict)


def adding(group: Any) -> Callable[[FactoredOptimizer], Call]:
    """Add a group."""
    return lambda optimizer: lambda: optimizer.add_param_group(group)


def known_parameter(optimizer: FactoredOptimizer) -> Call:
    """Add a parameter that is in another group."""
    group = {"params": [torch.zeros(2), parameters_of(optimizer)[0]]}
    return lambda: optimizer.add_param_group(group)


def expanded_parameter(optimizer: FactoredOptimizer) -> Call:
    """Step a parameter whose entries share memory, after others."""
    fill_gradients(optimizer)
    param = torch.ones(1, 1).expand(2, 3).detach().requires_grad_()
    param.grad = torch.ones(2, 3)

    def add_and_step() -> None:
        optimizer.add_param_group({"params": [param]})
        try:
            optimizer.step()
        finally:
            optimizer.param_groups.pop()
            optimizer.forget_settings()

    return add_and_step


BAD_CALLS: dict[str, Callable[[FactoredOptimizer], Call]] = {
    "spoiled rate": spoiled_rate,
    "sparse gradient": sparse_gradient,
    "other setting": other_setting,
    "foreign checkpoint": foreign_checkpoint,
    "missing group": missing_group,
    "damaged settings": damaged_settings,
    "other shape": other_shape,
    "missing key": missing_key,
    "known parameter": known_parameter,
    "integers": adding({"params": [torch.zeros(2, dtype=torch.int64)]}),
    "complex": adding({"params": [torch.zeros(2, dtype=torch.complex64)]}),
    "list": adding([torch.zeros(2)]),
    "no params": adding({"lr": 0.1}),
    "negative rate": adding({"params": [torch.zeros(2)], "lr": -0.1}),
    "own backend": adding({"params": [torch.zeros(2)], "capturable": True}),
    "impossible state": impossible_state,
    "late failure": late_failure,
    "expanded parameter": expanded_parameter,
    "half named": adding({"params": [("name", torch.zeros(2)), torch.zeros(3)]}),
}

REFUSALS = (ValueError, TypeError, RuntimeError)


def assert_refused(optimizer: FactoredOptimizer, call: Call, what: str) -> None:
    """The call raises a sentence, and leaves everything as it was."""
    before = snapshot(optimizer)
    with pytest.raises(REFUSALS) as caught:
        call()
    assert len(str(caught.value).split()) >= 5, what
    assert_same(before, snapshot(optimizer), what)
