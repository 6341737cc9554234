"""What a training around the optimizer does to it: schedulers, torch's defaults, groups, states."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

import maxfactor
from cases import published
from maxfactor import FAM, Adafactor, AdaptiveSchedule, MaxFactor

BACKENDS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "fused":
        pytest.importorskip("triton")
    return BACKENDS[request.param]


def parameters(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, dtype=torch.float32).to(DEVICE)) for shape in shapes
    ]


def advance(
    optimizer: Any, params: list[torch.nn.Parameter], steps: int = 1, seed: int = 1
) -> None:
    made = torch.Generator("cpu").manual_seed(seed)
    for _ in range(steps):
        for param in params:
            grad = torch.randn(param.shape, generator=made, dtype=torch.float32, device="cpu")
            param.grad = grad.to(DEVICE)
        optimizer.step()


def moved(make: Callable[..., Any], shapes: Sequence[tuple[int, ...]], steps: int) -> list[Tensor]:
    params = parameters(*shapes)
    advance(make(params), params, steps)
    return [param.detach() for param in params]


# ------------------------------------------------------------------------------ schedulers


@pytest.mark.parametrize("momentum", [None, FAM()])
@pytest.mark.parametrize("kind", ["one-cycle", "cyclic"])
def test_a_scheduler_that_writes_a_momentum_is_refused(kind: str, momentum: FAM | None) -> None:
    params = parameters((4, 3))
    optimizer = MaxFactor(params, momentum=momentum)
    if kind == "one-cycle":
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    else:
        lr_scheduler.CyclicLR(optimizer, base_lr=0.001, max_lr=0.01)
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match=r"group 0 was no number .*cycle_momentum=False"):
        advance(optimizer, params)
    assert torch.equal(params[0], before)
    assert not optimizer.state


def test_a_fixed_momentum_may_be_cycled() -> None:
    params = parameters((4, 3))
    optimizer = MaxFactor(params, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    for _ in range(5):
        advance(optimizer, params)
        scheduler.step()
    assert optimizer.param_groups[0]["momentum"] != 0.9


@pytest.mark.parametrize("version", ["0.1", "0.2", "0.3", "1.0"])
def test_one_cycle_keeps_its_min_lr_to_itself(version: str) -> None:
    params, control = parameters((4, 3)), parameters((4, 3))
    optimizer, other = (MaxFactor(own, **published(version)) for own in (params, control))
    scheduler = lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.01, total_steps=9, cycle_momentum=False, final_div_factor=0.01
    )
    for _ in range(8):
        other.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        advance(optimizer, params)
        advance(other, control)
        scheduler.step()
    assert torch.equal(params[0], control[0])
    assert "min_lr" in optimizer.param_groups[0]
    assert optimizer.describe().total.tensors == 1


def test_a_schedule_takes_its_numbers_by_name() -> None:
    optimizer: Any = MaxFactor(parameters((3, 2)))
    with pytest.raises(TypeError, match="positional"):
        AdaptiveSchedule(optimizer, 1000)  # type: ignore[call-arg]  # steps, or a rate?
    schedule = AdaptiveSchedule(optimizer, warmup_steps=np.int64(3))
    assert schedule.warmup_steps == 3


# -------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": FAM(bands=8, warmup=1)},
        {"momentum": 0.95, "nesterov": True, "direction": "orthogonal"},
    ],
)
def test_autocast_changes_nothing(backend: dict[str, Any], arguments: dict[str, Any]) -> None:
    """A step is often taken within the autocast of the forward pass."""
    if backend.get("fused") and arguments["momentum"] != 0.95:
        pytest.skip("the kernels have one band")
    shapes = [(8, 130), (4, 5)]
    params, control = parameters(*shapes), parameters(*shapes)
    optimizer, other = (MaxFactor(own, **arguments, **backend) for own in (params, control))
    advance(other, control, steps=3)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        advance(optimizer, params, steps=3)
        assert torch.is_autocast_enabled(DEVICE)
    for own, expected in zip(params, control, strict=True):
        assert torch.equal(own, expected)


def test_a_closure_keeps_its_autocast() -> None:
    (weight,) = parameters((4, 3))
    optimizer = MaxFactor([weight])
    seen = []

    def closure() -> float:
        seen.append((weight @ weight.T).dtype)
        return 0.0

    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        optimizer.step(closure)
    assert seen == [torch.bfloat16]


# ------------------------------------------------------------------------ torch's defaults


@pytest.fixture
def _defaults() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("cpu")


@pytest.mark.usefixtures("_defaults")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("momentum", [None, FAM(), FAM(bands=4)])
def test_the_default_dtype_changes_nothing(
    backend: dict[str, Any], momentum: FAM | None, dtype: torch.dtype
) -> None:
    if momentum is not None and momentum.bands > 1 and "fused" in backend:
        backend = {}

    def make(params: list[torch.nn.Parameter]) -> MaxFactor:
        groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": 0.02}]
        return MaxFactor(groups, momentum=momentum, **backend)

    shapes = [(8, 72), (5,)]
    wanted = moved(make, shapes, 3)
    torch.set_default_dtype(dtype)
    maxfactor.rule.fam.dct_basis.cache_clear()
    found = moved(make, shapes, 3)
    torch.set_default_dtype(torch.float32)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("_defaults")
def test_the_default_device_changes_nothing(backend: dict[str, Any]) -> None:
    def make(params: list[torch.nn.Parameter]) -> MaxFactor:
        return MaxFactor(params, momentum=FAM(), **backend)

    wanted = moved(make, [(8, 72), (5,)], 3)
    params = parameters((8, 72), (5,))
    torch.set_default_device("meta")
    advance(make(params), params, 3)
    torch.set_default_device("cpu")
    assert all(torch.equal(*pair) for pair in zip(params, wanted, strict=True))


# ------------------------------------------------------------------------- groups and state


def test_a_state_that_was_cleared_starts_anew(backend: dict[str, Any]) -> None:
    params, fresh = parameters((6, 8)), parameters((6, 8))
    optimizer = MaxFactor(params, **backend)
    advance(optimizer, params, 2)
    optimizer.state.clear()
    fresh[0].data.copy_(params[0].data)
    advance(optimizer, params, seed=5)
    advance(MaxFactor(fresh, **backend), fresh, seed=5)
    torch.testing.assert_close(params[0], fresh[0], rtol=1e-6, atol=1e-7)
    assert len(optimizer.state_dict()["state"]) == 1


def test_fam_set_in_a_group_is_saved_as_numbers() -> None:
    params = parameters((6, 8))
    optimizer = MaxFactor(params, momentum=FAM())
    advance(optimizer, params)
    optimizer.param_groups[0]["momentum"] = FAM(beta_max=0.9)
    advance(optimizer, params)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    advance(optimizer, params)
    assert optimizer.param_groups[0]["momentum"]["beta_max"] == 0.9


def test_numbers_of_numpy_are_saved_as_plain_ones() -> None:
    params = parameters((6, 8))
    optimizer = MaxFactor(params, momentum=FAM(warmup=np.int64(3), bands=np.int64(2)))
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(0.5) ** step)
    advance(optimizer, params)
    scheduler.step()
    optimizer.param_groups[0]["seed"] = np.int64(3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    (saved,) = torch.load(file, weights_only=True)["param_groups"]
    assert (saved["lr"], saved["seed"]) == (0.005, 3)


@pytest.mark.parametrize(
    ("shape", "name", "value"),
    [((3, 4, 5), "factor", "last"), ((4, 5), "full_matrix", True), ((1, 1), "scalar_boost", 2.0)],
)
def test_a_setting_that_the_state_was_not_made_for(
    shape: tuple[int, ...], name: str, value: object
) -> None:
    params = parameters(shape)
    optimizer = MaxFactor(params)
    advance(optimizer, params)
    optimizer.param_groups[0]["switches"] = {name: value}
    with pytest.raises(ValueError, match=rf"'param_0' was changed after its first step .*{name}"):
        advance(optimizer, params)


@pytest.mark.parametrize("given", [{}, {"weight": torch.ones(2)}])
def test_something_else_than_a_checkpoint_is_refused(given: dict[str, Any]) -> None:
    optimizer = MaxFactor(parameters((3, 2)))
    with pytest.raises(ValueError, match=r"what optimizer.state_dict\(\) returned"):
        optimizer.load_state_dict(given)


@pytest.mark.parametrize("momentum", ["fast", FAM])
def test_a_momentum_that_was_meant_otherwise(momentum: Any) -> None:
    with pytest.raises(TypeError, match=r"a number such as 0.95 or maxfactor.FAM\(\)"):
        MaxFactor(parameters((3, 2)), momentum=momentum)


def test_a_seed_of_numpy() -> None:
    optimizer = MaxFactor(parameters((3, 2)), seed=np.int64(3))
    assert optimizer.param_groups[0]["seed"] == 3


# -------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize("d", [0.5, 2.0, math.inf])
def test_vectors_that_move_by_their_filtered_update(backend: dict[str, Any], d: float) -> None:
    """(7) divides by max|y| though nothing moves by signs."""

    def make(own: dict[str, Any]) -> Callable[..., MaxFactor]:
        settings: dict[str, Any] = {
            "momentum": 0.9,
            "switches": {"vector_direction": "update"},
            "d": d,
        }
        return lambda params: MaxFactor(params, **settings, **own)

    shapes = [(64,), (6, 16)]
    wanted = moved(make(BACKENDS["plain"]), shapes, 3)
    for one, other in zip(moved(make(backend), shapes, 3), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_orthogonal_matrices_of_odd_sizes_side_by_side(backend: dict[str, Any]) -> None:
    """No matrix is written over its neighbour, whose rows begin on 16 bytes."""

    def make(own: dict[str, Any]) -> Callable[..., MaxFactor]:
        settings: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "direction": "orthogonal"}
        return lambda params: MaxFactor(params, **settings, **own)

    shapes = [(7, 5), (16, 64), (3, 3), (8, 16)]
    wanted = moved(make(BACKENDS["plain"]), shapes, 2)
    tolerance = 2e-3 if DEVICE == "cuda" else 1e-5  # bfloat16 there
    for one, other in zip(moved(make(backend), shapes, 2), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("direction", ["sign_max", "factored", "orthogonal"])
def test_a_matrix_that_begins_at_zero_grows(backend: dict[str, Any], direction: str) -> None:
    """With scale="initial" its size is that of its shape, now and later."""
    settings: dict[str, Any] = {"momentum": 0.9, "direction": direction, "weight_decay": 0.0}
    [param] = parameters((6, 8))
    grad = param.detach().clone()
    param.data.zero_()
    optimizer = MaxFactor([param], lr=0.1, scale="initial", **settings, **backend)
    for _ in range(3):
        param.grad = grad
        optimizer.step()
        assert optimizer.effective_lr() == pytest.approx([0.1 / math.sqrt(3 * 8)])
    size = float(param.detach().square().mean().sqrt()) / (0.1 / math.sqrt(3 * 8))
    assert 1.0 < size <= 3.01  # three steps of RMS 1 at most, all in one direction


def test_the_smallest_gradients_count_less_in_an_orthogonal_momentum(
    backend: dict[str, Any],
) -> None:
    """By (10) a gradient has its own size only below a hundredth of the usual one."""
    [param] = parameters((6, 8))
    signs = [torch.randn(6, 8, generator=torch.Generator().manual_seed(k)).sign() for k in (0, 1)]
    momentum: dict[str, Any] = {"momentum": 0.9, "momentum_dtype": "fp32"}
    optimizer = MaxFactor([param], direction="orthogonal", **momentum, **backend)
    for size, sign in zip((1.0, 1e-3), signs, strict=True):
        param.grad = size * sign.to(param.device)
        optimizer.step()
    usual = math.sqrt(1.0 - 2.0**-0.8)  # of R after the second step, but for 1e-6
    expected = 0.9 * 0.1 * signs[0] + 0.1 * (1e-3 / (0.01 * usual)) * signs[1]
    found = optimizer.state[param]["momentum"].cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("scale", "shape", "own", "size"),
    [
        ("initial", (6, 8), 0.03, 0.03),  # small, but not near zero
        ("initial", (6, 8), 0.002, 1 / math.sqrt(3 * 8)),
        ("usual", (6, 8), 0.002, 1 / math.sqrt(3 * 8)),  # near zero
        ("usual", (6, 8), 0.016, 0.016),  # as in networks of sines, .08 of the usual size
        ("usual", (6, 8), 0.06, 0.06),  # small on purpose
        ("usual", (6, 8), 0.07, 1 / math.sqrt(3 * 8)),
        ("usual", (6, 8), 0.3, 0.3),
        ("raised", (6, 8), 0.03, 0.1),
        ("raised", (2, 200, 4), 0.03, math.sqrt(2 / 800)),  # the more inputs, the smaller
        ("raised", (6, 8), 0.3, 0.3),
        ("raised", (8,), 0.03, 0.03),  # a vector has its own size
    ],
)
def test_the_size_of_small_weights(
    backend: dict[str, Any], scale: str, shape: tuple[int, ...], own: float, size: float
) -> None:
    [param] = parameters(shape)
    param.data.mul_(own / param.detach().square().mean().sqrt())
    optimizer = MaxFactor([param], lr=0.1, scale=scale, **backend)  # type: ignore[arg-type]
    for _ in range(2):  # later, it is still the first size
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert optimizer.effective_lr() == pytest.approx([0.1 * size], rel=1e-5)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_step_without_the_cap(backend: dict[str, Any], momentum: float | None) -> None:
    """By (2) the relative step is at most 1/sqrt(t); uncapped it is lr, and so is what decays."""
    for rule, share in (("relative", 0.5), ("uncapped", 0.9)):
        [param] = parameters((6, 8))
        first = param.detach().clone()
        switches = {"step_rule": rule, "decay_by": "relative_step"}
        optimizer = MaxFactor(
            [param], lr=0.9, scale="initial", weight_decay=0.1, momentum=momentum,
            switches=switches, **backend,
        )  # fmt: skip
        for _ in range(4):
            before = param.detach().clone()
            param.grad = torch.zeros_like(param)
            optimizer.step()
        size = float(first.square().mean().sqrt())
        assert optimizer.effective_lr() == pytest.approx([share * size], rel=1e-5)
        torch.testing.assert_close(param.detach(), before * (1 - 0.1 * share))  # decay alone


def test_decay_by_the_squared_step(backend: dict[str, Any]) -> None:
    """By lr until the cap 1/sqrt(t) is below it, then by 1/(lr t); nothing at a rate of 0."""
    [param] = parameters((6, 8))
    switches = {"decay_by": "squared_step"}
    optimizer = MaxFactor([param], lr=0.6, weight_decay=0.1, switches=switches, **backend)
    for t, decay in ((1, 0.6), (2, 0.6), (3, 1 / (0.6 * 3)), (4, 1 / (0.6 * 4)), (5, 0.0)):
        optimizer.param_groups[0]["lr"] = 0.6 if decay else 0.0
        before = param.detach().clone()
        param.grad = torch.zeros_like(param)
        optimizer.step()
        torch.testing.assert_close(param.detach(), before * (1 - 0.1 * decay), msg=f"step {t}")


def test_a_skipped_step_has_no_step_size(backend: dict[str, Any]) -> None:
    params = parameters((4, 8))
    optimizer = MaxFactor(params, **backend)
    bad = torch.ones(4, 8, device=DEVICE)
    bad[2, 3] = float("nan")
    params[0].grad = bad
    optimizer.step()
    assert optimizer.effective_lr() == [0.0]
    advance(optimizer, params)
    used = optimizer.effective_lr()
    optimizer.param_groups[0]["lr"] = 0.5
    params[0].grad = bad
    optimizer.step()
    assert optimizer.effective_lr() == used != [0.0]
    assert optimizer.skipped == 2


def test_adafactor_with_torchs_own_eps() -> None:
    """None is added to the squares here, which no small gradient would survive."""
    moves = []
    for eps in ((None, 1e-3), (1e-30, 1e-3)):
        params = parameters((8, 8))
        params[0].grad = params[0].detach() * 1e-5
        Adafactor(params, lr=0.01, eps=eps, relative_step=True).step()
        moves.append(params[0].detach())
    assert torch.equal(*moves)


def test_float16_stays_where_nothing_moves_it(backend: dict[str, Any]) -> None:
    """Far below the normal range too, where its spacing is fixed."""
    start = torch.randn(1000, 200, dtype=torch.float32).mul(2e-5).to(torch.float16).to(DEVICE)
    if "fused" in backend and DEVICE == "cpu":
        start = start[:4]
    param = torch.nn.Parameter(start.clone())
    optimizer = MaxFactor([param], lr=0.0, rounding="stochastic", **backend)
    for _ in range(3):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.equal(param, start)


def test_a_captured_step_that_would_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels cannot run float64, and torch operations check by reading the device."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    param = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"set nonfinite='ignore', but parameter .*float64"):
        MaxFactor([param], capturable=True).step()
    assert torch.equal(param, torch.ones_like(param))
