"""Weights, gradients and ratios near the ends of float32: all forms follow the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import oracle
from cases import arguments
from maxfactor import Adafactor, MaxFactor, rule
from maxfactor.rule import squares
from test_defects import CountReads

# The interpreter of Triton computes in NumPy, which warns of an overflow.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

FORMS = ["reference", "torch", "foreach", "fused", "sharded"]

# Size of W, size of G, and settings for which U, or its square, leaves the range of float32.
CASES: dict[str, tuple[float, float, dict[str, Any]]] = {
    "huge weights": (3e37, 1.0, {}),
    "huge weights, small d": (1e25, 1e-12, {"d": 0.2}),
    "tiny weights": (1e-30, 1.0, {"eps": (1e-10, 0.0)}),
    "huge gradients": (1.0, 1e15, {"clip_threshold": 0.7}),
    "huge ratios": (1.0, 1e14, {"max_norm": False, "d": 0.2}),
    "huge ratios, clipped": (1.0, 1e12, {"max_norm": False, "clip_threshold": 0.3}),
    "tiny ratios": (1.0, 1e-29, {"eps": (1e-18, 1e-3), "d": 0.01}),
    "tiny gradients": (1.0, 1e-15, {"max_norm": False, "clip_threshold": 0.3}),
}


def problem(shape: tuple[int, ...], weight: float, grad: float) -> tuple[Any, list[Any]]:
    rng = np.random.default_rng(0)
    w = np.float32(rng.normal(size=shape) * weight)
    rows = np.exp(rng.normal(size=(shape[0], *(1,) * (len(shape) - 1))))
    return w, [np.float32(rng.normal(size=shape) * rows * grad) for _ in range(2)]


def by_reference(w: Any, grads: list[Any], given: dict[str, Any]) -> tuple[Any, Any]:
    settings = rule.MaxFactorSettings(**given)
    weight = torch.from_numpy(w)
    state = rule.init_state(weight, settings)
    for grad in grads:
        weight, state, _ = rule.step(weight, torch.from_numpy(grad), state, settings)
    return weight, state


def by_optimizer(w: Any, grads: list[Any], given: dict[str, Any], form: str) -> tuple[Any, Any]:
    weight = torch.from_numpy(w.copy())
    how: dict[str, Any] = {"foreach": form == "foreach", "fused": form == "fused"}
    mesh = None
    if form == "sharded":
        how, mesh = {}, init_device_mesh("cpu", (1,))
        weight = distribute_tensor(weight, mesh, [Shard(0)])
    param = torch.nn.Parameter(weight)
    optimizer = MaxFactor([param], nonfinite="raise", **how, **given)
    for grad in map(torch.from_numpy, grads):
        param.grad = grad if mesh is None else distribute_tensor(grad, mesh, [Shard(0)])
        optimizer.step()
    state = {key: local(value) for key, value in optimizer.state[param].items()}
    return local(param.detach()), state


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(5, 7), (9,)])
def test_forms_follow_the_oracle(
    shape: tuple[int, ...], form: str, case: str, one_rank: None
) -> None:
    size, grad, given = CASES[case]
    w, grads = problem(shape, size, grad)
    expected = oracle.maxfactor(w.astype(float), [g.astype(float) for g in grads], **given)[-1]
    if form == "reference":
        weight, state = by_reference(w, grads, arguments(given))
    else:
        weight, state = by_optimizer(w, grads, arguments(given), form)
    move = np.abs(expected.param - w).max()
    assert move > 0.0
    error = np.abs(weight.double().numpy() - expected.param).max()
    assert error <= 1e-4 * move + 1e-7 * np.abs(w).max()
    squares_below = 2.0**-126  # underflow in the state, as its floor is larger
    for key, value in state.items():
        found = value.double().numpy()
        np.testing.assert_allclose(found, expected.state[key], rtol=1e-5, atol=squares_below)


@pytest.mark.parametrize("recipe", [{}, {"momentum": 0.9}, {"direction": "orthogonal"}])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 3e38), ("bfloat16", 3e38)])
def test_huge_weights_stay_where_the_rate_is_zero(
    recipe: dict[str, Any], fused: bool, dtype: str, size: float
) -> None:
    """RMS(W) was infinite, and 0 * inf is NaN."""
    start = torch.full((6, 5), size, dtype=getattr(torch, dtype))
    param = torch.nn.Parameter(start.clone())
    optimizer = MaxFactor([param], lr=0.0, fused=fused, **recipe)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.equal(param, start)
    assert optimizer.effective_lr() == [0.0]


def test_a_large_matrix_of_several_blocks_is_measured() -> None:
    """Blocks of rows, of which some are large and some are not."""
    weight = torch.ones(1200, 1000)
    weight[7], weight[1100] = 1e30, 2e-30
    param = torch.nn.Parameter(weight.clone())
    optimizer = MaxFactor([param], lr=0.5, weight_decay=0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.effective_lr()[0] == pytest.approx(0.5 * 1e30 / 1200**0.5, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1.0, 1e25, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_by_row_need_no_reading(scale: float, dtype: torch.dtype) -> None:
    """What a device computes without being read gives the same sums as the CPU's short way."""
    torch.manual_seed(0)
    x = (torch.randn(3, 4, 50) * scale).clamp(-3e38, 3e38).to(dtype)
    factor = torch.rand(3, 4, 1) + 0.5
    with CountReads() as counter:  # type: ignore[no-untyped-call]
        without = squares.parts_by_row(x, factor, may_read=False)
    assert counter.reads == 0
    read = squares.parts_by_row(x, factor, may_read=True)
    exact = (x.double() * factor.double()).square().sum(-1).sqrt()
    for parts in (without, read):
        root = squares.root_of(parts)
        torch.testing.assert_close(root.factor.double() * root.unit, exact, rtol=1e-5, atol=0)
    if scale == 1.0:
        torch.testing.assert_close(without, read, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("cls", [MaxFactor, Adafactor])
@pytest.mark.parametrize("fused", [False, True])
def test_a_finite_gradient_is_never_called_infinite(cls: type[Any], fused: bool) -> None:
    """Its squares overflow: the step is not taken, and the sentence says why."""
    param = torch.nn.Parameter(torch.ones(5, 4))
    bad = torch.nn.Parameter(torch.ones(3))
    optimizer = cls([("weight", param), ("bias", bad)], lr=0.1, nonfinite="raise", fused=fused)
    param.grad, bad.grad = torch.full((5, 4), 1e20), torch.ones(3)
    with pytest.raises(FloatingPointError, match=r"of 'weight' is finite, but so large, .*squares"):
        optimizer.step()
    bad.grad = torch.tensor([1.0, torch.inf, 1.0])
    with pytest.raises(FloatingPointError, match="gradient of 'bias' is not finite; the step"):
        optimizer.step()
    assert torch.equal(param, torch.ones(5, 4))
    assert all(float(state["step"]) == 0.0 for state in optimizer.state.values())
    param.grad, bad.grad = torch.full((5, 4), 1e17), torch.ones(3)
    optimizer.step()
    assert param.isfinite().all()
    assert (param < 1.0).all()


def test_an_earlier_skipped_step_is_not_blamed() -> None:
    good, bad = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    optimizer = MaxFactor([("a", good), ("b", bad)], fused=True, nonfinite="raise")
    good.grad, bad.grad = torch.full((3, 2), np.nan), torch.ones(3, 2)
    with pytest.raises(FloatingPointError, match="'a'"):
        optimizer.step()
    good.grad, bad.grad = torch.ones(3, 2), torch.full((3, 2), 1e20)
    with pytest.raises(FloatingPointError, match=r"of 'b' is finite, but so large"):
        optimizer.step()


@pytest.mark.parametrize("shape", [(4, 4), (5,)])
def test_a_tiny_tensor_is_measured_beside_others(shape: tuple[int, ...]) -> None:
    """Tensors of one shape are stepped together."""
    moved = []
    for others in (0, 2):
        params = [torch.nn.Parameter(torch.full(shape, 1e-28))]
        params += [torch.nn.Parameter(torch.full(shape, float(i))) for i in range(others)]
        optimizer = MaxFactor(params, eps=(1e-10, 1e-30), fused=False)
        for param in params:
            param.grad = torch.ones(shape)
        optimizer.step()
        moved.append(params[0].detach() - 1e-28)
    assert moved[0].abs().min() > 1e-31
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-5, atol=0.0)


def test_too_many_gradients_that_overflow() -> None:
    param = torch.nn.Parameter(torch.ones(5, 4))
    optimizer = MaxFactor([("weight", param)])
    param.grad = torch.full((5, 4), 1e20)
    for _ in range(19):
        optimizer.step()
    with pytest.raises(FloatingPointError, match=r"20 steps.*is finite, but.*scale the loss down"):
        optimizer.step()


def test_shards_agree_on_what_is_wrong(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    for value, message in ((1e20, "is finite, but so large"), (torch.inf, "is not finite")):
        for fused in (False, True):
            optimizer = MaxFactor([param], nonfinite="raise", fused=fused)
            param.grad = distribute_tensor(torch.full((4, 3), value), mesh, [Shard(0)])
            with pytest.raises(FloatingPointError, match=message):
                optimizer.step()
