"""One parameter's share of a step, as the optimizer hands it to a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from maxfactor.hyper import Hyper
    from maxfactor.state import State


@dataclass(frozen=True)
class Work:
    """A parameter, its gradient (never written), its state (written in place), its settings."""

    param: Tensor
    grad: Tensor
    state: State
    hyper: Hyper
