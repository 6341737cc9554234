"""The fused kernels with momentum, in every direction and scale, against the rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cases import BLOCKS, MOMENTUM_VARIANTS, no_host_sync, problem, settings_for
from comparison import compare_with_rule
from maxfactor import FAM, MaxFactor, for_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")

# Several tiles and strips, blocks that are cut short, vectors, a single value, nothing at all.
SHAPES: list[tuple[int, ...]] = [(9, 72), (33, 8), (3, 130), (70,), (5, 4, 6), (1,), (0, 3)]
if DEVICE == "cuda":
    SHAPES += [(300, 520), (1000, 64), (129, 333), (3000,), (64, 32, 9)]

COMBINATIONS = [
    ("fam", "int8", "sign_max", "current"),
    ("fam", "int8", "sign_max", "initial"),
    ("nesterov", "int8", "sign_max", "current"),
    ("nesterov", "fp32", "sign_max", "initial"),
    ("nesterov", "bf16", "factored", "current"),
    ("fam", "fp32", "factored", "current"),
    ("none", "int8", "factored", "initial"),
    ("nesterov", "int8", "orthogonal", "initial"),
    ("fam", "int8", "orthogonal", "current"),
    ("none", "int8", "orthogonal", "current"),
    ("none", "int8", "sign_max", "initial"),
]


@pytest.mark.parametrize(("momentum", "store", "direction", "scale"), COMBINATIONS)
def test_equals_the_rule(momentum: str, store: str, direction: str, scale: str) -> None:
    if store == "bf16" and DEVICE == "cpu":
        pytest.skip("Triton's interpreter cuts bfloat16 off instead of rounding it")
    cases = [problem(shape, steps=5, seed=i) for i, shape in enumerate(SHAPES)]
    compare_with_rule(settings_for(momentum, store, direction, scale), cases, "fused", DEVICE)


@pytest.mark.parametrize("variant", MOMENTUM_VARIANTS)
def test_other_settings(variant: str) -> None:
    cases = [problem(shape, steps=3, seed=i) for i, shape in enumerate(SHAPES[:5])]
    pairs = [("nesterov", "sign_max"), ("fam", "factored")]
    if DEVICE == "cpu":  # the interpreter is slow: one of them for each variant, in turn
        turn = list(MOMENTUM_VARIANTS).index(variant) % 2
        pairs = pairs[turn : turn + 1]
    for momentum, direction in pairs:
        settings = settings_for(momentum, "fp32", direction, "current") | MOMENTUM_VARIANTS[variant]
        compare_with_rule(settings, cases, "fused", DEVICE)


# The interpreter is slow: some cases, each with one momentum in turn.
IN_TURN = ["wide, rows", "wide, columns", "tall, columns"] if DEVICE == "cpu" else list(BLOCKS)


@pytest.mark.parametrize("name", IN_TURN)
def test_blocks(name: str) -> None:
    """Blocks that begin within tiles, of two matrices in one batch, beside a vector."""
    shape, blocks = BLOCKS[name]
    cases = [problem(each, steps=2, seed=i) for i, each in enumerate([shape, (9,), shape])]
    momenta = [("nesterov", "int8"), ("fam", "fp32"), ("none", "")]
    if DEVICE == "cpu":
        momenta = [momenta[IN_TURN.index(name)]]
    for momentum, store in momenta:
        settings = settings_for(momentum, store, "orthogonal", "initial") | {"blocks": blocks}
        compare_with_rule(settings, cases, "fused", DEVICE)


UNCLIPPED: dict[str, Any] = {"direction": "factored", "d": math.inf}


@pytest.mark.parametrize(
    ("momentum", "store", "scale", "more"),
    [
        ("fam", "int8", "current", {"weight_decay": 0.1}),
        ("fam", "fp32", "initial", {"maximize": True}),
        ("nesterov", "int8", "initial", {"eps": (1e-3, 1e-3)}),
    ],
)
def test_without_a_clip(momentum: str, store: str, scale: str, more: dict[str, Any]) -> None:
    """With d infinite nothing waits for the RMS of y: W moves in the launch that filters."""
    cases = [problem(shape, steps=5, seed=i) for i, shape in enumerate(SHAPES)]
    settings = settings_for(momentum, store, "factored", scale) | UNCLIPPED | more
    compare_with_rule(settings, cases, "fused", DEVICE)


def test_without_a_clip_next_to_others() -> None:
    """Launch groups with and without `apply` in one optimizer; a resumed run has the same bits."""
    shapes = [(9, 72), (33, 8), (70,), (12, 64)]
    grads = [problem(shape, steps=5, seed=i).grads for i, shape in enumerate(shapes)]

    def optimizer() -> tuple[MaxFactor, list[torch.Tensor]]:
        params: list[torch.Tensor] = [
            torch.nn.Parameter(problem(shape).weight.to(DEVICE)) for shape in shapes
        ]
        groups: list[dict[str, Any]] = [
            {"params": params[:1], **UNCLIPPED},
            {"params": params[1:3], "direction": "sign_max"},
            {"params": params[3:], "direction": "orthogonal"},
        ]
        return MaxFactor(groups, momentum=FAM(warmup=1), fused=True), params

    def step(taker: MaxFactor, params: list[torch.Tensor], t: int) -> None:
        for param, own in zip(params, grads, strict=True):
            param.grad = own[t].to(DEVICE)
        taker.step()

    (whole, first), (stopped, second) = optimizer(), optimizer()
    for t in range(5):
        step(whole, first, t)
    for t in range(2):
        step(stopped, second, t)
    resumed, third = optimizer()
    with torch.no_grad():
        for ours, theirs in zip(third, second, strict=True):
            ours.copy_(theirs)
    resumed.load_state_dict(stopped.state_dict())
    for t in range(2, 5):
        step(resumed, third, t)
    for ours, theirs in zip(third, first, strict=True):
        assert torch.equal(ours, theirs)


def trained(steps: int, grads: list[torch.Tensor], **settings: Any) -> MaxFactor:
    param = torch.nn.Parameter(problem((9, 72)).weight.to(DEVICE))
    optimizer = MaxFactor([param], fused=True, **settings)
    for grad in grads[:steps]:
        param.grad = grad.to(DEVICE)
        optimizer.step()
    return optimizer


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "direction", [{"direction": "sign_max"}, {"direction": "orthogonal"}, UNCLIPPED], ids=str
)
def test_a_skipped_step_changes_nothing(direction: dict[str, Any]) -> None:
    """A kernel may multiply memory that nobody wrote; what comes of it is not stored."""
    grads = problem((9, 72), steps=4).grads
    settings: dict[str, Any] = {"momentum": FAM(warmup=1), **direction}
    optimizer = trained(3, grads, **settings, scale="initial")
    [param] = optimizer.param_groups[0]["params"]
    before = {key: value.clone() for key, value in optimizer.state[param].items()}
    weight = param.detach().clone()
    param.grad = grads[3].to(DEVICE, copy=True)
    param.grad[2, 5] = float("nan")
    optimizer.step()
    assert optimizer.skipped == 1
    assert torch.equal(param, weight)
    for key, value in optimizer.state[param].items():
        assert torch.equal(value, before[key]), key
    param.grad = grads[3].to(DEVICE)
    optimizer.step()  # the next step is taken
    assert optimizer.skipped == 1
    assert not torch.equal(param, weight)


def test_bands_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"FAM with 8 bands.*set bands=1 or fused=False"):
        trained(1, problem((9, 72), steps=1).grads, momentum=FAM(bands=8))


def test_gradients_scaled_by_a_scaler() -> None:
    """What GradScaler hands over is taken off again before the momentum."""
    grads = problem((9, 72), steps=3).grads
    plain = trained(3, grads, momentum=FAM())
    [param] = plain.param_groups[0]["params"]
    scaled = torch.nn.Parameter(problem((9, 72)).weight.to(DEVICE))
    optimizer = MaxFactor([scaled], fused=True, momentum=FAM())
    vars(optimizer)["grad_scale"] = torch.full((1,), 1024.0, device=DEVICE)
    vars(optimizer)["found_inf"] = torch.zeros(1, device=DEVICE)
    for grad in grads:
        scaled.grad = grad.to(DEVICE) * 1024.0
        optimizer.step()
    torch.testing.assert_close(scaled, param, rtol=1e-5, atol=1e-7)
    ours, theirs = optimizer.state[scaled], plain.state[param]
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-7, msg=key)


@needs_gpu
def test_no_wait() -> None:
    params = [torch.nn.Parameter(torch.randn(s, device=DEVICE)) for s in [(64, 128), (300,)]]
    optimizer = MaxFactor(params, momentum=FAM(), direction="orthogonal", scale="initial")
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        with no_host_sync():
            optimizer.step()
            optimizer.spectrum()
    assert optimizer._fused is not None


@pytest.mark.parametrize("recipe", ["quality", "fast", "lean"])
def test_recipes(recipe: Any) -> None:
    """All kinds of layers at once: orthogonal and factored matrices share their launches."""
    models = []
    for fused in (True, False):
        torch.manual_seed(0)
        layers = [torch.nn.Embedding(40, 24), torch.nn.Linear(24, 72), torch.nn.Linear(72, 40)]
        model = torch.nn.Sequential(*layers).to(DEVICE)
        optimizer = for_model(model, recipe, fused=fused, foreach=False)
        for step in range(4):
            for i, param in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(10 * step + i)
                param.grad = torch.randn(param.shape, generator=generator).to(DEVICE)
            optimizer.step()
        models.append(model)
    # On a GPU the orthogonal direction is iterated in float16, by torch operations in bfloat16.
    tolerance = 1e-5 if DEVICE == "cpu" else 1e-3
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
