"""Long runs: counters stay exact, backends stay together, nothing grows.

`make soak` takes 20 000 steps on each backend; in the interpreter 300.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxfactor import Adafactor, MaxFactor, rule
from maxfactor.rule.rounding import noise_key
from soak import RULES, amount

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True, "fused": False, "nonfinite": "ignore"},
    "fused": {"fused": True},
}
SHAPES = ((6, 20), (9,), (2, 3, 4))


def run_of(backend: str, device: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """An optimizer on a backend; its parameters are `params`."""
    if backend == "fused":
        pytest.importorskip("triton")
    draws = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=draws).to(dtype) for shape in SHAPES]
    params = [nn.Parameter(weight.to(device)) for weight in weights]
    cls = options.pop("cls", MaxFactor)
    return cls(params, seed=3, **{**options, **BACKENDS[backend]})


def step(optimizer: Any, number: int) -> None:
    """A step with gradients that depend only on its number."""
    params = optimizer.param_groups[0]["params"]
    for param, grad in zip(params, gradients(number), strict=True):
        param.grad = grad.to(param.device, param.dtype)
    optimizer.step()


POOL = [
    [torch.randn(shape, generator=torch.Generator().manual_seed(97 * k + i)) for i, shape
     in enumerate(SHAPES)] for k in range(61)
]  # fmt: skip


def gradients(number: int) -> list[Tensor]:
    return POOL[number % len(POOL)]


def device_of(backend: str) -> str:
    return DEVICE if backend in ("fused", "capturable") else "cpu"


# --------------------------------------------------------------------------------- counters


STARTS = [2**24 - 1, 2**32 - 1, 2**31 - 1, 2**40][: amount(2, 4)]


def set_counter(optimizer: Any, number: int) -> None:
    """Load a checkpoint that has taken so many steps."""
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = torch.tensor(number)
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_counters_are_exact(backend: str, start: int) -> None:
    """float32 sticks at 2^24. The noise of the rounding follows the counter, so it shows it too."""
    optimizer = run_of(backend, device_of(backend), torch.bfloat16)
    step(optimizer, 0)
    set_counter(optimizer, start)
    params = optimizer.param_groups[0]["params"]
    settings = rule.MaxFactorSettings(seed=3)
    for number in range(1, 4):
        before = [
            (p.detach().cpu().clone(), {k: v.cpu().clone() for k, v in optimizer.state[p].items()})
            for p in params
        ]
        step(optimizer, number)
        for param, (weight, state), grad in zip(params, before, gradients(number), strict=True):
            count = optimizer.state[param]["step"]
            assert count.dtype == torch.int64
            assert int(count) == start + number
            result = rule.step(weight, grad.to(torch.bfloat16), state, settings)
            assert int(result.state["step"]) == start + number
            differ = (result.param != param.detach().cpu()).sum()
            assert int(differ) <= 1  # where the sum before it is rounded otherwise
    assert noise_key(3, float(start + 1)) != noise_key(3, float(start + 2))


def test_a_counter_of_an_earlier_version_is_taken_over() -> None:
    optimizer = run_of("plain", "cpu")
    step(optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = torch.tensor(5.0)
    optimizer.load_state_dict(saved)
    step(optimizer, 1)
    counts = [state["step"] for state in optimizer.state.values()]
    assert {(int(count), count.dtype) for count in counts} == {(6, torch.int64)}


def test_counters_on_the_device_with_another_default_dtype() -> None:
    """Powers of a counter are float32, whatever torch makes of integers."""
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = run_of("capturable", DEVICE, torch.float32, **RULES["fam"][1])
        expected = run_of("plain", "cpu", torch.float32, **RULES["fam"][1])
        for number in range(3):
            step(optimizer, number)
            step(expected, number)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(optimizer.state.values(), expected.state.values(), strict=True):
        for key, value in one.items():
            assert value.dtype == other[key].dtype
            torch.testing.assert_close(value.cpu(), other[key])


# ------------------------------------------------------------------------------------ drift


DRIFT_STEPS = {
    "plain": amount(60, 20_000),
    "foreach": amount(60, 20_000),
    "capturable": amount(60, 20_000),
    "fused": amount(2, 300) if DEVICE == "cpu" else amount(500, 20_000),
}
# A code of int8 may round otherwise, which moves a weight by a 127th of a step.
DRIFT = {"published": 1e-5, "adafactor": 1e-5, "fam": 3e-4, "orthogonal": 3e-4}
# With a fixed momentum of .95 a difference of one code stays, as .95 of it is rounded to one again.
# It is there after some hundred steps and does not grow; the weights come closer again.
SCALES = {**DRIFT, "orthogonal": 2 / 127}
IN_BFLOAT16 = 3e-2  # where torch operations on a GPU iterate


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_do_not_drift_from_the_reference(backend: str, name: str) -> None:
    cls, arguments = RULES[name]
    optimizer = run_of(backend, device_of(backend), cls=cls, **arguments)
    kind = rule.AdafactorSettings if cls is Adafactor else rule.MaxFactorSettings
    settings = kind.from_group(optimizer.param_groups[0])
    params = optimizer.param_groups[0]["params"]
    weights = [param.detach().cpu().clone() for param in params]
    states = [rule.init_state(weight, settings) for weight in weights]
    for number in range(DRIFT_STEPS[backend]):
        step(optimizer, number)
        for index, grad in enumerate(gradients(number)):
            taken = rule.step(weights[index], grad, states[index], settings)
            weights[index], states[index] = taken.param, taken.state
    for param, weight, state in zip(params, weights, states, strict=True):
        in_bfloat16 = name == "orthogonal" and backend == "capturable" and param.is_cuda
        assert drift(param, weight) < (IN_BFLOAT16 if in_bfloat16 else DRIFT[name])
        for key, value in state.items():
            if key != "momentum":  # codes; the scales are compared
                bound = SCALES if key == "momentum_scale" else DRIFT
                assert drift(optimizer.state[param][key], value) < bound[name], key


def drift(found: Tensor, expected: Tensor) -> float:
    """The difference in units of the tensor's size."""
    difference = found.detach().cpu().double() - expected.double()
    return float(difference.norm() / expected.double().norm().clamp(min=1e-30))


# ------------------------------------------------------------------------------------ growth


KEPT = 24  # bytes for each step: less than a float and its place in a list


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def python_bytes() -> int:
    """What Python objects take, as tracemalloc counts it.

    Python's cache of attributes keeps the names that were looked up. Torch makes a new string
    "__torch_function__" for many of its calls, so up to 4096 of them pile up there, slowly.
    """
    # Its name since Python 3.13, and before.
    clear = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
    clear()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_grows(backend: str) -> None:
    """Neither Python's memory nor the process's, nor files, nor threads, nor the GPU's memory."""
    steps = DRIFT_STEPS[backend]
    optimizer = run_of(backend, device_of(backend), **RULES["fam"][1])
    if steps < 50:
        pytest.skip("too few steps to see it")
    optimizer.record_metrics(every=10)
    for number in range(20):  # until caches are full
        step(optimizer, number)
        optimizer.metrics().summary()
    tracemalloc.start()
    try:
        taken(optimizer, steps // 2)  # what is new then is kept once
        before = taken(optimizer, steps // 2)
        after = taken(optimizer, steps)
    finally:
        tracemalloc.stop()
    assert after["python"] - before["python"] < KEPT * steps
    assert after["resident"] - before["resident"] < 16_000_000
    for name in ("files", "threads", "gpu"):
        assert after[name] == before[name], name


def taken(optimizer: Any, steps: int) -> dict[str, int]:
    """What is in use after some more steps."""
    for number in range(steps):
        step(optimizer, number)
        if number % 100 == 0:
            optimizer.load_state_dict(optimizer.state_dict())
    return {
        "python": python_bytes(),
        "resident": resident_bytes(),
        "files": open_files(),
        "threads": threading.active_count(),
        "gpu": torch.cuda.memory_allocated() if DEVICE == "cuda" else 0,
    }
