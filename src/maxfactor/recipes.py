"""Named sets of arguments: the published versions of MaxFactor, and recipes by layer kind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from maxfactor.settings import FAM, Switches

if TYPE_CHECKING:
    from torch import Tensor

RecipeName = Literal[
    "quality", "fast", "lean", "published-0.1", "published-0.2", "published-0.3", "published-1.0"
]
RECIPES: tuple[RecipeName, ...] = get_args(RecipeName)

# What `for_model` sorts a model's parameters into, in the order of its groups.
KINDS = ("hidden", "conv", "embedding", "head", "vector")


@dataclass(frozen=True)
class Recipe:
    """Settings for every kind of layer, and what differs for some.

    `lr_share` is not a setting of the optimizer: it is a kind's share of the learning rate.
    """

    common: dict[str, Any]
    by_kind: dict[str, dict[str, Any]] = field(default_factory=dict)

    def settings(self, kind: str | None = None, lr: float | Tensor | None = None) -> dict[str, Any]:
        """The arguments for a kind, or without one those that kinds have in common."""
        chosen = self._chosen(kind)
        share = chosen.pop("lr_share")
        if kind == "vector":
            chosen["weight_decay"] = 0.0
        rate = chosen["lr"] if lr is None else lr
        # A whole share leaves a tensor the caller's own, which may be changed from outside.
        return {**chosen, "lr": rate if share == 1.0 else rate * share}

    def share(self, kind: str) -> float:
        """A kind's share of the learning rate."""
        share: float = self._chosen(kind)["lr_share"]
        return share

    def _chosen(self, kind: str | None) -> dict[str, Any]:
        return {"lr_share": 1.0, **self.common, **self.by_kind.get(kind or "", {})}


COMMON = {"lr": 0.01, "gamma": 0.99, "d": 1.0}

# One column of the table of versions each; what a version leaves out has its default.
PUBLISHED: dict[RecipeName, dict[str, Any]] = {
    "published-0.1": {
        "eps": (None, 1e-3),
        "weight_decay": 0.0,
        "switches": Switches(eps_rms=1e-8),
    },
    "published-0.2": {
        "eps": (None, 1e-3),
        "weight_decay": 0.0,
        "switches": Switches(
            kappa_bounds=(0.0, 0.999),
            step_rule="ramp",
            decay_by="step_size",
            mean_eps=1e-12,
            clip_threshold=1.0,
            vector_direction="update",
        ),
    },
    "published-0.3": {
        "eps": (1e-10, 1e-4),
        "weight_decay": 0.01,
        "switches": Switches(
            kappa_bounds=(0.001, 0.999),
            min_lr=1e-7,
            mean_eps=None,
            scalar_boost=2.0,
            vector_direction="update",
        ),
    },
    "published-1.0": {"eps": (1e-10, 1e-3), "weight_decay": 0.01},
}

# Recipes of our own: version 1.0 but for what is said here. Their decay follows the step.
OWN: dict[RecipeName, Recipe] = {
    "lean": Recipe({**COMMON, "lr": 0.028, "weight_decay": 0.0, "direction": "factored"}),
    "fast": Recipe(
        {
            **COMMON,
            "momentum": FAM(beta_max=0.84),
            "momentum_dtype": "int8",
            "lr": 0.04,
            "weight_decay": 0.01,
            "direction": "factored",
            "d": math.inf,  # (10) has bounded the input of the filter
            "switches": Switches(decay_by="relative_step"),
        },
        {
            "embedding": {"lr_share": 0.5},
            "head": {"lr_share": 0.5},  # as when it is tied to the embedding
            "vector": {"lr_share": 0.25},
        },
    ),
    "quality": Recipe(
        {
            **COMMON,
            "momentum": FAM(beta_max=0.92),
            "momentum_dtype": "int8",
            "lr": 0.02,
            "weight_decay": 0.03,
            "direction": "factored",
            "d": math.inf,
            "scale": "initial",
            "switches": Switches(decay_by="relative_step"),
        },
        {
            "hidden": {"direction": "orthogonal", "momentum": 0.9, "nesterov": True},
            # Biases begin at zero: by their first size they would hardly ever move.
            "vector": {"scale": "current", "lr_share": 0.25},
        },
    ),
}


def find_recipe(name: RecipeName) -> Recipe:
    """Return a recipe by its name, or say which there are."""
    if name in PUBLISHED:
        return Recipe({**COMMON, **PUBLISHED[name]})
    if name not in OWN:
        known = ", ".join(map(repr, RECIPES))
        raise ValueError(f"unknown recipe {name!r}; known recipes: {known}")
    return OWN[name]


def recipe(name: RecipeName) -> dict[str, Any]:
    """Return the arguments of a published version of MaxFactor, or of another recipe.

    Args:
        name: "published-0.1", "published-0.2", "published-0.3", "published-1.0" or "lean". "fast"
            and "quality" differ from layer to layer and are for `for_model` alone.

    Returns:
        A new dict, to be changed as you like and unpacked into `MaxFactor`.

    Example:
        >>> import torch, maxfactor
        >>> weight = torch.nn.Parameter(torch.ones(3, 2))
        >>> settings = maxfactor.recipe("published-0.2") | {"weight_decay": 0.1}
        >>> optimizer = maxfactor.MaxFactor([weight], **settings)
    """
    found = find_recipe(name)
    if found.by_kind:
        raise ValueError(
            f"recipe {name!r} has different settings for different layers; "
            f"use maxfactor.for_model(model, recipe={name!r})"
        )
    return found.settings()
