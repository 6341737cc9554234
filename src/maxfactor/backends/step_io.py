"""The input of a backend, its result, and what autograd is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from maxfactor.backends.guard import BadGradients
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
    the index of the parameter's group; no batch whose results depend on it crosses a `window`.
    """

    name: str
    param: Tensor
    grad: Tensor
    rule: TensorRule
    lr: float | Tensor
    group: int
    state: State = field(default_factory=dict)
    window: int = 0


class Measured(NamedTuple):
    """What a recorded step measured of a parameter; sums are over all of its entries."""

    step_size: float  # alpha of (3)
    gradient_squares: float  # sum of G^2
    change_squares: float = 0.0  # sum of (W after - W before)^2
    weight_squares: float = 0.0  # sum of W^2 after the step
    lost: float = 0.0  # entries of W whose change rounding to nearest would drop
    beta: float | None = None  # of (12), the mean over bands; None without momentum
    clip: float = 1.0  # what bounds divided the update by: (8), (10) and the clip of the norm


class StepRecord(Protocol):
    """The measurements of a recorded step, on the device until they are read."""

    def read(self) -> tuple[bool, dict[Tensor, Measured]]:
        """Whether the step was skipped, and what was measured; waits for the device."""


@dataclass
class StepResult:
    """The step size of each parameter, or the gradients that stopped the step."""

    step_sizes: Sequence[float | Tensor] | Tensor = field(default_factory=list)
    bad: BadGradients | None = None
    record: StepRecord | None = None  # of a recorded step


def increment_version(params: Sequence[Tensor]) -> None:
    """Tell autograd of writes through addresses, as an in-place operation would."""
    try:
        torch.autograd.graph.increment_version(list(params))
    except (AttributeError, TypeError, RuntimeError):  # an older torch takes one at a time
        for param in params:
            torch.autograd.graph.increment_version(param)
