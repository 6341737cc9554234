"""Every backend leaves what the rule leaves with momentum, and in every direction."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import (
    BLOCKS,
    DIRECTIONS,
    LONG_ROWS,
    MOMENTA,
    MOMENTUM_RUNS,
    MOMENTUM_VARIANTS,
    SHAPES,
    NewTensors,
    no_host_sync,
    problem,
    settings_for,
)
from comparison import compare_with_rule, inputs_of
from maxfactor import FAM, MaxFactor, rule
from maxfactor.backends.torch import batch as torch_batch
from maxfactor.backends.torch import step as torch_step
from maxfactor.rule import MaxFactorSettings, reference
from maxfactor.state import init_state

BACKENDS = ["plain", "blocks", "foreach"]
STORES = [("int8", "current"), ("bf16", "usual"), ("fp32", "raised")]  # with a scale each
STEPS = 5  # the last one follows a gradient of zeros
LARGE = [(700, 333), (3, 70_000), (40, 30, 90), (70_001,)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both backends, and plain once more with every matrix, however small, in several blocks."""
    if request.param == "blocks":
        monkeypatch.setattr(torch_step, "CPU_BLOCK", 50)
    return str(request.param)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("momentum", MOMENTA)
def test_backends(momentum: str, direction: str, backend: str) -> None:
    """Each store with each momentum and each direction.

    A direction works on the filtered gradient and does not see how the memory is stored, so one
    store for each pair of momentum and direction is enough.
    """
    shapes = [*SHAPES.values(), *LONG_ROWS.values(), (9,), (7, 31)]
    cases = [problem(shape, steps=STEPS, seed=i) for i, shape in enumerate(shapes)]
    turn = list(MOMENTA).index(momentum) + DIRECTIONS.index(direction)
    store, scale = STORES[turn % len(STORES)]
    compare_with_rule(settings_for(momentum, store, direction, scale), cases, backend)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("backend", ["plain", "foreach"])
def test_blocks(backend: str, name: str) -> None:
    shape, blocks = BLOCKS[name]
    cases = [problem(each, steps=4, seed=i) for i, each in enumerate([shape, (9,), shape])]
    for momentum, store in [("nesterov", "int8"), ("fam", "bf16"), ("ema", "fp32"), ("none", "")]:
        settings = settings_for(momentum, store, "orthogonal", "initial") | {"blocks": blocks}
        compare_with_rule(settings, cases, backend)


@pytest.mark.parametrize("kind", ["plain", "foreach"])
@pytest.mark.parametrize("direction", ["sign_max", "factored"])
@pytest.mark.parametrize("momentum", ["nesterov", "fam", "bands"])
def test_large_matrices_in_blocks(
    momentum: str, direction: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_step, "CPU_BLOCK", 20_000)
    monkeypatch.setattr(torch_step, "DEVICE_BLOCK", 100_000)
    cases = [problem(shape, steps=5, seed=i) for i, shape in enumerate(LARGE)]
    compare_with_rule(settings_for(momentum, "int8", direction, "current"), cases, kind)


@pytest.mark.parametrize("variant", MOMENTUM_VARIANTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_settings(direction: str, variant: str, backend: str) -> None:
    """With and without a momentum in turn: each variant, direction and backend meets both."""
    shapes = [(), (9,), (31, 7), (7, 31), (12, 5, 3), (0, 5), (5, 130)]
    cases = [problem(shape, steps=STEPS) for shape in shapes]
    turn = list(MOMENTUM_VARIANTS).index(variant) + DIRECTIONS.index(direction)
    momentum = ("none", "fam")[(turn + BACKENDS.index(backend)) % 2]
    settings = settings_for(momentum, "fp32", direction, "current") | MOMENTUM_VARIANTS[variant]
    compare_with_rule(settings, cases, backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_dtypes(direction: str, dtype: torch.dtype, backend: str) -> None:
    """Parameters of another precision; the memories keep their own."""
    shapes = [(31, 7), (5, 130), (9,), (), (6, 40, 3)]
    cases = [problem(shape, dtype=dtype, steps=STEPS) for shape in shapes]
    for momentum in ("nesterov", "fam"):
        settings = settings_for(momentum, "int8", direction, "initial") | {"seed": 5}
        compare_with_rule(settings, cases, backend)


def test_without_reading_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs where step and lr are on a device: every number stays a tensor."""
    for module in (reference, torch_batch, torch_step):
        monkeypatch.setattr(module, "host_scalar", lambda x: x)
    monkeypatch.setattr(torch_step, "DEVICE_BLOCK", 400)
    shapes = [*SHAPES.values(), *LONG_ROWS.values(), (31, 7)]
    cases = [problem(shape, steps=STEPS, seed=i) for i, shape in enumerate(shapes)]
    for momentum, store in [("nesterov", "int8"), ("fam", "bf16"), ("bands", "int8")]:
        for direction in DIRECTIONS:
            settings = settings_for(momentum, store, direction, "initial")
            compare_with_rule(settings | {"lr": torch.tensor(0.01)}, cases, "foreach")


def test_counters_that_differ(backend: str) -> None:
    """Parameters of one shape that have taken different numbers of steps."""
    settings: dict[str, Any] = {"momentum": FAM(warmup=2), "scale": "initial"}
    checked_ = MaxFactorSettings(**settings)
    cases = [problem((6, 5), steps=6, seed=seed) for seed in range(3)]
    params: list[Tensor] = [torch.nn.Parameter(case.weight.clone()) for case in cases]
    optimizer = MaxFactor(params, foreach=backend == "foreach", fused=False, **settings)
    expected = [(case.weight, rule.init_state(case.weight, checked_)) for case in cases]
    for t in range(6):
        for i, case in enumerate(cases):
            params[i].grad = None if t == 1 + i else case.grads[t].clone()
            if t != 1 + i:
                expected[i] = rule.step(expected[i][0], case.grads[t], expected[i][1], checked_)[:2]
        optimizer.step()
    for param, (weight, state) in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state[param]["initial_rms"], state["initial_rms"])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_matrix_that_begins_at_zero_is_sized_by_its_shape(backend: str, direction: str) -> None:
    cases = []
    for shape in [(6, 5), (4, 3, 2), (5,)]:
        cases.append(replace(problem(shape, steps=3, seed=1), weight=torch.zeros(shape)))
    settings = settings_for("nesterov", "fp32", direction, "initial") | {"lr": 0.1}
    compare_with_rule(settings, cases, backend)
    param = torch.nn.Parameter(torch.zeros(6, 5))
    param.grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    optimizer = MaxFactor([param], foreach=backend == "foreach", fused=False, **settings)
    optimizer.step()
    assert optimizer.effective_lr() == pytest.approx([0.1 / math.sqrt(3 * 5)])


@pytest.mark.parametrize("direction", ["sign_max", "factored"])
@pytest.mark.parametrize("momentum", ["nesterov", "fam", "bands"])
def test_no_temporary_of_the_parameters_size(momentum: str, direction: str) -> None:
    param = torch.nn.Parameter(torch.randn(2048, 1024))
    param.grad = torch.randn(2048, 1024)
    settings = settings_for(momentum, "int8", direction, "current")
    optimizer = MaxFactor([param], foreach=False, fused=False, **settings)
    optimizer.step()
    with NewTensors([param, param.grad, *optimizer.state[param].values()]) as record:
        optimizer.step()
    assert (
        0
        < record.largest
        <= torch_step.block_size(param.device, foreach=False)
        <= param.numel() // 4
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_gradient_that_is_not_finite_changes_nothing(direction: str, backend: str) -> None:
    settings = settings_for("fam", "int8", direction, "initial")
    cases = [problem(shape, seed=i) for i, shape in enumerate([(8, 5), (5, 130), (9,)])]
    params: list[Tensor] = [torch.nn.Parameter(case.weight.clone()) for case in cases]
    optimizer = MaxFactor(params, foreach=backend == "foreach", fused=False, **settings)
    for t in (0, 1):
        for param, case in zip(params, cases, strict=True):
            param.grad = case.grads[t].clone()
        if t == 1:
            before = [x.clone() for p in params for x in (p.detach(), *optimizer.state[p].values())]
            for bad in params:
                assert bad.grad is not None
                bad.grad.view(-1)[3] = math.nan
                optimizer.step()
                bad.grad.view(-1)[3] = 1e25  # its square is not finite
                optimizer.step()
                bad.grad.view(-1)[3] = 0.0
            after = [x for p in params for x in (p.detach(), *optimizer.state[p].values())]
            assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
            assert optimizer.skipped == 6
        optimizer.step()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("momentum", MOMENTA)
def test_zero_rate_and_zero_gradient(momentum: str, direction: str, backend: str) -> None:
    """A rate of 0 changes no weight; gradients of 0 before any other leave decay alone."""
    settings = settings_for(momentum, "int8", direction, "current") | {"weight_decay": 0.5}
    cases = [problem(shape, steps=2) for shape in [*SHAPES.values(), (5, 130)]]
    params: list[Tensor] = [torch.nn.Parameter(case.weight.clone()) for case in cases]
    optimizer = MaxFactor(params, foreach=backend == "foreach", lr=0.1, **settings)
    for param in params:
        param.grad = torch.zeros(param.shape)
    for _ in range(2):
        optimizer.step()
    before = [param.detach().clone() for param in params]
    for weight, case in zip(before, cases, strict=True):
        torch.testing.assert_close(weight, case.weight * 0.95**2)
    optimizer.param_groups[0]["lr"] = 0.0
    for param, case in zip(params, cases, strict=True):
        param.grad = case.grads[0].clone()
    optimizer.step()
    for param, weight in zip(params, before, strict=True):
        assert torch.equal(param, weight)
        assert all(bool(value.isfinite().all()) for value in optimizer.state[param].values())


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ranges(direction: str, scale: float, backend: str) -> None:
    """Gradients so small that the floors act, or so large that a product would overflow."""
    cases = [problem(shape, steps=STEPS, scale=scale) for shape in [(31, 7), (5, 130), (9,)]]
    for momentum in MOMENTA:
        params: list[Tensor] = [torch.nn.Parameter(case.weight.clone()) for case in cases]
        settings = settings_for(momentum, "int8", direction, "current")
        optimizer = MaxFactor(params, foreach=backend == "foreach", **settings)
        for t in range(STEPS):
            for param, case in zip(params, cases, strict=True):
                param.grad = case.grads[t]
            optimizer.step()
        for param, case in zip(params, cases, strict=True):
            moved = (param.detach() - case.weight).abs().max() / case.weight.abs().max()
            assert 0.0 < moved < 0.5 or scale == 1e-30, f"{momentum} {param.shape} {moved}"
            assert bool(param.isfinite().all())
            state = optimizer.state[param].values()
            assert all(bool(value.isfinite().all()) for value in state)


def test_non_contiguous(backend: str) -> None:
    """A transposed parameter with strided gradients is the same matrix."""
    case = problem((31, 70), steps=5)
    for direction in DIRECTIONS:
        settings = settings_for("fam", "int8", direction, "current")
        straight = torch.nn.Parameter(case.weight.clone())
        strided = torch.nn.Parameter(case.weight.t().contiguous().t())
        assert not strided.is_contiguous()
        for param in (straight, strided):
            optimizer = MaxFactor([param], foreach=backend == "foreach", **settings)
            for grad in case.grads:
                param.grad = grad.t().contiguous().t() if param is strided else grad
                optimizer.step()
            assert optimizer.state[param]["momentum"].is_contiguous()
        off = (straight - strided).abs()
        assert (off > 1e-6).sum() <= 2  # on the edge of rounding


def test_state_stays_where_it_is(backend: str) -> None:
    """A checkpoint, a graph or another process may hold the tensors."""
    params: list[Tensor] = [torch.nn.Parameter(problem(s).weight) for s in SHAPES.values()]
    settings = settings_for("fam", "int8", "sign_max", "initial")
    optimizer = MaxFactor(params, foreach=backend == "foreach", **settings)
    places = []
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape)
        optimizer.step()
        tensors = [x for param in params for x in (param, *optimizer.state[param].values())]
        places.append([(id(x), x.data_ptr()) for x in tensors])
    assert places[0] == places[1] == places[2]


# ---------------------------------------------------------------------------- on a real GPU

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("step_on_device", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("momentum", ["none", "nesterov", "fam", "bands"])
def test_cuda(
    momentum: str, direction: str, step_on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule's own step on the device, without a wait for it."""
    monkeypatch.setattr(torch_step, "DEVICE_BLOCK", 100_000)
    checked_ = MaxFactorSettings(**settings_for(momentum, "int8", direction, "initial"))
    shapes = [*SHAPES.values(), *LONG_ROWS.values(), (300, 777), (64, 64), (64, 64)]
    cases = [problem(shape, steps=5) for shape in shapes]
    params = [case.weight.cuda() for case in cases]
    states = [
        init_state(p, checked_.rules.of(tuple(p.shape)), step_on_device=step_on_device)
        for p in params
    ]
    for t in range(5):
        grads = [case.grads[t].cuda() for case in cases]
        triples = list(zip(params, grads, states, strict=True))
        expected = [rule.step(p, g, s, checked_) for p, g, s in triples]
        works = inputs_of(params, grads, states, checked_)
        with no_host_sync():
            torch_step.step(works, check=False, foreach=True)
        for work, result in zip(works, expected, strict=True):
            alpha = float(result.step_size)
            assert torch.equal(work.state["step"], result.state["step"])
            if work.param.numel() == 0:
                continue
            off = (work.param - result.param).abs()
            # In bfloat16 a product of a batch may round otherwise than one alone.
            noise = 0.2 if direction == "orthogonal" else 2e-5
            wrong = off > 1e-6 * result.param.abs().max().clamp(min=1e-30) + noise * alpha
            assert int(wrong.sum()) <= 0.02 * off.numel() + 2


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("run", MOMENTUM_RUNS)
def test_cuda_graph(run: str) -> None:
    """Captured once and replayed, the step counts and remembers as it does without a graph."""
    weights = [torch.randn(shape, device="cuda") for shape in [(96, 130), (96, 130), (70,)]]
    grads = [[torch.randn_like(w) for w in weights] for _ in range(6)]
    results = []
    for captured in (False, True):
        params: list[Tensor] = [torch.nn.Parameter(w.clone()) for w in weights]
        optimizer = MaxFactor(
            params, foreach=True, capturable=True, nonfinite="ignore", seed=1, **MOMENTUM_RUNS[run]
        )
        for param in params:
            param.grad = torch.zeros_like(param)
        graph = None
        for t in range(6):
            for param, grad in zip(params, grads[t], strict=True):
                assert param.grad is not None
                param.grad.copy_(grad)
            if not captured or t < 2:
                optimizer.step()
                continue
            if graph is None:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay()
        results.append(params)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
