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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import oracle
from arrays import assert_close, assert_less
from cases import (
    BLOCKS,
    DIRECTIONS,
    LONG_ROWS,
    MOMENTA,
    MOMENTUM_VARIANTS,
    SHAPES,
    STORES,
    Problem,
    arguments,
    group_of,
    problem,
    settings_for,
)
from maxfactor import FAM, MaxFactor, rule
from maxfactor.rule import MaxFactorSettings
from maxfactor.rule.fam import (
    band_betas,
    band_counts,
    band_index,
    band_members,
    band_totals,
    dct_basis,
    from_bands,
    next_sums,
    over_columns,
    spectrum,
    to_bands,
)
from maxfactor.rule.int8 import dequantize, quantize, quantize_
from maxfactor.rule.momentum import (
    Memory,
    decode_momentum,
    encode_momentum,
    fixed_correction,
    memory_of,
)
from maxfactor.rule.newton_schulz import newton_schulz, orthogonal, steps_at_a_time

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


def compare_steps(
    cases: list[Problem], settings: dict[str, Any], *, by_reference: bool = False
) -> None:
    """Each step of an optimizer, or of `rule.step`, with the oracle's from the same start."""
    theirs = oracle.settings_of(**oracle_names(settings))
    params = [torch.nn.Parameter(case.weight.clone()) for case in cases]
    groups, others = group_of(params, arguments(settings))
    optimizer = MaxFactor(groups, **others)
    checked = optimizer._settings(0)
    ours = [rule.init_state(param, checked) for param in params]
    states = [oracle.fresh_state(theirs, tuple(param.shape)) for param in params]
    for t, grads in enumerate(zip(*(case.grads for case in cases), strict=True), start=1):
        before = [array(param) for param in params]
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            param.grad = grad.clone()
            if by_reference:
                param.data, ours[i], _ = rule.step(param.detach(), grad, ours[i], checked)
        if not by_reference:
            optimizer.step()
            ours = [optimizer.state[param] for param in params]
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            assert param.grad is not None
            assert torch.equal(param.grad, grad), "the gradient belongs to the user"
            stored = decoded(ours[i]) if "momentum" in ours[i] else None
            g = -array(grad) if theirs.maximize else array(grad)
            expected = oracle.one_step(theirs, before[i], g, states[i], t, stored)
            what = f"{tuple(param.shape)}, step {t}"
            compare_state(ours[i], expected, what)
            compare_param(param, expected, theirs, what)
            states[i] = {key: array(value) for key, value in ours[i].items()}


def oracle_names(settings: dict[str, Any]) -> dict[str, Any]:
    """The oracle's words for some of our settings."""
    found = dict(settings)
    if "kappa_bounds" in found:
        found["kappa_range"] = found.pop("kappa_bounds")
    if "vector_direction" in found:
        found["vector_sign"] = found.pop("vector_direction") == "sign_max"
    if "decay_by" in found:
        names = {"step_size": "alpha", "relative_step": "rho", "squared_step": "square"}
        found["decay_by"] = names[found["decay_by"]]
    return found


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
            allowed = 1e-5 * size + 1e-7 * size.max() + 1e-30  # a band may cancel as a whole
            assert_less(off, allowed, err_msg=f"{key}, {what}")
        else:
            atol = 3e-6 * value.max(initial=1e-3) if key == "momentum_scale" else 1e-37
            assert_close(array(ours[key]), value, rtol=2e-6, atol=atol, err_msg=f"{key}, {what}")


def compare_momentum(ours: dict[str, Tensor], expected: oracle.Snapshot, what: str) -> None:
    """The stored value is the nearest that the store has to the value that was to be stored."""
    wanted = expected.momentum
    if wanted is None:  # an empty parameter
        assert ours["momentum"].numel() == 0
        return
    # Old and new may cancel, and x is of the order of 1.
    noise = 3e-6 * np.abs(wanted).max(initial=1e-30) + 2e-7
    off = np.abs(decoded(ours) - wanted)
    if ours["momentum"].dtype == torch.float32:
        allowed = noise + 0.0 * off
    elif ours["momentum"].dtype == torch.bfloat16:
        allowed = HALF_BF16 * np.abs(wanted) + noise
    else:
        assert ours["momentum"].dtype == torch.int8
        allowed = 0.5 * step_of_codes(ours) + noise
        codes = ours["momentum"].abs().amax()
        assert codes == 127 or np.abs(wanted).max() < 1e-6, what  # all eight bits in use
    assert_less(off, allowed + 1e-37, err_msg=f"momentum, {what}")


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
    assert_less(off, allowed, err_msg=f"parameter, {what}")


# The scale decides the step size (2), a store how momentum is kept (12). Neither sees the other, so
# one store meets both scales.
KEPT = [(kind, "int8", scale) for kind in MOMENTA for scale in ("current", "initial")]
KEPT += [(kind, store, "current") for kind in MOMENTA for store in STORES if kind != "none"]
KEPT = sorted(set(KEPT))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("momentum", "store", "scale"), KEPT)
def test_oracle(momentum: str, store: str, scale: str, direction: str) -> None:
    """Past the warm-up, and past a gradient of zeros."""
    shapes = (SHAPES | LONG_ROWS).values()
    cases = [problem(shape, steps=5) for shape in shapes]
    compare_steps(cases, settings_for(momentum, store, direction, scale))


@pytest.mark.parametrize("name", BLOCKS)
def test_oracle_of_blocks(name: str) -> None:
    shape, blocks = BLOCKS[name]
    for momentum, store, scale in [
        ("nesterov", "int8", "initial"),
        ("fam", "bf16", "current"),
        ("bands", "fp32", "current"),
        ("none", "", "current"),
    ]:
        settings = settings_for(momentum, store, "orthogonal", scale) | {"blocks": blocks}
        compare_steps([problem(shape, steps=5)], settings)


@pytest.mark.parametrize("variant", MOMENTUM_VARIANTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_settings(direction: str, variant: str) -> None:
    cases = [problem(shape, steps=5) for shape in SHAPES.values()]
    for momentum in ("none", "nesterov", "fam"):
        settings = settings_for(momentum, "int8", direction, "current")
        compare_steps(cases, settings | MOMENTUM_VARIANTS[variant])


@pytest.mark.parametrize("variant", [*MOMENTUM_VARIANTS, None])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("momentum", MOMENTA)
def test_the_reference(momentum: str, direction: str, variant: str | None) -> None:
    chosen = settings_for(momentum, "int8", direction, "initial" if variant is None else "current")
    chosen |= {} if variant is None else MOMENTUM_VARIANTS[variant]
    cases = [problem(shape, steps=5) for shape in ((9,), (7, 31), (5, 2, 3, 3))]
    compare_steps(cases, chosen, by_reference=True)


@settings(max_examples=60, deadline=None, derandomize=True)  # a sign at 0 is anybody's guess
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple),
    momentum=st.sampled_from(sorted(MOMENTA)),
    store=st.sampled_from(STORES),
    direction=st.sampled_from(DIRECTIONS),
    seed=st.integers(0, 10_000),
)
def test_any_shape(
    shape: tuple[int, ...], momentum: str, store: str, direction: str, seed: int
) -> None:
    chosen = settings_for(momentum, store, direction, "initial")
    compare_steps([problem(shape, steps=5, seed=seed)], chosen)


# ------------------------------------------------------------------------------ limit cases


def final(settings: dict[str, Any], shape: tuple[int, ...], steps: int = 8) -> Tensor:
    """The weight after a few steps, with a float32 momentum."""
    case = problem(shape, steps=steps)
    store: Any = None if settings.get("momentum") is None else "fp32"
    checked = MaxFactorSettings(**settings, momentum_dtype=store)
    weight, state = case.weight, rule.init_state(case.weight, checked)
    for grad in case.grads:
        weight, state, _ = rule.step(weight, grad, state, checked)
    return weight


@pytest.mark.parametrize("shape", [(31, 7), (5, 130), (9,)])
@pytest.mark.parametrize("direction", ["sign_max", "orthogonal"])
def test_no_memory_is_no_momentum(direction: str, shape: tuple[int, ...]) -> None:
    """Where the update is scaled anyway; "factored" moves by x, which (10) has clipped."""
    without = final({"direction": direction}, shape)
    with_zero = final({"direction": direction, "momentum": 0.0}, shape)
    torch.testing.assert_close(with_zero, without, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(31, 7), (5, 130), (9,)])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_fam_between_equal_bounds_is_fixed(
    nesterov: bool, direction: str, shape: tuple[int, ...]
) -> None:
    fam = FAM(beta_min=0.8, beta_max=0.8, start=0.8, warmup=2, mix=0.2 if nesterov else 0.0)
    adaptive = final({"momentum": fam, "direction": direction}, shape)
    fixed = final({"momentum": 0.8, "nesterov": nesterov, "direction": direction}, shape)
    torch.testing.assert_close(adaptive, fixed, rtol=1e-5, atol=2e-6)


def test_equal_bands_are_one_band() -> None:
    """The transform alone changes nothing, where all bands have one memory."""
    same = {"beta_min": 0.8, "beta_max": 0.8, "start": 0.8}
    one = final({"momentum": same, "direction": "factored"}, (5, 130))
    eight = final({"momentum": {**same, "bands": 8}, "direction": "factored"}, (5, 130))
    torch.testing.assert_close(eight, one, rtol=1e-5, atol=2e-6)


def test_factored_is_adafactor() -> None:
    """Without momentum, decay and floors it is Adafactor with a relative step."""
    case = problem((31, 7), steps=8)
    settings = {"direction": "factored", "weight_decay": 0.0, "lr": 0.01, "mean_eps": 0.0}
    ours = final(arguments(settings), (31, 7))
    checked = rule.AdafactorSettings()
    weight, state = case.weight, rule.init_state(case.weight, checked)
    for grad in case.grads:
        weight, state, _ = rule.step(weight, grad, state, checked)
    torch.testing.assert_close(ours, weight, rtol=1e-5, atol=1e-6)


def test_a_steady_gradient_is_remembered_least() -> None:
    """Coherence near 1 for a gradient that repeats, near 0 for noise."""
    betas = {}
    for name in ("steady", "noise"):
        torch.manual_seed(0)
        param, steady = torch.nn.Parameter(torch.randn(16, 70)), torch.randn(16, 70)
        optimizer = MaxFactor([("w", param)], momentum=FAM())
        for _ in range(200):
            param.grad = steady.clone() if name == "steady" else torch.randn(16, 70)
            optimizer.step()
        found = optimizer.spectrum()["w"]
        betas[name] = found.beta.item()
        assert found.rho.item() == pytest.approx(1.0 if name == "steady" else 0.0, abs=0.1)
        assert found.power.item() == pytest.approx(1.0, rel=0.1)
    assert betas["steady"] == 0.5
    assert betas["noise"] > 0.9


def test_initial_scale_stops_growth() -> None:
    """A weight that is pushed one way grows by its own size, or by its first size only."""
    sizes = {}
    for scale in ("current", "initial"):
        param = torch.nn.Parameter(torch.ones(4, 4))
        optimizer = MaxFactor([param], lr=0.1, weight_decay=0.0, scale=scale)
        for _ in range(60):
            param.grad = -torch.ones(4, 4)
            optimizer.step()
        sizes[scale] = param.mean().item()
    assert sizes["initial"] == pytest.approx(1.0 + 0.1 * 60, rel=1e-5)
    assert sizes["current"] == pytest.approx(1.1**60, rel=1e-4)


# -------------------------------------------------------------------------------- the pieces


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (3, 5, 20), (1, 6), (6, 1), (1, 1)])
def test_orthogonal(shape: tuple[int, ...]) -> None:
    y = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    o = orthogonal(y)
    assert o.shape == y.shape
    for one, source in zip(o.reshape(-1, *shape[-2:]), y.reshape(-1, *shape[-2:]), strict=True):
        assert one.square().mean().item() == pytest.approx(1.0, rel=1e-5)
        values = torch.linalg.svdvals(one)
        assert values.max() / values.min() < 2.0
        assert (one * source).sum() > 0  # the same direction
        torch.testing.assert_close(orthogonal(3e20 * source), one, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(orthogonal(3e-30 * source), one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(12, 12), (12, 23), (12, 24), (50, 9), (2, 7, 21)])
def test_newton_schulz_is_five_steps(shape: tuple[int, ...]) -> None:
    """However many of them are taken at a time."""
    y = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours = newton_schulz(y).reshape(-1, *shape[-2:]).numpy()
    for one, source in zip(ours, y.reshape(-1, *shape[-2:]).numpy(), strict=True):
        np.testing.assert_allclose(one, oracle.newton_schulz(source), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [64, 256])
@pytest.mark.parametrize("kind", ["noise", "faint", "rank 1", "loud row", "ones"])
def test_newton_schulz_stays_bounded_in_bfloat16(n: int, kind: str) -> None:
    """Rounding must not grow, whatever the singular values are."""
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(64, n, generator=generator)
    if kind == "faint":
        y = y * torch.arange(1, 65).unsqueeze(1) ** -2.0
    elif kind == "rank 1":
        y = y[:, :1] @ y[:1]
    elif kind == "loud row":
        y[0] *= 1e4
    elif kind == "ones":
        y = torch.ones_like(y)
    values = torch.linalg.svdvals(newton_schulz(y.to(torch.bfloat16)).float())
    assert 0.5 < values.max() < 1.3


def test_steps_at_a_time_cost_no_digits() -> None:
    """In bfloat16 a wide matrix, which takes some at a time, is as near as a square one."""
    off = []
    for n in (64, 256):
        y = torch.randn(8, 64, n, generator=torch.Generator().manual_seed(4))
        exact, rounded = newton_schulz(y.double()), newton_schulz(y.to(torch.bfloat16)).double()
        off.append(float((rounded - exact).norm() / exact.norm()))
    assert off[1] < 1.5 * off[0] < 0.04


def test_steps_are_merged_for_wide_matrices() -> None:
    """From twice as long as high on; else it would cost more products than it saves."""
    assert steps_at_a_time(10, 20) == (1, 1, 3)
    assert steps_at_a_time(10, 19) == steps_at_a_time(10, 10) == (1, 1, 1, 1, 1)


@pytest.mark.parametrize("shape", [(64, 4), (4, 64), (2, 64, 4), (2, 4, 64)])
def test_products_have_the_size_of_the_smaller_side(shape: tuple[int, ...]) -> None:
    """Three times A = X Xᵀ and P X, and eleven products of the size of A."""
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.randn(shape))
    matrices = math.prod(shape) // (4 * 64)
    assert counter.get_total_flops() == matrices * (6 * 2 * 4 * 4 * 64 + 11 * 2 * 4 * 4 * 4)


@pytest.mark.parametrize("direction", ["orthogonal", "factored"])
def test_gradients_count_alike_in_the_momentum_of_an_orthogonal_matrix(direction: str) -> None:
    def moved(sizes: list[float]) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.ones(6, 4))
        optimizer = MaxFactor([weight], direction=direction, momentum=0.9, weight_decay=0.0)  # type: ignore[arg-type]
        for size in sizes:
            # Entries of one magnitude: R and C have equal rows and columns, whatever the size.
            weight.grad = size * torch.randn(6, 4, generator=generator).sign()
            optimizer.step()
        return weight.detach()

    equal, falling = moved([1.0] * 5), moved([64.0, 32.0, 16.0, 4.0, 1.0])
    if direction == "orthogonal":
        torch.testing.assert_close(falling, equal, rtol=1e-5, atol=1e-6)
    else:  # elsewhere smaller gradients are smaller steps
        assert (falling - equal).abs().max() > 1e-3


def test_orthogonal_of_the_negative() -> None:
    """The largest entry is the largest in magnitude, also if all are negative."""
    y = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) + 0.1
    assert torch.equal(orthogonal(-y), -orthogonal(y))


def test_orthogonal_is_float32() -> None:
    assert orthogonal(torch.eye(3, dtype=torch.bfloat16)).dtype == torch.float32


def test_orthogonal_of_zeros() -> None:
    assert torch.equal(orthogonal(torch.zeros(2, 5, 3)), torch.zeros(2, 5, 3))


@pytest.mark.parametrize("n", [1, 63, 64, 65, 128, 200])
def test_quantized(n: int) -> None:
    values = torch.randn(5, n) * torch.logspace(-20, 10, 5).unsqueeze(1)
    values[2] = 0.0
    codes, scales = quantize(values)
    assert codes.dtype == torch.int8
    assert scales.shape == (5, math.ceil(n / 64))
    off = (dequantize(codes, scales) - values).abs()
    wide = scales.repeat_interleave(64, dim=1)[:, :n]
    assert bool((off <= 0.5001 * wide).all())
    assert codes.abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127]
    again = quantize(dequantize(codes, scales))  # what was stored can be stored
    assert torch.equal(again.codes, codes)
    batch = quantize(values.expand(3, 5, n).clone())
    assert torch.equal(batch.codes[1], codes)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 128, 200])
def test_quantized_in_place(n: int) -> None:
    """The values become those that the codes stand for; others may be overwritten with them."""
    values = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n))
    before = values.clone()
    kept, meant = oracle.store(array(values.reshape(6, n)), "int8")
    codes, scales = quantize_(values)
    assert array(codes).reshape(6, n).tolist() == kept["momentum"].tolist()
    torch.testing.assert_close(scales.reshape(6, -1), torch.tensor(kept["momentum_scale"]).float())
    torch.testing.assert_close(values.reshape(6, n), torch.tensor(meant).float())
    assert torch.equal(dequantize(codes, scales), values)
    out = torch.full_like(values, math.nan)
    assert dequantize(codes, scales, out) is out
    assert torch.equal(out, values)
    again = quantize(before)
    assert torch.equal(again.codes, codes)
    assert not torch.equal(before, values) or n == 1  # `quantize` overwrites nothing


def test_quantized_near_zero() -> None:
    """A scale below the smallest normal number is kept, but nothing is divided by it."""
    values = torch.tensor([[2.0**-122, -(2.0**-123), 0.0], [2.0**-130, 0.0, 0.0]])
    codes, scales = quantize(values)
    assert codes.tolist() == [[16, -8, 0], [0, 0, 0]]
    torch.testing.assert_close(scales[:, 0], values[:, 0] / 127, rtol=0.0, atol=0.0)


def test_quantized_rounds_to_even() -> None:
    values = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantize(values).codes.tolist() == [[127, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("n", [1, 7, 63, 64, 65, 130])
def test_transform(n: int) -> None:
    x = torch.randn(3, 5, n)
    expected = torch.from_numpy(array(x) @ oracle.dct_matrix(n).T).float()
    torch.testing.assert_close(to_bands(x), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(from_bands(to_bands(x)), x, rtol=1e-5, atol=2e-6)
    for bands in (1, 2, 8, 64):
        index = band_index(n, bands, x.device)
        assert index.tolist() == oracle.band_of_columns(n, bands).tolist()
        assert bool((band_members(n, bands, x.device).sum(dim=1) == 1).all())


@pytest.mark.parametrize("n", [1, 7, 64, 65, 130])
@pytest.mark.parametrize("bands", [1, 2, 8])
def test_sums_over_bands(n: int, bands: int) -> None:
    """Of several matrices at once; a band without columns counts as one, and sums to 0."""
    generator = torch.Generator().manual_seed(n)
    x, momentum = (torch.randn(2, 3, n, generator=generator) for _ in range(2))
    inside = oracle.band_of_columns(n, bands)[:, None] == np.arange(bands)
    products = np.stack([array(x * momentum), array(x * x)], axis=1).sum(axis=2) @ inside
    torch.testing.assert_close(band_totals(x, momentum, bands), torch.tensor(products).float())
    counts = np.maximum(3 * inside.sum(axis=0), 3 * (inside.sum(axis=0) == 0))
    assert band_counts(3, n, bands, x.device).tolist() == counts.tolist()
    assert band_counts(3, n, bands, x.device).dtype == torch.float32
    wide = over_columns(torch.arange(2.0 * bands).reshape(2, bands), n)
    assert wide.expand(2, 1, n)[1, 0].tolist() == [bands + int(i) for i in inside.argmax(axis=1)]


def test_equation_11_by_hand() -> None:
    """Beta is `start` up to the last step of the warm-up, then 1 - A/P between its bounds."""
    fam = FAM(beta_min=0.5, beta_max=0.9, start=0.7, warmup=3, theta=0.75)
    sums = torch.tensor([[0.4, -1.0, 9.0, 0.0], [1.0, 1.0, 10.0, 0.0], [0.5, 0.5, 0.5, 0.0]])
    adapted = torch.tensor([0.6, 0.9, 0.5, 0.9])
    for t, expected in ((3, torch.full((4,), 0.7)), (4, adapted)):
        torch.testing.assert_close(band_betas(sums, t, fam), expected)
        torch.testing.assert_close(band_betas(sums, torch.tensor(t), fam), expected)
    means = torch.tensor([[2.0, 3.0, 4.0, 0.0], [8.0, 4.0, 2.0, 0.0]])
    found = next_sums(sums, adapted, means, fam)
    torch.testing.assert_close(found[0], torch.tensor([1.3, 0.75, 8.75, 0.0]))
    torch.testing.assert_close(found[1], torch.tensor([2.75, 1.75, 8.0, 0.0]))
    torch.testing.assert_close(found[2], torch.tensor([0.7, 0.55, 0.75, 0.1]))


def test_spectrum_by_hand() -> None:
    """Counted on the host or on the device; before the first step all of it is 0."""
    fam = FAM(beta_min=0.5, beta_max=0.9, start=0.7, warmup=3, theta=0.5)
    sums = torch.tensor([[0.4, 0.0], [1.0, 0.0], [0.5, 0.0]])
    for t, beta in ((2, [0.7, 0.7]), (3, [0.6, 0.9])):
        for when in (t, torch.tensor(t)):
            found = spectrum(sums, when, fam)
            torch.testing.assert_close(found.rho, torch.tensor([0.4, 0.0]))
            torch.testing.assert_close(found.beta, torch.tensor(beta))
            torch.testing.assert_close(found.power, torch.tensor([1.0 / (1 - 0.5**t), 0.0]))
    for when in (0, torch.tensor(0)):
        found = spectrum(torch.zeros(3, 2), when, fam)
        assert found.rho.tolist() == found.power.tolist() == [0.0, 0.0]


def test_the_transform_is_float32_whatever_the_default_is() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        basis = dct_basis.__wrapped__(6, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert basis.dtype == torch.float32


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999999])
def test_the_fixed_correction_keeps_its_digits(beta: float) -> None:
    for t in (1, 2, 100):
        expected = pytest.approx(1.0 - beta**t, rel=1e-5)  # float64
        assert fixed_correction(beta, t) == expected
        assert float(fixed_correction(beta, torch.tensor(t))) == expected


def test_equations_12_and_13_by_hand() -> None:
    """Both forms, the one that returns and the one that overwrites, with one beta or one each."""
    momentum, x = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -4.0]])
    for beta in (0.75, torch.tensor([[0.75, 0.75]])):
        for mix in (0.0, 0.25):
            memory = Memory(beta, 0.5, mix)
            average = memory.averaged(momentum, x)
            torch.testing.assert_close(average, torch.tensor([[1.5, 0.5]]))
            overwritten = momentum.clone()
            memory.average_(overwritten, x)
            torch.testing.assert_close(overwritten, average)
            y = (1 - mix) * average / 0.5 + mix * x
            torch.testing.assert_close(memory.lookahead(average, x), y)
            torch.testing.assert_close(memory.lookahead_(overwritten, x), y)
            torch.testing.assert_close(overwritten, y)


@pytest.mark.parametrize("bands", [1, 3])
def test_coefficients_of_a_batch_are_those_of_each_matrix(bands: int) -> None:
    """Also where the matrices have counted other steps, on the device."""
    fam = FAM(warmup=5, bands=bands)
    tensor_rule = MaxFactorSettings(momentum=fam).rules.matrix
    sums = torch.rand(2, 3, bands, generator=torch.Generator().manual_seed(0))
    together = memory_of(tensor_rule, torch.tensor([5, 6]).reshape(2, 1, 1), 70, sums)
    for i, t in enumerate((5, 6)):
        alone = memory_of(tensor_rule, t, 70, sums[i])
        assert alone.mix == together.mix == fam.mix
        for name in ("beta", "correction", "band_beta"):
            assert torch.equal(getattr(together, name)[i], getattr(alone, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_store_has_the_dtype_of_the_settings(dtype: torch.dtype) -> None:
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}[dtype]
    values = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    state = encode_momentum(values, name)
    assert state["momentum"].dtype == dtype
    assert ("momentum_scale" in state) == (name == "int8")
    found = decode_momentum(state, (5, 70))
    assert found.dtype == torch.float32
    _, expected = oracle.store(array(values), name)
    torch.testing.assert_close(found, torch.tensor(expected).float())
    assert torch.equal(decode_momentum(state, (1, 5, 70)), found[None])  # of a batch
