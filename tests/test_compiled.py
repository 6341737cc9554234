"""With `fused=True` on a CPU, compiled passes leave what the rule leaves."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import LONG_ROWS, SHAPES, VARIANTS, arguments, problem, published
from comparison import compare_with_rule
from maxfactor import FAM, Adafactor, MaxFactor, for_model, release_gradients, rule
from maxfactor.backends import dispatch
from maxfactor.backends.torch.compiled import batch as compiled
from maxfactor.backends.torch.compiled import passes
from maxfactor.recipes import RecipeName
from maxfactor.rule import squares
from maxfactor.settings import AdafactorSettings

# Several units, the last of which is short; two of one shape; rows that are no multiple of four.
LARGER = [(700, 133), (700, 133), (3, 7_000), (57, 40, 3)]
FAST: dict[str, Any] = {
    "momentum": {"warmup": 3, "theta": 0.8},
    "momentum_dtype": "int8",
    "direction": "factored",
    "d": math.inf,
}


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No interpreter of Triton, and small units."""
    monkeypatch.setattr(dispatch, "is_interpreted", lambda: False)
    monkeypatch.setattr(compiled, "UNIT", 5_000)
    compiled.units_of.cache_clear()
    yield
    compiled.units_of.cache_clear()


def cases_of(shapes: Sequence[tuple[int, ...]], **more: Any) -> list[Any]:
    return [problem(shape, steps=5, seed=i, **more) for i, shape in enumerate(shapes)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The shapes of the batches that were compiled."""
    found: list[tuple[int, int, int]] = []
    made = compiled.CompiledBatch.__init__

    def counting(self: Any, *given: Any) -> None:
        made(self, *given)
        found.append(self.shape)

    monkeypatch.setattr(compiled.CompiledBatch, "__init__", counting)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("version", ["0.1", "0.2", "0.3", "1.0"])
def test_published_versions(version: str, variant: str, counted: list[Any]) -> None:
    settings = arguments(published(version), VARIANTS[variant])
    compare_with_rule(settings, cases_of([*SHAPES.values(), (31, 7)]), "fused")
    by_torch = variant in ("no max_norm", "full_matrix")
    assert ((2, 31, 7) in counted) == (not by_torch)


@pytest.mark.parametrize("variant", ["as published", "maximize", "small d", "clip", "decay"])
def test_larger_matrices(variant: str, counted: list[Any]) -> None:
    settings = arguments(published("1.0"), VARIANTS[variant])
    compare_with_rule(settings, cases_of(LARGER), "fused")
    assert (2, 700, 133) in counted
    assert len(counted) == 5 * 3


@pytest.mark.parametrize("scale", ["current", "initial", "raised", "usual"])
@pytest.mark.parametrize("direction", ["factored", "sign_max"])
def test_scales_and_directions(direction: str, scale: str, counted: list[Any]) -> None:
    settings = {"direction": direction, "scale": scale, "weight_decay": 0.1}
    compare_with_rule(settings, cases_of(LARGER), "fused")
    assert len(counted) == 5 * 3


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"maximize": True},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": {"warmup": 2, "mix": 0.0}, "scale": "initial"},
        {"decay_by": "squared_step", "weight_decay": 0.3, "lr": 0.6},
        {"decay_by": "step_size", "weight_decay": 0.3},
        {"eps": (0.0, 1e-3)},
    ],
    ids=str,
)
def test_momentum(more: dict[str, Any], counted: list[Any]) -> None:
    shapes = [*SHAPES.values(), *LONG_ROWS.values(), *LARGER]
    compare_with_rule(arguments(FAST | more), cases_of(shapes), "fused")
    assert (2, 700, 133) in counted
    assert (1, 5, 130) in counted


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e-6, 1e6, 1e15])
@pytest.mark.parametrize("settings", [{}, {"direction": "factored"}, FAST], ids=["1", "2", "3"])
def test_ranges(settings: dict[str, Any], size: float) -> None:
    """Where floors act, and where squares overflow or lose their digits."""
    shapes = [(230, 19), (13, 14), (9, 70)]
    compare_with_rule(arguments(settings), cases_of(shapes, scale=size), "fused")


@pytest.mark.parametrize("settings", [{}, {"direction": "factored"}, FAST], ids=["1", "2", "3"])
def test_rows_and_matrices_without_a_gradient(
    settings: dict[str, Any], counted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an embedding: rows that never had one, next to others, and a weight of zeros."""
    monkeypatch.setattr(squares, "parts_by_row", None)  # nor is anything copied because of them
    cases = cases_of([(60, 33), (60, 33), (60, 33)])
    for grad in cases[0].grads:
        grad[20:] = 0.0
    for grad in cases[1].grads:
        grad.zero_()
    cases[2].weight.zero_()
    compare_with_rule(arguments(settings, {"weight_decay": 0.1}), cases, "fused")
    assert counted == [(3, 60, 33)] * 5


@pytest.mark.parametrize("size", [1e-25, 1e19])
def test_sizes_of_weights(size: float) -> None:
    cases = cases_of([(60, 33), (9, 70)])
    for case in cases:
        case.weight.mul_(size)
    compare_with_rule({"lr": 0.3}, cases, "fused")


@pytest.mark.parametrize("more", [{}, {"lr": 0.03, "weight_decay": 0.2}, {"clip_threshold": 0.4}])
def test_adafactor(more: dict[str, Any], counted: list[Any]) -> None:
    checked = AdafactorSettings(**more)
    cases = cases_of([*SHAPES.values(), *LARGER])
    params: list[Tensor] = [torch.nn.Parameter(case.weight.clone()) for case in cases]
    optimizer = Adafactor(params, fused=True, **more)
    expected = [(case.weight, rule.init_state(case.weight, checked)) for case in cases]
    for t in range(5):
        for i, (param, case) in enumerate(zip(params, cases, strict=True)):
            param.grad = case.grads[t].clone()
            expected[i] = rule.step(expected[i][0], case.grads[t], expected[i][1], checked)[:2]
        optimizer.step()
    for param, (weight, state) in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=2e-5, atol=2e-6)
        for key, value in state.items():
            ours = optimizer.state[param][key]
            torch.testing.assert_close(ours, value, rtol=4e-6, atol=1e-37)
    assert (2, 700, 133) in counted


# -------------------------------------------------------------------------- threads and memory


def stepped(optimizer: MaxFactor, param: Tensor, steps: int) -> None:
    for number in range(steps):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
        optimizer.step()


@pytest.mark.parametrize("direction", ["factored", "sign_max"])
def test_sums_of_weights_are_found_while_they_are_written(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a step need not read W for them, unless somebody else has written it."""
    read = list[int]()
    original = passes.weight_squares

    def counting(units: Any, at: Any, n: int, found: Any) -> None:
        read.append(n)
        original(units, at, n, found)

    monkeypatch.setattr(passes, "weight_squares", counting)
    weight = torch.randn(70, 33)
    param, resumed = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    settings: Any = {"direction": direction, "weight_decay": 0.1, "fused": True}
    optimizer = MaxFactor([param], **settings)
    stepped(optimizer, param, 4)
    assert len(read) == 1
    other = MaxFactor([resumed], **settings)
    with torch.no_grad():
        resumed.copy_(param)
    other.load_state_dict(optimizer.state_dict())
    for each, own in ((optimizer, param), (other, resumed)):
        stepped(each, own, 3)
    assert torch.equal(param, resumed)  # bit for bit, though one of them read W again
    assert len(read) == 2
    with torch.no_grad():
        param.mul_(3.0)
        resumed.data = 3.0 * resumed.data  # in another place
    for each, own in ((optimizer, param), (other, resumed)):
        stepped(each, own, 2)
    assert torch.equal(param, resumed)
    assert len(read) == 4


@pytest.mark.parametrize("settings", [{}, {"direction": "factored"}, FAST], ids=["1", "2", "3"])
def test_a_matrix_does_not_depend_on_the_others_of_its_batch(settings: dict[str, Any]) -> None:
    """So released gradients, which come window by window, leave the same bits."""
    torch.manual_seed(0)
    sizes = [1.0, 1e-25, 3.0, 0.0, 1e19]
    weights = [size * torch.randn(80, 500) for size in sizes]
    together = [torch.nn.Parameter(weight.clone()) for weight in weights]
    alone = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizers = [MaxFactor(together, fused=True, weight_decay=0.1, **settings)]
    optimizers += [MaxFactor([own], fused=True, weight_decay=0.1, **settings) for own in alone]
    for number in range(3):
        for own, other in zip(together, alone, strict=True):
            own.grad = torch.randn(80, 500) * 10.0**number
            other.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for own, other in zip(together, alone, strict=True):
        assert torch.equal(own, other)


def test_the_initial_size_needs_no_sums_of_weights() -> None:
    param = torch.nn.Parameter(torch.randn(70, 33))
    optimizer = MaxFactor([param], direction="factored", scale="initial", fused=True)
    stepped(optimizer, param, 2)
    (runner,) = optimizer._runners.values()
    assert runner._weight_sums.find([param]) is None


@pytest.mark.parametrize("settings", [{}, {"direction": "factored"}, FAST], ids=["1", "2", "3"])
def test_torchs_defaults_do_not_matter(settings: dict[str, Any]) -> None:
    found = []
    for dtype, device in [(torch.float32, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")]:
        param = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 60 * 33).view(60, 33))
        grads = [torch.sin(7.0 * param.detach()), torch.cos(9.0 * param.detach())]
        optimizer = MaxFactor([param], fused=True, **settings)
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        try:
            for grad in grads:
                param.grad = grad
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        found.append(param.detach())
    assert all(torch.equal(each, found[0]) for each in found)


def test_gradients_that_are_negated_when_they_are_read() -> None:
    grad = torch.randn(60, 33)
    params = [torch.nn.Parameter(torch.ones(60, 33)) for _ in range(2)]
    for param, given in zip(params, [grad.clone(), torch._neg_view(-grad)], strict=True):
        param.grad = given
        MaxFactor([param], fused=True).step()
    assert torch.equal(*params)


@pytest.mark.parametrize("settings", [{}, {"direction": "factored"}, FAST], ids=["1", "2", "3"])
def test_passes_leave_the_same_bits_with_any_number_of_threads(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # noqa: B023
        cases = cases_of(LARGER)
        params = [torch.nn.Parameter(case.weight.clone()) for case in cases]
        optimizer = MaxFactor(params, fused=True, **arguments(settings))
        for t in range(3):
            for param, case in zip(params, cases, strict=True):
                param.grad = case.grads[t].clone()
            optimizer.step()
        found.append([x for p in params for x in (p.detach(), *optimizer.state[p].values())])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_gradients_and_weights_of_other_layouts(counted: list[Any]) -> None:
    """A gradient that is not contiguous is copied; such a weight is stepped by torch."""
    case = problem((60, 33), steps=2)
    plain, turned, weight = (torch.nn.Parameter(case.weight.clone()) for _ in range(3))
    weight.data = case.weight.t().contiguous().t()
    optimizer = MaxFactor([plain, turned, weight], fused=True)
    for grad in case.grads:
        plain.grad, weight.grad = grad.clone(), grad.clone()
        turned.grad = grad.t().contiguous().t()
        optimizer.step()
    assert counted == [(2, 60, 33)] * 2
    assert torch.equal(plain, turned)
    torch.testing.assert_close(plain, weight)


@pytest.mark.parametrize("settings", [{}, FAST], ids=["1", "2"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e25])
def test_a_gradient_that_is_not_finite_changes_nothing(
    value: float, settings: dict[str, Any]
) -> None:
    cases = cases_of([(60, 33), (9,), (60, 33)])
    params = [torch.nn.Parameter(case.weight.clone()) for case in cases]
    optimizer = MaxFactor(params, fused=True, **arguments(settings))
    for t in range(2):
        for param, case in zip(params, cases, strict=True):
            param.grad = case.grads[t].clone()
        if t == 1:
            before = [x.clone() for p in params for x in (p.detach(), *optimizer.state[p].values())]
            params[2].grad.view(-1)[-1] = value  # type: ignore[union-attr]
        optimizer.step()
    after = [x for p in params for x in (p.detach(), *optimizer.state[p].values())]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert optimizer.skipped == 1


@pytest.mark.parametrize("settings", [{}, {"direction": "factored"}, FAST], ids=["1", "2", "3"])
def test_nan_is_not_lost_where_it_is_ignored(settings: dict[str, Any]) -> None:
    param = torch.nn.Parameter(torch.ones(8, 5))
    optimizer = MaxFactor([param], fused=True, nonfinite="ignore", **arguments(settings))
    param.grad = torch.randn(8, 5)
    param.grad[3, 2] = math.nan
    optimizer.step()
    assert param.isnan().any()


@pytest.mark.parametrize("recipe", ["quality", "fast", "lean"])
def test_recipes_and_checkpoints(recipe: RecipeName) -> None:
    """Two steps compiled, saved, two by torch, saved, two compiled: as six of torch."""

    def new_model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Conv1d(4, 8, 3), torch.nn.Flatten(), torch.nn.Linear(48, 40),
            torch.nn.Linear(40, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 5),
        )  # fmt: skip

    def steps(model: torch.nn.Module, optimizer: Any, first: int, last: int) -> None:
        for t in range(first, last):
            generator = torch.Generator().manual_seed(t)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()

    usual, model, saved = new_model(), new_model(), None
    steps(usual, for_model(usual, recipe, fused=False), 0, 6)
    for part, fused in enumerate([True, False, True]):
        optimizer = for_model(model, recipe, fused=fused)
        if saved is not None:
            optimizer.load_state_dict(saved)
        steps(model, optimizer, 2 * part, 2 * part + 2)
        saved = optimizer.state_dict()
    for ours, theirs in zip(model.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5)


def test_a_recorded_step_is_measured() -> None:
    param = torch.nn.Parameter(torch.ones(8, 5))
    optimizer = MaxFactor([("w", param)], fused=True)
    optimizer.record_metrics()
    param.grad = torch.randn(8, 5)
    optimizer.step()
    assert optimizer.metrics()["w"].clip == 1.0


def test_grad_scaler() -> None:
    """grad_scale divides, found_inf skips without counting; the user's gradient stays."""
    case = problem((9, 40), steps=3)
    params = [torch.nn.Parameter(case.weight.clone()) for _ in range(2)]
    scaled: Any = MaxFactor([params[0]], fused=True)
    plain = MaxFactor([params[1]], fused=True)
    assert scaled._step_supports_amp_scaling
    scaled.grad_scale = torch.full((), 8.0)
    for t, grad in enumerate(case.grads):
        scaled.found_inf = torch.full((), float(t == 1))
        given = params[0].grad = grad * 8.0
        scaled.step()
        assert params[0].grad is given
        assert torch.equal(given, grad * 8.0)
        if t != 1:
            params[1].grad = grad
            plain.step()
    assert torch.equal(params[0], params[1])
    assert int(scaled.state[params[0]]["step"]) == 2
    assert scaled.skipped == 0


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("dtype", "settings", "message"),
    [
        (torch.bfloat16, {}, r"parameter 'w' or its gradient is torch.bfloat16, .* use float32 or"),
        (torch.float32, FAST | {"momentum_dtype": "fp32"}, r"momentum of parameter 'w' is fp32 in"),
        (torch.float32, FAST | {"momentum": FAM(bands=4)}, r"is int8 in 4 bands, .* set momentum_"),
        (torch.float32, FAST | {"direction": "sign_max"}, r"set direction='factored', d=math.inf"),
        (torch.float32, FAST | {"d": 1.0}, r"without maxima and norms; set direction='factored'"),
    ],
)
def test_what_is_not_compiled_is_refused(
    dtype: torch.dtype, settings: dict[str, Any], message: str
) -> None:
    param = torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))
    optimizer = MaxFactor([("w", param)], fused=True, **settings)
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert not optimizer.state
    assert bool((param == 1.0).all())


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.nn.Parameter(torch.ones(3, 2))
    param.grad = torch.ones_like(param)
    monkeypatch.setattr(dispatch, "version_of", lambda _: (0, 58))
    with pytest.raises(RuntimeError, match=r"Numba 0\.58 is older than 0\.60; update it or set"):
        MaxFactor([param], fused=True).step()
    found = importlib.util.find_spec
    missing = lambda name: None if name == "numba" else found(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    with pytest.raises(RuntimeError, match=r"needs Numba, which is not installed; install it with"):
        MaxFactor([param], fused=True).step()
    MaxFactor([param]).step()  # nobody asked for it


def test_where_numba_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError(f"cannot cache {name}")

    dispatch.numba_error.cache_clear()
    monkeypatch.setattr(importlib, "import_module", fail)
    optimizer = MaxFactor([torch.nn.Parameter(torch.ones(3, 2))], fused=True)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 2)
    with pytest.raises(RuntimeError, match=r"Numba cannot be used: cannot cache .* NUMBA_CACHE_"):
        optimizer.step()
    assert not optimizer.state
    dispatch.numba_error.cache_clear()


def test_it_is_only_loaded_if_asked_for() -> None:
    """Loading Numba takes a second, which is not for those who do not use it."""
    code = """if True:
        import sys, torch, maxfactor
        weight = torch.nn.Parameter(torch.ones(300, 200))
        for fused in (None, True):
            weight.grad = torch.ones(300, 200)
            maxfactor.MaxFactor([weight], fused=fused).step()
            assert ("numba" in sys.modules) == (fused is True)
    """
    path = os.pathsep.join(sys.path)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], env=environment | {"PYTHONPATH": path}, check=True)


@pytest.mark.parametrize("settings", [{}, {"direction": "factored"}, FAST], ids=["1", "2", "3"])
def test_autograd_knows_what_was_written(settings: dict[str, Any], counted: list[Any]) -> None:
    """Else a second backward pass would take the new weights for those of the forward pass."""
    param = torch.nn.Parameter(torch.ones(60, 33))
    optimizer = MaxFactor([param], fused=True, **settings)
    loss = param.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert counted
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_of_other_types_are_left_to_torch(counted: list[Any]) -> None:
    """Their memory is not theirs: a pass would read address 0."""
    plain, wrapped = (torch.nn.Parameter(torch.ones(60, 33)) for _ in range(2))
    optimizer = MaxFactor([plain, wrapped], fused=True)
    for param in (plain, wrapped):
        param.grad = torch.ones(60, 33)
    wrapped.grad = torch.ones(60, 33).as_subclass(Other)
    optimizer.step()
    assert counted == [(1, 60, 33)]
    torch.testing.assert_close(plain, wrapped)


class Other(Tensor):
    """A type of its own."""


def test_sums_of_columns_are_small_beside_the_matrices() -> None:
    compiled.units_of.cache_clear()
    for k, m, n in [(64, 4096, 11_008), (1, 768, 51_865), (1, 51_865, 384)]:
        assert len(compiled.units_of(k, m, n)) * n <= k * m * n / 50
    compiled.units_of.cache_clear()


def test_a_skipped_step_is_recorded_later() -> None:
    param = torch.nn.Parameter(torch.ones(8, 5))
    optimizer: Any = MaxFactor([("w", param)], fused=True)
    optimizer.record_metrics(None)
    for found in (1.0, 0.0):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(found)
        param.grad = torch.ones(8, 5)
        optimizer.step()
    assert optimizer.metrics()["w"].grad_rms == pytest.approx(1.0)


def test_released_gradients_leave_the_same_bits() -> None:
    found = []
    for is_released in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(4)))
        optimizer = for_model(model, "fast", fused=True)
        handle = release_gradients(model, optimizer) if is_released else None
        for t in range(3):
            generator = torch.Generator().manual_seed(t)
            model(torch.randn(8, 20, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.detach().clone() for param in model.parameters()])
        if handle is not None:
            handle.remove()
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
