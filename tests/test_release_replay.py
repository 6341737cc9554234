"""`release_gradients`: windows share their memory, and are replayed as CUDA graphs.

On a CPU the kernels run in the interpreter, and the graphs are made up.
"""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxfactor import for_model, release_gradients
from maxfactor.optimizer import WHOLE, FactoredOptimizer
from trainings import assert_same

pytest.importorskip("triton", "3.3")  # torch 2.6 has an older one
from fake_graphs import use_fake_graphs
from maxfactor.backends.triton import replay, sharing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
WIDTH, LAYERS, STEPS = (256, 6, 12) if ON_GPU else (8, 2, 5)


def needs_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not ON_GPU, reason="no CUDA device")(test))


@pytest.fixture(autouse=True)
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window for each layer; captures after one step, and no real graphs on a CPU."""
    monkeypatch.setattr("maxfactor.windows.WINDOW", WIDTH * (WIDTH + 1))
    monkeypatch.setattr(replay, "SEEN_BEFORE", 1)
    monkeypatch.setattr(sharing, "LEAST_KEPT", 1)  # byte
    if not ON_GPU:
        use_fake_graphs(monkeypatch)


class Layers(nn.Module):
    """Equal layers, then one that is not always used, then one of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.optional = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor, use_optional: bool = False) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        if use_optional:
            x = self.optional(x)
        found: Tensor = self.head(x)
        return found


def made(recipe: Any, dtype: torch.dtype = torch.float32) -> tuple[Layers, FactoredOptimizer]:
    torch.manual_seed(0)
    model = Layers().to(DEVICE, dtype)
    return model, for_model(model, recipe, fused=True, seed=1)


def backward(model: Layers, step: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    x = x.to(DEVICE, next(model.parameters()).dtype)
    loss = model(x, use_optional=step == 3).float().square().mean()
    spoiled = model.parameters() if step == 4 else ()  # so that all windows are skipped
    hooks = [param.register_hook(with_nan) for param in spoiled]
    loss.backward()
    for hook in hooks:
        hook.remove()


def with_nan(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad.view(-1)[-1] = math.nan
    return grad


def trained(
    recipe: Any, dtype: torch.dtype, *, release: bool, steps: int = STEPS
) -> tuple[list[Any], Any]:
    """Weights and states, and the optimizer; its gradients are still released."""
    model, optimizer = made(recipe, dtype)
    if release:
        release_gradients(model, optimizer)
    with torch.backends.cudnn.flags(enabled=False):
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 6:
                with torch.no_grad():
                    model.head.weight.mul_(0.5)  # by others, which the next step must see
    found = [(param.detach(), optimizer.state[param]) for param in model.parameters()]
    return found, optimizer


def plans_of(optimizer: FactoredOptimizer) -> list[Any]:
    """The fused plans of windows."""
    runners = [runner for key, runner in optimizer._runners.items() if key != WHOLE]
    return [runner.fused for runner in runners if runner.fused is not None]


def compared(recipe: Any, dtype: torch.dtype) -> None:
    plain, _ = trained(recipe, dtype, release=False)
    released, optimizer = trained(recipe, dtype, release=True)
    plans = plans_of(optimizer)
    assert len(plans) > LAYERS
    assert [plan.replay.failure for plan in plans] == [None] * len(plans)
    always_used = [plan for plan in plans if plan.replay.replayed]
    assert len(always_used) >= LAYERS + 1
    assert_same(plain, released)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["lean", "quality"])
def test_replayed_windows_equal_a_step_at_the_end(recipe: Any) -> None:
    """Also after NaN, and with a layer that has a gradient in one step alone."""
    compared(recipe, torch.float32)


@needs_gpu
@pytest.mark.parametrize("recipe", ["published-1.0", "lean", "fast", "quality"])
def test_replayed_windows_equal_a_step_at_the_end_in_bfloat16(recipe: Any) -> None:
    compared(recipe, torch.bfloat16)


def settled(recipe: Any) -> tuple[Layers, FactoredOptimizer, Any]:
    """A model, its optimizer, and the handle, after steps whose last one was replayed."""
    model, optimizer = made(recipe)
    handle = release_gradients(model, optimizer)
    for step in (0, 1, 2, 5):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert sum(plan.replay.replayed for plan in plans_of(optimizer)) > LAYERS
    return model, optimizer, handle


@pytest.mark.gpu
def test_windows_have_one_workspace_until_removal() -> None:
    model, optimizer, handle = settled("quality")
    plans = plans_of(optimizer)
    memory = optimizer._sharing._memory
    assert memory is not None
    assert len(memory) == max(plan.workspace_bytes for plan in plans) > 0
    used = {at.workspace_at for plan in plans for at in plan.replay._graphs if plan.workspace_bytes}
    assert used == {memory.data_ptr()}
    assert len({id(plan._group_tables) for plan in plans}) == 1
    size, freed = len(memory), weakref.ref(memory)
    allocated = torch.cuda.memory_allocated() if ON_GPU else 0
    del plans, memory
    handle.remove()
    gc.collect()
    assert freed() is None
    assert not plans_of(optimizer)
    if ON_GPU:
        assert torch.cuda.memory_allocated() <= allocated - size
    backward(model, 6)
    optimizer.step()  # the usual one


@pytest.mark.gpu
def test_recipes_without_orthogonal_matrices_keep_no_workspace() -> None:
    _, optimizer, _ = settled("lean")
    assert optimizer._sharing._memory is None


@pytest.mark.gpu
def test_a_small_workspace_is_borrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only the windows without one are replayed."""
    monkeypatch.setattr(sharing, "LEAST_KEPT", 1 << 30)
    model, optimizer = made("quality")
    release_gradients(model, optimizer)
    for step in (0, 1, 2, 5):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer._sharing._memory is None
    for plan in plans_of(optimizer):
        assert bool(plan.replay.replayed) == (plan.workspace_bytes == 0)


@pytest.mark.gpu
def test_replayed_models_can_be_collected() -> None:
    model, optimizer, handle = settled("quality")
    alive = [weakref.ref(each) for each in (model, optimizer, model.head.weight)]
    alive.append(weakref.ref(optimizer._sharing._memory))  # type: ignore[arg-type]
    del model, optimizer, handle
    gc.collect()
    assert [each() for each in alive] == [None] * 4


@needs_gpu
def test_replayed_windows_keep_no_memory() -> None:
    model, optimizer, _ = settled("quality")
    allocated = []
    for step in range(5, 11):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated)) == 1


@needs_gpu
def test_backward_on_another_stream_is_launched() -> None:
    """And its windows do not use the memory of others."""
    model, optimizer, _ = settled("quality")
    before = [plan.replay.replayed for plan in plans_of(optimizer)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.manual_seed(0)
        other = Layers().to(DEVICE)
        theirs = for_model(other, "quality", fused=True, seed=1)
        release_gradients(other, theirs)
        for step in (0, 1, 2, 5):
            backward(other, step)
            theirs.step()
            theirs.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    assert theirs._sharing._memory is None
    assert not any(plan.replay.replayed for plan in plans_of(theirs))
    assert [plan.replay.replayed for plan in plans_of(optimizer)] == before
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)


@pytest.mark.gpu
def test_without_memory_to_keep_windows_borrow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*_: object, **__: object) -> None:
        asked.append(1)
        raise torch.OutOfMemoryError("no memory left")

    fake = SimpleNamespace(
        empty=refuse, uint8=torch.uint8, OutOfMemoryError=torch.OutOfMemoryError, cuda=torch.cuda
    )
    monkeypatch.setattr(sharing, "torch", fake)
    found = [
        trained("quality", torch.float32, release=release, steps=2)[0] for release in (False, True)
    ]
    assert asked == [1]  # and not in every step
    assert_same(found[0], found[1])


class Cast(nn.Module):
    """Its first weight may have any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x @ self.first.float())
        return found


@pytest.mark.gpu
def test_a_format_that_cannot_be_stepped_is_refused_before_any_step() -> None:
    """The window that comes first in backward is unchanged."""
    torch.manual_seed(0)
    model = Cast().to(DEVICE)
    optimizer = for_model(model, "lean", fused=True)
    release_gradients(model, optimizer)
    x = torch.randn(4, WIDTH, device=DEVICE)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.first.data = model.first.data.double()
    before = model.last.weight.detach().clone()
    with pytest.raises(RuntimeError, match="float64"):
        model(x).square().mean().backward()
    assert torch.equal(model.last.weight, before)


@pytest.mark.gpu
def test_settings_that_change_make_new_tables() -> None:
    results = []
    for release in (False, True):
        model, optimizer = made("lean")
        with release_gradients(model, optimizer) if release else nullcontext():
            for step in range(3):
                for group in optimizer.param_groups:
                    group["weight_decay"] = 0.1 * (step > 0)
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
        results.append([(param.detach(), optimizer.state[param]) for param in model.parameters()])
    assert_same(results[0], results[1])


def test_a_rate_between_two_backwards_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one step, each of some layers."""
    monkeypatch.setattr("maxfactor.windows.WINDOW", 30)
    changes = []
    for later in (0.01, 0.0):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(2))
        optimizer = for_model(model, "lean", fused=False)
        before = [param.detach().clone() for param in model.parameters()]
        release_gradients(model, optimizer)
        for layer, rate in zip(model, (0.01, later), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
            layer(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        pairs = zip(before, model.parameters(), strict=True)
        changes.append([not torch.equal(old, new) for old, new in pairs])
    assert changes == [[True, True], [True, False]]
