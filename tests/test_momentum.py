"""Momentum, FAM, the int8 store, the directions and the scale, against the float64 oracle.

Every step starts from our own state, and the oracle takes our stored momentum where equation (13)
reads it: a code that float32 rounds another way at .5 is no error, and must not become one later.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from cases import DIRECTIONS, LONG_ROWS, MOMENTA, SHAPES, STORES, Problem, problem
from maxfactor import MaxFactor, rule
from maxfactor.backends import foreach, plain
from maxfactor.rule import MaxFactorHyper

HALF_BF16 = 2.0**-8  # half the spacing of bfloat16, relative


def array(x: Tensor) -> Any:
    return x.detach().double().numpy().copy()


def decoded(state: dict[str, Tensor]) -> Any:
    """The momentum that a state stands for, in the parameter's shape."""
    momentum = array(state["momentum"])
    return momentum * step_of_codes(state) if "momentum_scale" in state else momentum


def step_of_codes(state: dict[str, Tensor]) -> Any:
    """The scale of each value of an int8 momentum."""
    shape = tuple(state["momentum"].shape)
    if 0 in shape:
        return np.zeros(shape)
    rows, _ = oracle.matrix_view(shape, "auto")
    scales = array(state["momentum_scale"]).reshape(math.prod(shape[: len(rows)]), -1)
    return oracle.widened(scales, math.prod(shape[len(rows) :])).reshape(shape)


def compare_steps(case: Problem, settings: dict[str, Any], what: str) -> None:
    """Each step of an optimizer with the oracle's step from the same start."""
    theirs = oracle.settings_of(**settings)
    param = torch.nn.Parameter(case.weight.clone())
    optimizer = MaxFactor([param], **settings)
    state = oracle.fresh_state(theirs, tuple(param.shape))
    for t, grad in enumerate(case.grads, start=1):
        before = array(param)
        param.grad = grad.clone()
        optimizer.step()
        ours = optimizer.state[param]
        assert torch.equal(param.grad, grad), "the gradient belongs to the user"
        stored = decoded(ours) if "momentum" in ours else None
        g = -array(grad) if theirs.maximize else array(grad)
        expected = oracle.one_step(theirs, before, g, state, t, stored)
        compare_state(ours, expected, f"{what}, step {t}")
        compare_param(param, expected, theirs, f"{what}, step {t}")
        state = {key: array(value) for key, value in ours.items()}


def compare_state(ours: dict[str, Tensor], expected: oracle.Snapshot, what: str) -> None:
    assert set(ours) == set(expected.state), what
    for key, value in expected.state.items():
        assert tuple(ours[key].shape) == value.shape, f"{key}, {what}"
        if key == "momentum":
            compare_momentum(ours, expected, what)
        elif key == "band_sums":
            # Products of either sign cancel in A; P is what they are small beside.
            size = np.stack([np.maximum(np.abs(value[0]), value[1]), value[1], value[2]])
            off = np.abs(array(ours[key]) - value)
            np.testing.assert_array_less(off, 1e-5 * size + 1e-30, err_msg=f"{key}, {what}")
        else:
            # Old and new may cancel in a momentum.
            atol = 3e-6 * value.max(initial=1e-30) if key == "momentum_scale" else 1e-37
            np.testing.assert_allclose(
                array(ours[key]), value, rtol=2e-6, atol=atol, err_msg=f"{key}, {what}"
            )


def compare_momentum(ours: dict[str, Tensor], expected: oracle.Snapshot, what: str) -> None:
    """The stored value is the nearest that the store has to the value that was to be stored."""
    wanted = expected.momentum
    if wanted is None:  # an empty parameter
        assert ours["momentum"].numel() == 0
        return
    noise = 3e-6 * np.abs(wanted).max(initial=1e-30)
    off = np.abs(decoded(ours) - wanted)
    if ours["momentum"].dtype == torch.float32:
        allowed = noise + 0.0 * off
    elif ours["momentum"].dtype == torch.bfloat16:
        allowed = HALF_BF16 * np.abs(wanted) + noise
    else:
        assert ours["momentum"].dtype == torch.int8
        allowed = 0.5 * step_of_codes(ours) + noise
        codes = ours["momentum"].abs().amax()
        assert codes == (127 if np.abs(wanted).max() > 0 else 0), what  # all eight bits in use
    np.testing.assert_array_less(off, allowed + 1e-37, err_msg=f"momentum, {what}")


def compare_param(
    param: Tensor, expected: oracle.Snapshot, settings: oracle.Rule, what: str
) -> None:
    """Tight before the sign: a flipped sign only where |U| is within tolerance of 0."""
    size = float(np.abs(expected.param).max(initial=1e-30))
    # Newton-Schulz multiplies a small singular value, and its error, by 3.4445 five times.
    noise = 2e-4 if settings.direction == "orthogonal" else 1e-5
    off = np.abs(array(param) - expected.param)
    allowed = np.full_like(off, 1e-6 * size + noise * expected.step_size)
    by_sign = settings.direction == "sign_max" or (
        settings.direction == "orthogonal" and param.dim() < 2
    )
    if by_sign and settings.momentum is not None:
        allowed += 2.0 * expected.step_size * (np.abs(expected.update) < 1e-5)
    np.testing.assert_array_less(off, allowed, err_msg=f"parameter, {what}")


def settings_for(momentum: str, store: str, direction: str, scale: str) -> dict[str, Any]:
    chosen = MOMENTA[momentum] | {"direction": direction, "scale": scale}
    return chosen if momentum == "none" else chosen | {"momentum_dtype": store}


@pytest.mark.parametrize("scale", ["current", "initial"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("momentum", "store"),
    [(kind, store) for kind in MOMENTA for store in (["int8"] if kind == "none" else STORES)],
)
def test_oracle(momentum: str, store: str, direction: str, scale: str) -> None:
    settings = settings_for(momentum, store, direction, scale)
    for name, shape in (SHAPES | LONG_ROWS).items():
        compare_steps(problem(shape), settings, f"{name} {shape}")


# ------------------------------------------------------------------------------- backends

BACKENDS = ["plain", "blocks", "foreach"]
LARGE = [(700, 333), (3, 70_000), (40, 30, 90), (70_001,)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both backends, and plain once more with every matrix, however small, in several blocks."""
    if request.param == "blocks":
        monkeypatch.setattr(plain, "CPU_BLOCK", 50)
    return str(request.param)


def compare_with_rule(settings: dict[str, Any], cases: list[Problem], backend: str) -> None:
    """All parameters in one optimizer; each step of each from the same start by the rule."""
    params: list[Tensor] = [torch.nn.Parameter(case.weight.clone()) for case in cases]
    optimizer = MaxFactor(params, foreach=backend == "foreach", fused=False, **settings)
    hyper = MaxFactorHyper(**settings)
    states = [rule.init_state(param, hyper) for param in params]
    for t in range(len(cases[0].grads)):
        expected = []
        for param, case, state in zip(params, cases, states, strict=True):
            param.grad = case.grads[t].clone()
            expected.append(rule.step(param.detach(), case.grads[t], state, hyper))
        optimizer.step()
        for i, (param, case) in enumerate(zip(params, cases, strict=True)):
            assert param.grad is not None
            assert torch.equal(param.grad, case.grads[t]), "the gradient belongs to the user"
            states[i] = {k: v.clone() for k, v in optimizer.state[param].items()}
            what = f"{tuple(param.shape)} at {t}"
            untouched = torch.stack(case.grads[: t + 1]).abs().sum(dim=0) == 0.0
            same_step(param.detach(), untouched, states[i], expected[i], hyper, what)
    mean = sum(float(result.step_size) for result in expected) / len(expected)
    assert optimizer.effective_lr() == pytest.approx([mean], rel=1e-6)


def same_step(
    param: Tensor,
    untouched: Tensor,
    state: dict[str, Tensor],
    expected: rule.Result,
    hyper: MaxFactorHyper,
    what: str,
) -> None:
    """The same but for a few values that were on the edge of rounding, or of a sign."""
    assert state.keys() == expected.state.keys()
    tipped = 0
    for key, value in state.items():
        theirs = expected.state[key]
        assert value.dtype == theirs.dtype, f"{key} of {what}"
        size = max(1e-30, float(theirs.abs().max()) if theirs.numel() else 0.0)
        if key == "momentum" and value.dtype != torch.float32:
            off = (value.double() - theirs.double()).abs()
            step = (
                1.0 if value.dtype == torch.int8 else 2.0**-7 * theirs.double().abs() + 1e-6 * size
            )
            assert bool((off <= step).all()), f"{key} of {what}"
            tipped = int((off > 0).sum())
            assert tipped <= 2 + 0.002 * value.numel(), f"{key} of {what}"
        else:
            loose = 5e-6 * size if key.startswith(("momentum", "band")) else 1e-37
            torch.testing.assert_close(value, theirs, rtol=4e-6, atol=loose)
    alpha = float(expected.step_size)
    off = (param.double() - expected.param.double()).abs()
    noise = 5e-4 if hyper.direction == "orthogonal" else 2e-5
    ulp = 0.0 if param.dtype == torch.float32 else torch.finfo(param.dtype).eps
    largest = max(1e-30, float(expected.param.abs().max()) if param.numel() else 0.0)
    allowed = (
        ulp * expected.param.double().abs() + 1e-6 * largest + (0.2 if tipped else noise) * alpha
    )
    if hyper.bands > 1:
        off[untouched] = 0.0  # zero but for the rounding of two transforms, and then its sign
    wrong = int((off > allowed).sum())
    assert wrong <= 0.001 * param.numel() + (2 if tipped else 0), f"parameter {what}: {wrong}"
    assert bool((off <= allowed + 2.0 * alpha).all()), f"parameter {what}"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("momentum", MOMENTA)
def test_backends(momentum: str, direction: str, backend: str) -> None:
    shapes = [*SHAPES.values(), *LONG_ROWS.values(), (9,), (7, 31)]
    cases = [problem(shape, steps=8, seed=i) for i, shape in enumerate(shapes)]
    for store in ["int8"] if momentum == "none" else STORES:
        for scale in ("current", "initial"):
            compare_with_rule(settings_for(momentum, store, direction, scale), cases, backend)


@pytest.mark.parametrize("kind", ["plain", "foreach"])
@pytest.mark.parametrize("direction", ["sign_max", "factored"])
@pytest.mark.parametrize("momentum", ["nesterov", "fam", "bands"])
def test_large_matrices_in_blocks(
    momentum: str, direction: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "CPU_BLOCK", 20_000)
    monkeypatch.setattr(foreach, "CHUNK", 100_000)
    cases = [problem(shape, steps=5, seed=i) for i, shape in enumerate(LARGE)]
    compare_with_rule(settings_for(momentum, "int8", direction, "current"), cases, kind)


VARIANTS: dict[str, dict[str, Any]] = {
    "maximize": {"maximize": True},
    "small d": {"d": 0.2},
    "large eps": {"eps": (0.05, 0.5)},
    "no eps": {"eps": (0.0, 1e-3)},
    "vectors by update": {"vector_direction": "update"},
    "decay by step size": {"decay_by": "step_size", "weight_decay": 0.3},
    "bounds": {"kappa_bounds": (0.1, 0.6), "min_lr": 0.1, "eps_rms": 0.1},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_settings(direction: str, variant: str, backend: str) -> None:
    cases = [problem(shape, steps=8) for shape in [*SHAPES.values(), *LONG_ROWS.values()]]
    for momentum in ("none", "nesterov", "fam"):
        settings = settings_for(momentum, "fp32", direction, "current") | VARIANTS[variant]
        compare_with_rule(settings, cases, backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_dtypes(direction: str, dtype: torch.dtype, backend: str) -> None:
    """Parameters of another precision; the memories keep their own."""
    shapes = [(31, 7), (5, 130), (9,), (), (6, 40, 3)]
    cases = [problem(shape, dtype=dtype, steps=6) for shape in shapes]
    for momentum in ("nesterov", "fam"):
        settings = settings_for(momentum, "int8", direction, "initial") | {"seed": 5}
        compare_with_rule(settings, cases, backend)
