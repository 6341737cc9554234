"""MaxFactor and Adafactor as entries of torch's own database of optimizers.

torch ships the database, `torch.testing._internal.common_optimizers`, but not the tests that use it
(TestOptimRenewed in its test/test_optim.py). It is internal and may change: `load` says why if it
cannot be used. docs/torch-tests.md lists what of these tests applies.
"""

from __future__ import annotations

import inspect
import os
from types import ModuleType
from typing import Any

import torch

from maxfactor import FAM, Adafactor, MaxFactor
from maxfactor.recipes import KINDS, RECIPES, find_recipe

DATABASE = "torch.testing._internal.common_optimizers"

# The fields of an entry, and the functions, that we use.
FIELDS = {
    "optim_inputs_func", "optim_error_inputs_func", "supported_impls", "supports_fused_on",
    "supports_complex", "supports_sparse", "has_capturable_arg", "not_og_supported_flags",
}  # fmt: skip
NAMES = (
    "OptimizerInfo",
    "OptimizerInput",
    "get_error_inputs_for_all_optims",
    "_get_optim_inputs_including_global_cliquey_kwargs",
    "optim_db",
)

MAXFACTOR_INPUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "decay": {"weight_decay": 0.1, "lr": 0.02},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "momentum_dtype": "fp32"},
    "nesterov in int8": {"momentum": 0.95, "nesterov": True},
    "FAM": {"momentum": FAM(warmup=1)},
    "FAM with bands": {"momentum": FAM(warmup=1, bands=4)},
    "orthogonal": {"direction": "orthogonal"},
    "orthogonal with momentum": {"direction": "orthogonal", "momentum": 0.9, "nesterov": True},
    "factored": {"direction": "factored", "d": 0.5, "scale": "initial"},
}
ADAFACTOR_INPUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "absolute rate": {"lr": 0.02, "weight_decay": 0.1},
    "rate as in torch": {"lr": 0.02, "relative_step": True},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "clip": {"clip_threshold": 0.5, "beta2_decay": -1.0},
}


def recipe_inputs() -> dict[str, dict[str, Any]]:
    """The settings of each recipe, for each kind of layer that has its own."""
    found: dict[str, dict[str, Any]] = {}
    for name in RECIPES:
        for kind in KINDS:
            settings = find_recipe(name).settings(kind)
            if settings not in found.values():
                found[f"{name}, {kind}"] = settings
    return found


INPUTS = {"MaxFactor": MAXFACTOR_INPUTS | recipe_inputs(), "Adafactor": ADAFACTOR_INPUTS}
CLASSES: dict[str, type[Any]] = {"MaxFactor": MaxFactor, "Adafactor": Adafactor}


class UnusableError(Exception):
    """Why torch's database cannot be used."""


def load() -> ModuleType:
    """Import the database; raise `UnusableError` if this torch has none, or another one."""
    # The import forbids changes of torch.backends in this process, also for other tests.
    flags = torch.backends.disable_global_flags.__globals__
    allowed = "__allow_nonbracketed_mutation_flag"
    before = flags.get(allowed)
    try:
        database = __import__(DATABASE, fromlist=["optim_db"])
    except ImportError as error:
        raise UnusableError(f"{DATABASE} of torch {torch.__version__}: {error}") from error
    finally:
        flags[allowed] = before
    missing = [name for name in NAMES if not hasattr(database, name)]
    if not missing:
        missing = sorted(FIELDS - set(inspect.signature(database.OptimizerInfo).parameters))
    if missing:
        raise UnusableError(f"{DATABASE} of torch {torch.__version__} has no {', '.join(missing)}")
    return database


def entry(database: ModuleType, name: str) -> Any:
    """The `OptimizerInfo` of MaxFactor or Adafactor."""
    cls = CLASSES[name]

    def inputs(device: object, dtype: object = None) -> list[Any]:
        return [
            database.OptimizerInput(params=None, kwargs=kwargs, desc=description)
            for description, kwargs in INPUTS[name].items()
        ]

    fused_on = ("cpu", "cuda") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
    return database.OptimizerInfo(
        cls,
        optim_inputs_func=inputs,
        optim_error_inputs_func=database.get_error_inputs_for_all_optims,
        supported_impls=("foreach", "fused"),
        not_og_supported_flags=("foreach", "fused", "maximize", "capturable"),
        supports_fused_on=fused_on,
        supports_complex=False,
        supports_sparse=False,
        has_capturable_arg=True,
    )
