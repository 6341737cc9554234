"""A damaged checkpoint is refused in a sentence, and a load that fails changes nothing at all."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from maxfactor import FAM, Adafactor, MaxFactor, release_gradients

NAN, INF = math.nan, math.inf

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "published": lambda named: MaxFactor(named),
    "fam int8": lambda named: MaxFactor(named, momentum=FAM(bands=2), scale="initial"),
    "bf16": lambda named: MaxFactor(named, momentum=0.9, momentum_dtype="bf16"),
    "orthogonal": lambda named: MaxFactor(named, momentum=0.9, direction="orthogonal"),
    "adafactor": lambda named: Adafactor(named, lr=0.01),
}

# What no training can lead to, by the key of the state; each is written to one element.
NOT_NEGATIVE = (NAN, INF, -INF, -1e-30, 1e39)
IMPOSSIBLE: dict[str, tuple[float, ...]] = {
    "step": (NAN, INF, -1.0, 1.5),
    "row_var": NOT_NEGATIVE,
    "col_var": NOT_NEGATIVE,
    "variance": NOT_NEGATIVE,
    "momentum_scale": NOT_NEGATIVE,
    "initial_rms": NOT_NEGATIVE,
    "momentum": (NAN, INF, -INF),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))


def stepped(
    rule: str = "published", own: nn.Module | None = None, steps: int = 3
) -> tuple[nn.Module, Any]:
    own = own or model()
    optimizer = RULES[rule](own.named_parameters())
    for seed in range(steps):
        torch.manual_seed(seed)
        own(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return own, optimizer


def frozen(value: Any) -> Any:
    """A deep copy that compares by value; tensors also by identity."""
    if isinstance(value, Tensor):
        return id(value), value.dtype, value._version, value.detach().clone().flatten().tolist()
    if isinstance(value, dict):
        return [(frozen(key), frozen(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return [frozen(entry) for entry in value]
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return id(value)


def snapshot(optimizer: torch.optim.Optimizer) -> Any:
    """All that an optimizer has: groups, state, flags, hooks, caches."""
    return frozen(optimizer.__dict__)


@pytest.mark.parametrize("rule", RULES)
def test_impossible_values_are_refused_by_name(rule: str) -> None:
    """In every tensor of every state: NaN, inf, negative and fractional numbers."""
    _, optimizer = stepped(rule)
    saved, before = optimizer.state_dict(), snapshot(optimizer)
    names = saved["param_groups"][0]["param_names"]
    for index, state in saved["state"].items():
        for key, tensor in state.items():
            for place, value in bad_values(key, tensor):
                is_wide = key == "step" or abs(value) > 1e38  # others counted steps as floats
                damaged = tensor.double() if is_wide else tensor.clone()
                damaged.view(-1)[place] = value
                spoilt = {**saved["state"], index: {**state, key: damaged}}
                shown = torch.tensor(value, dtype=torch.float32).item()
                said = f"{key} of parameter '{names[index]}' holds {shown:g}, but"
                with pytest.raises(ValueError, match=re.escape(said)):
                    optimizer.load_state_dict({**saved, "state": spoilt})
    assert snapshot(optimizer) == before
    optimizer.load_state_dict(saved)  # as it is, it loads


def bad_values(key: str, tensor: Tensor) -> Iterator[tuple[int, float]]:
    """Where to write which impossible value."""
    if key == "band_sums":
        bands = tensor.shape[1]
        for row, values in enumerate([(NAN, INF, -INF), NOT_NEGATIVE, (NAN, -0.1, 1.1)]):
            yield from ((row * bands, value) for value in values)
    elif tensor.dtype == torch.int8:
        yield tensor.numel() - 1, -128.0
    else:
        yield from ((tensor.numel() - 1, value) for value in IMPOSSIBLE[key])


def test_the_extremes_of_what_is_possible_load() -> None:
    _, optimizer = stepped("fam int8")
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        for key, tensor in state.items():
            if key in NOT_NEGATIVE_KEYS:
                tensor.zero_()
        state["step"].zero_()
    optimizer.load_state_dict(saved)
    assert all(float(state["step"]) == 0.0 for state in optimizer.state.values())
    saved["state"][0]["row_var"][-1] = INF  # beside zeros, which are possible
    with pytest.raises(ValueError, match=r"row_var of parameter '0.weight' holds inf, but"):
        optimizer.load_state_dict(saved)


NOT_NEGATIVE_KEYS = [key for key, values in IMPOSSIBLE.items() if values is NOT_NEGATIVE]

DAMAGES: dict[str, Callable[[Any], Any]] = {
    "None": lambda _: None,
    "text": lambda _: "x",
    "number": lambda _: -1.5,
    "list": lambda _: [[]],
    "dict": lambda _: {"x": {}},
    "meta": lambda _: torch.empty((), device="meta"),
    "sparse": lambda _: torch.eye(2).to_sparse(),
    "complex": lambda old: torch.zeros(getattr(old, "shape", ()), dtype=torch.complex64),
    "bool": lambda old: torch.ones(getattr(old, "shape", ()), dtype=torch.bool),
    "own meta": lambda old: old.to("meta") if isinstance(old, Tensor) else old,
    "own sparse": lambda old: old.to_sparse() if isinstance(old, Tensor) else old,
    "flat": lambda old: torch.zeros(3, 3) if isinstance(old, Tensor) else old,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every entry of a checkpoint."""
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, entry in entries:
        yield (*path, key)
        yield from places(entry, (*path, key))


def damaged_at(value: Any, path: tuple[Any, ...], damage: str | None) -> Any:
    """A copy of a checkpoint with one entry replaced, or deleted; None if that is no damage."""
    first, *rest = path
    result = copy.copy(value)
    if damage is None and not rest:
        del result[first]
        return result
    new = damaged_at(value[first], tuple(rest), damage) if rest else None
    if not rest and damage is not None:
        new = DAMAGES[damage](value[first])
        if new is value[first]:
            return None
    result[first] = new
    return None if rest and new is None else result


def refusal(optimizer: torch.optim.Optimizer, saved: Any) -> str | None:
    """The sentence by which a checkpoint is refused; None if it loads."""
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("rule", ["published", "fam int8", "adafactor"])
def test_a_load_that_fails_anywhere_changes_nothing(rule: str) -> None:
    """Each entry in turn is deleted or replaced by something else.

    What is refused is refused by a ValueError of ours, and not a bit of the optimizer changes. What
    loads is no damage to it, such as a setting that has a default.
    """
    small = nn.Linear(6, 1)
    own, optimizer = stepped(rule, small, steps=1)
    saved, before = copy.deepcopy(optimizer.state_dict()), snapshot(optimizer)
    refused = 0
    for path in places(saved):
        for damage in (*DAMAGES, None):
            spoilt = damaged_at(saved, path, damage)
            if spoilt is None:
                continue
            reason = refusal(optimizer, spoilt)
            if reason is not None:
                assert "checkpoint" in reason, (path, damage)
                assert snapshot(optimizer) == before, (path, damage)
                refused += 1
            else:
                for param in own.parameters():
                    param.grad = torch.ones_like(param)
                optimizer.step()
                own, optimizer = stepped(rule, small, steps=1)
                before = snapshot(optimizer)
    assert refused > 150


@pytest.mark.parametrize("content", [None, [], "state", 3, {}, {"state": {}}])
def test_what_is_no_checkpoint_is_refused(content: Any) -> None:
    _, optimizer = stepped()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"checkpoint.*give what optimizer.state_dict\(\) return"):
        optimizer.load_state_dict(content)
    assert snapshot(optimizer) == before


def test_a_parameter_of_two_groups_is_refused() -> None:
    _, optimizer = stepped()
    saved, before = optimizer.state_dict(), snapshot(optimizer)
    [group] = saved["param_groups"]
    group["params"] = [0, 1, 2, 2]
    with pytest.raises(ValueError, match=r"damaged: its groups list parameter 2 twice; give what"):
        optimizer.load_state_dict(saved)
    assert snapshot(optimizer) == before


def test_what_a_users_hook_returns_is_checked() -> None:
    _, optimizer = stepped()
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda *_: [1])
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="its content is no dict, but list"):
        optimizer.load_state_dict(saved)
    assert snapshot(optimizer) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [("own meta", "is on the meta device, but"), ("own sparse", r"is sparse \(torch.sparse_coo\)")],
)
def test_tensors_without_values(damage: str, message: str) -> None:
    _, optimizer = stepped()
    saved = optimizer.state_dict()
    saved["state"][0]["row_var"] = DAMAGES[damage](saved["state"][0]["row_var"])
    with pytest.raises(ValueError, match=f"row_var of parameter '0.weight' {message}"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("registers", ["pre", "post"])
def test_a_users_hook_that_fails_undoes_the_load(registers: str) -> None:
    _, optimizer = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    saved["state"][0]["step"] += 7

    def fail(*_: object) -> None:
        raise KeyError("mine")

    getattr(optimizer, f"register_load_state_dict_{registers}_hook")(fail)
    before = snapshot(optimizer)
    with pytest.raises(KeyError, match="mine"):
        optimizer.load_state_dict(saved)
    assert snapshot(optimizer) == before


def test_released_gradients_go_on_after_a_load_that_failed() -> None:
    own, optimizer = stepped()
    other, plain = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][3]["variance"][0] = NAN
    with release_gradients(own, optimizer):
        with pytest.raises(ValueError, match=r"variance of parameter '1.bias' holds nan"):
            optimizer.load_state_dict(saved)
        own(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    other(torch.ones(2, 6)).sum().backward()
    plain.step()
    for a, b in zip(own.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


class CountTransfers(TorchFunctionMode):
    """Counts the calls that bring values to the host."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        reads = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__)
        self.calls += func in reads
        return func(*args, **(kwargs or {}))


def test_the_values_are_read_at_once() -> None:
    """One transfer to the host for all tensors, as each would wait for a GPU."""
    _, optimizer = stepped("fam int8")
    saved = optimizer.state_dict()
    with CountTransfers() as counter:
        optimizer.load_state_dict(saved)
    assert counter.calls == 1


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "SGD", "Adam", "RMSprop", "Adagrad"])
def test_foreign_checkpoints_change_nothing(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    own, optimizer = stepped()
    matrices = [param for param in own.parameters() if param.dim() == 2]
    foreign = getattr(torch.optim, name)(matrices, lr=0.1)
    for param in matrices:
        param.grad = torch.ones_like(param)
    foreign.step()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"was saved by another optimizer, not by maxfactor\.MaxF"):
        optimizer.load_state_dict(foreign.state_dict())
    assert snapshot(optimizer) == before
