"""Fused steps that are replayed as CUDA graphs: when, and that no bit depends on it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxfactor
from cases import no_host_sync
from maxfactor.optimizer import FactoredOptimizer

pytest.importorskip("triton")
from fake_graphs import use_fake_graphs
from maxfactor.backends.triton import replay
from maxfactor.backends.triton.replay import MOST, SEEN_BEFORE, LaunchArguments, Replay

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEVER = 1 << 30  # steps before a capture
STEPS = 12
# On a GPU. What is borrowed comes from another pool than gradients, all of less than 1 MiB, so that
# it is in the same place in each step.
WIDTH = 256


def needs_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")(test))


# ------------------------------------------------------------------------------- the decisions


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on the CPU."""
    use_fake_graphs(monkeypatch)


def graphs_of(device: str = "cuda") -> Replay:
    return Replay(torch.device(device))


def arguments(address: int = 0, *, measure: bool = False) -> LaunchArguments:
    return LaunchArguments(address, check=True, measure=measure, is_scaled=False)


class Launches:
    """Counts the steps that were launched."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.mark.usefixtures("fake")
def test_a_few_ordinary_steps_come_first() -> None:
    graphs, launch = graphs_of(), Launches()
    for step in range(1, 6):
        graphs.run(arguments(), launch)
        assert launch.count == step  # each of them runs once, replayed or not
        assert graphs.captured == int(step > SEEN_BEFORE)
        assert graphs.replayed == max(0, step - SEEN_BEFORE)


@pytest.mark.usefixtures("fake")
def test_other_arguments_are_another_graph() -> None:
    graphs = graphs_of()
    ran: list[int] = []
    for step in range(40):
        which = step % 2
        graphs.run(arguments(which), lambda which=which: ran.append(which))  # type: ignore[misc]
    assert ran == [0, 1] * 20
    assert graphs.captured == 2
    for _ in range(SEEN_BEFORE):
        graphs.run(arguments(0, measure=True), lambda: ran.append(2))
    assert graphs.captured == 2


@pytest.mark.usefixtures("fake")
def test_few_graphs_are_kept() -> None:
    """The one that was used last is kept longest, and captures become rare."""
    graphs, launch = graphs_of(), Launches()
    for address in range(MOST + 2):
        before = graphs.replayed
        for _ in range(SEEN_BEFORE * 2**address):
            graphs.run(arguments(address), launch)
        assert graphs.replayed == before
        graphs.run(arguments(address), launch)
        assert graphs.captured == address + 1
    assert [each.workspace_at for each in graphs._graphs] == [2, 3, 4]
    graphs.run(arguments(2), launch)
    assert [each.workspace_at for each in graphs._graphs] == [3, 4, 2]


@pytest.mark.usefixtures("fake")
def test_addresses_that_never_repeat_are_forgotten() -> None:
    graphs, launch = graphs_of(), Launches()
    for address in range(1000):
        graphs.run(arguments(address), launch)
    assert launch.count == 1000
    assert graphs.captured == 0
    assert len(graphs._counts) <= replay.MOST_COUNTED


@pytest.mark.usefixtures("fake")
def test_a_failed_capture_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "captured", fail)
    graphs, launch = graphs_of(), Launches()
    for step in range(1, 8):
        graphs.run(arguments(), launch)
        assert launch.count == step
    assert graphs.failure == "RuntimeError: operation not permitted when stream is capturing"
    assert not graphs.enabled
    assert graphs.captured == graphs.replayed == 0


@pytest.mark.usefixtures("fake")
def test_another_stream_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, launch = graphs_of(), Launches()
    for _ in range(SEEN_BEFORE + 1):
        graphs.run(arguments(), launch)
    with monkeypatch.context() as patch:
        patch.setattr(replay, "is_default_stream", lambda _: False)
        graphs.run(arguments(), launch)
    assert graphs.replayed == 1
    graphs.run(arguments(), launch)
    assert graphs.replayed == 2
    assert graphs.captured == 1


@pytest.mark.usefixtures("fake")
def test_captures_can_be_left_to_another_time() -> None:
    graphs, launch = graphs_of(), Launches()
    graphs.is_deferred = True
    for step in range(1, SEEN_BEFORE + 2):
        assert graphs.take_pending() is None
        graphs.run(arguments(), launch)
        assert launch.count == step
    due = graphs.take_pending()
    assert due == arguments()
    assert graphs.take_pending() is None
    assert graphs.captured == graphs.replayed == 0
    graphs.capture(due, launch)
    assert (graphs.captured, launch.count) == (1, SEEN_BEFORE + 1)  # which runs nothing
    graphs.run(arguments(), launch)
    assert graphs.replayed == 1


def test_no_graphs_in_the_interpreter() -> None:
    graphs, launch = graphs_of("cpu"), Launches()
    for _ in range(5):
        graphs.run(arguments(), launch)
    assert launch.count == 5
    assert not graphs.enabled


# ------------------------------------------------------------------------------ whole trainings


class Model(nn.Module):
    """One of each kind of layer; less for the interpreter, which is slow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        if DEVICE == "cpu":
            return
        self.embedding = nn.Embedding(2 * width, width)
        self.conv = nn.Conv1d(width, width, 3)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, 2 * width)


RECIPES: dict[str, dict[str, Any]] = {
    "published-1.0": {},
    "lean": {},
    "fast": {},
    "quality": {},
    "quality by heads": {"heads_per_block": 1},
}


def build(
    recipe: str, dtype: torch.dtype, width: int = 8, **settings: Any
) -> tuple[nn.Module, FactoredOptimizer]:
    torch.manual_seed(0)
    model = Model(width).to(DEVICE, dtype)
    name: Any = recipe.split(" ")[0]
    settings = {"fused": True, "seed": 1, **RECIPES[recipe], **settings}
    return model, maxfactor.for_model(model, name, **settings)


def gradients(model: nn.Module, step: int) -> None:
    """New ones, in other places than those of the step before."""
    model.zero_grad()
    model.shift = [torch.empty(4096 * (1 + step % 3), device=DEVICE)]  # type: ignore[assignment]
    for index, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + index)
        drawn = torch.randn(param.shape, generator=generator)
        param.grad = drawn.to(param.device, param.dtype)


def contents(optimizer: FactoredOptimizer) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [x for param in params for x in optimizer.state[param].values()]
    # On the host, so that steps find the device's memory as it was.
    return [x.detach().clone().cpu() for x in (*params, *states)]


def step_with_events(model: nn.Module, optimizer: FactoredOptimizer, step: int) -> None:
    """A step of a training in which all kinds of things happen."""
    gradients(model, step)
    first, *_, last = model.parameters()
    if step == 6:
        assert last.grad is not None
        last.grad.view(-1)[-1] = math.nan  # the step is skipped
    if step == 8:
        with torch.no_grad():
            first.mul_(0.5)  # by others, which the next step must see
    if step == 9:
        first.data = first.data.clone()
    if step == 10 and first.grad is not None:
        first.grad = first.grad.t().contiguous().t()
    if step == 11:
        del first.grad
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + step // 2)
    optimizer.step()


def train(recipe: str, dtype: torch.dtype, **settings: Any) -> tuple[list[list[Tensor]], int]:
    """All weights and states after each step, and how many steps were replayed."""
    model, optimizer = build(recipe, dtype, **settings)
    found, plans = [], []
    for step in range(STEPS):
        if step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        step_with_events(model, optimizer, step)
        assert optimizer._fused is not None
        assert optimizer._fused.replay.failure is None
        if optimizer._fused not in plans:
            plans.append(optimizer._fused)
        found.append(contents(optimizer))
    assert optimizer.skipped == 1
    return found, sum(plan.replay.replayed for plan in plans)


def assert_equal(one: list[list[Tensor]], other: list[list[Tensor]]) -> None:
    for step, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), f"step {step}"


def compared(
    recipe: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> None:
    monkeypatch.setattr(replay, "SEEN_BEFORE", 1)
    replayed, count = train(recipe, dtype, **settings)
    monkeypatch.setattr(replay, "SEEN_BEFORE", NEVER)
    launched, none = train(recipe, dtype, **settings)
    assert count >= 3
    assert none == 0
    assert_equal(replayed, launched)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has real graphs")
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("recipe", ["lean", "quality by heads"])
def test_captured_arguments_stay_valid(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of an earlier step, run again, take the present one."""
    # The fake graph keeps what its step borrowed.
    run = Replay.run
    monkeypatch.setattr(
        Replay,
        "run",
        lambda self, at, launch: run(self, at._replace(workspace_at=0), launch),
    )
    compared(recipe, torch.float32, monkeypatch)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_equal_launches(
    recipe: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with new gradients and rates, NaN, reloads and writes by others."""
    compared(recipe, dtype, monkeypatch, width=WIDTH)


@needs_gpu
@pytest.mark.parametrize("recipe", ["published-1.0", "quality"])
def test_replays_with_a_tensor_as_rate(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seen_before in (1, NEVER):
        monkeypatch.setattr(replay, "SEEN_BEFORE", seen_before)
        model, optimizer = build(recipe, torch.float32, WIDTH)
        for group in optimizer.param_groups:
            group["lr"] = torch.full((), 0.01, device=DEVICE)
        for step in range(8):
            gradients(model, step)
            for group in optimizer.param_groups:
                group["lr"].fill_(0.01 / (1 + step))
            optimizer.step()
        assert optimizer._fused is not None
        assert bool(optimizer._fused.replay.replayed) == (seen_before == 1)
        found.append([contents(optimizer)])
    assert_equal(*found)


@needs_gpu
@pytest.mark.parametrize("recipe", ["published-1.0", "fast", "quality"])
def test_replays_with_grad_scaler(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that overflow at first, so that steps are skipped."""
    found = []
    for seen_before in (1, NEVER):
        monkeypatch.setattr(replay, "SEEN_BEFORE", seen_before)
        model, optimizer = build(recipe, torch.float32, WIDTH)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**127, backoff_factor=2.0**-16)
        for step in range(12):
            scale = scaler.scale(torch.ones((), device=DEVICE))
            gradients(model, step)
            for param in model.parameters():
                assert param.grad is not None
                param.grad = param.grad * scale
            scaler.step(optimizer)
            scaler.update()
        assert optimizer._fused is not None
        assert bool(optimizer._fused.replay.replayed) == (seen_before == 1)
        first = next(model.parameters())
        assert 4 <= int(optimizer.state[first]["step"]) < 12
        found.append([contents(optimizer)])
    assert_equal(*found)


@needs_gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_wait_for_nothing_and_keep_no_memory(recipe: str) -> None:
    model, optimizer = build(recipe, torch.bfloat16, WIDTH)
    allocated = []
    for step in range(12):
        gradients(model, step)
        with no_host_sync():
            optimizer.step()
        optimizer.zero_grad()
        model.shift = []  # type: ignore[assignment]
        allocated.append(torch.cuda.memory_allocated())
    assert optimizer._fused is not None
    assert optimizer._fused.replay.replayed >= 6
    assert len(set(allocated[6:])) == 1
    if recipe.startswith("published"):  # products of the others have a workspace of cuBLAS
        assert allocated[-1] - allocated[2] <= 4096


@needs_gpu
def test_a_graph_of_the_user_beside_ours() -> None:
    """A capture reads its own table of addresses, and ordinary steps go on with theirs."""
    results = []
    for graphed in (False, True):
        model, optimizer = build("lean", torch.float32, 64, capturable=True)
        for step in range(6):  # ours is captured
            gradients(model, step)
            optimizer.step()
        assert optimizer._fused is not None
        assert optimizer._fused.replay.replayed >= 1
        for step in range(6, 12):
            gradients(model, 6)
            if step == 6 and graphed:
                static = [param.grad for param in model.parameters()]
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            if graphed and step % 2 == 0:
                graph.replay()
            else:
                optimizer.step()
        torch.cuda.synchronize()
        results.append([contents(optimizer)])
        if graphed:
            assert all(grad is not None for grad in static)  # alive until here
    assert_equal(*results)
