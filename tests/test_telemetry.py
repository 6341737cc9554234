"""Metrics of recorded steps against what is computed directly from W before and after."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import maxfactor
from cases import no_host_sync
from maxfactor import rule
from maxfactor.optimizer import FactoredOptimizer
from maxfactor.rule import reference
from maxfactor.settings import TensorRule
from maxfactor.state import factoring
from maxfactor.telemetry import ParameterMetrics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates to bfloat16 where a GPU rounds to nearest.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
RTOL = 2e-5  # of sums in float32
FORMS: dict[str, dict[str, Any]] = {"plain": {}, "foreach": {"foreach": True}}
SETTINGS: dict[str, dict[str, Any]] = {  # on top of MaxFactor's defaults; each has another bound
    "small d": {"d": 0.2, "weight_decay": 0.3},
    "bands": {"momentum": {"warmup": 1, "theta": 0.5, "bands": 4}},
    "momentum and d": {"momentum": 0.8, "direction": "factored", "d": 0.3},
    "maximize": {"momentum": 0.9, "nesterov": True, "direction": "orthogonal", "maximize": True},
}


class Model(nn.Module):
    """One layer of each kind; some share a shape, one is longer than a block of int8 values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 70)
        self.down = nn.Linear(70, 12)
        self.mix = nn.Linear(12, 12)
        self.blend = nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.table(tokens).mT).mT
        x = self.down(torch.relu(self.up(self.norm(x))))
        out: Tensor = self.head(self.blend(self.mix(x)))
        return out


class Tiny(nn.Module):
    """As few tiles as possible, for the interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 66)
        self.down = nn.Linear(66, 8, bias=False)
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(self.up(self.table(tokens))))
        return out


def tiny(dtype: torch.dtype) -> Tiny:
    torch.manual_seed(0)
    return Tiny().to(DEVICE, dtype)


def make(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(DEVICE, dtype)


def backward(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (3, 6), generator=generator).to(DEVICE)
    (model(tokens).float().square().mean() * scale).backward()


def optimizer_of(
    model: nn.Module, recipe: str, form: dict[str, Any], **more: Any
) -> FactoredOptimizer:
    if recipe in maxfactor.RECIPES:
        return maxfactor.for_model(model, recipe=recipe, **form, **more)
    if recipe == "adafactor":
        return maxfactor.Adafactor(model.named_parameters(), **form, **more)
    return maxfactor.MaxFactor(model.named_parameters(), **SETTINGS[recipe], **form, **more)


# ------------------------------------------------------------------------- direct computations


def size(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def clip_of(grad: Tensor, state: dict[str, Tensor], own: TensorRule, update: Tensor) -> float:
    """The divisors of (8), (10) and the norm, from the state after the step."""
    clip = 1.0
    g = grad.double()
    moment = state["row_var"] if "row_var" in state else state["variance"]
    if own.is_filtered:
        clip = max(1.0, math.sqrt(float(g.square().mean()) / float(moment.double().mean())))
    if own.is_orthogonal or own.boost is not None:
        return clip
    if own.divides_by_peak:
        update = update / update.abs().max()
    if own.norm_clip:
        excess = max(1.0, float(update.norm()) / own.norm_clip)
        update, clip = update / excess, clip * excess
    if own.rms_bound < math.inf:
        clip *= max(1.0, size(update) / own.rms_bound)
    return clip


def scaled_gradient(
    grad: Tensor, state: dict[str, Tensor], own: TensorRule, before: Tensor
) -> Tensor:
    """U = G / sqrt(V) of a rule without momentum."""
    layout = factoring(tuple(grad.shape), own.factor)
    if layout is None or own.dense:
        g, moments = grad.float().reshape(-1), {"variance": state["variance"].reshape(-1)}
    else:
        g = grad.float().reshape(layout.matrix)
        row, col = (*layout.matrix[:-1], 1), (*layout.matrix[:-2], 1, layout.matrix[-1])
        moments = {"row_var": state["row_var"].view(row), "col_var": state["col_var"].view(col)}
    variance = reference.variance_of(moments, own)
    return g * variance.clamp(min=own.variance_floor).rsqrt()


def check(
    found: ParameterMetrics,
    before: Tensor,
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    own: TensorRule,
) -> None:
    assert found.grad_rms == pytest.approx(size(grad), rel=RTOL)
    assert found.weight_rms == pytest.approx(size(param), rel=RTOL)
    change = size(param.detach().double() - before.double())
    assert found.update_rms == pytest.approx(change, rel=RTOL)
    assert found.update_ratio == pytest.approx(change / size(param), rel=2 * RTOL)
    if not own.has_momentum:
        update = scaled_gradient(grad, state, own, before)
        assert found.clip == pytest.approx(clip_of(grad, state, own, update), rel=1e-4)
    elif not own.needs_norm:
        assert found.clip == pytest.approx(clip_of(grad, state, own, grad), rel=1e-4)
    assert not found.skipped
    assert found.is_finite


def run(
    recipe: str,
    form: dict[str, Any],
    dtype: torch.dtype,
    steps: int = 4,
    model: nn.Module | None = None,
) -> None:
    """Compare each step of a training with direct computations."""
    model = make(dtype) if model is None else model
    optimizer = optimizer_of(model, recipe, form)
    optimizer.record_metrics(every=1)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step, 1.0 if step != 2 else 30.0)  # a large gradient for the bounds
        names = {param: name for name, param in model.named_parameters()}
        befores = {name: param.detach().clone() for name, param in model.named_parameters()}
        states = {
            name: {key: x.detach().cpu().clone() for key, x in optimizer.state[param].items()}
            for name, param in model.named_parameters()
            if optimizer.state.get(param)
        }
        optimizer.step()
        metrics = optimizer.metrics()
        assert list(metrics) == [each.name for each in optimizer.members()]
        for index, group in enumerate(optimizer.param_groups):
            settings = optimizer._settings(index)
            for param in group["params"]:
                name = names[param]
                own = settings.rules.of(tuple(param.shape))
                grad, state = param.grad.cpu(), optimizer.state[param]
                after = {key: x.cpu() for key, x in state.items()}
                found, before = metrics[name], befores[name].cpu()
                check(found, before, param.cpu(), grad, after, own)
                # The same step in float32, by the reference: alpha, beta, and what is lost.
                old = states.get(name) or rule.init_state(before, settings)
                wide = rule.step(before.float(), grad, old, settings)
                assert found.step_size == pytest.approx(float(wide.step_size), rel=1e-5)
                assert found.beta == pytest.approx(beta_of(old, own, step + 1))
                if dtype == torch.float32:
                    assert found.lost is None
                else:
                    lost = (wide.param.to(dtype) == before) & (wide.param != before)
                    few = max(0.02, 2.1 / lost.numel())  # in borderline cases
                    assert found.lost == pytest.approx(float(lost.float().mean()), abs=few)


def beta_of(state: dict[str, Tensor], own: TensorRule, t: int) -> float | None:
    if not own.has_momentum:
        return None
    if own.fam is None or "band_sums" not in state:
        return own.beta
    return float(rule.fam.band_betas(state["band_sums"], t, own.fam).mean())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", [*maxfactor.RECIPES, "adafactor", *SETTINGS])
def test_metrics_are_those_of_the_step(recipe: str, form: str) -> None:
    run(recipe, FORMS[form], torch.float32)


@pytest.mark.parametrize("recipe", ["lean", "fast", "quality"])
def test_metrics_in_16_bits(recipe: str) -> None:
    run(recipe, {}, torch.bfloat16)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("quality", HALF), ("small d", torch.float32), ("published-1.0", HALF)],
)
def test_metrics_of_the_kernels(recipe: str, dtype: torch.dtype) -> None:
    """Orthogonal batches and a direct write; the general kernel; packed signs."""
    run(recipe, {"fused": True, "lr": 0.004}, dtype, steps=2, model=tiny(dtype))


# ------------------------------------------------------------------- which steps are recorded


def trained(form: dict[str, Any], every: int | None) -> tuple[nn.Module, FactoredOptimizer]:
    model = tiny(torch.float32)
    optimizer = optimizer_of(model, "fast", form)
    if every is not None:
        optimizer.record_metrics(every=every)
    for step in range(1 if form else 3):  # the interpreter is slow
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("form", ["plain", pytest.param("fused", marks=[pytest.mark.gpu])])
def test_recording_does_not_change_the_step(form: str) -> None:
    if form == "fused":
        pytest.importorskip("triton")
    chosen = {"fused": True} if form == "fused" else {}
    (alone, silent), (measured, _) = trained(chosen, None), trained(chosen, 1)
    # On a GPU the kernel that measures is compiled apart, and may round sums otherwise.
    relative, absolute = (1e-6, 1e-7) if DEVICE == "cuda" else (0.0, 0.0)
    for one, other in zip(alone.parameters(), measured.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=relative, atol=absolute)
    if form == "fused":  # nothing was prepared either
        assert silent._fused is not None
        assert silent._fused._recorder is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_a_recorded_step_does_not_wait() -> None:
    model = make()
    optimizer = optimizer_of(model, "quality", {})
    optimizer.record_metrics(every=1)
    backward(model, 0)
    optimizer.step()  # plans, and compiles
    with no_host_sync():
        optimizer.step()
        metrics = optimizer.metrics()
    assert metrics.summary()["skipped"] == 0.0


def test_every_and_age() -> None:
    model = make()
    optimizer = optimizer_of(model, "lean", {})
    with pytest.raises(RuntimeError, match=r"call optimizer\.record_metrics"):
        optimizer.metrics()
    optimizer.record_metrics(every=3)
    ages, norms = [], []
    for step in range(8):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        ages.append(optimizer.metrics().age)
        norms.append(optimizer.metrics().summary()["grad_norm"])
        if step == 5:
            optimizer.record_metrics(every=None)
    assert ages == [0, 1, 2, 0, 1, 2, 0, 1]
    assert norms[0] == norms[2] != norms[3]
    optimizer.record_metrics(every=0)
    backward(model, 9)
    optimizer.step()
    assert optimizer.metrics().age == 2
    for wrong in (-1, 1.5, "often"):
        with pytest.raises((TypeError, ValueError), match="every"):
            optimizer.record_metrics(every=wrong)  # type: ignore[arg-type]


def test_metrics_stay_those_of_their_step() -> None:
    model = make()
    optimizer = optimizer_of(model, "fast", {})
    optimizer.record_metrics(every=1)
    backward(model, 0)
    optimizer.step()
    first = optimizer.metrics()  # not read yet
    expected = optimizer.metrics().summary()
    backward(model, 1)
    optimizer.step()
    assert first.summary() == expected != optimizer.metrics().summary()


@pytest.mark.parametrize("form", ["plain", pytest.param("fused", marks=[pytest.mark.gpu])])
def test_a_skipped_step_says_so(form: str) -> None:
    if form == "fused":
        pytest.importorskip("triton")
    model = tiny(torch.float32)
    optimizer = optimizer_of(model, "lean", {"fused": True} if form == "fused" else {})
    optimizer.record_metrics(every=1)
    backward(model, 0)
    bad = model.up.weight
    assert isinstance(bad, nn.Parameter)
    assert bad.grad is not None
    bad.grad[0, 0] = math.nan
    optimizer.step()
    metrics = optimizer.metrics()
    assert metrics.skipped
    assert optimizer.skipped == 1
    assert [name for name, each in metrics.items() if not each.is_finite] == ["up.weight"]
    other = metrics["down.weight"]
    assert other.grad_rms == pytest.approx(size(model.down.weight.grad), rel=RTOL)  # type: ignore[arg-type]
    assert (other.step_size, other.update_ratio, other.beta) == (0.0, 0.0, None)
    summary = metrics.summary()
    assert summary["skipped"] == 1.0
    assert "hidden/update_ratio" not in summary
    assert all(map(math.isfinite, summary.values()))
    lines = optimizer.report()
    assert lines[0] == f"The step was skipped for {len(metrics)} of {len(metrics)} parameters."
    assert lines[1:] == ["up.weight: the gradient is not finite, or its squares overflow."]


def test_released_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxfactor.windows.WINDOW", 500)  # several windows
    found = []
    for released in (False, True):
        model = make()
        optimizer = optimizer_of(model, "fast", {})
        optimizer.record_metrics(every=2)
        if released:
            maxfactor.release_gradients(model, optimizer)
        assert len({each.window for each in optimizer.members()}) > 3
        for step in range(4):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.metrics().age == 1
        found.append(dict(optimizer.metrics()))
    assert found[0] == found[1]


def test_sharded_parameters_are_refused(one_rank: None) -> None:
    mesh = DeviceMesh("cpu", torch.arange(1))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    optimizer = maxfactor.MaxFactor([("up.weight", weight)])
    with pytest.raises(RuntimeError, match=r"'up\.weight' is a DTensor"):
        optimizer.record_metrics()
    optimizer.record_metrics(every=0)


def test_equal_names_of_two_groups() -> None:
    params = [nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    optimizer = maxfactor.MaxFactor([{"params": [("w", param)]} for param in params])
    optimizer.record_metrics()
    for size_of_it, param in enumerate(params, 1):
        param.grad = torch.full_like(param, size_of_it)
    optimizer.step()
    found = {name: each.grad_rms for name, each in optimizer.metrics().items()}
    assert found == pytest.approx({"w": 1.0, "w of group_1": 2.0})


# ----------------------------------------------------------------------- summary and report


def test_summary_is_over_all_entries_of_a_kind() -> None:
    model = make(torch.bfloat16)
    optimizer = optimizer_of(model, "fast", {})
    optimizer.record_metrics()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    backward(model, 0)
    optimizer.step()
    metrics = optimizer.metrics()
    summary = metrics.summary()
    names = [name for name, each in metrics.items() if each.kind == "hidden"]
    params = dict(model.named_parameters())
    after = torch.cat([params[name].double().flatten() for name in names])
    change = after - torch.cat([before[name].double().flatten() for name in names])
    grad = torch.cat([params[name].grad.double().flatten() for name in names])  # type: ignore[union-attr]
    assert summary["hidden/update_ratio"] == pytest.approx(size(change) / size(after), rel=RTOL)
    assert summary["hidden/grad_rms"] == pytest.approx(size(grad), rel=RTOL)
    assert summary["hidden/beta"] == pytest.approx(0.9)
    assert 0.0 <= summary["hidden/lost"] <= 1.0
    assert summary["skipped"] == 0.0
    squares = [float(p.grad.double().square().sum()) for p in params.values()]  # type: ignore[union-attr]
    norm = math.sqrt(sum(squares))
    assert summary["grad_norm"] == pytest.approx(norm, rel=RTOL)
    kinds = {"hidden", "conv", "embedding", "head", "vector"}
    assert {key.split("/")[0] for key in summary} == kinds | {"grad_norm", "skipped"}


def test_report_names_what_stands_out() -> None:
    model = make()
    settings: dict[str, Any] = {"momentum": {"warmup": 0}, "weight_decay": 0.0, "lr": 0.01}
    matrices = ("up.weight", "down.weight", "mix.weight", "blend.weight", "conv.weight")
    params = [(n, p) for n, p in model.named_parameters() if n in matrices]
    optimizer = maxfactor.MaxFactor(params, **settings)
    optimizer.record_metrics(every=1)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    assert "dominates" not in str(optimizer.report())
    optimizer.zero_grad()
    backward(model, 3)
    grads = {name: param.grad for name, param in params}
    with torch.no_grad():
        grads["up.weight"].mul_(1e4)  # type: ignore[union-attr]
        grads["mix.weight"].zero_()  # type: ignore[union-attr]
        grads["blend.weight"].mul_(1e-8)  # type: ignore[union-attr]
        model.down.weight.mul_(1e-6)  # below eps2: the step is large for its size
    optimizer.step()
    text = str(optimizer.report())
    assert "up.weight: the gradient dominates, with 100% of the squared norm of all 5" in text
    assert "mix.weight: the gradient is zero." in text
    assert "blend.weight: the gradient vanishes; its RMS is" in text
    assert "down.weight: the step changes it by" in text
    assert "times the median of group_0" in text
    assert "FAM's memory is at its" in text
    for wrong in (0, "all"):
        with pytest.raises((TypeError, ValueError), match="k "):
            optimizer.report(k=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["quality", "fast", "lean"])
def test_biases_that_begin_at_zero_do_not_stand_out(recipe: maxfactor.RecipeName) -> None:
    """Nor do the norms beside them, in a Transformer that is new."""
    torch.manual_seed(0)
    model = torch.nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True).to(DEVICE)
    optimizer = maxfactor.for_model(model, recipe)
    optimizer.record_metrics(every=1)
    inputs, targets = torch.randn(2, 5, 16, device=DEVICE), torch.randn(2, 5, 16, device=DEVICE)
    for _ in range(2):
        optimizer.zero_grad()
        (model(inputs, targets) - inputs).abs().mean().backward()
        optimizer.step()
        assert "the step changes it by" not in str(optimizer.report())
    found = optimizer.metrics()
    assert found["encoder.layers.0.norm1.bias"].update_ratio > 0.1


def test_report_of_lost_changes() -> None:
    nearest: dict[str, Any] = {"rounding": "nearest"}
    for settings, words in ((nearest, "use rounding='stochastic'"), ({}, "on average")):
        model = make(torch.bfloat16)
        optimizer = maxfactor.MaxFactor(
            model.named_parameters(), lr=2e-4, weight_decay=0.0, **settings
        )
        optimizer.record_metrics()
        backward(model, 0)
        optimizer.step()
        lines = [line for line in optimizer.report(k=2) if "half a unit" in line]
        assert len(lines) == 2
        assert all(words in line for line in lines)


def test_report_of_nothing() -> None:
    model = make()
    optimizer = optimizer_of(model, "lean", {})
    optimizer.record_metrics()
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "bias" in name:
                param.fill_(0.3)
    optimizer.step()
    assert optimizer.report() == ["Nothing stands out among 15 parameters."]
