"""`release_gradients`: steps in backward equal a step at the end, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

import maxfactor
from maxfactor import RECIPES, Adafactor, AdaptiveSchedule, MaxFactor, for_model, release_gradients
from maxfactor.backends.step_io import StepInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
VOCABULARY, WIDTH = 30, 24


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows for small models."""
    monkeypatch.setattr("maxfactor.windows.WINDOW", 2000)


class Net(nn.Module):
    """Tied embeddings, a convolution, a frozen layer, and a layer that is not always used."""

    def __init__(self, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.optional = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, use_optional: bool = False) -> Tensor:
        x = self.tokens(tokens)
        x = self.frozen(self.conv(x.mT).mT)
        for layer in self.layers:
            x = layer(x)
        if use_optional:
            x = self.optional(x)
        found: Tensor = self.head(x)
        return found


class Small(nn.Module):
    """For the interpreter: two matrices of one shape in two windows, an odd matrix, a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.second(self.first(x)))
        return found


def made(dtype: torch.dtype = torch.float32, device: str = "cpu", **sizes: int) -> Net:
    torch.manual_seed(0)
    return Net(**sizes).to(device, dtype)


def backward(model: nn.Module, t: int, use_optional: bool = False) -> None:
    device = next(model.parameters()).device
    tokens = torch.randint(VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(t))
    tokens = tokens.to(device)
    logits = model(tokens, use_optional)
    cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()


def trained(
    model: nn.Module, optimizer: Any, release: bool, steps: int = 3, every: int = 2
) -> list[int]:
    """Train; return how many gradients were left after each backward.

    The optional layer is used in every second step, so that the set of gradients changes.
    """
    left = []
    with release_gradients(model, optimizer) if release else nullcontext():
        for t in range(steps):
            backward(model, t, use_optional=t % every == 1)
            left.append(sum(param.grad is not None for param in model.parameters()))
            optimizer.step()
            if release:
                assert all(param.grad is None for param in model.parameters())
            optimizer.zero_grad()
    return left


def assert_equal(one: tuple[nn.Module, Any], two: tuple[nn.Module, Any]) -> None:
    """Parameters, states and step sizes, bit for bit."""
    (here, ours), (there, theirs) = one, two
    for (name, a), b in zip(here.named_parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert set(ours.state[a]) == set(theirs.state[b]), name
        for key, value in ours.state[a].items():
            assert torch.equal(value, theirs.state[b][key]), (name, key)
    assert ours.skipped == theirs.skipped


def both(
    make_model: Callable[[], nn.Module], make_optimizer: Callable[[nn.Module], Any], **training: int
) -> tuple[list[int], list[int]]:
    """Train with and without release; compare; return the gradients left by both."""
    models = [make_model(), make_model()]
    optimizers = [make_optimizer(model) for model in models]
    left = [
        trained(model, optimizer, release, **training)
        for model, optimizer, release in zip(models, optimizers, (False, True), strict=True)
    ]
    assert_equal((models[0], optimizers[0]), (models[1], optimizers[1]))
    return left[0], left[1]


# ------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_a_step_at_the_end(recipe: Any, dtype: torch.dtype) -> None:
    all_of_them, left = both(lambda: made(dtype), lambda model: for_model(model, recipe))
    assert left[1] == 0 < all_of_them[1]  # every layer is used in this step
    assert 0 < left[0] < all_of_them[0]  # windows with an unused parameter wait for `step`


@pytest.mark.parametrize("cls", [MaxFactor, Adafactor])
def test_one_group_of_all_layers(cls: type[Any]) -> None:
    both(made, lambda model: cls(model.parameters(), foreach=True))


@pytest.mark.parametrize("recipe", ["quality", "fast"])
def test_batches_do_not_cross_windows(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of this size are computed otherwise alone than in a batch, in the last bit."""
    monkeypatch.setattr("maxfactor.windows.WINDOW", 40_000)
    results = []
    for release in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(4)))
        optimizer = for_model(model, recipe)
        with release_gradients(model, optimizer) if release else nullcontext():
            for t in range(2):
                x = torch.randn(4, 192, generator=torch.Generator().manual_seed(t))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append((model, optimizer))
    assert_equal(results[0], results[1])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_a_step_at_the_end_on_a_gpu(recipe: Any, fused: bool, dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        return made(dtype, "cuda", width=264, layers=4)

    # Convolutions and attention that are deterministic.
    with torch.backends.cudnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH):
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("maxfactor.windows.WINDOW", 500_000)
                both(make, lambda model: for_model(model, recipe, fused=fused), steps=4)
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recipe", "dtype", "steps"),
    [("quality", torch.bfloat16, 2), ("published-0.3", torch.float32, 1)],
    ids=["quality", "published-0.3"],
)
def test_kernels_equal_a_step_at_the_end(
    recipe: Any, dtype: torch.dtype, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", "3.3")  # torch 2.6 has an older one
    monkeypatch.setattr("maxfactor.windows.WINDOW", 70)
    results = []
    for release in (False, True):
        torch.manual_seed(0)
        model = Small().to(DEVICE, dtype)
        optimizer = for_model(model, recipe, fused=True)
        if release:
            release_gradients(model, optimizer)
        for t in range(steps):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(t))
            model(x.to(DEVICE, dtype)).float().square().mean().backward()
            assert release == (model.first.weight.grad is None)
            optimizer.step()
            optimizer.zero_grad()
        results.append((model, optimizer))
    assert_equal(results[0], results[1])


def kernels(own: list[StepInput], idle: list[StepInput]) -> dict[Any, Any]:
    """The kernels that a plan chooses, by launch key."""
    from maxfactor.backends.triton.local_parameters import local_parameter
    from maxfactor.backends.triton.plan import LaunchPlan, keys_of
    from maxfactor.backends.triton.workspace import ON_DEVICE

    params, others = ([local_parameter(each) for each in inputs] for inputs in (own, idle))
    keys = keys_of([*params, *others])
    pairs = list(zip(keys[len(params) :], others, strict=True))
    plan = LaunchPlan(params, keys[: len(params)], [0] * 9, pairs)
    return {group.key: group.spec(ON_DEVICE) for group in plan.groups}


@pytest.mark.parametrize(("recipe", "others_matter"), [("quality", False), ("published-0.3", True)])
def test_windows_choose_the_kernels_of_the_whole(recipe: Any, others_matter: bool) -> None:
    """Other kernels compute the same, but not in every last bit."""
    pytest.importorskip("triton")
    inputs = for_model(made(), recipe).inputs_on_meta()
    whole, differ = kernels(inputs, []), False
    for window in {each.window for each in inputs}:
        own = [each for each in inputs if each.window == window]
        idle = [each for each in inputs if each.window != window]
        assert kernels(own, idle).items() <= whole.items()
        differ |= not kernels(own, []).items() <= whole.items()
    assert differ == others_matter


@needs_gpu
@pytest.mark.gpu
def test_peak_memory_on_a_gpu() -> None:
    """Gradients of 16 layers of 64 MB are never there at once."""
    peaks = []
    for release in (False, True):
        layers = [nn.Linear(4096, 4096, bias=False) for _ in range(16)]
        model = nn.Sequential(*layers).to("cuda")
        optimizer = for_model(model, "lean")
        if release:
            release_gradients(model, optimizer)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(torch.randn(8, 4096, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated())
        del model, optimizer, layers
    assert peaks[1] < peaks[0] - 12 * 64 * 2**20


# ------------------------------------------------------------------------------- what is stepped


def test_the_estimate_is_the_peak_of_the_gradients() -> None:
    """Also of a tied weight, whose gradient comes once, as a sum."""
    model = made()
    optimizer = for_model(model, "lean")
    peak = 0
    calls: list[Tensor] = []

    def count(param: Tensor) -> None:
        nonlocal peak
        calls.append(param)
        peak = max(peak, sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(count)  # runs before ours
    with release_gradients(model, optimizer):
        backward(model, 0, use_optional=True)
    assert sum(each is model.tokens.weight for each in calls) == 1
    estimated = maxfactor.estimate_memory(model, "lean", gradient_release=True).gradients
    assert 0 < peak <= estimated < maxfactor.estimate_memory(model, "lean").gradients
    assert estimated - peak <= model.tokens.weight.nbytes  # which autograd holds until its sum


def test_schedules_and_resumed_runs_equal_a_step_at_the_end() -> None:
    results = []
    for release in (False, True):
        model, saved = made(torch.bfloat16), list[dict[str, Any]]()
        for _ in range(2):  # a checkpoint in between
            optimizer = for_model(model, "quality", seed=1)
            schedule = AdaptiveSchedule(optimizer, warmup_steps=2, total_steps=6)
            if saved:
                optimizer.load_state_dict(saved[0])
                schedule.load_state_dict(saved[1])
            with release_gradients(model, optimizer) if release else nullcontext():
                for t in range(2):
                    backward(model, t)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                saved = [optimizer.state_dict(), schedule.state_dict()]
        results.append((model, optimizer, schedule.effective_lr(), schedule.get_last_lr()))
    assert_equal(results[0][:2], results[1][:2])
    assert results[0][2:] == results[1][2:]
    assert min(results[0][2]) > 0


def test_loading_while_released_equals_loading_before() -> None:
    model = made()
    optimizer = for_model(model, "fast")
    trained(model, optimizer, release=False)
    saved = optimizer.state_dict()
    copies = []
    for release in (False, True):
        copy = made()
        copy.load_state_dict(model.state_dict())
        fresh = for_model(copy, "fast")
        with release_gradients(copy, fresh) if release else nullcontext():
            fresh.load_state_dict(saved)
            for t in range(2):
                backward(copy, t)
                fresh.step()
                fresh.zero_grad()
        copies.append((copy, fresh))
    assert_equal(copies[0], copies[1])


def test_removal_restores_the_usual_step() -> None:
    models = [made(), made()]
    optimizers = [for_model(model, "quality") for model in models]
    handle = release_gradients(models[1], optimizers[1])
    for t in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, t)
            optimizer.step()
            assert (model.tokens.weight.grad is None) == (model is models[1] and t < 2)
            optimizer.zero_grad()
        if t == 1:
            handle.remove()
            handle.remove()  # has no effect
    assert_equal((models[0], optimizers[0]), (models[1], optimizers[1]))
    release_gradients(models[1], optimizers[1]).remove()


def test_a_handle_that_is_dropped_keeps_nothing_alive() -> None:
    """Trainings one after another in one process each have the memory for themselves."""
    model = nn.Linear(4, 3)
    optimizer = for_model(model, "fast")
    release_gradients(model, optimizer)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad is None  # the optimizer keeps the release
        optimizer.step()
    alive = [weakref.ref(each) for each in (model, optimizer, model.weight)]
    del model, optimizer
    gc.collect()
    assert [each() for each in alive] == [None] * 3


def test_unfrozen_layers_join() -> None:
    results = []
    for release in (False, True):
        model = made()
        optimizer = for_model(model, "quality")
        with release_gradients(model, optimizer) if release else nullcontext():
            for t in range(3):
                backward(model, t)
                optimizer.step()
                optimizer.zero_grad()
                if t == 0:
                    optimizer.add_module(model.frozen.requires_grad_(True))
            backward(model, 9, use_optional=True)
            assert (model.frozen.weight.grad is None) == release
            optimizer.step()
        results.append((model, optimizer))
    assert_equal(results[0], results[1])


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # on Python 3.13.0
def test_compiled_models() -> None:
    def make() -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(made(layers=1), backend="aot_eager")  # type: ignore[return-value]

    both(make, lambda model: for_model(model, "lean"), steps=2, every=1)


def test_closures() -> None:
    models = [made(), made()]
    optimizers = [for_model(model, "fast") for model in models]
    release_gradients(models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):

        def closure(model: nn.Module = model) -> float:
            backward(model, 0)
            return 1.5

        assert optimizer.step(closure) == 1.5
    assert_equal((models[0], optimizers[0]), (models[1], optimizers[1]))


def test_the_first_step_of_distributed_checkpoints_changes_nothing() -> None:
    model = made()
    optimizer = for_model(model, "quality")
    before = [param.clone() for param in model.parameters()]
    with release_gradients(model, optimizer):
        get_optimizer_state_dict(model, optimizer)
        assert all(float(state["step"]) == 0 for state in optimizer.state.values())
    assert all(map(torch.equal, before, model.parameters()))


# ------------------------------------------------------------------------------------- the guard


def poisoned(**settings: Any) -> tuple[Net, MaxFactor, list[Tensor]]:
    """A released model whose head gets a gradient that is not finite."""
    model = made()
    optimizer = for_model(model, "lean", **settings)
    release_gradients(model, optimizer)
    before = [param.clone() for param in model.parameters()]
    model.layers[1].get_parameter("linear2.weight").register_hook(lambda grad: grad * torch.nan)
    return model, optimizer, before


def test_only_the_window_with_the_nan_is_skipped() -> None:
    model, optimizer, before = poisoned()
    backward(model, 0, use_optional=True)
    optimizer.step()
    assert optimizer.skipped == 1
    changed = {
        name: not torch.equal(param, old)
        for (name, param), old in zip(model.named_parameters(), before, strict=True)
    }
    assert not changed["layers.1.linear2.weight"]
    assert changed["tokens.weight"]
    assert changed["conv.weight"]
    optimizer.release.remove()  # type: ignore[union-attr]
    assert optimizer.skipped == 1


def test_a_nan_raises_in_backward() -> None:
    model, _, _ = poisoned(nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"layers\.1\.linear2\.weight"):
        backward(model, 0, use_optional=True)


# ------------------------------------------------------------------------------------- refusals


def test_accumulation_is_refused() -> None:
    model = made()
    optimizer = for_model(model, "lean")
    release_gradients(model, optimizer)
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"second gradient before optimizer\.step\(\)"):
        backward(model, 1)
    optimizer.zero_grad()  # starts anew
    backward(model, 1)
    optimizer.step()


def test_gradscaler_is_refused_by_name() -> None:
    model = made()
    optimizer = for_model(model, "lean")
    scaler = torch.amp.GradScaler("cpu")
    with release_gradients(model, optimizer):
        scaler.scale(model(torch.zeros(1, 3, dtype=torch.int64)).sum()).backward()
        with pytest.raises(RuntimeError, match="cannot be used with GradScaler"):
            scaler.step(optimizer)
    assert not optimizer._step_supports_amp_scaling
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    with release_gradients(model, optimizer):
        disabled.scale(model(torch.zeros(1, 3, dtype=torch.int64)).sum()).backward()
        disabled.step(optimizer)


def test_other_uses_are_refused() -> None:
    model = made()
    optimizer = for_model(model, "lean")
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got list"):
        release_gradients([model], optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="MaxFactor or Adafactor of maxfactor, got SGD"):
        release_gradients(model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capturable=True"):
        release_gradients(model, for_model(model, "lean", capturable=True))
    with pytest.raises(ValueError, match="'weight' of the optimizer is not in the model"):
        release_gradients(model.layers, for_model(model.conv, "lean"))
    release_gradients(model, optimizer)
    with pytest.raises(ValueError, match="released already; call remove"):
        release_gradients(model, optimizer)


def test_several_processes_and_shards_are_refused(one_rank: None) -> None:
    model = nn.Linear(4, 4)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match="for one process"):
        release_gradients(wrapped, for_model(model, "lean"))
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeError, match="'weight' is a DTensor"):
        release_gradients(sharded, for_model(sharded, "lean"))
