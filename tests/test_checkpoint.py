"""state_dict and load_state_dict: nothing lost, nothing silently cast, nothing foreign loaded."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from maxfactor import Adafactor, MaxFactor, Switches, recipe
from test_torch_contract import inject, net, train

by_class = pytest.mark.parametrize("cls", [MaxFactor, Adafactor])


def snapshot(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    return groups, state


def assert_unchanged(optimizer: torch.optim.Optimizer, before: tuple[Any, Any]) -> None:
    groups, state = snapshot(optimizer)
    assert groups == before[0]
    assert set(state) == set(before[1])
    for param, tensors in state.items():
        assert all(torch.equal(value, before[1][param][key]) for key, value in tensors.items())


@by_class
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_resume_through_a_file_is_exact(cls: type[Any], dtype: torch.dtype) -> None:
    """Saved, loaded with weights_only=True, and trained on: the same bits as without the break."""
    straight, broken = net(dtype), net(dtype)
    one, two = cls(straight.parameters()), cls(broken.parameters())
    train(one, list(straight.parameters()), range(8))
    train(two, list(broken.parameters()), range(4))

    file = io.BytesIO()
    torch.save({"model": broken.state_dict(), "optimizer": two.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    resumed = net(dtype, seed=1)
    resumed.load_state_dict(checkpoint["model"])
    three = cls(resumed.parameters(), lr=0.5)
    three.load_state_dict(checkpoint["optimizer"])
    for state in three.state.values():
        kept = {key: value.dtype for key, value in state.items()}
        assert kept.pop("step") == torch.int64
        assert set(kept.values()) == {torch.float32}
    train(three, list(resumed.parameters()), range(4, 8))

    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in one.state[a].items():
            assert torch.equal(value, three.state[b][key])
    assert three.param_groups[0]["lr"] == one.param_groups[0]["lr"]


@by_class
def test_a_loaded_dict_is_not_shared(cls: type[Any]) -> None:
    """Training on must not change the checkpoint, nor the optimizer it came from."""
    first, second = net(), net()
    one, two = cls(first.parameters()), cls(second.parameters())
    train(one, list(first.parameters()), range(2))
    two.load_state_dict(one.state_dict())
    before = snapshot(one)
    train(two, list(second.parameters()), range(2, 4))
    assert_unchanged(one, before)


def test_a_loaded_state_has_no_history() -> None:
    model = net()
    saved = saved_from(model)
    for state in saved["state"].values():
        state["step"] = state["step"].float().requires_grad_()
        for key, value in state.items():
            state[key] = value.requires_grad_()
    optimizer = MaxFactor(model.named_parameters())
    optimizer.load_state_dict(saved)
    for state in optimizer.state.values():
        assert not any(value.requires_grad for value in state.values())


def test_state_dict_keyword_and_roundtrip() -> None:
    """torch's distributed checkpointing loads by keyword; accelerate loads a state into itself."""
    model = net()
    optimizer = MaxFactor(model.parameters())
    train(optimizer, list(model.parameters()), range(2))
    before = snapshot(optimizer)
    optimizer.load_state_dict(state_dict=optimizer.state_dict())
    assert_unchanged(optimizer, before)


def test_users_load_hooks_see_the_restored_state() -> None:
    model = net(torch.bfloat16)
    optimizer = MaxFactor(model.parameters())
    train(optimizer, list(model.parameters()), range(2))
    saved = optimizer.state_dict()
    seen: set[tuple[bool, torch.dtype]] = set()

    def halve(_: object, loaded: dict[str, Any]) -> dict[str, Any]:
        state = {i: {k: v / 2 for k, v in s.items()} for i, s in loaded["state"].items()}
        return {**loaded, "state": state}

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.update(
            (k == "step", v.dtype) for s in o.state.values() for k, v in s.items()
        )
    )
    optimizer.load_state_dict(saved)
    assert seen == {(True, torch.int64), (False, torch.float32)}
    assert [int(s["step"]) for s in optimizer.state.values()] == [1] * 4


def saved_from(model: torch.nn.Module, **arguments: Any) -> dict[str, Any]:
    optimizer = MaxFactor(model.named_parameters(), **arguments)
    train(optimizer, list(model.parameters()), range(1))
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (torch.nn.Linear(48, 5), {}, r"2 param.* group 0.* has 4; '3.weight' is only in this opt"),
        (torch.nn.Sequential(net(), torch.nn.Linear(4, 4)), {}, "'1.weight' is only in the check"),
        (torch.nn.Sequential(torch.nn.Conv1d(3, 8, 5), *list(net())[1:]), {}, "of parameter '0.w"),
        (net(), {"switches": {"full_matrix": True}}, None),
        (net(), {"switches": {"factor": "last"}}, None),
    ],
)
def test_foreign_checkpoints(
    model: torch.nn.Module, arguments: dict[str, Any], message: str | None
) -> None:
    """A longer, shorter or differently shaped model is refused by name, and nothing changes.

    Another `factor` or `full_matrix` is no other model: the checkpoint brings its own settings.
    """
    own = net()
    optimizer = MaxFactor(own.named_parameters())
    train(optimizer, list(own.parameters()), range(2))
    before = snapshot(optimizer)
    saved = saved_from(model, **arguments)
    if message is None:
        optimizer.load_state_dict(saved)
        train(optimizer, list(own.parameters()), range(2, 4))
    else:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert_unchanged(optimizer, before)


@by_class
@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("other", ["Adafactor", "AdamW", "ASGD", "Rprop", "SGD"])
def test_other_optimizers_are_refused(cls: type[Any], other: str, stepped: bool) -> None:
    """By our mark: the settings and the state of some would fit."""
    model = net()
    foreign = getattr(torch.optim, other)(model.parameters())
    if stepped:
        inject(list(model.parameters()), 0)
        foreign.step()
    optimizer = cls(model.parameters())
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"group 0 was saved by another optimizer, not by maxf"):
        optimizer.load_state_dict(foreign.state_dict())
    assert_unchanged(optimizer, before)


def test_a_later_format_and_a_damaged_setting_are_refused() -> None:
    model = net()
    optimizer = MaxFactor(model.parameters())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["made_by"] = "maxfactor.MaxFactor/99"
    with pytest.raises(ValueError, match=r"MaxFactor/99'.* reads 'maxfactor.MaxFactor/1'"):
        optimizer.load_state_dict(saved)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["eps"] = 1e-8
    with pytest.raises(ValueError, match=r"group 0 are damaged: eps must be a pair"):
        optimizer.load_state_dict(saved)


def test_other_groups_and_states_are_refused() -> None:
    model = net()
    optimizer = MaxFactor(model.parameters())
    saved = optimizer.state_dict()
    saved["state"] = {0: {"exp_avg": torch.zeros(())}}
    with pytest.raises(ValueError, match=r"holds \['exp_avg'\].*'param_0'.*another optimizer"):
        optimizer.load_state_dict(saved)
    split = MaxFactor([{"params": [p]} for p in model.parameters()])
    with pytest.raises(ValueError, match="4 parameter groups, this optimizer has 1"):
        optimizer.load_state_dict(split.state_dict())


@pytest.mark.parametrize(
    ("own", "saved", "message"),
    [
        ((2, 1), (2, 2), "2 parameters in group 1, .* has 1; 'param_3' is only in the checkpoint"),
        ((2, 3), (2, 2), "2 parameters in group 1, .* has 3; 'param_4' is only in this optimizer"),
    ],
)
def test_parameters_without_names_are_numbered(
    own: tuple[int, ...], saved: tuple[int, ...], message: str
) -> None:
    """Through all groups, from 0 on."""

    def optimizer_of(sizes: tuple[int, ...]) -> MaxFactor:
        return MaxFactor(
            [{"params": [torch.nn.Parameter(torch.ones(2)) for _ in range(size)]} for size in sizes]
        )

    with pytest.raises(ValueError, match=message):
        optimizer_of(own).load_state_dict(optimizer_of(saved).state_dict())


def test_an_empty_parameter_is_loaded() -> None:
    """Of its state only the counter has a value."""
    params = [torch.nn.Parameter(torch.ones(0))]
    optimizer = MaxFactor(params)
    train(optimizer, params, range(3))
    fresh = MaxFactor(params)
    fresh.load_state_dict(optimizer.state_dict())
    assert int(fresh.state[params[0]]["step"]) == 3


@pytest.mark.parametrize("lr", [None, 0.01])
def test_one_of_ours_is_refused_by_the_other(lr: float | None) -> None:
    """Their states have the same keys and shapes; only the mark tells them apart."""
    model = net()
    makes = (MaxFactor(model.parameters()), Adafactor(model.parameters(), lr=lr))
    for mine, other in (makes, makes[::-1]):
        before = snapshot(mine)
        with pytest.raises(ValueError, match=r"was saved by 'maxfactor\.\w+/1', not by maxf"):
            mine.load_state_dict(other.state_dict())
        assert_unchanged(mine, before)


def test_a_group_in_another_order_is_loaded_by_name() -> None:
    """As the model's weights are: by order they would get the momenta of other layers."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in "ab"})
    optimizer = MaxFactor(model.named_parameters(), momentum=0.9)
    train(optimizer, list(model.parameters()), range(2))
    turned = torch.nn.ModuleDict({name: model[name] for name in "ba"})
    fresh = MaxFactor(turned.named_parameters(), momentum=0.9)
    saved = optimizer.state_dict()
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["param_names"] == ["b.weight", "b.bias", "a.weight", "a.bias"]
    assert saved["param_groups"][0]["param_names"][0] == "a.weight"
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            assert torch.equal(fresh.state[param][key], value)


def test_other_names_are_loaded_by_order() -> None:
    model = net()
    optimizer = MaxFactor((f"module.{name}", param) for name, param in model.named_parameters())
    train(optimizer, list(model.parameters()), range(1))
    fresh = MaxFactor(model.named_parameters())
    fresh.load_state_dict(optimizer.state_dict())
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            assert torch.equal(fresh.state[param][key], value)


def test_a_checkpoint_without_a_newer_setting_takes_its_default() -> None:
    model = net()
    optimizer = MaxFactor(model.parameters(), **recipe("published-0.3"))
    train(optimizer, list(model.parameters()), range(2))
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["switches"]["mean_eps"]
    fresh = MaxFactor(model.parameters(), **recipe("published-0.3"))
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["switches"]["kappa_bounds"] == (0.001, 0.999)
    assert fresh._settings(0).rules.matrix.count_eps == Switches().mean_eps
    train(fresh, list(model.parameters()), range(2, 3))
