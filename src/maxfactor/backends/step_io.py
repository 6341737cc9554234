"""What the optimizer hands to a backend, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from maxfactor.settings import GroupRules, TensorRule
    from maxfactor.state import State


class GroupStep(NamedTuple):
    """What a group contributes to a step: its rules, resolved once, and the rate of this step."""

    rules: GroupRules
    lr: float | Tensor


@dataclass
class StepInput:
    """A parameter, its gradient (never written), its rule and its state, which is written in place.

    The state is empty until a backend was chosen. `group` is the index of the parameter's group.
    """

    name: str
    param: Tensor
    grad: Tensor
    rule: TensorRule
    lr: float | Tensor
    group: int
    state: State = field(default_factory=dict)


@dataclass
class StepResult:
    """The step size of each parameter, or the names of those whose gradient is not finite."""

    step_sizes: Sequence[float | Tensor] | Tensor = field(default_factory=list)
    nonfinite: list[str] = field(default_factory=list)
