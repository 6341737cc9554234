"""Recipes at their own rates, and variants of them from which the recipes are chosen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from maxfactor.recipes import OWN
from studies.suite.search import Search, seeds_of
from studies.suite.tasks import FAMILIES, NARROW, SCALE, TASKS, UNSEEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from maxfactor.recipes import RecipeName
    from studies.suite.trials import Trial

WHOLE = tuple(family for family in FAMILIES if family != "lora")  # the whole model is trained
EVERYWHERE = (*FAMILIES, NARROW)
OUTER = ("conv", "embedding", "head")  # kinds with a least size
GRID = (0.25, 0.5, 1.0, 2.0, 4.0)  # of a recipe's own rate, 16 x from end to end
TENFOLD = 10.0  # a rate at which nothing may become NaN


@dataclass(frozen=True)
class Variant:
    """A recipe with other settings, on all families or on some."""

    recipe: str
    rates: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    by_kind: dict[str, dict[str, Any]] = field(default_factory=dict)
    families: tuple[str, ...] = FAMILIES
    iteration: str = ""


def relative(weight_decay: float, **switches: Any) -> dict[str, Any]:
    """Decay by the relative step."""
    return {
        "weight_decay": weight_decay,
        "switches": {"decay_by": "relative_step", **switches},
    }


def floor(size: float, **more: Any) -> dict[str, Any]:
    """Smaller weights move as if their size were this."""
    return {"eps": [1e-10, size], **more}


def floors(size: float, vectors: float) -> dict[str, dict[str, Any]]:
    """Least sizes of everything but hidden matrices."""
    return {**{kind: floor(size) for kind in OUTER}, "vector": floor(vectors)}


def changed(
    recipe: str,
    by_kind: dict[str, dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
    families: tuple[str, ...] = WHOLE,
    iteration: str = "",
) -> Variant:
    """A recipe at its own rate, with other settings of some kinds of layers or of all."""
    rates = (own_rate(recipe),)
    return Variant(recipe, rates, settings or {}, by_kind or {}, families, iteration)


def own_rate(recipe: str) -> float:
    """The rate that a recipe has by default."""
    return float(OWN[cast("RecipeName", recipe)].common["lr"])


A_THIRD = {"switches": {"decay_by": "squared_step", "usual_from": 1.0 / 3.0}}
UNCAPPED = {"step_rule": "uncapped"}
SQUARED = {"switches": {"decay_by": "squared_step"}}
ORTHOGONAL = {"direction": "orthogonal", "momentum": 0.9, "nesterov": True}


def share(kind: str, part: float) -> dict[str, dict[str, Any]]:
    """Another share of the rate for a kind."""
    return {kind: {"lr_share": part}}


def adaptive(beta_max: float, part: float = 1.0) -> dict[str, dict[str, Any]]:
    """Convolutions with FAM, as they were before they were orthogonal."""
    momentum = {"direction": "factored", "momentum": {"beta_max": beta_max}, "nesterov": False}
    return {"conv": {**momentum, "lr_share": part}}


WITHOUT = {"direction": "factored", "momentum": None, "nesterov": False, "momentum_dtype": None}

# The most promising first: time may be over before the last.
VARIANTS: dict[str, Variant] = {
    "quality": Variant("quality", (0.04,), families=EVERYWHERE),
    "fast": Variant("fast", (0.08,)),
    "lean": Variant("lean", (0.04,)),
    "quality usual from a third": changed("quality", {"hidden": A_THIRD}, families=EVERYWHERE),
    "quality hidden wd .03": changed("quality", {"hidden": {"weight_decay": 0.03}}),
    "quality hidden wd .1": changed("quality", {"hidden": {"weight_decay": 0.1}}),
    # Better with every seed on a CPU; not measured on a GPU yet.
    "quality adapter momentum .8": changed(
        "quality", {"adapter": {"momentum": 0.8}}, families=("lora",)
    ),
    "fast by the square": changed("fast", settings=SQUARED),
    "fast usual": changed("fast", {"hidden": {"scale": "usual"}}),
    "lean usual": changed("lean", {"hidden": {"scale": "usual"}}),
    "quality own sizes": changed("quality", {"hidden": {"scale": "initial"}}),
    "quality conv adaptive": changed("quality", adaptive(0.92)),
    "quality conv adaptive, double": changed("quality", adaptive(0.92, 2.0)),
    "quality conv double": changed("quality", share("conv", 2.0)),
    "quality conv half": changed("quality", share("conv", 0.5)),
    "fast conv adaptive": changed("fast", adaptive(0.84)),
    "fast conv double": changed("fast", share("conv", 1.0)),
    "lean conv factored": changed("lean", {"conv": WITHOUT}),
    "lean conv double": changed("lean", share("conv", 2.0)),
    "lean initial": Variant("lean", (0.028, 0.056), {"scale": "initial"}),
    "quality outer orthogonal": changed("quality", dict.fromkeys(OUTER[1:], ORTHOGONAL)),
    "quality head double": changed("quality", share("head", 2.0)),
    "quality vectors double": changed("quality", share("vector", 0.5)),
    # Attention matrices in blocks; of 6 heads, groups of 4 are groups of 3.
    "quality heads one by one": changed("quality", settings={"heads_per_block": 1}),
    "quality groups of 4 heads": changed("quality", settings={"heads_per_block": 4}),
    "fast uncapped": changed("fast", settings=relative(0.01, **UNCAPPED)),
    "quality half": Variant("quality", (0.02,)),
    "quality double": Variant("quality", (0.08,)),
    "fast half": Variant("fast", (0.04,)),
    "fast wd .03": changed("fast", settings=relative(0.03), families=FAMILIES),
    # Another precision of the same equations.
    "quality iterated in float32": changed("quality", iteration="float32"),
}


def own_search(name: str, task: str, trial: Callable[..., Trial]) -> Search:
    """A recipe at its own rate with all seeds, and over a grid of rates."""
    own = own_rate(name)
    grid: tuple[float, ...] = (*GRID, TENFOLD)
    if TASKS[task].family in (SCALE, UNSEEN):  # the best rate of the default recipe alone
        grid = GRID if name == "quality" else (1.0,)
    rates = tuple(float(f"{own * factor:.4g}") for factor in grid)
    made = trial(task, name, own)
    return Search(name, made, rates, extends=False, seeds=seeds_of(task), always=own)


def variant_search(
    name: str, task: str, trial: Callable[..., Trial], seeds: tuple[int, ...] = (0,)
) -> Search | None:
    """A variant at its rates, with one seed or more; None if it is not for the task's family."""
    variant = VARIANTS[name]
    if TASKS[task].family not in variant.families:
        return None
    made = replace(
        trial(task, variant.recipe, variant.rates[0]),
        settings=variant.settings,
        by_kind=variant.by_kind,
        iteration=variant.iteration,
    )
    return Search(name, made, variant.rates, extends=False, seeds=seeds)
