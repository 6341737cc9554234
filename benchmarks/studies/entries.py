"""Rows of tables: a recipe or a peer, with settings in place of its own.

Stored rows of `quality` and `fast` were measured before version 0.2.0, with weight decay 0.1 and
0.01 by `lr`. Rows here have this decay (EARLIER_DECAY), so they match what is stored, or that of
0.2.0 (DECAY_OF_0_2_0); `momentum_study.py --decay recipe` takes the recipe's own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import maxfactor
from maxfactor import recipes
from studies.runs import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN: dict[str, recipes.Recipe] = {str(name): found for name, found in recipes.OWN.items()}

EARLIER_DECAY: dict[str, dict[str, Any]] = {
    "quality": {"weight_decay": 0.1, "switches": {"decay_by": "lr"}},
    "fast": {"weight_decay": 0.01, "switches": {"decay_by": "lr"}},
}
DECAY_OF_0_2_0: dict[str, dict[str, Any]] = {
    "quality": {"weight_decay": 0.03, "switches": {"decay_by": "relative_step"}},
    "fast": {"weight_decay": 0.01, "switches": {"decay_by": "relative_step"}},
}
# Until 0.2.0 these recipes scaled steps by the present size of each weight.
EARLIER_SCALE: dict[str, dict[str, Any]] = {
    "fast": {"scale": "current"},
    "lean": {"scale": "current"},
}
# ... and small weights moved by a share of their own size, in every kind of layer.
EARLIER_EPS = {"eps": [1e-10, 1e-3]}
RAISED = ("conv", "embedding", "head")  # the kinds whose least size depends on their shape
# Convolutions moved as embeddings do; now they are orthogonal.
OF_CONVOLUTIONS: dict[str, Any] = {
    "direction": "sign_max",
    "momentum": None,
    "nesterov": False,
    "momentum_dtype": None,
    "lr_share": 1.0,
}
QUARTER = {"vector": {"lr_share": 0.25}}  # of the learning rate, for norms and biases
HALF_QUARTER = {"embedding": {"lr_share": 0.5}, **QUARTER}


@dataclass(frozen=True)
class Entry:
    """A row of a table: a run without its learning rate and seed."""

    name: str
    run: Run
    rates: tuple[float, ...]
    search: int = 1  # seeds at each rate, by whose mean the best rate is chosen
    seeds: int = 3  # at the best rate

    def at(self, lr: float, seed: int = 0) -> Run:
        """The run with a learning rate and a seed."""
        return replace(self.run, lr=lr, seed=seed)


def entry(
    name: str,
    optimizer: str,
    rates: Sequence[float],
    search: int = 1,
    seeds: int = 3,
    **settings: Any,
) -> Entry:
    """A row; `settings` are fields of Run, and anything else is an argument of `for_model`."""
    given = {key: settings.pop(key) for key in list(settings) if key in Run.__dataclass_fields__}
    if optimizer in OWN:
        earlier = EARLIER_DECAY.get(optimizer, {})
        settings = {**earlier, **EARLIER_EPS, **EARLIER_SCALE.get(optimizer, {}), **settings}
        by_kind = with_earlier_convolutions(given.get("by_kind", {}), optimizer, settings)
        is_quality = optimizer == "quality"
        given["by_kind"] = with_own_sizes(by_kind, settings) if is_quality else by_kind
    return Entry(
        name, Run(optimizer, rates[0], settings=settings, **given), tuple(rates), search, seeds
    )


def with_own_sizes(by_kind: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by kind, with the initial scale where the row does not say another."""
    if "scale" in settings:
        return by_kind
    kinds = ("hidden",) if "scale" in by_kind.get("others", {}) else ("hidden", *RAISED)
    own = {kind: {"scale": "initial", **by_kind.get(kind, {})} for kind in kinds}
    return {**by_kind, **own}


def with_earlier_convolutions(
    by_kind: dict[str, Any], recipe: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Settings by kind, with convolutions as all other layers where the row does not say more."""
    chosen: dict[str, Any] = {**OWN[recipe].common, **settings, **by_kind.get("others", {})}
    common = {name: chosen.get(name, default) for name, default in OF_CONVOLUTIONS.items()}
    if common["momentum"] is None:
        common["momentum_dtype"] = None
    if isinstance(common["momentum"], maxfactor.FAM):
        common["momentum"] = asdict(common["momentum"])
    return {**by_kind, "conv": {**common, **by_kind.get("conv", {})}}


def fam(**settings: Any) -> dict[str, Any]:
    """FAM's settings as a parameter group holds them, all of them, so that a key is complete."""
    return asdict(maxfactor.FAM(**settings))


def first(
    recipe: str, name: str, rates: Sequence[float], search: int = 1, **settings: Any
) -> Entry:
    """A row of `fast` or `quality` in its first form: the full learning rate for every layer.

    `fast` then had FAM up to 0.92.
    """
    momentum = {"momentum": fam(beta_max=0.92)} if recipe == "fast" else {}
    by_kind = settings.pop("by_kind", {})
    by_kind = {**by_kind, "others": {"lr_share": 1.0, **by_kind.get("others", {})}}
    return entry(name, recipe, rates, search, by_kind=by_kind, **{**momentum, **settings})


def first_fast(name: str, rates: Sequence[float], search: int = 1, **settings: Any) -> Entry:
    """A row of `fast` in its first form."""
    return first("fast", name, rates, search, **settings)


def first_quality(name: str, rates: Sequence[float], search: int = 1, **settings: Any) -> Entry:
    """A row of `quality` in its first form."""
    return first("quality", name, rates, search, **settings)


def with_recipe_decay(row: Entry) -> Entry:
    """The same row with the decay that its recipe has now, unless the row is about decay."""
    return _with_decay(row, {})


def with_decay_of_0_2_0(row: Entry) -> Entry:
    """The same row with the decay that its recipe had in 0.2.0, unless the row is about decay."""
    return _with_decay(row, DECAY_OF_0_2_0.get(row.run.optimizer, {}))


def _with_decay(row: Entry, decay: dict[str, Any]) -> Entry:
    run, earlier = row.run, EARLIER_DECAY.get(row.run.optimizer, {})
    is_earlier = earlier.items() <= run.settings.items()
    settings = {name: value for name, value in run.settings.items() if name not in earlier}
    changed = replace(run, settings={**settings, **decay})
    return replace(row, run=changed) if earlier and is_earlier else row
