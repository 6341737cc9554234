"""Batches of orthogonal matrices in lanes: side by side, and no bit depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Barrier, Lock, Semaphore, get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxfactor
from maxfactor import windows
from maxfactor.optimizer import FactoredOptimizer

pytest.importorskip("triton")
from maxfactor.backends.triton import orthogonal, replay, step, workspace
from maxfactor.backends.triton.lanes import lane_stream
from maxfactor.backends.triton.launches import GroupLaunches
from maxfactor.backends.triton.step import FusedStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 256 if DEVICE == "cuda" else 8
RECIPES: dict[str, dict[str, Any]] = {"quality": {}, "quality by heads": {"heads_per_block": 1}}


def needs_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")(test))


@pytest.fixture
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches in each lane: memory for one or two tensors, and as many in a window."""
    itemsize = 2 if DEVICE == "cuda" else 4
    monkeypatch.setattr(workspace, "BATCH_BYTES", 24 * WIDTH**2 * itemsize)
    monkeypatch.setattr(windows, "WINDOW", 5 * WIDTH**2)


class Model(nn.Module):
    """Matrices of three shapes, and some that are not orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))
        self.tall = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.embedding = nn.Embedding(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2 * WIDTH)


def build(recipe: str, **settings: Any) -> tuple[nn.Module, FactoredOptimizer]:
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    settings = {"fused": True, "seed": 1, **RECIPES[recipe], **settings}
    return model, maxfactor.for_model(model, "quality", **settings)


def gradients(model: nn.Module, number: int) -> None:
    for index, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * number + index)
        param.grad = torch.randn(param.shape, generator=generator).to(param.device)


def contents(optimizer: FactoredOptimizer) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [x for param in params for x in optimizer.state[param].values()]
    return [x.detach().clone().cpu() for x in (*params, *states)]


def train(
    recipe: str, lanes: int, *, steps: int = 3, records: bool = False, replays: bool = False
) -> list[Any]:
    """Weights, states and what was recorded, after some steps, one of which is skipped."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(workspace, "LANES", lanes)
        model, optimizer = build(recipe)
        if records:
            optimizer.record_metrics(every=1)
        for number in range(steps):
            gradients(model, number)
            if number == min(2, steps - 2):
                next(model.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
            optimizer.step()
        assert optimizer._fused is not None
        batches = optimizer._fused._orthogonal.batches
        assert optimizer._fused._orthogonal.lanes == lanes
        assert all([each.lane for each in batches].count(lane) > 1 for lane in range(lanes))
        assert optimizer.skipped == 1
        assert optimizer._fused.replay.failure is None
        assert bool(optimizer._fused.replay.replayed) == replays
        metrics = optimizer.metrics().summary() if records else None
        return [metrics, *contents(optimizer)]


def assert_equal(one: list[Any], other: list[Any]) -> None:
    assert one[0] == other[0]
    for a, b in zip(one[1:], other[1:], strict=True):
        assert torch.equal(a, b)


class Turns:
    """Threads that take turns: one runs until it gives way to the next."""

    def __init__(self) -> None:
        self._jobs: dict[int, list[Callable[[], None]]] = {}
        self._turns: dict[int, Semaphore] = {}  # by thread, of those that have not ended
        self._lock = Lock()

    def add(self, lane: int, job: Callable[[], None]) -> None:
        self._jobs.setdefault(lane, []).append(job)

    def run(self) -> None:
        jobs, self._jobs = list(self._jobs.values()), {}
        ready = Barrier(len(jobs) + 1)
        with ThreadPoolExecutor(len(jobs)) as pool:
            ended = [pool.submit(self._work, each, ready) for each in jobs]
            ready.wait()
            next(iter(self._turns.values())).release()
        for each in ended:
            each.result()

    @torch.no_grad()
    def _work(self, jobs: list[Callable[[], None]], ready: Barrier) -> None:
        own = Semaphore(0)
        with self._lock:
            self._turns[get_ident()] = own
        ready.wait()
        own.acquire()
        try:
            for job in jobs:
                job()
        finally:
            following = self._after_this()
            del self._turns[get_ident()]
            following.release()

    def _after_this(self) -> Semaphore:
        threads = list(self._turns)
        return self._turns[threads[(threads.index(get_ident()) + 1) % len(threads)]]

    def give_way(self) -> None:
        if get_ident() in self._turns:
            self._after_this().release()
            self._turns[get_ident()].acquire()


@pytest.fixture
def interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes take turns at each launch, so that one would find what another wrote."""
    turns = Turns()
    launch_batch = FusedStep._launch_batch

    def put_off(self: FusedStep, *arguments: Any) -> None:
        turns.add(arguments[-1].lane, lambda: launch_batch(self, *arguments))

    @contextmanager
    def forked(*_: object) -> Iterator[Any]:
        yield lambda _: nullcontext()
        turns.run()

    def in_turns(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            turns.give_way()
            result = function(*arguments, **options)
            turns.give_way()
            return result

        return called

    monkeypatch.setattr(step, "forked", forked)
    monkeypatch.setattr(FusedStep, "_launch_batch", put_off)
    for name in ("_with_momentum", "_measure_blocks", "_apply", "_add_parts"):
        monkeypatch.setattr(GroupLaunches, name, in_turns(getattr(GroupLaunches, name)))
    for name in ("symmetric", "multiply"):
        monkeypatch.setattr(orthogonal, name, in_turns(getattr(orthogonal, name)))


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has real lanes")
@pytest.mark.usefixtures("few_at_a_time", "interleaved")
@pytest.mark.parametrize(
    ("recipe", "records"),
    [("quality", False), ("quality", True), ("quality by heads", True)],
)
def test_lanes_share_nothing(recipe: str, records: bool) -> None:
    """In turns, batch by batch, and in one lane."""
    one, two = (train(recipe, lanes, records=records) for lanes in (1, 2))
    assert_equal(one, two)


# ---------------------------------------------------------------------------------- on a GPU


@needs_gpu
@pytest.mark.usefixtures("few_at_a_time")
@pytest.mark.parametrize("replays", [True, False], ids=["replayed", "launched"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_lanes_change_no_bit(recipe: str, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each several times, as a race shows only sometimes."""
    monkeypatch.setattr(replay, "SEEN_BEFORE", 1)
    monkeypatch.setattr(replay, "has_graphs", lambda _: replays)
    records = not replays  # recorded steps are launched
    one = train(recipe, 1, steps=8, records=records, replays=replays)
    for _ in range(3):
        assert_equal(one, train(recipe, 2, steps=8, records=records, replays=replays))


@needs_gpu
@pytest.mark.usefixtures("few_at_a_time")
@pytest.mark.parametrize("recipe", RECIPES)
def test_lanes_in_a_graph_of_the_user(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for lanes, graphed in ((1, False), (2, False), (2, True)):
        monkeypatch.setattr(workspace, "LANES", lanes)
        model, optimizer = build(recipe, capturable=True)
        static = [torch.zeros_like(param) for param in model.parameters()]
        graph = torch.cuda.CUDAGraph()
        for number in range(8):
            gradients(model, number)
            for param, own in zip(model.parameters(), static, strict=True):
                assert param.grad is not None
                own.copy_(param.grad)
                param.grad = own
            if graphed and number >= 3:
                if number == 3:
                    with torch.cuda.graph(graph):
                        optimizer.step()
                graph.replay()
            else:
                optimizer.step()
        torch.cuda.synchronize()
        assert optimizer._fused is not None
        assert optimizer._fused._orthogonal.lanes == lanes
        found.append([None, *contents(optimizer)])
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])


@needs_gpu
@pytest.mark.usefixtures("few_at_a_time")
def test_lanes_on_a_stream_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is freed after a step is not used by its lanes any more."""
    monkeypatch.setattr(replay, "has_graphs", lambda _: False)
    one = train("quality", 1, steps=6)
    with torch.cuda.stream(torch.cuda.Stream()):
        two = train("quality", 2, steps=6)
    assert_equal(one, two)


@needs_gpu
@pytest.mark.usefixtures("few_at_a_time")
def test_lanes_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward of another thread steps the windows."""
    found = []
    for lanes, release in ((1, False), (2, False), (2, True)):
        monkeypatch.setattr(workspace, "LANES", lanes)
        torch.manual_seed(0)
        shapes = [(WIDTH, WIDTH)] * 6 + [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)] * 2
        model = nn.Sequential(*(nn.Linear(*shape) for shape in shapes)).to(DEVICE)
        optimizer = maxfactor.for_model(model, "quality", fused=True, seed=1)
        with maxfactor.release_gradients(model, optimizer) if release else nullcontext():
            for number in range(6):
                x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
                model(x.to(DEVICE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            plans = [each.fused for each in optimizer._runners.values() if each.fused]
            assert max(plan._orthogonal.lanes for plan in plans) == lanes
        found.append([None, *contents(optimizer)])
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])


@needs_gpu
def test_streams_are_shared_by_plans() -> None:
    """Each has a workspace of cuBLAS; one of a capture is not used outside of it."""
    current = torch.cuda.current_stream()
    assert lane_stream(current, 1) == lane_stream(torch.cuda.current_stream(), 1) != current
    captures = replay.capture_stream(torch.device("cuda", torch.cuda.current_device()))
    assert lane_stream(captures, 1) not in (lane_stream(current, 1), captures, current)
