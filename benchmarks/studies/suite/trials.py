"""A trial: one optimizer with one learning rate and seed on one task."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from maxfactor.recipes import OWN
from maxfactor.settings import Switches

if TYPE_CHECKING:
    from maxfactor.recipes import Recipe, RecipeName
    from measurement import Record


@dataclass(frozen=True)
class Trial:
    """Everything that decides what a training computes.

    Args:
        task: A name in TASKS.
        optimizer: A recipe of ours, or a name in PEERS.
        lr: The highest learning rate.
        seed: Of the weights and of the order of the data.
        share: Of a peer of several optimizers: AdamW's part of the learning rate.
        settings: Of a recipe: arguments of `for_model`.
        by_kind: Of a recipe: settings for layers of one kind; `lr_share` scales their rate.
        iteration: "float32" for plain Newton-Schulz steps; empty for the device's own precision.
        quick: Everything tiny, to test the program.
    """

    task: str
    optimizer: str
    lr: float
    seed: int = 0
    share: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    by_kind: dict[str, dict[str, Any]] = field(default_factory=dict)
    iteration: str = ""
    quick: bool = False

    @property
    def described(self) -> Record:
        """The fields that are not empty, which is how a trial is stored."""
        return {name: value for name, value in asdict(self).items() if value or name == "seed"}

    @property
    def key(self) -> str:
        """A digest by which a trial is found again; that of a recipe has its settings, too."""
        return self.key_in(RULE_EDITIONS.get(self.optimizer, 0))

    def key_in(self, edition: int, recipe: Recipe | None = None) -> str:
        """The key with an edition of the recipe's rule, or with an earlier recipe, too."""
        settings = _settings(self.optimizer) if recipe is None else _as_text(recipe)
        suffix = f"{edition} {settings}" if settings else ""
        return _digest(json.dumps(self.described, sort_keys=True) + suffix)

    @property
    def jobs(self) -> int:
        """How many small trials it counts for."""
        from studies.suite.tasks import TASKS

        return TASKS[self.task].jobs

    @property
    def is_base(self) -> bool:
        """Whether fine-tuning begins with the trained model."""
        return self == base_trial(self.task, self.quick) and self.task in BASES

    def __str__(self) -> str:
        extra: dict[str, Any] = {**self.settings, **self.by_kind}
        if self.iteration:
            extra["iteration"] = self.iteration
        share = f" share {self.share:g}" if self.share else ""
        shown = f" {json.dumps(extra)}" if extra else ""
        return f"{self.task} {self.optimizer} lr {self.lr:g}{share} seed {self.seed}{shown}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


@functools.cache
def _settings(name: str) -> str:
    """The settings of a recipe; empty for a peer."""
    recipe = OWN.get(cast("RecipeName", name))
    return "" if recipe is None else _as_text(recipe)


def _as_text(recipe: Recipe) -> str:
    """Its settings, without a switch that was added later: stored trials keep their keys."""
    return str(recipe).replace(f", usual_from={Switches().usual_from}", "")


def base_trial(task: str, quick: bool) -> Trial:
    """The trial whose model fine-tuning begins with."""
    return Trial(task, "adamw-98", BASE_RATE, quick=quick)


RULE_EDITIONS = {"quality": 7, "fast": 6, "lean": 6}  # raised if equal settings compute otherwise
BASES = ("whisper", "llama")
BASE_RATE = 0.002
