"""The one table of cases that every rule and every backend is tested on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from maxfactor import Switches, recipe
from maxfactor.recipes import RecipeName
from maxfactor.settings import as_setting

SHAPES: dict[str, tuple[int, ...]] = {
    "0-d": (),
    "one": (1,),
    "1-d": (9,),
    "one-by-one": (1, 1),
    "tall": (31, 7),
    "wide": (7, 31),
    "row": (1, 6),
    "column": (6, 1),
    "3-d": (12, 5, 3),
    "4-d": (5, 2, 3, 3),
    "empty vector": (0,),
    "empty matrix": (0, 5),
}

# The arguments of both MaxFactor and the oracle, each set over every version.
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "factor last": {"factor": "last"},
    "decay": {"weight_decay": 0.3},
    "maximize": {"maximize": True},
    "small d": {"d": 0.2},
    "no max_norm": {"max_norm": False},
    "full_matrix": {"full_matrix": True},
    "clip": {"clip_threshold": 0.7},
    "no clip": {"clip_threshold": 0.0},
    "boost": {"scalar_boost": 3.0},
    "large eps": {"eps": (0.05, 0.5)},
    "eps_rms": {"eps_rms": 0.1},
    "gamma": {"gamma": 0.5, "beta2_decay": -0.3},
}

ADAFACTOR_VARIANTS: dict[str, dict[str, Any]] = {
    "relative": {},
    "absolute": {"lr": 0.03, "weight_decay": 0.2},
    "decay": {"weight_decay": 0.5},
    "as torch": {"lr": 0.05, "relative_step": True, "weight_decay": 0.1},
    "factor last": {"factor": "last"},
    "maximize": {"maximize": True},
    "clip": {"clip_threshold": 0.4},
    "large eps": {"eps": (0.1, 0.5)},
    "default eps": {"eps": (None, 1e-3)},
}

# Rows longer than a block of 64 values: a tail of its own, whole blocks only, and a convolution.
LONG_ROWS: dict[str, tuple[int, ...]] = {"tail": (5, 130), "whole": (3, 128), "conv": (6, 40, 3)}

MOMENTA: dict[str, dict[str, Any]] = {
    "none": {},
    "ema": {"momentum": 0.9},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "fam": {"momentum": {"warmup": 3, "theta": 0.8}},
    "bands": {"momentum": {"warmup": 3, "theta": 0.8, "bands": 8, "mix": 0.2}},
}
DIRECTIONS = ["sign_max", "factored", "orthogonal"]
STORES = ["int8", "bf16", "fp32"]

MOMENTUM_RUNS: dict[str, dict[str, Any]] = {
    "fam int8": {"momentum": {"warmup": 2}, "scale": "initial"},
    "bands bf16": {"momentum": {"bands": 4}, "momentum_dtype": "bf16"},
    "orthogonal": {"momentum": 0.95, "nesterov": True, "direction": "orthogonal"},
    "factored fp32": {"momentum": 0.9, "momentum_dtype": "fp32", "direction": "factored"},
}

# Shapes and blocks of the orthogonal direction. Blocks of 11 rows and of 44 columns begin within
# tiles of the kernels, and within blocks of 64 values that share an int8 scale.
BLOCKS: dict[str, tuple[tuple[int, ...], tuple[str, int]]] = {
    "wide, rows": ((33, 20), ("rows", 11)),
    "tall, rows": ((24, 5), ("rows", 8)),
    "single rows": ((5, 72), ("rows", 1)),
    "rows of a convolution": ((6, 10, 3), ("rows", 2)),
    "wide, columns": ((3, 132), ("columns", 44)),
    "tall, columns": ((18, 20), ("columns", 5)),
}

# What may be set beside them.
MOMENTUM_VARIANTS: dict[str, dict[str, Any]] = {
    "maximize": {"maximize": True},
    "small d": {"d": 0.2},
    "large eps": {"eps": (0.05, 0.5)},
    "no eps": {"eps": (0.0, 1e-3)},
    "vectors by update": {"vector_direction": "update"},
    "decay by step size": {"decay_by": "step_size", "weight_decay": 0.3},
    "decay by relative step": {"decay_by": "relative_step", "weight_decay": 0.3, "lr": 0.6},
    "decay by squared step": {"decay_by": "squared_step", "weight_decay": 0.3, "lr": 0.6},
    "bounds": {"kappa_bounds": (0.1, 0.6), "min_lr": 0.1, "eps_rms": 0.1},
}

STEPS = 6
ZERO_AT = 3  # the step without a gradient signal; after the warm-up of FAM in MOMENTA

SWITCHES = {field.name for field in fields(Switches)}


def published(version: str) -> dict[str, Any]:
    """The arguments of a published version."""
    return recipe(cast("RecipeName", f"published-{version}"))


def arguments(*settings: dict[str, Any]) -> dict[str, Any]:
    """Merge settings, later ones first; the names of switches go into `switches`."""
    flat: dict[str, Any] = {}
    for each in settings:
        flat |= cast("dict[str, Any]", as_setting(each.get("switches")) or {})
        flat |= {name: value for name, value in each.items() if name != "switches"}
    switches = {name: value for name, value in flat.items() if name in SWITCHES}
    others = {name: value for name, value in flat.items() if name not in SWITCHES}
    return {**others, "switches": switches} if switches else others


def group_of(params: list[Any], settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of MaxFactor, with what only a group may have in a group."""
    own = {"params": params, "blocks": settings.get("blocks")}
    return [own], {name: value for name, value in settings.items() if name != "blocks"}


def settings_for(momentum: str, store: str, direction: str, scale: str) -> dict[str, Any]:
    """The arguments of MaxFactor and the oracle."""
    chosen = MOMENTA[momentum] | {"direction": direction, "scale": scale}
    return chosen if momentum == "none" else chosen | {"momentum_dtype": store}


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Fails when something in it waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class NewTensors(TorchDispatchMode):
    """Records the number of elements of the largest storage that an operation made."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in self.known:
                size = out.untyped_storage().nbytes() // out.element_size()
                self.largest = max(self.largest, size)
        return result


@dataclass
class Problem:
    """A weight and the gradients that are injected step by step."""

    weight: Tensor
    grads: list[Tensor] = field(default_factory=list)

    def arrays(self) -> tuple[Any, list[Any]]:
        """The same in float64, for the oracle."""
        return (
            self.weight.double().numpy().copy(),
            [grad.double().numpy().copy() for grad in self.grads],
        )


def problem(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
    scale: float = 1.0,
    seed: int = 0,
) -> Problem:
    """Gradients of changing size with rows and columns of different size, and some zeros."""
    weight, grads = _drawn(shape, dtype, steps, scale, seed)
    return Problem(weight.clone(), [grad.clone() for grad in grads])


@lru_cache(256)
def _drawn(
    shape: tuple[int, ...], dtype: torch.dtype, steps: int, scale: float, seed: int
) -> tuple[Tensor, list[Tensor]]:
    """Drawn once for all settings and backends, which takes longer than a step."""
    rng = np.random.default_rng(seed)
    weight = torch.from_numpy(np.asarray(rng.normal(size=shape) * 0.3)).to(dtype)
    grads = []
    for t in range(steps):
        grad = np.asarray(rng.normal(size=shape) * np.exp(rng.normal(size=shape)))
        grad = np.where(rng.random(size=shape) < 0.1, 0.0, grad) * scale * (1.0 + t % 4)
        if t == ZERO_AT:
            grad = np.zeros(shape)
        grads.append(torch.from_numpy(np.asarray(grad)).to(dtype))
    return weight, grads
