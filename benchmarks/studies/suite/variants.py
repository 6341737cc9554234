"""Recipes at their own rates, and variants of them from which the recipes are chosen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from maxfactor.recipes import OWN
from studies.suite.search import Search
from studies.suite.tasks import FAMILIES, TASKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from maxfactor.recipes import RecipeName
    from studies.suite.trials import Trial

WHOLE = tuple(family for family in FAMILIES if family != "lora")  # the whole model is trained
GRID = (0.25, 0.5, 1.0, 2.0, 4.0)  # of a recipe's own rate, 16 x from end to end


@dataclass(frozen=True)
class Variant:
    """A recipe with other settings, on all families or on some."""

    recipe: str
    rates: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    by_kind: dict[str, dict[str, Any]] = field(default_factory=dict)
    families: tuple[str, ...] = FAMILIES


def relative(weight_decay: float, **switches: Any) -> dict[str, Any]:
    """Decay by the relative step."""
    return {
        "weight_decay": weight_decay,
        "switches": {"decay_by": "relative_step", **switches},
    }


HIGH = (0.04,)
OTHERS = ("conv", "embedding", "head")
VARIANTS: dict[str, Variant] = {
    "quality": Variant("quality", (0.02, 0.04, 0.08)),
    "quality wd 0": Variant("quality", HIGH, relative(0.0)),
    "quality wd .1": Variant("quality", HIGH, relative(0.1)),
    "quality vectors 1": Variant(
        "quality", HIGH, by_kind={"vector": {"lr_share": 1.0}}, families=WHOLE
    ),
    "quality vectors .03": Variant(
        "quality", HIGH, by_kind={"vector": {"eps": [1e-10, 0.03]}}, families=WHOLE
    ),
    "quality vectors 1 .03": Variant(
        "quality", HIGH, by_kind={"vector": {"eps": [1e-10, 0.03], "lr_share": 1.0}}, families=WHOLE
    ),
    "quality others .5": Variant(
        "quality", HIGH, by_kind={kind: {"lr_share": 0.5} for kind in OTHERS}, families=WHOLE
    ),
    "quality beta .95": Variant(
        "quality", HIGH, by_kind={"hidden": {"momentum": 0.95}}, families=WHOLE
    ),
    "quality adapters FAM": Variant(
        "quality",
        HIGH,
        by_kind={
            "adapter": {"direction": "factored", "momentum": {"beta_max": 0.92}, "nesterov": False}
        },
        families=("lora",),
    ),
    "fast": Variant("fast", (0.04, 0.08, 0.16)),
    "fast beta .92": Variant("fast", HIGH, {"momentum": {"beta_max": 0.92}}),
    "fast mix .16": Variant("fast", HIGH, {"momentum": {"beta_max": 0.84, "mix": 0.16}}),
    "fast vectors 1 .03": Variant(
        "fast", HIGH, by_kind={"vector": {"eps": [1e-10, 0.03], "lr_share": 1.0}}, families=WHOLE
    ),
    "fast wd .03": Variant("fast", HIGH, relative(0.03)),
    "lean": Variant("lean", (0.014, 0.028, 0.056)),
}


def own_rate(recipe: str) -> float:
    """The rate that a recipe has by default."""
    return float(OWN[cast("RecipeName", recipe)].common["lr"])


def own_search(name: str, task: str, trial: Callable[..., Trial]) -> Search:
    """A recipe at its own rate with all seeds, and over a grid of rates."""
    own = own_rate(name)
    rates = tuple(float(f"{own * factor:.4g}") for factor in GRID)
    return Search(name, trial(task, name, own), rates, extends=False, always=own)


def variant_search(name: str, task: str, trial: Callable[..., Trial]) -> Search | None:
    """A variant at its rates, with one seed; None if it is not for the task's family."""
    variant = VARIANTS[name]
    if TASKS[task].family not in variant.families:
        return None
    made = replace(
        trial(task, variant.recipe, variant.rates[0]),
        settings=variant.settings,
        by_kind=variant.by_kind,
    )
    return Search(name, made, variant.rates, extends=False, seeds=(0,))
