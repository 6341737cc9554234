"""The functional form on its own, the factoring, and the recipes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from cases import SHAPES, problem
from maxfactor import FAM, MaxFactor, Switches, recipe, rule
from maxfactor.recipes import PUBLISHED
from maxfactor.rule import reference
from maxfactor.settings import AdafactorSettings, MaxFactorSettings, Scale, Settings
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


SCALES: tuple[Scale, ...] = ("initial", "usual", "raised")


def test_a_matrix_that_begins_near_zero_takes_the_size_of_its_shape() -> None:
    """From a hundredth of it on, its own. Later the first size stays; a vector has none at zero."""
    assumed = torch.tensor(0.5)
    initial, usual, raised = (MaxFactorSettings(scale=scale).rules.matrix for scale in SCALES)
    for t in (1, torch.tensor(1)):
        for own, expected in ((0.0, 0.5), (0.0049, 0.5), (0.005, 0.005), (0.04, 0.04), (3.0, 3.0)):
            size, state = reference.weight_size(torch.tensor(own), assumed, t, initial)
            assert size.item() == state["initial_rms"].item() == torch.tensor(expected).item()
        for own, expected in ((0.0, 0.5), (0.06, 0.06), (0.16, 0.16), (0.18, 0.5), (0.51, 0.51)):
            size, _ = reference.weight_size(torch.tensor(own), assumed, t, usual)
            assert size.item() == pytest.approx(expected)  # from a third of it on, all of it
        for least, own, expected in ((1.0, 0.49, 0.49), (1.0, 0.5, 0.5), (0.1, 0.06, 0.5)):
            chosen = MaxFactorSettings(scale="usual", switches={"usual_from": least}).rules.matrix
            size, _ = reference.weight_size(torch.tensor(own), assumed, t, chosen)
            assert size.item() == pytest.approx(expected)
        for own, expected in ((0.0, 0.5), (0.49, 0.5), (0.5, 0.5), (0.51, 0.51)):
            size, _ = reference.weight_size(torch.tensor(own), assumed, t, raised)
            assert size.item() == torch.tensor(expected).item()
    for t in (2, torch.tensor(2)):
        size, state = reference.weight_size(torch.tensor(3.0), assumed, t, initial)
        assert size.item() == state["initial_rms"].item() == 0.5
    size, state = reference.weight_size(torch.tensor(3.0), torch.tensor(0.0), 2, initial)
    assert (size.item(), state["initial_rms"].item()) == (3.0, 0.0)
    assert reference.weight_size(torch.tensor(3.0), None, 1, initial) == (torch.tensor(3.0), {})
    wide = torch.tensor(3.0, dtype=torch.float64)  # of a float64 weight
    assert reference.weight_size(wide, assumed, 1, initial)[1]["initial_rms"].dtype == torch.float32


def test_an_empty_tensor_is_only_counted() -> None:
    weight, settings = torch.ones(0, 3), MaxFactorSettings()
    result = rule.step(weight, weight, rule.init_state(weight, settings), settings)
    assert result.param is not weight
    assert result.param.shape == (0, 3)
    assert result.step_size == 0.0
    assert int(result.state["step"]) == 1


def test_the_warm_up_of_version_0_2_ends() -> None:
    """After 10 000 steps 1/sqrt(t) is the smaller of the two; lr caps the product."""
    ramped = MaxFactorSettings(**recipe("published-0.2")).rules.matrix
    for t, expected in ((1, 1e-6), (5_000, 0.005), (20_000, 20_000**-0.5)):
        for when in (t, torch.tensor(t)):
            found = reference.step_size(torch.tensor(2.0), when, 1.0, ramped)
            assert float(found) == pytest.approx(2.0 * expected, rel=1e-6)
    assert float(reference.step_size(torch.tensor(2.0), 20_000, 2.0**-7, ramped)) == 2.0**-7


def test_a_weight_decay_of_one() -> None:
    by_lr = MaxFactorSettings(weight_decay=1.0).rules.matrix
    assert reference.decay_factor(0.5, 1, 0.25, by_lr) == 0.75
    assert (
        reference.decay_factor(0.5, 1, 0.25, MaxFactorSettings(weight_decay=0.0).rules.matrix)
        == 1.0
    )


def test_second_moments_of_zero() -> None:
    """Nothing is divided by 0, also without eps; the floor of V bounds 1 / sqrt(V)."""
    zeros = {"row_var": torch.zeros(2, 1), "col_var": torch.zeros(1, 3)}
    by_mean = MaxFactorSettings(direction="factored", eps=(0.0, 0.0)).rules.matrix
    assert by_mean.divides_by_mean
    assert torch.equal(reference.variance_of(zeros, by_mean), torch.zeros(2, 3))
    undivided = MaxFactorSettings(switches=Switches(max_norm=False)).rules.matrix
    bound = torch.full((2, 3), undivided.variance_floor**-0.5)
    torch.testing.assert_close(reference.inverse_root(zeros, undivided), bound)


def test_a_boosted_scalar_without_a_gradient_stays() -> None:
    boosted = MaxFactorSettings(eps=(0.0, 0.0), switches=Switches(scalar_boost=10.0)).rules.of(())
    assert boosted.boost is not None
    zero = torch.zeros(1)
    assert torch.equal(reference.published_move(zero, {"variance": zero}, boosted), zero)


@pytest.mark.parametrize("direction", ["sign_max", "orthogonal"])
@pytest.mark.parametrize("bands", [1, 2, 8])
def test_a_column_without_gradients_stays(bands: int, direction: Any) -> None:
    """A DCT of the others leaks into it, which a sign or whitening would enlarge."""
    settings = MaxFactorSettings(momentum=FAM(bands=bands), direction=direction, weight_decay=0.0)
    case = problem((6, 70))
    weight, state = case.weight, rule.init_state(case.weight, settings)
    for grad in case.grads[:4]:
        grad[:, 5] = 0.0
        weight, state, _ = rule.step(weight, grad, state, settings)
    assert torch.equal(weight[:, 5], case.weight[:, 5])
    assert not torch.equal(weight[:, 6], case.weight[:, 6])


def test_only_what_is_on_the_cpu_is_read() -> None:
    assert reference.host_scalar(torch.tensor([2.0])) == 2.0
    assert isinstance(reference.host_scalar(torch.tensor([2.0])), float)
    elsewhere = reference.host_scalar(torch.empty(1, device="meta"))
    assert isinstance(elsewhere, torch.Tensor)
    assert elsewhere.shape == ()


def test_the_smaller_and_the_larger_of_numbers_and_tensors() -> None:
    for a, b in ((1.0, 2.0), (2.0, 1.0)):
        for left in (a, torch.tensor(a)):
            for right in (b, torch.tensor(b)):
                assert float(reference.smaller(left, right)) == 1.0
                assert float(reference.larger(left, right)) == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_rounded_once(dtype: torch.dtype) -> None:
    """At the end of a step that is computed in float32."""
    settings = MaxFactorSettings(rounding="nearest", weight_decay=0.3)
    case = problem((31, 7), dtype=dtype)
    wide = case.weight.float()
    state = rule.init_state(wide, settings)
    narrow = rule.step(case.weight, case.grads[0], state, settings)
    exact = rule.step(wide, case.grads[0].float(), state, settings)
    assert torch.equal(narrow.param, exact.param.to(dtype))
