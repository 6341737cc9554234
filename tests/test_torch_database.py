"""What torch tests on its database of optimizers, on our entries; docs/torch-tests.md has a table.

The checks are our own, from the contract that each area has. They run on every input of an entry:
settings, momenta, directions, and every recipe.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from cases import ZERO_AT, problem
from maxfactor.optimizer import FactoredOptimizer
from optimizer_database import CLASSES, INPUTS, UnusableError, entry, load
from trainings import assert_same, parameters_of

SHAPES: list[tuple[int, ...]] = [(6, 5), (6, 5), (7,), (4, 3, 3), ()]
KERNEL_INPUTS = ("default", "FAM", "orthogonal with momentum")  # the interpreter is slow

each_input = pytest.mark.parametrize(
    ("name", "description"),
    [(name, description) for name, inputs in INPUTS.items() for description in inputs],
)
each_class = pytest.mark.parametrize("name", list(INPUTS))


@pytest.fixture(scope="module")
def database() -> ModuleType:
    try:
        return load()
    except UnusableError as error:
        pytest.skip(str(error))


@pytest.fixture
def kwargs(database: ModuleType, name: str, description: str) -> dict[str, Any]:
    """The arguments of an input, as the database has them."""
    inputs = entry(database, name).optim_inputs_func("cpu")
    found: dict[str, Any] = next(each.kwargs for each in inputs if each.desc == description)
    return copy.deepcopy(found)


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [nn.Parameter(problem(shape, dtype=dtype).weight) for shape in SHAPES]


def set_gradients(params: list[Tensor], t: int) -> None:
    for index, param in enumerate(params):
        case = problem(tuple(param.shape), dtype=param.dtype, steps=t + 1, seed=index)
        param.grad = case.grads[t]


def train(optimizer: FactoredOptimizer, steps: range) -> None:
    for t in steps:
        set_gradients(parameters_of(optimizer), t)
        optimizer.step()


def make(name: str, params: Any, kwargs: dict[str, Any], **others: Any) -> FactoredOptimizer:
    made: FactoredOptimizer = CLASSES[name](params, **{**kwargs, "fused": False, **others})
    return made


def values(optimizer: FactoredOptimizer) -> list[Any]:
    """Weights and states."""
    params = parameters_of(optimizer)
    return [[param.detach(), dict(optimizer.state[param])] for param in params]


# ----------------------------------------------------------------------------------- the entries


@each_class
def test_entries(database: ModuleType, name: str) -> None:
    """Each entry gives every input, without flags, and with each backend."""
    info = entry(database, name)
    inputs = info.optim_inputs_func("cpu")
    assert [each.desc for each in inputs] == list(INPUTS[name])
    assert not any({"foreach", "fused"} & set(each.kwargs) for each in inputs)
    assert info.name == name
    # The database's own helper adds flags that a device supports; for it, foreach needs a GPU.
    every = database._get_optim_inputs_including_global_cliquey_kwargs("cpu", None, info)
    assert {each.kwargs["fused"] for each in every} == {False, "cpu" in info.supports_fused_on}
    for each in [*every, *inputs]:
        made = info.optim_cls(weights(), **each.kwargs)
        assert set(each.kwargs) <= set(made.param_groups[0])


@each_class
def test_inputs_that_torch_refuses(database: ModuleType, name: str) -> None:
    """With the same type of error, or the same warning."""
    info = entry(database, name)
    for bad in info.optim_error_inputs_func("cpu", torch.float32):
        given = bad.optimizer_error_input
        params = weights() if given.params is None else given.params
        if issubclass(bad.error_type, Warning):
            with pytest.warns(bad.error_type, match=bad.error_regex):
                info.optim_cls(params, **given.kwargs)
        else:
            with pytest.raises(bad.error_type):
                info.optim_cls(params, **given.kwargs)


# ----------------------------------------------------------------------- parameters and groups


@each_input
def test_ways_to_pass_parameters(name: str, kwargs: dict[str, Any]) -> None:
    """A list, a generator, groups, and names: the same steps, and groups change no defaults."""
    ways: list[Callable[[list[Tensor]], Any]] = [
        lambda params: params,
        iter,
        lambda params: [{"params": params[:2]}, {"params": params[2:]}],
        lambda params: [{"params": params[0]}, {"params": iter(params[1:])}],
        lambda params: ((f"w{i}", param) for i, param in enumerate(params)),
        lambda params: [{"params": [(f"w{i}", p) for i, p in enumerate(params)]}],
    ]
    results = []
    for way in ways:
        results.append(make(name, way(weights()), kwargs))
        train(results[-1], range(2))
    for other in results[1:]:  # groups are batched by themselves, which may change the last bit
        close(results[0], other)


@each_input
def test_settings_of_a_group(name: str, kwargs: dict[str, Any]) -> None:
    """A group's settings are its own; the defaults, and later groups, do not have them."""
    own, usual, late = weights()[0], weights()[1], weights()[2]
    groups = [{"params": [own], "lr": 0.3, "weight_decay": 0.5}, {"params": [usual]}]
    optimizer = make(name, groups, kwargs)
    defaults = copy.deepcopy(optimizer.defaults)
    train(optimizer, range(2))
    optimizer.add_param_group({"params": [late]})
    train(optimizer, range(1))
    assert optimizer.defaults == defaults
    first, second, third = optimizer.param_groups
    assert (first["lr"], first["weight_decay"]) == (0.3, 0.5)
    for group in (second, third):
        assert group["lr"] == optimizer.defaults["lr"]
        assert group["weight_decay"] == optimizer.defaults["weight_decay"]
    alone = make(name, [{"params": [weights()[0]], "lr": 0.3, "weight_decay": 0.5}], kwargs)
    train(alone, range(2))
    train(alone, range(1))
    assert_same(values(alone)[0], values(optimizer)[0])


@each_class
def test_a_generator_is_used_once(name: str) -> None:
    params = iter(weights())
    CLASSES[name](params)
    with pytest.raises(ValueError, match="can be used only once"):
        CLASSES[name](params)


@each_class
@pytest.mark.parametrize("flag", ["differentiable", "amsgrad", "betas"])
def test_flags_that_we_do_not_have(name: str, flag: str) -> None:
    with pytest.raises(TypeError, match=flag):
        CLASSES[name](weights(), **{flag: True})


@each_class
def test_capturable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for CUDA graphs: refused on the CPU, before anything has changed."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    params = weights()
    optimizer = CLASSES[name](params, capturable=True)
    set_gradients(params, 0)
    if torch.cuda.is_available():
        pytest.skip("CUDA is available")
    with pytest.raises(RuntimeError, match="capturable=True is for CUDA graphs"):
        optimizer.step()
    assert not optimizer.state


# -------------------------------------------------------------------------------------- the step


@each_input
def test_first_step_goes_downhill(name: str, kwargs: dict[str, Any]) -> None:
    """Without decay, W moves against G; with `maximize`, along it."""
    optimizer = make(name, weights(), {**kwargs, "weight_decay": 0.0})
    before = weights()
    train(optimizer, range(1))
    for old, param in zip(before, parameters_of(optimizer), strict=True):
        assert param.grad is not None
        along = float(((param - old).detach() * param.grad).sum())
        uphill = 1.0 if kwargs.get("maximize") else -1.0
        assert along * uphill > 0 or not param.grad.any()


@each_input
def test_maximize(name: str, kwargs: dict[str, Any]) -> None:
    """To maximize is to minimize with the negative gradient."""
    rising, falling = (make(name, weights(), {**kwargs, "maximize": up}) for up in (True, False))
    for t in range(2):
        for optimizer, sign in ((rising, -1.0), (falling, 1.0)):
            set_gradients(parameters_of(optimizer), t)
            for param in parameters_of(optimizer):
                assert param.grad is not None
                param.grad.mul_(sign)
            optimizer.step()
    assert_same(values(rising), values(falling))


@each_input
def test_rate_as_a_tensor(name: str, kwargs: dict[str, Any]) -> None:
    """0-dimensional or with one element: the steps of the same float, and not overwritten."""
    plain = make(name, weights(), {**kwargs, "lr": 0.02})
    train(plain, range(3))
    for rate in (torch.tensor(0.02), torch.tensor([0.02])):
        optimizer = make(name, weights(), {**kwargs, "lr": rate})
        train(optimizer, range(3))
        assert optimizer.param_groups[0]["lr"] is rate
        assert float(rate) == pytest.approx(0.02)
        for a, b in zip(parameters_of(plain), parameters_of(optimizer), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@each_input
def test_foreach_equals_plain(name: str, kwargs: dict[str, Any]) -> None:
    """Weights and states, over five steps, in several dtypes."""
    for dtype in (torch.float32, torch.float64):
        runs = [make(name, weights(dtype), kwargs, foreach=foreach) for foreach in (False, True)]
        for optimizer in runs:
            train(optimizer, range(5))
        close(*runs)


def close(one: FactoredOptimizer, other: FactoredOptimizer) -> None:
    for mine, theirs in zip(values(one), values(other), strict=True):
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=2e-5)
        for key, value in mine[1].items():
            if value.dtype == torch.int8:  # codes may tip
                assert int((value.int() - theirs[1][key].int()).abs().max()) <= 1
            else:
                torch.testing.assert_close(value, theirs[1][key], rtol=1e-4, atol=1e-5)


@each_class
def test_fused_equals_plain(database: ModuleType, name: str) -> None:
    """The kernels, for some of the inputs."""
    info = entry(database, name)
    if "cpu" not in info.supports_fused_on:
        pytest.skip("Triton's interpreter is off; test_gpu.py compares the kernels on a GPU")
    for each in info.optim_inputs_func("cpu"):
        if each.desc in KERNEL_INPUTS:
            plain = make(name, weights()[1:4], each.kwargs)
            fused = make(name, weights()[1:4], each.kwargs, fused=True)
            train(plain, range(2))
            train(fused, range(2))
            close(plain, fused)


@each_class
def test_fused_on_meta(name: str) -> None:
    params = [nn.Parameter(torch.ones(3, 2, device="meta"))]
    optimizer = CLASSES[name](params, fused=True)
    params[0].grad = torch.ones(3, 2, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        optimizer.step()


@each_input
def test_zero_gradients(name: str, kwargs: dict[str, Any]) -> None:
    """Without decay they leave the weights, and they are counted as steps."""
    optimizer = make(name, weights(), {**kwargs, "weight_decay": 0.0})
    before = weights()
    for param in parameters_of(optimizer):
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for old, param in zip(before, parameters_of(optimizer), strict=True):
        assert torch.equal(old, param)
        assert float(optimizer.state[param]["step"]) == 1.0


@each_input
def test_missing_gradients(name: str, kwargs: dict[str, Any]) -> None:
    """No gradient, no step and no state. Empty tensors are stepped."""
    empty = nn.Parameter(torch.ones(0, 3))
    optimizer = make(name, [*weights(), empty], kwargs)
    optimizer.step()
    assert not optimizer.state
    params = parameters_of(optimizer)
    set_gradients(params[1:], 0)
    optimizer.step()
    assert torch.equal(params[0], weights()[0])
    assert params[0] not in optimizer.state
    assert all(optimizer.state[param] for param in params[1:])


@each_input
def test_mixed_dtypes(name: str, kwargs: dict[str, Any]) -> None:
    """Parameters of all dtypes in one group: each as it would be alone, with a float32 state."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    together = [weights(dtype)[0] for dtype in dtypes]
    optimizer = make(name, together, {**kwargs, "seed": 0})
    case = problem((6, 5), steps=2)
    apart = [make(name, [weights(dtype)[0]], {**kwargs, "seed": 0}) for dtype in dtypes]
    for grad in case.grads:
        for param, alone in zip(together, apart, strict=True):
            param.grad = grad.to(param.dtype)
            (other,) = parameters_of(alone)
            other.grad = param.grad.clone()
            alone.step()
        optimizer.step()
    for param, alone in zip(together, apart, strict=True):
        assert_same([param.detach(), dict(optimizer.state[param])], values(alone)[0])
        state = optimizer.state[param]
        floats = {k: v for k, v in state.items() if k not in ("momentum", "step")}
        assert all(value.dtype == torch.float32 for value in floats.values())


@each_class
def test_default_dtype(name: str) -> None:
    """Another default dtype changes nothing."""
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            optimizer = make(name, weights(), {}, foreach=True)
            train(optimizer, range(2))
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(values(optimizer))
    assert_same(results[0], results[1])


@each_class
def test_complex_and_sparse(name: str) -> None:
    with pytest.raises(TypeError, match=r"complex64.*view_as_complex"):
        CLASSES[name]([torch.zeros(2, 2, dtype=torch.complex64)])
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = CLASSES[name]([param])
    param.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match=r"is sparse .*sparse=False"):
        optimizer.step()
    assert not optimizer.state


@each_input
def test_closure(name: str, kwargs: dict[str, Any]) -> None:
    """Called once, with gradients on; its loss is returned."""
    param, calls = nn.Parameter(torch.ones(3, 2)), []
    optimizer = make(name, [param], kwargs)

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 6.0
    assert calls == [True]


class LiveBytes(TorchDispatchMode):
    """Measures the largest number of bytes of living tensors that operations made."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.storages = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(out, Tensor):
                self.add(out.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.storages:
            return
        self.storages.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())

    def drop(self, key: int, size: int) -> None:
        self.storages.discard(key)
        self.now -= size


@each_input
def test_peak_memory(name: str, kwargs: dict[str, Any]) -> None:
    """Batched or not, a step borrows a few copies of the matrices that it batches."""
    shape, count = (64, 96), 4
    sizes = {}
    for foreach in (False, True):
        params = [nn.Parameter(problem(shape, seed=i, steps=1).weight) for i in range(count)]
        optimizer = make(name, params, kwargs, foreach=foreach)
        train(optimizer, range(1))
        states = [value for param in params for value in optimizer.state[param].values()]
        grads = [param.grad for param in params if param.grad is not None]
        with LiveBytes([*params, *grads, *states]) as live:
            optimizer.step()
        sizes[foreach] = live.peak
        assert live.now < live.peak / 4  # step sizes, and the basis of a DCT
    batch = 4 * count * shape[0] * shape[1]
    assert 0 < sizes[True] <= 12 * batch
    assert sizes[True] <= 1.05 * sizes[False] + 4 * batch


# ----------------------------------------------------------------------------------------- hooks


@each_class
def test_hooks_of_a_step(name: str) -> None:
    """Before and after a step, of this optimizer and of all, with its arguments; removable."""
    optimizer, calls = make(name, weights(), {}), []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("all pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("all post")),
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
    ]
    train(optimizer, range(1))
    for handle in handles:
        handle.remove()
    train(optimizer, range(1))
    assert calls == ["all pre", "pre", "post", "all post"]

    def add_a_closure(_: Any, args: Any, kwargs: Any) -> Any:
        return (args[0], lambda: 7.0), kwargs

    optimizer.register_step_pre_hook(add_a_closure)
    result: Any = optimizer.step()
    assert result == 7.0


@each_class
def test_hooks_of_state_dicts(name: str) -> None:
    """Before and after saving and loading; what they return is used, and `prepend` is honoured."""
    optimizer, calls = make(name, weights(), {}), []
    train(optimizer, range(1))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "note": 1})
    state = optimizer.state_dict()
    assert state["note"] == 1

    def halve(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        calls.append("load")
        groups = [{**group, "weight_decay": 0.5} for group in loaded["param_groups"]]
        return {**loaded, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("last"))
    optimizer.load_state_dict(state)
    assert calls == ["save", "first", "load", "last"]
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


# ----------------------------------------------------------------------------------- checkpoints


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@each_input
def test_state_dicts(name: str, kwargs: dict[str, Any]) -> None:
    """A copy, or a file with weights_only=True, continues bit for bit; the source stays."""
    optimizer = make(name, weights(), kwargs)
    train(optimizer, range(2))
    for way in (copy.deepcopy, through_file):
        params = [nn.Parameter(param.detach().clone()) for param in parameters_of(optimizer)]
        other, state = make(name, params, kwargs), way(optimizer.state_dict())
        kept = copy.deepcopy(state)
        other.load_state_dict(state)
        assert_same(other.state_dict(), optimizer.state_dict())
        train(other, range(2, 4))
        assert_same(state, kept)
        twin = copy.deepcopy(optimizer)
        train(twin, range(2, 4))
        assert_same(values(other), values(twin))


@each_input
def test_state_dicts_of_another_dtype(name: str, kwargs: dict[str, Any]) -> None:
    """Loaded for bfloat16 or float64 parameters, the state keeps its own dtypes and bits."""
    optimizer = make(name, weights(), kwargs)
    train(optimizer, range(2))
    for dtype in (torch.bfloat16, torch.float64):
        other = make(name, weights(dtype), kwargs)
        other.load_state_dict(optimizer.state_dict())
        for mine, theirs in zip(values(optimizer), values(other), strict=True):
            assert_same(mine[1], theirs[1])
        train(other, range(1))
        assert all(bool(param.isfinite().all()) for param in parameters_of(other))


@each_input
def test_state_dicts_without_newer_settings(name: str, kwargs: dict[str, Any]) -> None:
    """A checkpoint that lacks flags takes those of the optimizer."""
    optimizer = make(name, weights(), kwargs)
    train(optimizer, range(1))
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for flag in ("foreach", "fused", "maximize", "capturable"):
            group.pop(flag)
    optimizer.load_state_dict(state)
    train(optimizer, range(1))
    assert {"foreach", "fused", "maximize", "capturable"} <= set(optimizer.param_groups[0])


@each_class
def test_names_in_state_dicts(name: str) -> None:
    """From parameters with names to some without, and back."""
    named = make(name, [(f"w{i}", param) for i, param in enumerate(weights())], {})
    plain = make(name, weights(), {})
    train(named, range(1))
    plain.load_state_dict(named.state_dict())
    for mine, theirs in zip(values(named), values(plain), strict=True):
        assert_same(mine[1], theirs[1])
    named.load_state_dict(plain.state_dict())
    train(named, range(1))


@each_class
def test_counters_that_are_no_tensors(name: str) -> None:
    """Old checkpoints of torch have them; ours never did, so they are refused."""
    optimizer = make(name, weights(), {})
    train(optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] = 1.0
    with pytest.raises(ValueError, match="step of parameter 'param_0'"):
        optimizer.load_state_dict(state)


@each_input
def test_copies(name: str, kwargs: dict[str, Any]) -> None:
    """Deep copies and pickles have all public attributes, print alike, and go on alike."""
    optimizer = make(name, weights(), kwargs)
    train(optimizer, range(2))
    ways: list[Callable[[Any], Any]] = [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
    for duplicate in ways:
        other = duplicate(optimizer)
        public = {key for key in vars(optimizer) if not key.startswith("_")}
        assert {key for key in vars(other) if not key.startswith("_")} == public
        assert repr(other).startswith(type(optimizer).__name__)
        assert "lr" in repr(other)
        assert_same(values(optimizer), values(other))
        reference = copy.deepcopy(optimizer)
        train(reference, range(2, 3))
        train(other, range(2, 3))
        assert_same(values(reference), values(other))


# -------------------------------------------------------------------------- schedulers and scalers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 8, cycle_momentum=False),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, 3),
}


def test_all_schedulers_are_here() -> None:
    known = {
        key
        for key, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler)
    }
    new = known - set(SCHEDULERS) - {"LRScheduler", "_LRScheduler"}
    if new and torch.__version__ >= "2.14":
        pytest.skip(f"torch {torch.__version__} has {sorted(new)}, which this test does not know")
    assert not new


@each_class
@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
def test_schedulers(name: str, scheduler: str) -> None:
    """They write the rates that they write into SGD, and a checkpoint of both resumes."""
    relative = {"relative_step": True} if name == "Adafactor" else {}
    ours = make(name, weights(), {"lr": 0.1, **relative})
    theirs = torch.optim.SGD(weights(), lr=0.1)
    own, other = SCHEDULERS[scheduler](ours), SCHEDULERS[scheduler](theirs)
    for t in range(6):
        before = [param.detach().clone() for param in parameters_of(ours)]
        rate = ours.param_groups[0]["lr"]
        assert rate == theirs.param_groups[0]["lr"]
        train(ours, range(t, t + 1))
        theirs.step()
        if rate > 0 and t != ZERO_AT:  # whose gradient is zero
            assert not torch.equal(before[0], parameters_of(ours)[0])
        metric = [1.0] if scheduler == "ReduceLROnPlateau" else []
        own.step(*metric)
        other.step(*metric)
    copied = copy.deepcopy(ours)
    again = SCHEDULERS[scheduler](copied)
    copied.load_state_dict(ours.state_dict())
    again.load_state_dict(own.state_dict())
    assert copied.param_groups[0]["lr"] == ours.param_groups[0]["lr"]


def test_schedulers_that_write_the_momentum() -> None:
    """Honoured if it is a number, refused with the remedy if there is none."""
    for momentum in (0.9, None):
        optimizer = make("MaxFactor", weights(), {"momentum": momentum})
        lr_scheduler.OneCycleLR(optimizer, 0.1, 8)
        set_gradients(parameters_of(optimizer), 0)
        if momentum is None:
            with pytest.raises(ValueError, match="set cycle_momentum=False"):
                optimizer.step()
        else:
            assert optimizer.param_groups[0]["momentum"] == 0.95
            optimizer.step()


@each_class
def test_averaged_models(name: str) -> None:
    """SWA averages the weights that the steps left."""
    model = nn.Linear(3, 2)
    averaged = swa_utils.AveragedModel(model)
    optimizer, seen = make(name, model.parameters(), {}), []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        seen.append(model.weight.detach().clone())
    mean = averaged.module.get_parameter("weight").detach()
    torch.testing.assert_close(mean, torch.stack(seen).mean(dim=0))


@each_class
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(name: str, fused: bool) -> None:
    """Scaled by a power of two, the steps are the same; one with an infinity is left out."""
    if fused and torch.cuda.is_available():
        pytest.skip("the interpreter is off; test_gpu.py has it on a GPU")
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    scaled, plain = (make(name, model.parameters(), {}, fused=fused) for model in models)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t in range(3):
        x = torch.full((1, 3), float("inf") if t == 1 else t + 1.0)
        for model in models:
            model.zero_grad()
        scaler.scale(models[0](x).sum()).backward()
        models[1](x).sum().backward()
        scaler.step(scaled)
        scaler.update()
        if t != 1:
            plain.step()
    assert scaler.get_scale() == 512.0
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, theirs)


# ------------------------------------------------------------------------------------- the table

PAGE = Path(__file__).parent.parent / "docs" / "torch-tests.md"


def test_the_table_is_complete(database: ModuleType) -> None:
    """It names every test that the installed database names, and exactly our own."""
    text = PAGE.read_text()
    names = {
        decorator.test_name
        for info in database.optim_db
        for decorator in info.decorators
        if getattr(decorator, "cls_name", None) == "TestOptimRenewed" and decorator.test_name
    }
    missing = sorted(name for name in names if f"`{name}`" not in text)
    if missing and torch.__version__ >= "2.14":
        pytest.skip(f"torch {torch.__version__} has {missing}, which the table does not know")
    assert not missing
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    here = {name for row in rows for name in re.findall(r"`(test_\w+)`", row[3])}
    assert here == {key for key in vars(sys.modules[__name__]) if key.startswith("test_")}
