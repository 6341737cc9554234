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

# The kinds of parameters in `for_model`, in the order of its groups.
KINDS = ("hidden", "conv", "tensor", "embedding", "head", "adapter", "vector")


@dataclass(frozen=True)
class Recipe:
    """Settings of all kinds of layers, and overrides for some kinds.

    `lr_share` is not a setting of the optimizer. It scales the learning rate of a kind.
    """

    common: dict[str, Any]
    by_kind: dict[str, dict[str, Any]] = field(default_factory=dict)

    def settings(self, kind: str | None = None, lr: float | Tensor | None = None) -> dict[str, Any]:
        """The arguments for a kind; for None those that all kinds have in common."""
        chosen = self._chosen(kind)
        share = chosen.pop("lr_share")
        if kind == "vector":
            chosen["weight_decay"] = 0.0
        rate = chosen["lr"] if lr is None else lr
        # With a share of 1 a tensor stays the caller's own, who may change it later.
        return {**chosen, "lr": rate if share == 1.0 else rate * share}

    def share(self, kind: str) -> float:
        """The factor of a kind's learning rate."""
        share: float = self._chosen(kind)["lr_share"]
        return share

    def _chosen(self, kind: str | None) -> dict[str, Any]:
        return {"lr_share": 1.0, **self.common, **self.by_kind.get(kind or "", {})}


COMMON = {"lr": 0.01, "gamma": 0.99, "d": 1.0}

# Each is a column of docs/published-versions.md; the rest are the defaults.
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

# The direction of hidden matrices in `quality`, and of convolutions in all of our own recipes. The
# first layers of a speech model learn much faster with it, and are a small part of a transformer.
ORTHOGONAL = {
    "direction": "orthogonal",
    "momentum": 0.9,
    "nesterov": True,
    "momentum_dtype": "int8",
}

# Our own recipes: version 1.0 with these changes.
OWN: dict[RecipeName, Recipe] = {
    "lean": Recipe(
        {
            **COMMON,
            "lr": 0.04,
            "weight_decay": 0.0,
            "direction": "factored",
        },
        {
            # Smaller matrices, such as those that begin at zero, move as if their RMS were 0.005.
            "hidden": {"eps": (1e-10, 0.005)},
            "conv": {**ORTHOGONAL, "scale": "raised"},
            "tensor": {"scale": "raised"},
            "embedding": {"scale": "raised"},
            "head": {"scale": "raised"},
            "adapter": {"scale": "initial", "lr_share": 2.8},
            # Biases start at or near zero: they move as if their RMS were 0.1.
            "vector": {"eps": (1e-10, 0.1)},
        },
    ),
    "fast": Recipe(
        {
            **COMMON,
            "momentum": FAM(beta_max=0.84),
            "momentum_dtype": "int8",
            "lr": 0.08,
            "weight_decay": 0.01,
            "direction": "factored",
            "d": math.inf,  # (10) bounds the input of the momentum
            "scale": "initial",
            "switches": Switches(decay_by="relative_step"),
        },
        {
            "conv": {**ORTHOGONAL, "scale": "raised", "lr_share": 0.5},
            "tensor": {"scale": "raised"},
            "embedding": {"scale": "raised", "lr_share": 0.5},
            "head": {"scale": "raised", "lr_share": 0.5},  # as when it is tied to the embedding
            "adapter": {"lr_share": 2.0},
            "vector": {"scale": "current", "eps": (1e-10, 0.2), "lr_share": 0.25},
        },
    ),
    "quality": Recipe(
        {
            **COMMON,
            "momentum": FAM(beta_max=0.92),
            "momentum_dtype": "int8",
            "lr": 0.04,
            "weight_decay": 0.03,
            "direction": "factored",
            "d": math.inf,
            "scale": "initial",
            "switches": Switches(decay_by="squared_step"),
        },
        {
            "hidden": {**ORTHOGONAL, "scale": "usual", "weight_decay": 0.06},
            "conv": {**ORTHOGONAL, "scale": "raised"},
            "adapter": ORTHOGONAL,
            "tensor": {"scale": "raised"},
            "embedding": {"scale": "raised"},
            "head": {"scale": "raised"},
            "vector": {"scale": "current", "eps": (1e-10, 0.4), "lr_share": 0.25},
        },
    ),
}


def find_recipe(name: RecipeName) -> Recipe:
    """Return a recipe by its name."""
    if name in PUBLISHED:
        return Recipe({**COMMON, **PUBLISHED[name]})
    if name not in OWN:
        known = ", ".join(map(repr, RECIPES))
        raise ValueError(f"unknown recipe {name!r}; known recipes: {known}")
    return OWN[name]


def recipe(name: RecipeName) -> dict[str, Any]:
    """Return the arguments of a published version of MaxFactor.

    Args:
        name: "published-0.1", "published-0.2", "published-0.3" or "published-1.0". "quality",
            "fast" and "lean" differ from layer to layer and are for `for_model` alone.

    Returns:
        A new dict of arguments for `MaxFactor`, which you may change.

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
