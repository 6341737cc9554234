"""What people expect of any torch optimizer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import problem
from maxfactor import Adafactor, MaxFactor
from maxfactor.optimizer import FactoredOptimizer

by_class = pytest.mark.parametrize("cls", [MaxFactor, Adafactor])


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv1d(3, 8, 3), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(48, 4)
    ).to(dtype)


def inject(params: Sequence[Tensor], t: int) -> None:
    """Gradients that depend on the shape and the step, not on the order of the parameters."""
    for param in params:
        grads = problem(tuple(param.shape), dtype=param.dtype, steps=t + 1, seed=param.numel())
        param.grad = grads.grads[t]


def train(optimizer: FactoredOptimizer, params: Sequence[Tensor], steps: range) -> None:
    for t in steps:
        inject(params, t)
        optimizer.step()


@by_class
def test_named_parameters_equal_plain_ones(cls: type[Any]) -> None:
    one, two = net(), net()
    train(cls(one.parameters()), list(one.parameters()), range(3))
    named = cls(two.named_parameters())
    train(named, list(two.parameters()), range(3))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert named.param_groups[0]["param_names"][0] == "0.weight"


def test_groups_have_their_own_settings() -> None:
    decayed, plain = torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3, 2))
    groups: list[dict[str, Any]] = [
        {"params": [decayed], "weight_decay": 0.5, "lr": 0.1},
        {"params": [plain]},
    ]
    optimizer = MaxFactor(groups, weight_decay=0.0)
    decayed.grad = torch.zeros(3, 2)
    plain.grad = torch.zeros(3, 2)
    optimizer.step()
    torch.testing.assert_close(decayed.detach(), torch.full((3, 2), 0.95))
    assert torch.equal(plain, torch.ones(3, 2))


@by_class
def test_add_param_group_in_the_middle(cls: type[Any]) -> None:
    model = net()
    early, late = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizer = cls(early)
    train(optimizer, early, range(2))
    optimizer.add_param_group({"params": late, "weight_decay": 0.2})
    train(optimizer, early + late, range(2, 4))
    assert [int(optimizer.state[p]["step"]) for p in early + late] == [4, 4, 2, 2]
    assert optimizer.param_groups[1]["weight_decay"] == 0.2
    assert optimizer.param_groups[1]["beta2_decay"] == -0.8


def test_closure_is_called_with_gradients_on() -> None:
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = MaxFactor([param])

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 6.0
    assert (param < 1.0).all()


@by_class
def test_maximize_is_minimize_of_the_negative(cls: type[Any]) -> None:
    case = problem((8, 5))
    up, down = (torch.nn.Parameter(case.weight.clone()) for _ in range(2))
    rising, falling = cls([up], maximize=True), cls([down])
    for grad in case.grads:
        up.grad, down.grad = -grad, grad.clone()
        rising.step()
        falling.step()
    assert torch.equal(up, down)


@by_class
def test_tensor_lr_equals_float_lr(cls: type[Any]) -> None:
    one, two = net(), net()
    train(cls(one.parameters(), lr=0.02), list(one.parameters()), range(4))
    lr = torch.tensor(0.02)
    optimizer = cls(two.parameters(), lr=lr)
    train(optimizer, list(two.parameters()), range(4))
    assert optimizer.param_groups[0]["lr"] is lr
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@by_class
def test_step_hooks_and_zero_grad(cls: type[Any]) -> None:
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer, calls = cls([param]), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    param.grad = torch.ones(3, 2)
    optimizer.step()
    assert calls == ["pre", "post"]
    optimizer.zero_grad()
    assert param.grad is None


@by_class
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_go_on_alike(cls: type[Any], duplicate: Any) -> None:
    params = [torch.nn.Parameter(problem(s).weight) for s in [(8, 5), (9,)]]
    optimizer = cls(params)
    train(optimizer, params, range(3))
    copied = duplicate(optimizer)
    theirs = [p for group in copied.param_groups for p in group["params"]]
    train(optimizer, params, range(3, 6))
    train(copied, theirs, range(3, 6))
    for a, b in zip(params, theirs, strict=True):
        assert a is not b
        assert torch.equal(a, b)
    assert copied.effective_lr() == optimizer.effective_lr()
    assert duplicate(
        cls([torch.nn.Parameter(torch.ones(2))], fused=True)
    )._step_supports_amp_scaling


@by_class
def test_parameters_without_gradient_are_skipped(cls: type[Any]) -> None:
    used, unused = torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3, 2))
    optimizer = cls([used, unused], weight_decay=0.1)
    used.grad = torch.ones(3, 2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(3, 2))
    assert unused not in optimizer.state


@by_class
def test_a_layer_frozen_in_the_middle(cls: type[Any]) -> None:
    """As in torch's own tests: no gradient at step 3 means no step for that parameter."""
    case = problem((8, 5), steps=7)
    param, control = (torch.nn.Parameter(case.weight.clone()) for _ in range(2))
    frozen, plain = cls([param]), cls([control])
    for t, grad in enumerate(case.grads):
        param.grad = None if t == 3 else grad.clone()
        frozen.step()
        if t != 3:
            control.grad = grad.clone()
            plain.step()
    assert torch.equal(param, control)


@by_class
def test_order_and_neighbours_do_not_matter(cls: type[Any]) -> None:
    """eps1 = None must not take the first parameter's epsilon for all the others."""
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((8, 5), torch.float32),
        ((9,), torch.bfloat16),
        ((4, 3, 2), torch.float32),
        ((6,), torch.float64),
        ((7, 7), torch.float16),
    ]
    results: list[dict[tuple[int, ...], Tensor]] = []
    for order in (shapes, shapes[::-1], [shapes[2]], [shapes[0]]):
        params = [torch.nn.Parameter(problem(s, dtype=d).weight) for s, d in order]
        optimizer = cls(params, eps=(None, 1e-3))
        train(optimizer, params, range(5))
        results.append({tuple(p.shape): p.detach() for p in params})
    for shape, _ in shapes:
        for other in results[1:]:
            if shape in other:
                assert torch.equal(results[0][shape], other[shape])


@by_class
def test_all_zero_gradient_changes_nothing_but_decay(cls: type[Any]) -> None:
    for shape in [(8, 5), (9,), (), (4, 3, 2)]:
        param = torch.nn.Parameter(torch.ones(shape))
        optimizer = cls([param], lr=0.1, weight_decay=0.5)
        for _ in range(3):
            param.grad = torch.zeros(shape)
            optimizer.step()
        torch.testing.assert_close(param.detach(), torch.full(shape, 0.95**3))
        assert all(bool(x.isfinite().all()) for x in optimizer.state[param].values())


@by_class
def test_torch_schedulers_work(cls: type[Any]) -> None:
    schedulers = torch.optim.lr_scheduler
    for make in (
        lambda o: schedulers.CosineAnnealingLR(o, T_max=10),
        lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=10, cycle_momentum=False),
        lambda o: schedulers.LambdaLR(o, lambda step: 0.5**step),
    ):
        param = torch.nn.Parameter(torch.ones(3, 2))
        optimizer = cls([param], lr=0.1)
        scheduler = make(optimizer)
        for _ in range(8):
            param.grad = torch.ones(3, 2)
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] < 0.1


def test_effective_lr_is_the_mean_step_size() -> None:
    large, small = torch.nn.Parameter(torch.full((3, 2), 4.0)), torch.nn.Parameter(torch.zeros(5))
    optimizer = MaxFactor([large, small], lr=0.01)
    assert optimizer.effective_lr() == [0.0]
    large.grad, small.grad = torch.ones(3, 2), torch.ones(5)
    optimizer.step()
    assert optimizer.effective_lr() == pytest.approx([0.01 * (4.0 + 1e-3) / 2])


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # on Python 3.13.0
@by_class
def test_compiled_training_loops(cls: type[Any]) -> None:
    """torch.compile leaves the step as it is: around it, and asked to compile it."""
    models = [net(seed=3) for _ in range(3)]
    optimizers = [cls(model.parameters()) for model in models]
    compiled_step: Any = torch.compile(optimizers[1].step, backend="eager")

    @torch.compile(backend="eager")
    def compiled_call() -> None:
        optimizers[2].step()

    @torch.compile(backend="eager")
    def loss_of(model: torch.nn.Module, x: Tensor) -> Tensor:
        result: Tensor = model(x).square().mean()
        return result

    for t in range(3):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(t))
        for model in models:
            model.zero_grad()
            loss_of(model, x).backward()
        optimizers[0].step()
        compiled_step()
        compiled_call()
    for a, b, c in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
