"""What the property tests draw from, how many examples they run, and the bound of a step.

`make test` runs the same examples every time. `make fuzz` runs the same properties with new seeds;
it passes one in the environment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from cases import arguments
from maxfactor import RECIPES, Adafactor, MaxFactor, recipe
from maxfactor.optimizer import FactoredOptimizer

# ----------------------------------------------------------------------------------------- ranges

LARGEST_WEIGHT = 2.0**120  # at any time; sums of float32 end at 2^128
LARGEST_WEIGHT_POWER = 100  # of two, at the start
LARGEST_GRADIENT_POWER = 56  # squares of 2^64 and more overflow, and the step is refused
SMALLEST_COMPARED_POWER = -100  # of gradients

# --------------------------------------------------------------------------------------- the runs

# Examples of each property in `make test`.
EXAMPLES = {
    "bounded": 500,
    "scaled": 400,
    "permuted": 350,
    "reference": 300,
    "kernels": 10,
    "resumed": 150,
    "refused": 150,
    "groups": 110,
    "model": 40,
}
SEED = os.environ.get("MAXFACTOR_FUZZ_SEED")  # set by tests/fuzz.py
F = TypeVar("F")


def run_settings(name: str) -> settings:
    """The same examples every time, or those of the seed."""
    return settings(
        max_examples=EXAMPLES[name],
        deadline=None,
        database=None,
        derandomize=SEED is None,
        print_blob=SEED is not None,
        stateful_step_count=10,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def with_seed(test: F) -> F:
    """Let the examples follow from the seed, if there is one."""
    if SEED is None:
        return test
    seeded: F = seed(int(SEED))(test)  # type: ignore[type-var]
    return seeded


class Counter:
    """Counts the examples of a property, and reports them to pytest."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record
        self.count = 0

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count a property; fail if it ran fewer examples than planned."""
        yield
        self._record("examples", self.count)
        assert self.count >= EXAMPLES[name]


# ------------------------------------------------------------------------------------ the tensors

Shape = tuple[int, ...]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("contiguous", "channels_last", "transposed", "strided", "offset")
KINDS = ("normal", "normal", "normal", "sparse", "single", "rows", "constant", "zeros")

# 0-d to 5-d, with sizes 0 and 1, and rows of more than one block of 64 values.
SHAPES = st.one_of(
    st.lists(st.integers(1, 5), max_size=3),
    st.lists(st.integers(0, 4), max_size=5),
    st.sampled_from([[3, 65], [130], [2, 64], [70, 3], [1, 128], [4, 3, 3, 3], [3, 1, 3, 3]]),
).map(tuple)

# Powers of two; most are ordinary, so that extremes do not hide everything else.
ORDINARY = st.integers(-8, 8)
WEIGHT_POWERS = st.one_of(ORDINARY, ORDINARY, st.integers(-60, LARGEST_WEIGHT_POWER))
GRADIENT_POWERS = st.one_of(ORDINARY, ORDINARY, st.integers(-140, LARGEST_GRADIENT_POWER))
COMPARED_POWERS = st.one_of(
    ORDINARY, ORDINARY, st.integers(SMALLEST_COMPARED_POWER, LARGEST_GRADIENT_POWER)
)


def array(shape: Shape, kind: str, power: int, rng: np.random.Generator) -> Any:
    """Values of about 2^power."""
    values = np.asarray(rng.normal(size=shape))
    if kind == "constant":
        values = np.ones(shape)
    elif kind == "zeros":
        values = np.zeros(shape)
    elif kind == "sparse":
        values = np.where(rng.random(size=shape) < 0.8, 0.0, values)
    elif kind == "single" and values.size:
        keep = np.zeros(values.size)
        keep[rng.integers(values.size)] = 1.0
        values = keep.reshape(shape)
    elif kind == "rows" and len(shape) > 1:
        sizes = 2.0 ** rng.integers(-12, 13, size=shape[0])
        values = values * sizes.reshape(-1, *(1,) * (len(shape) - 1))
    return np.clip(values, -16.0, 16.0) * 2.0**power


def tensor(
    shape: Shape, dtype: torch.dtype, kind: str, power: int, rng: np.random.Generator
) -> Tensor:
    """The same as a tensor; float16 has a small range."""
    if dtype == torch.float16:
        power = min(max(power, -10), 5)
    return torch.from_numpy(np.asarray(array(shape, kind, power, rng))).to(dtype)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values in another memory format."""
    if layout == "channels_last" and values.dim() in (4, 5):
        memory = torch.channels_last if values.dim() == 4 else torch.channels_last_3d
        return values.clone(memory_format=memory)
    if layout == "transposed" and values.dim() >= 2:
        order = tuple(reversed(range(values.dim())))
        return values.permute(order).contiguous().permute(order)
    if layout == "strided" and values.dim():
        room = values.new_zeros((*values.shape[:-1], 2 * values.shape[-1]))
        view = room[..., ::2]
        return view.copy_(values)
    if layout == "offset":
        room = values.new_zeros(values.numel() + 1)
        return room[1:].view(values.shape).copy_(values)
    return values.clone()


# ----------------------------------------------------------------------------------- the settings

MOMENTA: tuple[dict[str, Any], ...] = (
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.95, "nesterov": True},
    {"momentum": {"warmup": 1, "theta": 0.8}},
    {"momentum": {"warmup": 0, "bands": 4, "mix": 0.2}},
    {"momentum": {"beta_min": 0.0, "beta_max": 0.999, "start": 0.0, "mix": 1.0}},
)
PUBLISHED = [name for name in RECIPES if name.startswith("published")]


@st.composite
def common(draw: st.DrawFn) -> dict[str, Any]:
    """Settings that both optimizers have."""
    return {
        "lr": draw(st.sampled_from([0.0, 2e-4, 0.01, 0.01, 0.1, 1.0])),
        "beta2_decay": draw(st.sampled_from([-0.8, -0.8, -1.0, -0.3, 0.0])),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.3])),
        "maximize": draw(st.booleans()),
        "rounding": draw(st.sampled_from([None, "stochastic", "nearest"])),
        "seed": draw(st.sampled_from([0, 1, 2**40])),
    }


@st.composite
def new_rule(draw: st.DrawFn) -> dict[str, Any]:
    """Momentum and directions."""
    chosen: dict[str, Any] = {"direction": draw(st.sampled_from(["factored", "orthogonal"]))}
    if draw(st.booleans()):
        chosen["direction"] = draw(st.sampled_from(["sign_max", "factored", "orthogonal"]))
        chosen |= draw(st.sampled_from(MOMENTA))
        chosen["momentum_dtype"] = draw(st.sampled_from([None, "int8", "bf16", "fp32"]))
    chosen["step_rule"] = draw(st.sampled_from(["relative", "uncapped"]))
    return chosen


@st.composite
def published_rule(draw: st.DrawFn) -> dict[str, Any]:
    """A published version, or one of its own with any of their switches."""
    flat = arguments(recipe(draw(st.sampled_from(PUBLISHED))))
    chosen: dict[str, Any] = {**flat.pop("switches", {}), **flat}
    for name in ("lr", "gamma", "d", "weight_decay"):
        chosen.pop(name, None)
    choices: dict[str, list[Any]] = {
        "factor": ["auto", "last"],
        "max_norm": [True, False],
        "scalar_boost": [None, 2.0],
        "full_matrix": [False, True],
        "clip_threshold": [0.0, 0.5, 1.0],
        "step_rule": ["relative", "uncapped", "ramp"],
    }
    for name in draw(st.lists(st.sampled_from(sorted(choices)), max_size=3, unique=True)):
        chosen[name] = draw(st.sampled_from(choices[name]))
    if chosen.get("step_rule") == "ramp":
        chosen["min_lr"] = 0.0
    return chosen


@st.composite
def maxfactor_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of MaxFactor, flat: switches stand beside the others."""
    chosen = {
        **draw(common()),
        "eps": draw(
            st.sampled_from([(1e-10, 1e-3), (None, 1e-3), (0.0, 1e-3), (0.05, 0.5), (1e-10, 0.0)])
        ),
        "d": draw(st.sampled_from([1.0, 1.0, 0.2, 3.0, math.inf])),
        "gamma": draw(st.sampled_from([0.99, 0.5, 0.0])),
        "scale": draw(st.sampled_from(["current", "initial", "usual", "raised"])),
        "usual_from": draw(st.sampled_from([None, 0.02, 1.0])),
        "decay_by": draw(st.sampled_from(["lr", "relative_step", "squared_step", "step_size"])),
        "vector_direction": draw(st.sampled_from(["sign_max", "update"])),
    }
    return {**chosen, **draw(st.one_of(new_rule(), published_rule()))}


@st.composite
def adafactor_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of Adafactor."""
    chosen = {
        **draw(common()),
        "eps": draw(st.sampled_from([(1e-30, 1e-3), (None, 1e-3), (0.0, 1e-3), (0.1, 0.5)])),
        "clip_threshold": draw(st.sampled_from([1.0, 0.4, 3.0])),
        "relative_step": draw(st.sampled_from([None, True])),
        "factor": draw(st.sampled_from(["auto", "last"])),
    }
    if draw(st.booleans()):
        chosen |= {"lr": None}
    return chosen


@dataclass
class Case:
    """An optimizer to be built, with its parameters, and gradients for some steps."""

    settings: dict[str, Any]
    shapes: list[Shape]
    dtypes: list[torch.dtype]
    layouts: list[str]
    weight_power: int
    gradient_power: int
    kinds: list[str]
    number: int
    is_adafactor: bool = False
    execution: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """The arguments of the class."""
        found = dict(self.settings) if self.is_adafactor else arguments(self.settings)
        return {**found, **self.execution}

    def weights(self) -> list[Tensor]:
        """The initial weights, in their memory formats."""
        rng = np.random.default_rng(self.number)
        return [
            laid_out(tensor(shape, dtype, "normal", self.weight_power, rng), layout)
            for shape, dtype, layout in zip(self.shapes, self.dtypes, self.layouts, strict=True)
        ]

    def gradients(self, t: int) -> list[Tensor]:
        """The gradients of step t, in memory formats of their own."""
        rng = np.random.default_rng([self.number, t + 1])
        kind, layouts = self.kinds[t], self.layouts[1:] + self.layouts[:1]
        return [
            laid_out(tensor(shape, dtype, kind, self.gradient_power, rng), layout)
            for shape, dtype, layout in zip(self.shapes, self.dtypes, layouts, strict=True)
        ]

    def build(self, params: Sequence[Any], **others: Any) -> FactoredOptimizer:
        """The optimizer of some parameters."""
        cls: type[Any] = Adafactor if self.is_adafactor else MaxFactor
        built: FactoredOptimizer = cls(params, **{**self.arguments(), **others})
        return built


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    shapes: st.SearchStrategy[Shape] = SHAPES,
    dtypes: Sequence[torch.dtype] = DTYPES,
    weight_powers: st.SearchStrategy[int] = WEIGHT_POWERS,
    gradient_powers: st.SearchStrategy[int] = GRADIENT_POWERS,
    kinds: Sequence[str] = KINDS,
    most_steps: int = 3,
) -> Case:
    """Any settings, shapes, dtypes and memory formats, for one to three parameters."""
    chosen = draw(st.lists(shapes, min_size=1, max_size=3))
    is_adafactor = draw(st.integers(0, 3)) == 0
    count = len(chosen)
    return Case(
        settings=draw(adafactor_settings() if is_adafactor else maxfactor_settings()),
        shapes=chosen,
        dtypes=draw(st.lists(st.sampled_from(dtypes), min_size=count, max_size=count)),
        layouts=draw(st.lists(st.sampled_from(LAYOUTS), min_size=count, max_size=count)),
        weight_power=draw(weight_powers),
        gradient_power=draw(gradient_powers),
        kinds=draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most_steps)),
        number=draw(st.integers(0, 2**32)),
        is_adafactor=is_adafactor,
        execution={"foreach": draw(st.booleans()), "fused": False},
    )


# ----------------------------------------------------------------------- the bound of docs/rule.md


@dataclass
class Expected:
    """What a step may do to a parameter: keep * W, moved by at most `entry` and `norm`."""

    keep: float
    alpha: float
    entry: float  # bound on the move of each entry
    norm: float  # bound on the norm of the move


class Bound:
    """Equations (1) to (4) in float64 for one parameter, and the bounds that (7) to (9) give.

    In units of alpha. Divided by its peak, an update has entries of at most 1, and (8) and the clip
    of the norm only make it smaller. Bounded by (8), it has an RMS of at most d; orthogonal, of 1.
    Version 0.3 moves a single value by boost * G / sqrt(v) with v >= (1 - gamma) G^2. With d = inf
    the factored direction has no bound.
    """

    def __init__(self, case: Case, weight: Tensor) -> None:
        self.settings, self.is_adafactor = case.settings, case.is_adafactor
        self.shape, self.count = tuple(weight.shape), max(weight.numel(), 1)
        self.first: float | None = None
        self.t = 0

    def next(self, weight: Tensor, lr: float | None) -> Expected:
        """The bound of the next step, from the weight before it."""
        self.t += 1
        alpha, rho = self._step_size(weight, lr)
        rate = self._decay_rate(alpha, rho, lr)
        entry, norm = self._units()
        keep = 1.0 - rate * float(self.settings["weight_decay"])
        if alpha == 0.0:  # d may be infinite
            entry = norm = 0.0
        return Expected(keep, alpha, alpha * entry, alpha * norm)

    def _step_size(self, weight: Tensor, lr: float | None) -> tuple[float, float]:
        size, rate = self._size(weight), 0.01 if lr is None else lr
        size = max(size, float(self.settings["eps"][1]))
        rule = self.settings.get("step_rule", "relative")
        if self.is_adafactor and lr is not None and not self.settings["relative_step"]:
            return rate, rate
        if rule == "ramp":
            rho = min(rate, 1.0 / math.sqrt(self.t))
            return min(rate, size * min(1e-6 * self.t, 1.0 / math.sqrt(self.t))), rho
        rho = rate if rule == "uncapped" else min(rate, 1.0 / math.sqrt(self.t))  # (2)
        rho = max(rho, float(self.settings.get("min_lr", 0.0))) if rate > 0 else 0.0
        return rho * size, rho  # (3)

    def _size(self, weight: Tensor) -> float:
        now = float(weight.double().square().mean().sqrt()) if weight.numel() else 0.0
        scale = self.settings.get("scale", "current")
        if scale == "current":
            return now
        if self.first is None:
            assumed = oracle.assumed_size(self.shape, scale)
            least = self.settings.get("usual_from") or 1.0 / 3.0
            self.first = oracle.first_size(now, assumed, scale, least)
        return self.first if self.first > 0 else now

    def _decay_rate(self, alpha: float, rho: float, lr: float | None) -> float:
        if self.is_adafactor:
            return alpha if lr is None else lr
        by = self.settings.get("decay_by", "lr")
        rate = float(lr or 0.0)
        square = rho * min(1.0, rho / rate) if rate else 0.0
        rates = {"lr": rate, "relative_step": rho, "squared_step": square, "step_size": alpha}
        return rates[by]

    def _units(self) -> tuple[float, float]:
        root = math.sqrt(self.count)
        if self.is_adafactor:
            bound = float(self.settings["clip_threshold"]) * root
            return bound, bound
        boost = self.settings.get("scalar_boost")
        if boost is not None and self.count == 1:
            bound = float(boost) / math.sqrt(1.0 - self.settings["gamma"])
            return bound, bound
        direction = self.settings.get("direction", "sign_max")
        if direction == "factored":
            bound = float(self.settings["d"]) * root
            return bound, bound
        if direction == "orthogonal" and len(self.shape) > 1:
            return root, root
        return 1.0, root


def rounding_errors(weight: Tensor, result: Tensor, expected: Expected) -> Tensor:
    """How far rounding may put each entry from where the equations put it."""
    largest = torch.maximum(weight.double().abs(), result.double().abs())
    unit = max(torch.finfo(result.dtype).eps, torch.finfo(torch.float32).eps)
    smallest = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
    spacing = 2.0 * unit * largest + smallest.get(result.dtype, 2.0**-149)
    return spacing + 2e-5 * min(expected.norm, 1e300)


def may_overflow(param: Tensor, expected: Expected) -> bool:
    """Whether a step could leave the range of the parameter's dtype, or of squares in float32."""
    most = min(torch.finfo(param.dtype).max / 4, LARGEST_WEIGHT)
    largest = float(param.abs().max()) if param.numel() else 0.0
    decayed = largest * max(1.0, abs(expected.keep))
    if expected.entry == float("inf"):
        return param.dtype == torch.float16 or decayed > most
    return decayed + expected.entry > most
