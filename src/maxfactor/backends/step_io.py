"""The input of a backend, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from maxfactor.settings import GroupRules, TensorRule
    from maxfactor.state import State


class GroupStep(NamedTuple):
    """The rules of a parameter group, and its learning rate in this step."""

    rules: GroupRules
    lr: float | Tensor


@dataclass
class StepInput:
    """A parameter with its gradient, rule and state. A backend updates the state in place.

    It never writes to the gradient. The state is empty until a backend has been chosen. `group` is
    the index of the parameter's group; no batch crosses a `window`.
    """

    name: str
    param: Tensor
    grad: Tensor
    rule: TensorRule
    lr: float | Tensor
    group: int
    state: State = field(default_factory=dict)
    window: int = 0


@dataclass
class StepResult:
    """The step size of each parameter, or the names of parameters with a nonfinite gradient."""

    step_sizes: Sequence[float | Tensor] | Tensor = field(default_factory=list)
    nonfinite: list[str] = field(default_factory=list)
