"""Properties of a step, for any settings, shapes, dtypes and memory formats.

docs/developing.md says how to run them for longer; `properties.py` has what they draw from.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from comparison import same_step
from maxfactor import rule
from maxfactor.rule import AdafactorSettings, MaxFactorSettings
from maxfactor.settings import Settings
from properties import (
    COMPARED_POWERS,
    EXAMPLES,
    LARGEST_WEIGHT,
    ORDINARY,
    Bound,
    Case,
    Counter,
    Expected,
    cases,
    may_overflow,
    rounding_errors,
    run_settings,
    with_seed,
)
from trainings import BAD_CALLS, COPIES, assert_refused, assert_same, parameters_of, snapshot

FLOAT32_TINY = 2.0**-126


@pytest.fixture
def counter(record_property: Any) -> Counter:
    return Counter(record_property)


def test_there_are_enough_examples() -> None:
    assert sum(EXAMPLES.values()) >= 2000


def parameters(case: Case) -> list[Tensor]:
    return [weight.requires_grad_() for weight in case.weights()]


# ------------------------------------------------------------------------------------- one step


def test_steps_are_finite_and_bounded(counter: Counter) -> None:
    """Also: gradients are never written, and zero gradients only decay."""

    @with_seed
    @run_settings("bounded")
    @given(cases())
    def check(case: Case) -> None:
        counter.count += 1
        params = parameters(case)
        optimizer = case.build(params)
        bounds = [Bound(case, param.detach()) for param in params]
        for t in range(len(case.kinds)):
            before = [param.detach().clone() for param in params]
            lr = case.settings["lr"]
            expected = [b.next(w, lr) for b, w in zip(bounds, before, strict=True)]
            if any(may_overflow(w, e) for w, e in zip(before, expected, strict=True)):
                return
            step_with(optimizer, params, case.gradients(t))
            for param, old, each in zip(params, before, expected, strict=True):
                assert_bounded(param.detach(), old, each, lr)
                assert_finite(optimizer.state[param])
                if set(case.kinds[: t + 1]) == {"zeros"}:
                    assert_only_decayed(param.detach(), old, each)

    with counter.of("bounded"):
        check()


def step_with(optimizer: Any, params: list[Tensor], grads: list[Tensor]) -> None:
    """Take a step; the gradients stay as they are."""
    kept = [grad.clone() for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    versions = [grad._version for grad in grads]
    optimizer.step()
    for param, grad, version, old in zip(params, grads, versions, kept, strict=True):
        assert param.grad is grad
        assert grad._version == version
        assert torch.equal(grad, old)


def assert_finite(state: dict[str, Tensor]) -> None:
    for key, value in state.items():
        assert bool(value.double().isfinite().all()), key


def assert_bounded(new: Tensor, old: Tensor, expected: Expected, lr: float | None) -> None:
    """The bound of docs/rule.md; lr = 0 changes nothing."""
    assert bool(new.isfinite().all())
    if lr == 0.0:
        assert torch.equal(new, old)
    move = (new.double() - expected.keep * old.double()).abs()
    errors = rounding_errors(old, new, expected)
    assert bool((move <= expected.entry + errors).all())
    slack = float(errors.square().sum().sqrt())
    assert float(move.square().sum().sqrt()) <= expected.norm * (1 + 2e-5) + slack


def assert_only_decayed(new: Tensor, old: Tensor, expected: Expected) -> None:
    still = Expected(expected.keep, 0.0, 0.0, 0.0)
    assert_bounded(new, old, still, None)


# ---------------------------------------------------------------------------------- symmetries


def test_scaled_gradients_take_the_same_steps(counter: Counter) -> None:
    """Powers of two between 2^-49 and 2^49, which is 1e-15 to 1e15, bit for bit."""

    @with_seed
    @run_settings("scaled")
    @given(cases(dtypes=(torch.float32, torch.bfloat16, torch.float64)), st.data())
    def check(case: Case, data: st.DataObject) -> None:
        counter.count += 1
        if case.settings["beta2_decay"] == 0.0:  # V would forget entries that M has
            case.settings["beta2_decay"] = -0.8
        low, high = invariant_powers(case)
        assume(low < high)
        powers = data.draw(st.tuples(*[st.integers(low, high)] * 2))
        runs = [scaled_run(case, power) for power in powers]
        for one, other in zip(*runs, strict=True):
            assert torch.equal(one, other)

    with counter.of("scaled"):
        check()


def scaled_run(case: Case, power: int) -> list[Tensor]:
    """The weights and momenta after all steps with gradients of 2^(power - 2) to 2^(power + 2)."""
    params = parameters(replace(case, weight_power=0))
    optimizer = case.build(params)
    for t in range(len(case.kinds)):
        rng = np.random.default_rng([case.number, t])
        for param in params:
            values = np.asarray(2.0 ** rng.uniform(-2, 2, size=tuple(param.shape)))
            signs = rng.choice([-1.0, 1.0, 1.0, -1.0, 0.0], size=tuple(param.shape))
            param.grad = torch.from_numpy(np.asarray(values * signs)).to(param.dtype) * 2.0**power
        optimizer.step()
    momenta = [optimizer.state[param].get("momentum", param) for param in params]
    return [each.detach() for each in [*params, *momenta]]


def invariant_powers(case: Case) -> tuple[int, int]:
    """The powers of two by which gradients may be scaled without a change.

    Every operation commutes with a power of two, unless a floor or an offset is felt, or a number
    leaves the range of float32. `scaled_run` has gradients G of 2^(k-2) to 2^(k+2), or 0, and up
    to three steps. A mean over rows has at least one entry of a tensor with N entries, and weighs
    it by 2^-5 or more. So R, C >= 2^(2k - 9 - log N), and R / max R >= 2^(-17 - log N).
    """
    log_n = math.log2(max(max(math.prod(shape) for shape in case.shapes), 1))
    given, low, high = case.settings, [-49.0], [49.0]
    eps1 = given["eps"][0]
    smallest = -9.0 - log_n  # of R and C, beside 2^2k
    if case.is_adafactor:
        offset = 1e-30 if eps1 is None else eps1
        if offset > 0.0:  # it is lost in the rounding of R
            low.append((math.log2(offset) + 26.0 - smallest) / 2)
        return math.ceil(max(low)), math.floor(min(high))
    eps1 = torch.finfo(torch.float32).eps if eps1 is None else eps1
    floor = math.log2(max(eps1 + (given.get("eps_rms") or 0.0), FLOAT32_TINY))
    variance_floor = math.log2(max(eps1**2, FLOAT32_TINY))
    low.append((variance_floor - 2 * smallest + 17.0) / 2)  # V = R / max R * C, or v
    low.append((floor - smallest) / 2)  # max R
    if not given.get("max_norm", True):  # V = R C, and U has the size of 1 / G
        low.append((variance_floor - 2 * smallest) / 4)
        high += [(126.0 - 8.0) / 4, -floor - 6.0]
    if given.get("scalar_boost") is not None and eps1 > 0.0:  # sqrt(v) + eps1
        low.append(math.log2(eps1) + 26.0 + 6.0)
    return math.ceil(max(low)), math.floor(min(high))


MATRICES = st.tuples(st.integers(1, 6), st.integers(1, 70))
STACKS = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


def test_permuted_rows_permute_the_result(counter: Counter) -> None:
    """Within the rounding of sums; noise of stochastic rounding depends on the position."""

    @with_seed
    @run_settings("permuted")
    @given(
        cases(
            shapes=MATRICES | STACKS,
            dtypes=(torch.float32, torch.float64),
            weight_powers=ORDINARY,
            gradient_powers=ORDINARY,
            kinds=("normal",),
        )
    )
    def check(case: Case) -> None:
        counter.count += 1
        if "momentum" in case.settings:  # codes of int8 may tip
            case.settings["momentum_dtype"] = "fp32"
        weights, rng = case.weights(), np.random.default_rng(case.number)
        orders = [torch.from_numpy(rng.permutation(len(weight))) for weight in weights]
        plain = [weight.clone().requires_grad_() for weight in weights]
        mixed = [w[order].requires_grad_() for w, order in zip(weights, orders, strict=True)]
        optimizers = case.build(plain), case.build(mixed)
        for t in range(len(case.kinds)):
            grads = case.gradients(t)
            for a, b, grad, order in zip(plain, mixed, grads, orders, strict=True):
                a.grad, b.grad = grad, grad[order]
            for optimizer in optimizers:
                optimizer.step()
        for a, b, order, weight in zip(plain, mixed, orders, weights, strict=True):
            move, other = (a - weight).detach()[order], (b - weight[order]).detach()
            same_move(move, other, float(weight.abs().max()), case)

    with counter.of("permuted"):
        check()


def same_move(move: Tensor, other: Tensor, size: float, case: Case) -> None:
    """Equal but for rounding: five steps of the iteration multiply it by up to 3.4445^5."""
    is_orthogonal = case.settings.get("direction") == "orthogonal"
    noise = 2e-3 if is_orthogonal else 2e-5
    largest = float(move.abs().max())
    torch.testing.assert_close(move, other, rtol=0.0, atol=noise * largest + 1e-6 * size)


# ------------------------------------------------------------------------------ the three forms


def checked_settings(case: Case) -> Settings:
    given = {k: v for k, v in case.arguments().items() if k not in case.execution}
    return AdafactorSettings(**given) if case.is_adafactor else MaxFactorSettings(**given)


def compare_with_reference(case: Case) -> None:
    """Each step of each parameter, from the same start, equals that of `rule.step`."""
    params, checked = parameters(case), checked_settings(case)
    optimizer = case.build(params)
    states = [rule.init_state(param.detach(), checked) for param in params]
    is_orthogonal = case.settings.get("direction") == "orthogonal"
    untouched = [torch.ones(shape, dtype=torch.bool) for shape in case.shapes]
    for t in range(len(case.kinds)):
        grads = case.gradients(t)
        if t == 0 and is_rehearsal(case, grads):
            return
        expected = [
            rule.step(param.detach(), grad, state, checked)
            for param, grad, state in zip(params, grads, states, strict=True)
        ]
        if not all(bool((result.param.abs() <= LARGEST_WEIGHT).all()) for result in expected):
            return  # or beyond the range of the dtype
        step_with(optimizer, params, grads)
        for i, param in enumerate(params):
            states[i] = {key: value.clone() for key, value in optimizer.state[param].items()}
            untouched[i] &= grads[i] == 0
            noise = 5e-4 * math.sqrt(max(param.numel(), 1)) if is_orthogonal else 2e-5
            what = f"{case.shapes[i]} at {t}"
            same_step(param.detach(), untouched[i], states[i], expected[i], checked, noise, what)


def is_rehearsal(case: Case, grads: list[Tensor]) -> bool:
    """Whether a first step is taken for that of torch.distributed.checkpoint, and not counted."""
    return case.settings["lr"] == 0.0 and not any(bool(grad.any()) for grad in grads)


def test_torch_operations_equal_the_reference(counter: Counter) -> None:
    @with_seed
    @run_settings("reference")
    @given(cases(gradient_powers=COMPARED_POWERS))
    def check(case: Case) -> None:
        counter.count += 1
        compare_with_reference(case)

    with counter.of("reference"):
        check()


# Triton's interpreter cuts bfloat16 off instead of rounding it.
REPLACED_FOR_KERNELS: dict[str, dict[str, Any]] = {
    "momentum_dtype": {"bf16": "fp32"},
    "rounding": {"nearest": None},
}


# NumPy warns where the kernels look whether a square overflows.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_kernels_equal_the_reference(counter: Counter) -> None:
    """In Triton's interpreter, which is slow: few examples."""

    @with_seed
    @run_settings("kernels")
    @given(
        cases(
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            gradient_powers=COMPARED_POWERS,
            most_steps=2,
        )
    )
    def check(case: Case) -> None:
        counter.count += 1
        for name, value in REPLACED_FOR_KERNELS.items():
            if case.settings.get(name) in value:
                case.settings[name] = value[case.settings[name]]
        momentum = case.settings.get("momentum")
        if isinstance(momentum, dict):  # the kernels have one band
            case.settings["momentum"] = {**momentum, "bands": 1}
        compare_with_reference(replace(case, execution={"fused": True}))

    with counter.of("kernels"):
        check()


# ------------------------------------------------------------------------ copies and bad calls


def test_copies_continue_bit_for_bit(counter: Counter) -> None:
    @with_seed
    @run_settings("resumed")
    @given(cases(), st.sampled_from(sorted(COPIES)))
    def check(case: Case, way: str) -> None:
        counter.count += 1
        params = parameters(case)
        optimizer = case.build(params)
        step_with(optimizer, params, case.gradients(0))
        twin = COPIES[way](optimizer)
        assert_same(optimizer.state_dict(), twin.state_dict(), way)
        for t in range(len(case.kinds)):
            for each in (optimizer, twin):
                step_with(each, parameters_of(each), case.gradients(t))
        old, new = snapshot(optimizer), snapshot(twin)
        for name in ("params", "grads", "states", "groups"):
            assert_same(old[name], new[name], f"{way} {name}")

    with counter.of("resumed"):
        check()


def test_refused_calls_change_nothing(counter: Counter) -> None:
    @with_seed
    @run_settings("refused")
    @given(cases(weight_powers=ORDINARY, most_steps=1), st.sampled_from(sorted(BAD_CALLS)))
    def check(case: Case, name: str) -> None:
        counter.count += 1
        params = parameters(case)
        optimizer = case.build(params)
        step_with(optimizer, params, case.gradients(0))
        assert_refused(optimizer, BAD_CALLS[name](optimizer), name)

    with counter.of("refused"):
        check()
