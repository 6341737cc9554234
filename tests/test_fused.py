"""The fused kernels against `rule.step`: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import ADAFACTOR_VARIANTS, SHAPES, VARIANTS, arguments, no_host_sync, problem, published
from maxfactor import Adafactor, MaxFactor, rule
from maxfactor.backends import dispatch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")

# Several tiles, slabs and strips; odd sizes, so that rows are not aligned. The interpreter has
# small tiles, and gets small tensors.
LARGER: dict[str, tuple[int, ...]] = {
    "tiles": (9, 72),
    "slabs": (33, 8),
    "odd": (5, 67),
    "long": (100,),
}
if DEVICE == "cuda":
    LARGER = {"tiles": (70, 520), "slabs": (600, 40), "odd": (33, 301), "long": (1000,)}
ALL = {**SHAPES, **LARGER}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def expected(
    cases: dict[str, Any], checked: rule.MaxFactorSettings | rule.AdafactorSettings, steps: int
) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """The same steps by the reference."""
    results = {}
    for name, case in cases.items():
        weight, state = case.weight, rule.init_state(case.weight, checked)
        for grad in case.grads[:steps]:
            weight, state, _ = rule.step(weight, grad, state, checked)
        results[name] = (weight, state)
    return results


def run(
    cls: type[Any], cases: dict[str, Any], arguments: dict[str, Any], steps: int
) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    params = {n: torch.nn.Parameter(c.weight.clone().to(DEVICE)) for n, c in cases.items()}
    optimizer = cls(list(params.items()), fused=True, **arguments)
    for t in range(steps):
        for name, case in cases.items():
            params[name].grad = case.grads[t].clone().to(DEVICE)
        optimizer.step()
        for name, case in cases.items():
            grad = params[name].grad
            assert grad is not None
            assert torch.equal(grad.cpu(), case.grads[t])
    return optimizer, params


def compare(
    optimizer: Any,
    params: Mapping[str, Tensor],
    wanted: dict[str, tuple[Tensor, dict[str, Tensor]]],
) -> None:
    for name, (weight, state) in wanted.items():
        tolerance = TOLERANCE[weight.dtype]
        scale = float(weight.double().abs().max()) if weight.numel() else 1.0
        torch.testing.assert_close(
            params[name].detach().cpu(), weight, rtol=tolerance, atol=tolerance * scale, msg=name
        )
        ours = optimizer.state[params[name]]
        assert set(ours) == set(state)
        for key, value in state.items():
            torch.testing.assert_close(
                ours[key].cpu(), value, rtol=3e-6, atol=1e-37, msg=f"{key} of {name}"
            )


# The interpreter is slow: there every version once, and every switch once.
PAIRS = [(v, w) for v in ("0.1", "0.2", "0.3", "1.0") for w in VARIANTS]
if DEVICE == "cpu":
    PAIRS = [(v, w) for v, w in PAIRS if v == "1.0" or w == "as published"]
STEPS = 4 if DEVICE == "cuda" else 2


def shapes_for(variant: str, variants: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """All shapes on a GPU; in the interpreter every second one, the others in the next variant."""
    first = list(variants).index(variant) % 2
    return ALL if DEVICE == "cuda" else dict(list(ALL.items())[first::2])


@pytest.mark.parametrize(("version", "variant"), PAIRS)
def test_maxfactor(version: str, variant: str) -> None:
    settings = arguments(published(version), VARIANTS[variant])
    shapes = ALL if variant == "as published" else shapes_for(variant, VARIANTS)
    cases = {name: problem(shape, steps=STEPS) for name, shape in shapes.items()}
    optimizer, params = run(MaxFactor, cases, settings, STEPS)
    compare(optimizer, params, expected(cases, rule.MaxFactorSettings(**settings), STEPS))


@pytest.mark.parametrize("variant", ADAFACTOR_VARIANTS)
def test_adafactor(variant: str) -> None:
    settings = ADAFACTOR_VARIANTS[variant]
    shapes = ALL if variant == "relative" else shapes_for(variant, ADAFACTOR_VARIANTS)
    cases = {name: problem(shape, steps=STEPS) for name, shape in shapes.items()}
    optimizer, params = run(Adafactor, cases, settings, STEPS)
    compare(optimizer, params, expected(cases, rule.AdafactorSettings(**settings), STEPS))


FEW = ["0-d", "1-d", "wide", "odd", "tiles"]


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_the_references(dtype: torch.dtype, rounding: str) -> None:
    """The same noise at the same place: bits differ only where float32 differs before rounding."""
    if DEVICE == "cpu" and dtype == torch.bfloat16 and rounding == "nearest":
        pytest.skip("Triton's interpreter cuts bfloat16 off instead of rounding it")
    settings: dict[str, Any] = {"rounding": rounding, "seed": 2**40 + 17}
    cases = {name: problem(ALL[name], dtype=dtype, steps=2) for name in FEW}
    optimizer, params = run(MaxFactor, cases, settings, 2)
    wanted = expected(cases, rule.MaxFactorSettings(**settings), 2)
    compare(optimizer, params, wanted)
    same = torch.cat([params[n].detach().cpu().eq(wanted[n][0]).flatten() for n in FEW])
    assert same.double().mean() > 0.98


def test_mixed_dtypes_gradients_and_strides() -> None:
    """float32 weights with bfloat16 gradients, and so on, some transposed, in one optimizer."""
    checked = rule.MaxFactorSettings()
    cases, params, wanted = {}, {}, {}
    kinds = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
    kinds += [(torch.float32, torch.float32), (torch.float16, torch.float16)]
    for i, (dtype, grad_dtype) in enumerate(kinds):
        for j, shape in enumerate([(9, 40), (5, 67), (50,)]):
            case = problem(shape, dtype=grad_dtype, steps=2, seed=i)
            weight = case.weight.to(dtype)
            strided = weight.t().contiguous().t() if j == 1 else weight.clone()
            cases[f"{i}{j}"] = (case, weight)
            params[f"{i}{j}"] = torch.nn.Parameter(strided.to(DEVICE))
            state = rule.init_state(weight, checked)
            for grad in case.grads:
                weight, state, _ = rule.step(weight, grad, state, checked)
            wanted[f"{i}{j}"] = (weight, state)
    optimizer = MaxFactor(list(params.items()), fused=True)
    for t in range(2):
        for name, param in params.items():
            grad = cases[name][0].grads[t].to(DEVICE)
            if param.dtype != grad.dtype:
                param.grad_dtype = grad.dtype
            param.grad = grad.t().contiguous().t() if grad.dim() == 2 else grad
        optimizer.step()
    compare(optimizer, params, wanted)


def snapshot(optimizer: Any) -> list[Tensor]:
    """Parameters and all state, copied."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [x for p in params for x in optimizer.state[p].values()]
    return [x.detach().clone() for x in params + states]


def poisoned(value: float) -> tuple[Any, list[torch.nn.Parameter], list[Tensor]]:
    """An optimizer after two good steps, whose last parameter then gets a bad gradient."""
    params = [torch.nn.Parameter(problem(s).weight.to(DEVICE)) for s in [(9, 40), (50,), (5, 67)]]
    names = ["first", "second", "third"]
    optimizer = MaxFactor(list(zip(names, params, strict=True)), fused=True)
    for t in range(2):
        for param in params:
            param.grad = problem(tuple(param.shape)).grads[t].to(DEVICE)
        optimizer.step()
    good = [problem(tuple(p.shape)).grads[2].to(DEVICE) for p in params]
    for param, grad in zip(params, good, strict=True):
        param.grad = grad.clone()
    assert params[2].grad is not None
    params[2].grad[3, 1] = value
    return optimizer, params, good


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float) -> None:
    optimizer, params, good = poisoned(value)
    before = snapshot(optimizer)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer), strict=True))
    assert optimizer.skipped == 1
    clean, clean_params, _ = poisoned(1.0)
    for group in (params, clean_params):
        for param, grad in zip(group, good, strict=True):
            param.grad = grad.clone()
    optimizer.step()  # as if the bad step had not happened
    clean.load_state_dict({**clean.state_dict()})
    clean.step()
    assert all(torch.equal(a, b) for a, b in zip(params, clean_params, strict=True))
    assert optimizer.skipped == 1


def test_nonfinite_raise_and_ignore() -> None:
    optimizer, _, _ = poisoned(float("nan"))
    before = snapshot(optimizer)
    optimizer.defaults["nonfinite"] = "raise"
    with pytest.raises(FloatingPointError, match="gradient of 'third' is not finite"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer), strict=True))
    optimizer.defaults["nonfinite"] = "ignore"
    optimizer.step()
    assert not all(bool(x.isfinite().all()) for x in snapshot(optimizer))


def test_twenty_in_a_row_are_an_error() -> None:
    optimizer, params, good = poisoned(float("nan"))

    def keep_on() -> None:
        for _ in range(40):
            optimizer.step()
            if DEVICE == "cuda":
                torch.cuda.synchronize()  # the counters reach the host one step later

    with pytest.raises(FloatingPointError, match=r"2\d steps in a row .* of 'third' is not finite"):
        keep_on()
    for param, grad in zip(params, good, strict=True):
        param.grad = grad
    optimizer.step()
    assert all(bool(param.isfinite().all()) for param in params)


def test_skipped_replays_are_an_error_when_asked() -> None:
    """The device counts what a graph skips; the host learns of it only here."""
    optimizer, _, _ = poisoned(float("nan"))
    optimizer.check_skipped()  # before the first step too
    optimizer.step()
    optimizer.check_skipped()
    assert optimizer._fused is not None
    layout = pytest.importorskip("maxfactor.backends.triton.kernels.layout")
    optimizer._fused.status.counters[layout.Counter.IN_A_ROW] = 20  # as after 19 replays
    with pytest.raises(FloatingPointError, match=r"20 steps in a row .* of 'third' is not finite"):
        optimizer.check_skipped()
    optimizer.check_skipped()


def test_grad_scaler_tensors() -> None:
    """grad_scale divides, found_inf skips without counting; the step count stays too."""
    case = problem((9, 40), steps=3)
    params = [torch.nn.Parameter(case.weight.clone().to(DEVICE)) for _ in range(2)]
    scaled: Any = MaxFactor([params[0]], fused=True)
    plain = MaxFactor([params[1]], fused=True)
    assert scaled._step_supports_amp_scaling
    scaled.grad_scale = torch.full((), 8.0, device=DEVICE)
    for t, grad in enumerate(case.grads):
        scaled.found_inf = torch.full((), float(t == 1), device=DEVICE)
        params[0].grad = (grad * 8.0).to(DEVICE)
        scaled.step()
        if t != 1:
            params[1].grad = grad.to(DEVICE)
            plain.step()
    torch.testing.assert_close(params[0], params[1])
    assert int(scaled.state[params[0]]["step"]) == 2
    assert scaled.skipped == 0


def test_state_goes_from_backend_to_backend() -> None:
    """Two steps fused, saved, two steps plain, saved, two steps fused: as six of the reference."""
    case = problem((9, 40), steps=6)
    checked = rule.MaxFactorSettings()
    weight, state = case.weight, rule.init_state(case.weight, checked)
    for grad in case.grads:
        weight, state, _ = rule.step(weight, grad, state, checked)
    param = torch.nn.Parameter(case.weight.clone().to(DEVICE))
    saved = None
    for part, fused in enumerate([True, False, True]):
        optimizer = MaxFactor([param], fused=fused, foreach=False)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for grad in case.grads[2 * part : 2 * part + 2]:
            param.grad = grad.to(DEVICE)
            optimizer.step()
        saved = optimizer.state_dict()
    compare(optimizer, {"x": param}, {"x": (weight, state)})


def test_tensors_that_move_and_settings_that_change() -> None:
    """New gradients, a rescheduled lr, a frozen layer and weights written by somebody else."""
    case, checked = problem((9, 40), steps=6), rule.MaxFactorSettings()
    weight, state = case.weight, rule.init_state(case.weight, checked)
    other = torch.nn.Parameter(torch.ones(5, 67, device=DEVICE))
    param = torch.nn.Parameter(case.weight.clone().to(DEVICE))
    optimizer = MaxFactor([param, other], fused=True)
    for t, grad in enumerate(case.grads):
        rate = 0.01 * (t + 1)
        optimizer.param_groups[0]["lr"] = rate
        param.grad = grad.to(DEVICE)
        other.grad = None if t in (2, 3) else torch.ones_like(other)
        if t == 4:
            weight = weight * 3.0
            with torch.no_grad():
                param.mul_(3.0)  # the squares that the kernels kept are stale now
        optimizer.step()
        weight, state, _ = rule.step(weight, grad, state, rule.MaxFactorSettings(lr=rate))
    compare(optimizer, {"x": param}, {"x": (weight, state)})
    assert int(optimizer.state[other]["step"]) == 4


def test_gradients_that_are_laid_out_otherwise() -> None:
    """A plan for aligned float32 gradients meets others of odd addresses, and of bfloat16."""
    case, checked = problem((8, 64), steps=6), rule.MaxFactorSettings()
    grads = [grad.to(torch.bfloat16).float() for grad in case.grads]
    weight, state = case.weight, rule.init_state(case.weight, checked)
    param = torch.nn.Parameter(case.weight.clone().to(DEVICE))
    optimizer = MaxFactor([param], fused=True)
    for t, grad in enumerate(grads):
        weight, state, _ = rule.step(weight, grad, state, checked)
        param.grad = None
        param.grad_dtype = torch.bfloat16 if t in (3, 4) else torch.float32
        shift = int(t in (1, 2))
        place = torch.empty(grad.numel() + shift, dtype=param.grad_dtype, device=DEVICE)
        param.grad = place[shift:].view(grad.shape).copy_(grad)
        optimizer.step()
    compare(optimizer, {"x": param}, {"x": (weight, state)})


def test_autograd_sees_the_write() -> None:
    param = torch.nn.Parameter(torch.ones(9, 40, device=DEVICE))
    optimizer = MaxFactor([param], fused=True)
    loss = param.square().sum()
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fused_says_why_it_cannot() -> None:
    param = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64, device=DEVICE))
    optimizer = MaxFactor([("w", param)], fused=True)
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"parameter 'w' .* is torch.float64; use float32"):
        optimizer.step()
    assert not optimizer.state
    elsewhere = torch.tensor(0.01, device="meta")
    optimizer = MaxFactor([param], lr=elsewhere, fused=True)
    with pytest.raises(RuntimeError, match=r"lr is a tensor of torch.float32 on meta; make it"):
        optimizer.step()
    assert not optimizer.state
    with pytest.raises(ValueError, match="exclude each other"):
        MaxFactor([param], fused=True, foreach=True)
    with pytest.raises(ValueError, match="fused is one for the whole optimizer"):
        MaxFactor([{"params": [param], "fused": True}])


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("has_triton", False, r"Triton is not installed; install it .* or set fused=False"),
        ("version_of", (2, 9), r"Triton 2\.9 is older than \d+\.\d+; install a newer torch"),
    ],
)
def test_fused_where_triton_cannot_run(
    name: str, found: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, name, lambda *_: found)
    param = torch.nn.Parameter(torch.ones(3, 2))
    param.grad = torch.ones_like(param)
    optimizer = MaxFactor([("w", param)], fused=True)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert not optimizer.state
    usual = MaxFactor([("w", param)])  # chooses what can run
    usual.step()
    assert usual.state


ROUND, ODD = [(8, 16), (16,), (4, 8)], [(8, 16), (5,), (3, 7)]
SINGLE, BOTH = (torch.float32,), (torch.float32, torch.bfloat16)


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, seen: list[Any]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: Any) -> Any:
        self.seen.append(self.kernel)
        return self.kernel[grid]


@pytest.mark.parametrize(
    ("cls", "shapes", "dtypes", "launches"),
    [
        (MaxFactor, ROUND, SINGLE, 4),
        (MaxFactor, ODD, SINGLE, 7),
        (MaxFactor, ROUND, BOTH, 7),
        (MaxFactor, ODD * 5, BOTH, 13),
        (Adafactor, ROUND, SINGLE, 5),
    ],
)
def test_launches(
    monkeypatch: pytest.MonkeyPatch,
    cls: type[Any],
    shapes: list[tuple[int, ...]],
    dtypes: tuple[torch.dtype, ...],
    launches: int,
) -> None:
    """As many as the README says, however many tensors there are."""
    module = pytest.importorskip("maxfactor.backends.triton.launches")
    seen: list[Any] = []
    for name in ("statistics", "finalize", "maxima", "with_momentum", "rescale", "apply"):
        monkeypatch.setattr(module, name, Counted(getattr(module, name), seen))
    params = [
        torch.nn.Parameter(torch.randn(shape).to(DEVICE, dtype))
        for shape in shapes
        for dtype in dtypes
    ]
    optimizer = cls(params, fused=True)
    for _ in range(2):  # the first step measures the weights too
        seen.clear()
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    assert len(seen) == launches


@needs_gpu
@pytest.mark.parametrize("cls", [MaxFactor, Adafactor])
def test_no_wait_and_few_launches(cls: type[Any]) -> None:
    """No host sync, at most nine launches, however many tensors there are."""
    counts = []
    for copies in (1, 20):
        shapes = [(64, 128), (300,), (16, 3, 5), (1,)] * copies
        params = [torch.nn.Parameter(torch.randn(s, device=DEVICE)) for s in shapes]
        optimizer = cls(params)
        for _ in range(6):  # the last of them are replayed
            for param in params:
                param.grad = torch.randn_like(param)
            with no_host_sync():
                optimizer.step()
        assert optimizer._fused is not None
        assert optimizer._fused.replay.replayed >= 2
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as profile:
            optimizer.step()
            torch.cuda.synchronize()
        on_device = [e for e in profile.key_averages() if e.self_device_time_total > 0]
        counts.append(sum(e.count for e in on_device if "Mem" not in e.key))
    assert counts[0] == counts[1] <= 9


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_bit_for_bit(dtype: torch.dtype) -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(s, device=DEVICE, dtype=dtype))
            for s in [(1280, 1280), (5120,), (700, 333)]
        ]
        optimizer = MaxFactor(params, seed=3)
        for _ in range(5):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        results.append(snapshot(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_gpu
def test_cuda_graph() -> None:
    """Captured once, replayed with new gradients and a new lr in a tensor."""
    case = problem((70, 520), steps=6)
    lr = torch.full((), 0.01, device=DEVICE)
    param, control = (torch.nn.Parameter(case.weight.clone().to(DEVICE)) for _ in range(2))
    optimizer = MaxFactor([param], lr=lr, capturable=True)
    eager = MaxFactor([control], lr=0.01)
    static = case.grads[0].to(DEVICE)
    param.grad = static
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    static.copy_(case.grads[1])
    with torch.cuda.graph(graph):
        optimizer.step()
    control.grad = case.grads[0].to(DEVICE)
    eager.step()
    for t in range(1, 6):
        static.copy_(case.grads[t])
        lr.fill_(0.01 * t)
        graph.replay()
        eager.param_groups[0]["lr"] = 0.01 * t
        control.grad = case.grads[t].to(DEVICE)
        eager.step()
    torch.testing.assert_close(param, control, rtol=1e-5, atol=1e-7)
    assert int(optimizer.state[param]["step"]) == 6


@needs_gpu
def test_grad_scaler_itself() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32, device=DEVICE)
    optimizer = MaxFactor(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)  # overflows at first
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(16, 64, device=DEVICE)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    steps = int(optimizer.state[model.weight]["step"])
    assert 0 < steps < 40
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@needs_gpu
def test_more_than_two_to_the_31_elements() -> None:
    """The last row of a huge matrix moves as it should."""
    rows, cols = 2**20 + 8, 2048
    param = torch.nn.Parameter(torch.ones(rows, cols, device=DEVICE, dtype=torch.bfloat16))
    optimizer = MaxFactor([param], lr=0.5, weight_decay=0.0, rounding="nearest")
    grad = torch.zeros(rows, cols, device=DEVICE, dtype=torch.bfloat16)
    grad[-1] = 1.0
    param.grad = grad
    optimizer.step()
    assert torch.equal(param[-1], torch.full((cols,), 0.5, device=DEVICE, dtype=torch.bfloat16))
    assert torch.equal(param[-2], torch.ones(cols, device=DEVICE, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_in_the_gradient_moves_nothing(dtype: torch.dtype) -> None:
    """Signs are kept as one bit each, which cannot tell a zero: such tiles take another way."""
    torch.manual_seed(0)
    before = torch.randn(70, 520, dtype=dtype, device=DEVICE)
    grad = torch.randn(70, 520, dtype=dtype, device=DEVICE)
    grad[:, 5] = 0.0
    grad[3] = 0.0
    fused, plain = (torch.nn.Parameter(before.clone()) for _ in range(2))
    fused.grad, plain.grad = grad, grad
    for param, is_fused in ((fused, True), (plain, False)):
        MaxFactor(
            [param], lr=0.1, weight_decay=0.0, rounding="nearest", fused=is_fused, foreach=False
        ).step()
    assert torch.equal(fused[:, 5], before[:, 5])
    assert torch.equal(fused[3], before[3])
    assert bool((fused != before)[:3, :5].all())
    torch.testing.assert_close(
        fused, plain, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-7
    )
