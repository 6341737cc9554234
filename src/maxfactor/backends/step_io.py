"""What the optimizer hands to a backend, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from maxfactor.settings import Hyper
    from maxfactor.state import State


@dataclass(frozen=True)
class Pending:
    """A parameter, its gradient (never written) and its settings, before there is any state."""

    name: str
    param: Tensor
    grad: Tensor
    hyper: Hyper


@dataclass(frozen=True)
class Work(Pending):
    """What a backend gets: the state is written in place."""

    state: State


@dataclass
class Outcome:
    """What a step did: the step size of each parameter, or why nothing was changed."""

    step_sizes: Sequence[float | Tensor] | Tensor = field(default_factory=list)
    nonfinite: list[str] = field(default_factory=list)
