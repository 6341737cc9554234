"""`release_gradients`: which gradients are watched, in whatever order and number they come.

All layers are one window. Each of them is watched at first, then only the one that came last.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxfactor import for_model, release_gradients
from trainings import assert_same


class Layers(nn.Module):
    """Three layers, of which those are used that are named, in that order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x: Tensor, order: str) -> Tensor:
        for name in order:
            x = x + self.get_submodule(name)(x).tanh()
        return x


def left_by(model: Layers, order: str, seed: int = 0) -> str:
    """The layers that have a gradient after a backward."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    model(x, order).square().mean().backward()
    return "".join(name for name in "abc" if model.get_submodule(name).weight.grad is not None)


def watched(handle: Any, model: Layers) -> str:
    """The layers whose gradients are watched."""
    return "".join(name for name in "abc" if model.get_submodule(name).weight in handle._hooks)


def trained_layers(orders: list[str], *, release: bool) -> tuple[Layers, Any]:
    model = Layers()
    optimizer = for_model(model, "lean")
    with release_gradients(model, optimizer) if release else nullcontext():
        for seed, order in enumerate(orders):
            left_by(model, order, seed)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def contents(model: nn.Module, optimizer: Any) -> list[Any]:
    """Parameters and their states."""
    return [(param.detach(), optimizer.state[param]) for param in model.parameters()]


@pytest.mark.parametrize(
    "orders",
    [
        ["abc"] * 3,
        ["abc", "cba", "cba", "bca"],
        ["abc", "ac", "b", "bc", "abc"],
        ["c", "c", "abc", "ab"],
    ],
)
def test_gradients_in_any_order(orders: list[str]) -> None:
    plain, released = (trained_layers(orders, release=release) for release in (False, True))
    assert_same(contents(*plain), contents(*released))


@pytest.mark.parametrize(
    ("orders", "left", "then"),
    [
        (["abc", "abc"], ["", ""], ["a", "a"]),
        (["abc", "bca", "bca"], ["", "", ""], ["a", "b", "b"]),
        (["abc", "ac", "abc"], ["", "ac", ""], ["a", "abc", "a"]),  # one is unused
        (["abc", "bc", "abc"], ["", "bc", ""], ["a", "abc", "a"]),  # the last one is unused
    ],
)
def test_the_last_gradient_of_a_window_is_watched(
    orders: list[str], left: list[str], then: list[str]
) -> None:
    """If another one is unused, the window waits for the step, but for that one time."""
    model = Layers()
    optimizer = for_model(model, "lean")
    handle = release_gradients(model, optimizer)
    found = []
    for order in orders:
        waiting = left_by(model, order)
        optimizer.step()
        optimizer.zero_grad()
        found.append((waiting, watched(handle, model)))
    assert found == list(zip(left, then, strict=True))


def test_a_second_gradient_of_one_that_is_not_watched() -> None:
    model, optimizer = trained_layers(["abc"], release=False)
    release_gradients(model, optimizer)
    left_by(model, "abc")
    optimizer.step()
    optimizer.zero_grad()
    assert left_by(model, "abc") == ""
    assert left_by(model, "bc") == "bc"
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"'b\.weight' got a second gradient"):
        optimizer.step()
    for one, other in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_second_gradient_after_a_group_was_added() -> None:
    model, optimizer = trained_layers(["abc"], release=False)
    release_gradients(model, optimizer)
    for _ in range(2):
        left_by(model, "abc")
        optimizer.step()
        optimizer.zero_grad()
    left_by(model, "abc")
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.zeros(3)))]})
    with pytest.raises(RuntimeError, match="got a second gradient"):
        left_by(model, "bc")


def test_a_layer_that_is_frozen_for_one_step() -> None:
    """The last one, whose gradient the others wait for."""
    results = []
    for release in (False, True):
        model = Layers()
        optimizer = for_model(model, "lean")
        with release_gradients(model, optimizer) if release else nullcontext():
            for step in range(4):
                model.a.requires_grad_(step != 1)
                left_by(model, "abc", step)
                optimizer.step()
                optimizer.zero_grad()
        results.append(contents(model, optimizer))
    assert_same(results[0], results[1])


@pytest.mark.parametrize("order", ["abc", "bc"])
def test_a_step_that_fails_is_named_and_can_be_left(order: str) -> None:
    """In backward, or after it, where the last gradient did not come."""
    model = Layers()
    optimizer = for_model(model, "lean", nonfinite="raise")
    release_gradients(model, optimizer)
    left_by(model, "abc")
    optimizer.step()
    optimizer.zero_grad()
    hook = model.b.weight.register_hook(lambda grad: grad * torch.nan)
    if order == "abc":
        with pytest.raises(FloatingPointError, match=r"b\.weight"):
            left_by(model, order)
    else:
        left_by(model, order)
    with pytest.raises(FloatingPointError, match=r"b\.weight"):  # not a second gradient
        optimizer.step()
    hook.remove()
    model.zero_grad()  # the model's, not the optimizer's
    optimizer.zero_grad()
    assert left_by(model, "abc") in ("", "abc")
    optimizer.step()
