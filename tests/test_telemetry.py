"""Metrics of recorded steps against what is computed directly from W before and after."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxfactor
from maxfactor import rule
from maxfactor.optimizer import FactoredOptimizer
from maxfactor.rule import reference
from maxfactor.settings import TensorRule
from maxfactor.state import factoring
from maxfactor.telemetry import ParameterMetrics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
        return maxfactor.for_model(model, recipe=recipe, **form, **more)  # type: ignore[arg-type]
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


def run(recipe: str, form: dict[str, Any], dtype: torch.dtype, steps: int = 4) -> None:
    """Compare each step of a training with direct computations."""
    model = make(dtype)
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
                    assert found.lost == pytest.approx(float(lost.float().mean()), abs=0.02)


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
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        ("quality", torch.bfloat16),
        ("fast", torch.float32),
        ("lean", torch.bfloat16),
        ("published-0.2", torch.float32),
        ("published-1.0", torch.bfloat16),
        ("small d", torch.float32),
        ("maximize", torch.float32),
        ("adafactor", torch.float32),
    ],
)
def test_metrics_of_the_kernels(recipe: str, dtype: torch.dtype) -> None:
    run(recipe, {"fused": True}, dtype, steps=3)
