"""The code that numba compiles: its settings, its limits, and what it must not depend on."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxfactor
import oracle
from arrays import assert_close
from cases import LONG_ROWS, SHAPES, problem
from comparison import compare_with_rule, compile_small_matrices
from maxfactor import FAM, MaxFactor
from maxfactor.backends import dispatch
from maxfactor.settings import FLOAT32_MAX

pytest.importorskip("numba", reason="needs the extra cpu")

from maxfactor.backends.numba import batch as compiled_batch
from maxfactor.backends.numba import kernels, threads

FAST: dict[str, Any] = {"direction": "factored", "d": math.inf, "scale": "initial"}
SERVED: dict[str, dict[str, Any]] = {
    "published": {},
    "small d": {"d": 0.2, "weight_decay": 0.3},
    "maximize": {"maximize": True},
    "raised": {"scale": "raised", "lr": 0.5},
    "lean": {"direction": "factored", "scale": "initial"},
    "lean, maximize": {"direction": "factored", "maximize": True, "d": 0.3},
    "fast": {**FAST, "momentum": FAM(warmup=2, theta=0.8)},
    "fixed momentum": {**FAST, "momentum": 0.9},
    "nesterov": {**FAST, "momentum": 0.8, "nesterov": True},
}
LEFT: dict[str, dict[str, Any]] = {
    "orthogonal": {"direction": "orthogonal"},
    "momentum in bf16": {**FAST, "momentum": 0.9, "momentum_dtype": "bf16"},
    "momentum and sign": {"momentum": 0.9},
    "momentum and maximize": {**FAST, "momentum": 0.9, "maximize": True},
    "bands": {**FAST, "momentum": FAM(bands=4)},
    "published-0.2": maxfactor.recipe("published-0.2"),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_small_matrices(monkeypatch)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of matrices of each compiled batch."""
    found: list[int] = []
    make = compiled_batch.MatrixBatch.__init__

    def counted(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
        found.append(len(inputs))
        make(self, inputs, *args, **kwargs)

    monkeypatch.setattr(compiled_batch.MatrixBatch, "__init__", counted)
    return found


def parameters(*shapes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    """Parameters with gradients."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(0.3 * torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def stepped(settings: dict[str, Any], steps: int = 3, **more: Any) -> list[Tensor]:
    """What some steps leave of parameters and states."""
    params = parameters((70, 65), (31, 7), (9,))
    optimizer = MaxFactor(params, **settings, **more)
    for _ in range(steps):
        optimizer.step()
    states = [value for param in params for value in optimizer.state[param].values()]
    return [*(param.detach() for param in params), *states]


# ------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("name", SERVED)
def test_equals_the_rule(name: str, batches: list[int]) -> None:
    shapes = [*SHAPES.values(), *LONG_ROWS.values()]
    cases = [problem(shape, steps=8, seed=i) for i, shape in enumerate(shapes)]
    compare_with_rule(SERVED[name], cases, "compiled")
    matrices = sum(len(shape) > 1 and math.prod(shape) > 0 for shape in shapes)
    assert batches == [matrices] * 8


@pytest.mark.parametrize("name", ["published", "lean", "fixed momentum"])
def test_equals_the_oracle(name: str, batches: list[int]) -> None:
    settings = SERVED[name]
    for shape in [(31, 7), (5, 130), (12, 5, 3)]:
        case = problem(shape, steps=6)
        param = nn.Parameter(case.weight.clone())
        optimizer = MaxFactor([param], **settings)
        weight, grads = case.arrays()
        for grad, expected in zip(
            case.grads, oracle.maxfactor(weight, grads, **settings), strict=True
        ):
            param.grad = grad.clone()
            optimizer.step()
            size = abs(expected.param).max()
            found = param.detach().double().numpy()
            assert_close(found, expected.param, rtol=2e-6, atol=2e-6 * size, err_msg=f"{shape}")
            for key in ("row_var", "col_var"):
                found = optimizer.state[param][key].double().numpy()
                assert_close(found, expected.state[key], rtol=2e-6, atol=1e-37, err_msg=key)
    assert len(batches) == 18


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15])
@pytest.mark.parametrize("name", ["published", "lean", "fast"])
def test_ranges(name: str, scale: float) -> None:
    """Where floors are felt, and where the squares of U or W overflow in float32."""
    cases = [problem((40, 66), steps=6, scale=scale)]
    cases[0].weight *= 1e25
    compare_with_rule(SERVED[name], cases, "compiled")


def test_large_matrices(monkeypatch: pytest.MonkeyPatch, batches: list[int]) -> None:
    """With the sizes that they have outside of tests; the smaller one is left to torch."""
    monkeypatch.undo()
    cases = [problem(shape, steps=3, seed=i) for i, shape in enumerate([(700, 333), (30, 70)])]
    for name in ("published", "fast"):
        compare_with_rule(SERVED[name], cases, "compiled")


# ---------------------------------------------------------------------------- who is served


@pytest.mark.parametrize("name", LEFT)
def test_other_settings_are_left_to_torch(name: str, batches: list[int]) -> None:
    compiled, plain = stepped(LEFT[name]), stepped(LEFT[name], fused=False)
    assert all(map(torch.equal, compiled, plain))
    assert batches == []


@pytest.mark.parametrize(
    "execution", [{"fused": False}, {"foreach": True}, {"nonfinite": "ignore"}], ids=str
)
def test_other_forms_on_demand(execution: dict[str, Any], batches: list[int]) -> None:
    stepped({}, **execution)
    assert batches == []


def test_other_tensors_are_left_to_torch(batches: list[int]) -> None:
    half, wide, last, late = parameters((8, 9), (8, 9), (4, 5, 3, 3), (8, 9))
    params: list[Any] = [
        nn.Parameter(half.detach().to(torch.bfloat16)),
        nn.Parameter(wide.detach().double()),
        nn.Parameter(last.detach().to(memory_format=torch.channels_last)),
        late,
    ]
    for param in params:
        param.grad = torch.ones_like(param)
    late.grad = torch.ones(9, 8).T
    MaxFactor(params).step()
    assert batches == []


def test_without_numba(monkeypatch: pytest.MonkeyPatch, batches: list[int]) -> None:
    monkeypatch.setattr(dispatch, "has_numba", lambda: False)
    assert all(map(torch.equal, stepped({}), stepped({}, fused=False)))
    assert batches == []


def test_counters_that_differ(batches: list[int]) -> None:
    params = parameters((9, 8), (9, 8), (7, 6))
    optimizer = MaxFactor(params)
    grad, params[0].grad = params[0].grad, None
    optimizer.step()
    params[0].grad = grad
    optimizer.step()
    assert batches == [2, 1, 2]
    assert [int(optimizer.state[param]["step"]) for param in params] == [1, 2, 2]


# ----------------------------------------------------------------- what nothing may depend on


@pytest.mark.parametrize("name", ["published", "lean", "fast"])
def test_threads_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for count in (1, 2, 5):
        monkeypatch.setattr(compiled_batch, "thread_count", lambda count=count: count)
        found.append(stepped(SERVED[name]))
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


@pytest.mark.parametrize("name", ["published", "lean", "fast"])
def test_other_parameters_change_nothing(name: str) -> None:
    """So windows of released gradients take the step of all parameters, bit for bit."""
    together, alone = parameters((70, 65), (31, 7)), parameters((70, 65), (31, 7))
    whole = MaxFactor(together, **SERVED[name])
    parts = [MaxFactor([param], **SERVED[name]) for param in alone]
    for _ in range(3):
        for optimizer in (whole, *parts):
            optimizer.step()
    assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("name", ["published", "small d", "lean", "fast"])
def test_recorded_steps(name: str) -> None:
    """The same weights, bit for bit, and the metrics of torch operations."""
    plain, recorded = parameters((70, 65), (9,)), parameters((70, 65), (9,))
    usual, own = MaxFactor(plain, **SERVED[name]), MaxFactor(recorded, **SERVED[name])
    other = MaxFactor(parameters((70, 65), (9,)), fused=False, **SERVED[name])
    for optimizer in (own, other):
        optimizer.record_metrics(every=1)
    for optimizer in (usual, own, other):
        for _ in range(4):
            optimizer.step()
    assert all(map(torch.equal, plain, recorded))
    for found, expected in zip(own.metrics().values(), other.metrics().values(), strict=True):
        assert vars_of(found) == pytest.approx(vars_of(expected), rel=1e-4)


def vars_of(metrics: Any) -> dict[str, float]:
    values = {key: getattr(metrics, key) for key in metrics.__dataclass_fields__}
    return {key: value for key, value in values.items() if isinstance(value, (int, float))}


def test_a_copy_continues_bit_for_bit() -> None:
    """The sums of W^2 that a step leaves are those that the next one would compute."""
    params = parameters((70, 65), (31, 7))
    optimizer = MaxFactor(params)
    optimizer.step()
    other, kept = copy.deepcopy((optimizer, params))
    for one, two in zip(params, kept, strict=True):
        two.grad = one.grad
    for _ in range(2):
        optimizer.step()
        other.step()
    assert all(map(torch.equal, params, kept))


def test_writes_are_noticed_and_made_known() -> None:
    param, same = parameters((70, 65))[0], parameters((70, 65))[0]
    one, two = MaxFactor([param]), MaxFactor([same], fused=False)
    before = param._version
    for optimizer in (one, two):
        optimizer.step()
    assert param._version > before
    with torch.no_grad():
        for each in (param, same):
            each.mul_(5.0)
    for optimizer in (one, two):
        optimizer.step()
    assert one.effective_lr() == pytest.approx(two.effective_lr(), rel=1e-5)


# ---------------------------------------------------------------------------------- the guard


@pytest.mark.parametrize(("value", "said"), [(math.nan, "not finite"), (1e30, "overflow")])
def test_bad_gradients_change_nothing(value: float, said: str) -> None:
    params = parameters((70, 65), (31, 7), (9,))
    optimizer = MaxFactor(params, nonfinite="raise")
    optimizer.step()
    assert params[0].grad is not None
    params[0].grad[3, 4] = value
    before = copy.deepcopy((optimizer.state_dict(), params))
    with pytest.raises(FloatingPointError, match=f"param_0.*{said}|{said}.*param_0"):
        optimizer.step()
    for now, then in zip(params, before[1], strict=True):
        assert torch.equal(now, then)
    states = optimizer.state_dict()["state"]
    for index, state in before[0]["state"].items():
        assert all(torch.equal(states[index][key], value) for key, value in state.items())


def test_zero_gradients_and_weights() -> None:
    params = parameters((70, 65), (31, 7))
    for param in params:
        param.grad = torch.zeros_like(param)
    with torch.no_grad():
        params[1].zero_()
    before = [param.detach().clone() for param in params]
    for settings in ({"eps": (0.0, 1e-3)}, SERVED["lean"], SERVED["fast"]):
        MaxFactor(params, **settings, weight_decay=0.0).step()
    assert all(map(torch.equal, params, before))


def test_the_ends_of_float32() -> None:
    param, same = parameters((70, 65))[0], parameters((70, 65))[0]
    with torch.no_grad():
        for each in (param, same):
            each.mul_(FLOAT32_MAX / 10.0)
    for each, fused in ((param, None), (same, False)):
        MaxFactor([each], lr=1e-3, fused=fused).step()
    torch.testing.assert_close(param, same, rtol=1e-5, atol=0.0)


# -------------------------------------------------------------------------------- the machinery


def test_no_folder_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(*, cache: bool = False, **_: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(kernels, "njit", njit)
    decorate: Any = kernels.compiled
    assert decorate()(math.sqrt) is math.sqrt


def test_an_error_in_a_thread_is_raised() -> None:
    def kernel(first: int, last: int) -> None:
        if first == 0:
            raise ValueError("of the first part")

    with pytest.raises(ValueError, match="of the first part"):
        threads.launch(kernel, [1, 2])
