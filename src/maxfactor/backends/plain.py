"""The plain backend: `rule.step` for one parameter after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from maxfactor import rule
from maxfactor.work import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.work import Work


def step(works: Sequence[Work], *, check: bool) -> Outcome:
    """Take one step for each parameter; with `check`, none at all if a gradient is not finite."""
    if check and (bad := [w.name for w in works if not torch.isfinite(w.grad).all()]):
        return Outcome(nonfinite=bad)
    return Outcome([_step_one(work) for work in works])


def _step_one(work: Work) -> rule.Scalar:
    result = rule.step(work.param, work.grad, work.state, work.hyper)
    work.param.copy_(result.param)
    for key, value in result.state.items():
        work.state[key].copy_(value)  # in place: a checkpoint or a graph may hold the tensor
    return result.step_size
