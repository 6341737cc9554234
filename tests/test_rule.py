"""The functional form on its own, the factoring, and the recipes."""

from __future__ import annotations

import inspect

import pytest
import torch

from cases import SHAPES, problem
from maxfactor import MaxFactor, recipe, rule
from maxfactor.recipes import PUBLISHED
from maxfactor.rule import reference
from maxfactor.settings import AdafactorSettings, MaxFactorSettings, Settings
from maxfactor.state import factoring


@pytest.mark.parametrize(
    "settings", [MaxFactorSettings(), AdafactorSettings(), MaxFactorSettings(d=0.3)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_changes_none_of_its_arguments(settings: Settings, shape: str) -> None:
    case = problem(SHAPES[shape], steps=3)
    weight, state = case.weight, rule.init_state(case.weight, settings)
    for grad in case.grads:
        before = [weight.clone(), grad.clone(), *(x.clone() for x in state.values())]
        result = rule.step(weight, grad, state, settings)
        after = [weight, grad, *state.values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        for key, value in result.state.items():
            assert value.shape == state[key].shape
        weight, state = result.param, result.state


def test_it_is_the_optimizers_step() -> None:
    case = problem((8, 5))
    param, settings = torch.nn.Parameter(case.weight.clone()), MaxFactorSettings(lr=0.03)
    optimizer, weight = MaxFactor([param], lr=0.03), case.weight
    state = rule.init_state(weight, settings)
    for grad in case.grads:
        param.grad = grad.clone()
        optimizer.step()
        weight, state, step_size = rule.step(weight, grad, state, settings)
        torch.testing.assert_close(param.detach(), weight, rtol=1e-6, atol=1e-7)
        assert optimizer.effective_lr() == pytest.approx([float(step_size)], rel=1e-6)


def test_worth_knowing() -> None:
    """Limit cases that the README states: where the rule collapses to something simple."""
    case = problem((8, 5), steps=1)
    weight, (grad,) = case.weight, case.grads
    settings = MaxFactorSettings(lr=0.01, weight_decay=0.0)
    moved = weight - rule.step(weight, grad, rule.init_state(weight, settings), settings).param
    assert torch.equal(moved.sign(), grad.sign())  # sign(U) = sign(G)
    size = 0.01 * weight.square().mean().sqrt()
    torch.testing.assert_close(moved.abs().max(), size, rtol=1e-5, atol=0.0)  # max|U| = 1
    vector = rule.step(weight[0], grad[0], rule.init_state(weight[0], settings), settings)
    expected = weight[0] - vector.step_size * grad[0].sign()  # a vector moves by its sign alone
    torch.testing.assert_close(vector.param, expected)


@pytest.mark.parametrize(
    ("shape", "factor", "matrix", "row", "col"),
    [
        ((7, 31), "auto", (7, 31), (7, 1), (1, 31)),
        ((384, 80, 3), "auto", (384, 240), (384, 1, 1), (1, 80, 3)),
        ((384, 80, 3), "last", (384, 80, 3), (384, 80, 1), (384, 1, 3)),
        ((5, 2, 3, 3), "auto", (10, 9), (5, 2, 1, 1), (1, 1, 3, 3)),
        ((5, 2, 3, 3), "last", (10, 3, 3), (5, 2, 3, 1), (5, 2, 1, 3)),
        ((4, 1, 4), "auto", (4, 4), (4, 1, 1), (1, 1, 4)),  # a tie: the earlier split
    ],
)
def test_factoring(
    shape: tuple[int, ...],
    factor: str,
    matrix: tuple[int, ...],
    row: tuple[int, ...],
    col: tuple[int, ...],
) -> None:
    found = factoring(shape, factor)
    assert found is not None
    assert (found.matrix, found.row, found.col) == (matrix, row, col)


def test_vectors_are_not_factored() -> None:
    assert factoring((9,), "auto") is None
    assert factoring((), "last") is None


def test_recipe_1_0_is_the_default() -> None:
    signature = inspect.signature(MaxFactor).parameters
    assert recipe("published-1.0").items() <= {k: v.default for k, v in signature.items()}.items()


def test_a_recipe_is_the_callers_own() -> None:
    recipe("published-0.2")["lr"] = 3.0
    assert recipe("published-0.2")["lr"] == 0.01
    for name in PUBLISHED:
        MaxFactor([torch.nn.Parameter(torch.ones(2))], **recipe(name))


def test_rms_of_a_large_matrix() -> None:
    """One running float32 sum over as many elements is off by a thousandth."""
    large = torch.rand(20_000, 500, generator=torch.Generator().manual_seed(0))
    exact = large.double().square().mean().sqrt().item()
    assert reference.rms(large).item() == pytest.approx(exact, rel=1e-6)
