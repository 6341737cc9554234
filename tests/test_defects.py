"""One regression test for each defect of the published code (docs/published-versions.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cases import arguments, problem, published
from maxfactor import MaxFactor, for_model

VERSIONS = ["0.1", "0.2", "0.3", "1.0"]
by_version = pytest.mark.parametrize("version", VERSIONS)


def stepped(param: Tensor, grads: list[Tensor], version: str, **changes: object) -> MaxFactor:
    optimizer = MaxFactor([param], **arguments(published(version), changes))
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return optimizer


@by_version
def test_1_every_group_is_trained(version: str) -> None:
    params = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(3)]
    optimizer = MaxFactor([{"params": [p]} for p in params], **published(version))
    for param in params:
        param.grad = torch.ones(3, 2)
    optimizer.step()
    for param in params:
        assert (param < 1.0).all()


@by_version
def test_2_biases_move_both_ways(version: str) -> None:
    """The square of the gradient used as the gradient could only push one way."""
    bias = torch.nn.Parameter(torch.zeros(2))
    stepped(bias, [torch.tensor([1.0, -1.0])] * 3, version, weight_decay=0.0)
    assert bias[0] < 0.0 < bias[1]


@by_version
def test_2_a_small_regression_net_learns(version: str) -> None:
    """The published 0.2 and 0.3 go to NaN here; the target is learned, not merely approached."""
    torch.manual_seed(0)
    x = torch.linspace(-1.0, 1.0, 64).unsqueeze(1)
    y = torch.sin(3.0 * x) - 0.5
    net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    # 0.2 starts at a millionth of the weight per step, so it gets what the others have from lr.
    changes = {"step_rule": "relative"} if version == "0.2" else {}
    optimizer = MaxFactor(net.parameters(), **arguments(published(version), changes))
    for _ in range(600 if version == "0.2" else 450):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.02 * y.var().item()


@by_version
def test_3_the_variance_of_a_vector_is_its_own(version: str) -> None:
    """It must be the average of the squared gradients, not the update computed from it."""
    case = problem((9,))
    optimizer = stepped(torch.nn.Parameter(case.weight), case.grads, version)
    expected = torch.zeros(9)
    for grad in case.grads:
        expected = 0.99 * expected + 0.01 * grad**2
    (state,) = optimizer.state.values()
    torch.testing.assert_close(state["variance"], expected, rtol=2e-6, atol=0.0)


def floats(state: dict[str, Tensor]) -> int:
    return sum(value.numel() for key, value in state.items() if key != "step")


@by_version
@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ((7, 31), 7 + 31),
        ((1, 6), 1 + 6),
        ((384, 80, 3), 384 + 240),  # Conv1d of Whisper's stem
        ((256, 1, 31), 256 + 31),  # a Conformer's depthwise convolution
        ((5, 2, 3, 3), 10 + 9),
        ((9,), 9),
        ((), 1),
    ],
)
def test_4_state_is_factored(version: str, shape: tuple[int, ...], kept: int) -> None:
    param = torch.nn.Parameter(torch.randn(shape))
    optimizer = stepped(param, [torch.randn(shape)], version)
    state = optimizer.state[param]
    assert floats(state) == kept
    step = state.pop("step")
    assert (step.shape, step.dtype) == ((), torch.int64)
    assert all(value.dtype == torch.float32 for value in state.values())


def test_4_factor_last_keeps_the_factors_of_each_matrix() -> None:
    param = torch.nn.Parameter(torch.randn(12, 5, 3))
    optimizer = stepped(param, [torch.randn(12, 5, 3)], "1.0", factor="last")
    assert floats(optimizer.state[param]) == 12 * (5 + 3)


def test_5_the_clip_acts() -> None:
    """With U clipped to L2 norm 1 the move is smaller than without, by the norm of U."""
    case = problem((8, 5), steps=1)
    moves = []
    for threshold in (0.0, 1.0):
        param = torch.nn.Parameter(case.weight.clone())
        stepped(param, case.grads, "0.2", clip_threshold=threshold, step_rule="relative")
        moves.append((param - case.weight).detach())
    u = (
        case.grads[0]
        / (case.grads[0].square().mean(1, True) @ case.grads[0].square().mean(0, True)).sqrt()
    )
    norm = (u / u.abs().max()).norm()
    assert norm > 1.5
    torch.testing.assert_close(moves[1], moves[0] / norm, rtol=1e-4, atol=1e-7)


@by_version
def test_6_each_parameter_keeps_its_own_state(version: str) -> None:
    shapes = [(4, 3), (3,), (2, 5), (6,)]
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = MaxFactor(params, **published(version))
    for t in range(3):
        for index, param in enumerate(params):
            skip = index == 1 and t == 1
            param.grad = None if skip else torch.full_like(param, 0.1 * (index + 1))
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [3, 2, 3, 3]
    for index, param in enumerate(params):
        for key, value in optimizer.state[param].items():
            if key in ("row_var", "col_var") and version in ("0.1", "1.0"):
                expected = torch.full_like(value, (0.1 * (index + 1)) ** 2)
                torch.testing.assert_close(value, expected)
            if key == "variance":
                assert value.shape == param.shape


class CountReads(TorchDispatchMode):
    """Counts how often a tensor's value is brought to the host."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@by_version
@pytest.mark.parametrize("shape", [(8, 5), (9,), (4, 3, 2)])
def test_7_only_the_step_counter_is_read(version: str, shape: tuple[int, ...]) -> None:
    """The counter lives on the CPU; everything else stays on the device.

    On the CPU, where it is free, the sizes of W and of U are read too; on a device nothing is:
    `test_norms_by_row_need_no_reading`.
    """
    case = problem(shape)
    param = torch.nn.Parameter(case.weight)
    optimizer = stepped(
        param, case.grads[:2], version, clip_threshold=0.5, d=0.5, nonfinite="ignore"
    )
    param.grad = case.grads[2]
    with CountReads() as counter:  # type: ignore[no-untyped-call]
        optimizer.step()
    assert counter.reads == 6


class ForbidGradWrites(TorchFunctionMode):
    """Fails when an in-place function is given the tensor it watches."""

    def __init__(self, watched: Tensor) -> None:
        super().__init__()
        self.version = watched._version
        self.watched = watched

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        assert self.watched._version == self.version, f"{func} wrote the gradient"
        return result


@by_version
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 5), (9,), ()])
def test_8_the_gradient_is_never_written(
    version: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    case = problem(shape, dtype=dtype, steps=3)
    param = torch.nn.Parameter(case.weight)
    optimizer = MaxFactor([param], **(published(version) | {"maximize": True}))
    for grad in case.grads:
        param.grad = grad.clone()
        with ForbidGradWrites(param.grad):
            optimizer.step()
        assert torch.equal(param.grad, grad)


@pytest.mark.parametrize("recipe_name", ["published-1.0", "lean", "fast", "quality"])
@pytest.mark.parametrize("out", [1, 4])
def test_channels_last_convolutions_step(recipe_name: Any, out: int) -> None:
    """Their stack is not contiguous where there is one output channel; the step is the same."""
    weights = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(16, out, 3)
        model.to(memory_format=memory_format)  # type: ignore[call-overload]
        optimizer = for_model(model, recipe=recipe_name)
        for _ in range(3):
            model(torch.ones(2, 16, 5, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
