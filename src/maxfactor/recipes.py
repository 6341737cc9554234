"""Named sets of arguments: the published versions of MaxFactor."""

from __future__ import annotations

from typing import Any

# One column of the table of versions each; what a version leaves out has its default.
RECIPES: dict[str, dict[str, Any]] = {
    "0.1": {
        "eps": (None, 1e-3),
        "weight_decay": 0.0,
        "eps_rms": 1e-8,
    },
    "0.2": {
        "eps": (None, 1e-3),
        "weight_decay": 0.0,
        "kappa_bounds": (0.0, 0.999),
        "step_rule": "ramp",
        "decay_by": "step_size",
        "mean_eps": 1e-12,
        "clip_threshold": 1.0,
        "vector_direction": "update",
    },
    "0.3": {
        "eps": (1e-10, 1e-4),
        "weight_decay": 0.01,
        "kappa_bounds": (0.001, 0.999),
        "min_lr": 1e-7,
        "mean_eps": None,
        "scalar_boost": 2.0,
        "vector_direction": "update",
    },
    "1.0": {
        "eps": (1e-10, 1e-3),
        "weight_decay": 0.01,
    },
}
COMMON = {"lr": 0.01, "gamma": 0.99, "d": 1.0}


def recipe(name: str) -> dict[str, Any]:
    """Return the arguments of a published version of MaxFactor.

    Args:
        name: "0.1", "0.2", "0.3" or "1.0".

    Returns:
        A new dict, to be changed as you like and unpacked into `MaxFactor`.

    Example:
        >>> import torch, maxfactor
        >>> weight = torch.nn.Parameter(torch.ones(3, 2))
        >>> settings = maxfactor.recipe("0.2") | {"clip_threshold": 0.0}
        >>> optimizer = maxfactor.MaxFactor([weight], **settings)
    """
    if name not in RECIPES:
        known = ", ".join(repr(known) for known in RECIPES)
        raise ValueError(f"unknown recipe {name!r}; known recipes: {known}")
    return {**COMMON, **RECIPES[name]}
