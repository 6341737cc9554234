"""Every backend leaves what a loop over `rule.step` leaves: parameters, state, step sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import (
    ADAFACTOR_VARIANTS,
    SHAPES,
    VARIANTS,
    NewTensors,
    arguments,
    no_host_sync,
    problem,
    published,
)
from comparison import inputs_of
from maxfactor import Adafactor, MaxFactor, recipe, rule
from maxfactor.backends.torch import step as torch_step
from maxfactor.optimizer import FactoredOptimizer
from maxfactor.settings import AdafactorSettings, MaxFactorSettings, Settings
from maxfactor.state import init_state

VERSIONS = ["0.1", "0.2", "0.3", "1.0"]
BACKENDS = ["plain", "blocks", "foreach"]
STEPS = 5  # the fourth gradient of a case is zero
LARGE = [(700, 333), (3, 70_000), (70_001,), (40, 30, 90)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both backends, and plain once more with every matrix, however small, in several blocks."""
    if request.param == "blocks":
        monkeypatch.setattr(torch_step, "SMALL", 0)
        monkeypatch.setattr(torch_step, "CPU_BLOCK", 50)
    return str(request.param)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The tests run side by side; threads that wait for each other's cores take minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(cls: type[Any], params: list[Tensor], backend: str, **settings: Any) -> FactoredOptimizer:
    given = arguments(settings) if cls is MaxFactor else settings
    optimizer: FactoredOptimizer = cls(params, foreach=backend == "foreach", fused=False, **given)
    return optimizer


def checked(cls: type[Any], settings: dict[str, Any]) -> Settings:
    if cls is MaxFactor:
        return MaxFactorSettings(**arguments(settings))
    return AdafactorSettings(**settings)


def assert_same(ours: Tensor, theirs: Tensor, what: str, rtol: float = 1e-6) -> None:
    """Parameters relative to their largest entry, as they cross zero."""
    if torch.equal(ours, theirs):  # as they mostly are, and faster to see
        return
    scale = max(1e-30, float(theirs.abs().max()) if theirs.numel() else 0.0)
    torch.testing.assert_close(
        ours, theirs, rtol=rtol, atol=rtol * scale, msg=lambda text: f"{what}: {text}"
    )


def compare(
    cls: type[Any],
    settings: dict[str, Any],
    shapes: list[tuple[int, ...]],
    backend: str,
    rtol: float = 1e-6,
) -> None:
    """All shapes in one optimizer, against each on its own by the rule."""
    cases = [problem(shape, steps=STEPS, seed=index) for index, shape in enumerate(shapes)]
    params: list[Tensor] = [torch.nn.Parameter(case.weight.clone()) for case in cases]
    optimizer = make(cls, params, backend, **settings)
    for t, expected in enumerate(steps_of_the_rule(cls, settings, shapes)):
        for param, case in zip(params, cases, strict=True):
            param.grad = case.grads[t].clone()
        optimizer.step()
        for param, case, (weight, state, _) in zip(params, cases, expected, strict=True):
            what = f"{tuple(param.shape)} at step {t + 1}"
            assert param.grad is not None
            assert torch.equal(param.grad, case.grads[t]), "the gradient belongs to the user"
            assert_same(param.detach(), weight, what, rtol)
            assert optimizer.state[param].keys() == state.keys()
            for key, value in optimizer.state[param].items():
                if not torch.equal(value, state[key]):
                    torch.testing.assert_close(value, state[key], rtol=2e-6, atol=1e-37)
    mean = sum(float(result.step_size) for result in expected) / len(expected)
    assert optimizer.effective_lr() == pytest.approx([mean], rel=1e-6)


LAST: dict[str, list[list[rule.Result]]] = {}  # what the rule left last, for the next backend


def steps_of_the_rule(
    cls: type[Any], settings: dict[str, Any], shapes: list[tuple[int, ...]]
) -> list[list[rule.Result]]:
    """What the rule leaves of each shape, by step."""
    key = repr((cls, settings, shapes))
    if key not in LAST:
        LAST.clear()
        cases = [problem(shape, steps=STEPS, seed=index) for index, shape in enumerate(shapes)]
        checked_ = checked(cls, settings)
        before = [rule.Result(c.weight, rule.init_state(c.weight, checked_), 0.0) for c in cases]
        LAST[key] = []
        for t in range(STEPS):
            before = [
                rule.step(weight, case.grads[t], state, checked_)
                for case, (weight, state, _) in zip(cases, before, strict=True)
            ]
            LAST[key].append(before)
    return LAST[key]


# -------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_maxfactor(version: str, variant: str, backend: str) -> None:
    compare(
        MaxFactor,
        arguments(published(version), VARIANTS[variant]),
        list(SHAPES.values()),
        backend,
    )


@pytest.mark.parametrize("variant", ADAFACTOR_VARIANTS)
def test_adafactor(variant: str, backend: str) -> None:
    compare(Adafactor, ADAFACTOR_VARIANTS[variant], list(SHAPES.values()), backend)


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for each matrix, the last of them short; several chunks for each list."""
    monkeypatch.setattr(torch_step, "CPU_BLOCK", 20_000)
    monkeypatch.setattr(torch_step, "DEVICE_BLOCK", 100_000)


# Sums over long rows in another order, and eight steps of them: twice the usual tolerance.
@pytest.mark.parametrize("kind", ["plain", "foreach"])
@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(
    "variant", ["as published", "maximize", "small d", "no max_norm", "clip", "large eps"]
)
@pytest.mark.parametrize("version", ["0.2", "1.0"])
def test_maxfactor_in_blocks(version: str, variant: str, kind: str) -> None:
    compare(
        MaxFactor,
        arguments(published(version), VARIANTS[variant]),
        LARGE,
        kind,
        rtol=2e-6,
    )


@pytest.mark.parametrize("kind", ["plain", "foreach"])
@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("variant", ["relative", "as torch", "clip", "large eps"])
def test_adafactor_in_blocks(variant: str, kind: str) -> None:
    compare(Adafactor, ADAFACTOR_VARIANTS[variant], LARGE, kind, rtol=2e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e-6, 1e6, 1e15])
def test_ranges(scale: float, backend: str) -> None:
    """Where floors act, and where a product of row and column factor would overflow."""
    for shape in [(230, 190), (13, 14), (9,)]:
        case, checked_ = problem(shape, steps=STEPS, scale=scale), MaxFactorSettings()
        param = torch.nn.Parameter(case.weight.clone())
        optimizer = make(MaxFactor, [param], backend)
        weight, state = case.weight, rule.init_state(case.weight, checked_)
        for grad in case.grads:
            param.grad = grad.clone()
            optimizer.step()
            weight, state, _ = rule.step(weight, grad, state, checked_)
        assert_same(param.detach(), weight, f"{shape}")


@pytest.mark.parametrize("max_norm", [True, False])
def test_no_floor_and_no_gradient(max_norm: bool, backend: str) -> None:
    """eps1 = 0 leaves only float32's smallest number to divide by; 0 * inf would be NaN."""
    settings: dict[str, Any] = {"eps": (0.0, 1e-3), "max_norm": max_norm, "lr": 0.5}
    checked_ = MaxFactorSettings(**arguments(settings))
    for shape in [(300, 200), (9, 5), (9,)]:
        weight = 1e4 * problem(shape).weight
        param, state = torch.nn.Parameter(weight.clone()), rule.init_state(weight, checked_)
        optimizer = make(MaxFactor, [param], backend, **settings)
        for grad in [torch.zeros(shape), problem(shape).grads[0], torch.zeros(shape)]:
            param.grad = grad.clone()
            optimizer.step()
            weight, state, _ = rule.step(weight, grad, state, checked_)
            assert_same(param.detach(), weight, f"{shape}")


# ----------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("kind", ["plain", "foreach"])
@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("cls", [MaxFactor, Adafactor])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit(dtype: torch.dtype, rounding: str, cls: type[Any], kind: str) -> None:
    """Each step from the same start: only what float32 noise tips over may round another way."""
    settings = {"rounding": rounding, "seed": 5, "weight_decay": 0.1}
    checked_ = checked(cls, settings)
    for shape in [(300, 177), (30, 7), (5, 3, 3), (9,), (300,), ()]:
        case = problem(shape, dtype=dtype, steps=6)
        param = torch.nn.Parameter(case.weight.clone())
        optimizer = make(cls, [param], kind, **settings)
        state = rule.init_state(param, checked_)
        for grad in case.grads:
            expected = rule.step(param.detach(), grad, state, checked_)
            param.grad = grad.clone()
            optimizer.step()
            differs = param.detach() != expected.param
            assert differs.sum() <= 1 + 0.01 * param.numel(), f"{shape}: other bits of noise"
            assert_same(param.detach(), expected.param, f"{shape}", torch.finfo(dtype).eps)
            state = {key: value.clone() for key, value in optimizer.state[param].items()}
            for key, value in state.items():
                torch.testing.assert_close(value, expected.state[key], rtol=2e-6, atol=1e-37)


def test_mixed_dtypes_and_layouts(backend: str) -> None:
    """One optimizer with all of them gives each what it gets alone."""
    shapes = [(40, 30), (9,), (9,), (6, 5, 2), ()]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    cases = [problem(shape, dtype=d, steps=6) for d in dtypes for shape in shapes]
    cases.append(problem((30, 40)))
    together: list[Tensor] = [torch.nn.Parameter(c.weight.clone()) for c in cases]
    together[-1] = torch.nn.Parameter(cases[-1].weight.t().contiguous().t())
    alone: list[Tensor] = [torch.nn.Parameter(p.detach().clone()) for p in together]
    optimizers = [make(MaxFactor, together, backend, seed=3)]
    optimizers += [make(MaxFactor, [param], backend, seed=3) for param in alone]
    for t in range(6):
        for case, one, other in zip(cases, together, alone, strict=True):
            one.grad, other.grad = case.grads[t].clone(), case.grads[t].clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(together, alone, strict=True):
        assert_same(one.detach(), other.detach(), f"{one.dtype} {tuple(one.shape)}")


def test_parameters_with_different_step_counts(backend: str) -> None:
    cases = [problem((6, 5), steps=STEPS), problem((9,), steps=STEPS), problem((9,), seed=1)]
    params: list[Tensor] = [torch.nn.Parameter(case.weight.clone()) for case in cases]
    optimizer, checked_ = make(MaxFactor, params, backend), MaxFactorSettings()
    expected = [(c.weight, rule.init_state(c.weight, checked_)) for c in cases]
    for t in range(STEPS):
        for i, case in enumerate(cases):
            params[i].grad = None if t == 2 + i else case.grads[t].clone()
            if t != 2 + i:
                expected[i] = rule.step(expected[i][0], case.grads[t], expected[i][1], checked_)[:2]
        optimizer.step()
    for param, (weight, _) in zip(params, expected, strict=True):
        assert_same(param.detach(), weight, f"{tuple(param.shape)}")


# --------------------------------------------------------------------------- non-finite gradients

NAMES = ["first", "middle", "last"]


def named_case(
    backend: str, nonfinite: str, cls: type[Any] = MaxFactor
) -> tuple[FactoredOptimizer, list[Tensor], list[list[Tensor]]]:
    """A matrix, a batch that takes the simple way, and a vector; gradients by step."""
    cases = [problem(shape, seed=i) for i, shape in enumerate([(8, 5), (4, 3, 2), (9,)])]
    params: list[Tensor] = [torch.nn.Parameter(case.weight) for case in cases]
    optimizer: FactoredOptimizer = cls(
        list(zip(NAMES, params, strict=True)),
        foreach=backend == "foreach",
        fused=False,
        nonfinite=nonfinite,
        **({"switches": {"factor": "last"}} if cls is MaxFactor else {"factor": "last"}),
    )
    return optimizer, params, [list(grads) for grads in zip(*(c.grads for c in cases), strict=True)]


def take(optimizer: FactoredOptimizer, params: list[Tensor], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()


def spoiled(grads: list[Tensor], which: int, value: float) -> list[Tensor]:
    bad = [grad.clone() for grad in grads]
    bad[which].view(-1)[-1] = value
    return bad


def snapshot(optimizer: FactoredOptimizer, params: list[Tensor]) -> Iterator[Tensor]:
    for param in params:
        yield param.detach()
        yield from optimizer.state[param].values()


@pytest.mark.parametrize("cls", [MaxFactor, Adafactor])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e25])
def test_skip(value: float, which: int, cls: type[Any], backend: str) -> None:
    """1e25 is finite, but its square is not: the statistics would be lost."""
    optimizer, params, grads = named_case(backend, "skip", cls)
    control, others, _ = named_case(backend, "skip", cls)
    for t in (0, 1):
        take(optimizer, params, grads[t])
        take(control, others, grads[t])
    before = [x.clone() for x in snapshot(optimizer, params)]
    take(optimizer, params, spoiled(grads[2], which, value))
    assert optimizer.skipped == 1
    for old, new in zip(before, snapshot(optimizer, params), strict=True):
        assert torch.equal(old, new)
    for t in (2, 3):
        take(optimizer, params, grads[t])
        take(control, others, grads[t])
    assert (optimizer.skipped, control.skipped) == (1, 0)
    for ours, theirs in zip(snapshot(optimizer, params), snapshot(control, others), strict=True):
        assert torch.equal(ours, theirs)


def test_raise_names_the_parameters(backend: str) -> None:
    optimizer, params, grads = named_case(backend, "raise")
    before = [param.detach().clone() for param in params]
    bad = spoiled(spoiled(grads[0], 0, math.nan), 2, math.inf)
    with pytest.raises(FloatingPointError, match=r"the gradient of 'first', 'last' is not finite"):
        take(optimizer, params, bad)
    for old, new in zip(before, params, strict=True):
        assert torch.equal(old, new)
    take(optimizer, params, grads[0])
    assert all(not torch.equal(old, new) for old, new in zip(before, params, strict=True))


def test_ignore_lets_it_through(backend: str) -> None:
    optimizer, params, grads = named_case(backend, "ignore")
    take(optimizer, params, spoiled(grads[0], 0, math.nan))
    assert optimizer.skipped == 0
    assert params[0].isnan().all()
    assert params[1].isfinite().all()
    assert params[2].isfinite().all()


def test_too_many_in_a_row(backend: str) -> None:
    optimizer, params, grads = named_case(backend, "skip")
    for t in range(19):
        take(optimizer, params, spoiled(grads[t % 4], 1, math.nan))
    take(optimizer, params, grads[0])  # a good one starts the count anew
    for t in range(19):
        take(optimizer, params, spoiled(grads[t % 4], 1, math.nan))
    with pytest.raises(FloatingPointError, match=r"20 steps in a row .*'middle' is not finite"):
        take(optimizer, params, spoiled(grads[0], 1, math.nan))


# ------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (MaxFactor, {}),
        (MaxFactor, recipe("published-0.2")),
        (MaxFactor, {"eps": (0.1, 1e-3)}),
        (MaxFactor, {"max_norm": False}),
        (Adafactor, {}),
    ],
)
def test_no_temporary_of_the_parameters_size(
    cls: type[Any], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    param = torch.nn.Parameter(torch.randn(4096, 1024).to(dtype))
    param.grad = torch.randn(4096, 1024).to(dtype)
    optimizer = make(cls, [param], "plain", **settings)
    optimizer.step()
    with NewTensors([param, param.grad]) as record:
        optimizer.step()
    assert (
        0
        < record.largest
        <= torch_step.block_size(param.device, foreach=False)
        <= param.numel() // 4
    )


def test_state_stays_where_it_is(backend: str) -> None:
    """A checkpoint, a graph or another process may hold the tensors."""
    params: list[Tensor] = [torch.nn.Parameter(problem(s).weight) for s in SHAPES.values()]
    optimizer = make(MaxFactor, params, backend)
    places = []
    for t in range(3):
        for param, shape in zip(params, SHAPES.values(), strict=True):
            param.grad = problem(shape, steps=t + 1).grads[t]
        optimizer.step()
        tensors = [x for param in params for x in (param, *optimizer.state[param].values())]
        places.append([(id(x), x.data_ptr()) for x in tensors])
    assert places[0] == places[1] == places[2]


# ---------------------------------------------------------------------------- on a real GPU

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step_on_device", [False, True])
def test_cuda(step_on_device: bool, dtype: torch.dtype, backend: str) -> None:
    """The same as on the CPU, and without the check no wait for the device."""
    settings: list[Settings] = [MaxFactorSettings(**published(version)) for version in VERSIONS]
    settings += [AdafactorSettings(seed=1), AdafactorSettings(lr=torch.tensor(0.01, device="cuda"))]
    shapes = [*SHAPES.values(), (300, 777)]
    for checked_ in settings:
        cases = [problem(shape, dtype=dtype) for shape in shapes]
        params = [case.weight.cuda() for case in cases]
        states = [
            init_state(p, checked_.rules.of(tuple(p.shape)), step_on_device=step_on_device)
            for p in params
        ]
        for t in range(STEPS):
            grads = [case.grads[t].cuda() for case in cases]
            expected = [
                rule.step(p, g, s, checked_) for p, g, s in zip(params, grads, states, strict=True)
            ]
            works = inputs_of(params, grads, states, checked_)
            with no_host_sync():
                torch_step.step(works, check=False, foreach=backend == "foreach")
            for work, (weight, state, _) in zip(works, expected, strict=True):
                noise = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
                assert_same(work.param, weight, f"{tuple(weight.shape)} at step {t + 1}", noise)
                for key, value in state.items():
                    torch.testing.assert_close(work.state[key], value, rtol=2e-6, atol=1e-37)


@pytest.mark.gpu
@on_gpu
def test_cuda_check(backend: str) -> None:
    checked_ = MaxFactorSettings()
    params = [torch.randn(shape, device="cuda") for shape in [(8, 5), (9,), (4, 3, 2)]]
    grads, states = map(torch.randn_like, params), [rule.init_state(p, checked_) for p in params]
    works = inputs_of(params, list(grads), states, checked_)
    works[1].grad[3] = math.nan
    before = [param.clone() for param in params]
    bad = torch_step.step(works, check=True, foreach=backend == "foreach").bad
    assert bad == (["p1"], False)
    assert all(torch.equal(old, new) for old, new in zip(before, params, strict=True))


@pytest.mark.parametrize("cls", [MaxFactor, Adafactor])
def test_tensors_of_one_shape_that_are_batches_of_matrices(cls: type[Any], backend: str) -> None:
    """With factor="last" each tensor is a batch of its own; together they equal each alone."""
    case = problem((2, 4, 3), steps=2)
    params: list[Tensor] = [torch.nn.Parameter(case.weight.clone()) for _ in range(3)]
    optimizers = [
        make(cls, params[:2], backend, factor="last"),
        make(cls, params[2:], backend, factor="last"),
    ]
    for grad in case.grads:
        for param in params:
            param.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(params[0], params[2])
    assert torch.equal(params[1], params[2])


@pytest.mark.parametrize("execution", [{"fused": False}, {"foreach": True}, {"fused": True}])
def test_a_skipped_step_is_not_counted_for_empty_parameters(execution: dict[str, Any]) -> None:
    if execution.get("fused"):
        pytest.importorskip("triton", minversion="3.3")
    full, empty = torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(0, 2))
    optimizer = MaxFactor([full, empty], **execution)
    full.grad, empty.grad = torch.ones(3, 2), torch.ones(0, 2)
    optimizer.step()
    full.grad[0, 0] = math.nan
    optimizer.step()
    assert optimizer.skipped == 1
    assert [float(optimizer.state[param]["step"]) for param in (full, empty)] == [1.0, 1.0]
