"""The plain backend: `rule.step` for one parameter after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maxfactor import rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.work import Work


def step(works: Sequence[Work]) -> list[rule.Scalar]:
    """Take one step for each parameter; return the step size that each of them used."""
    return [_step_one(work) for work in works]


def _step_one(work: Work) -> rule.Scalar:
    result = rule.step(work.param, work.grad, work.state, work.hyper)
    work.param.copy_(result.param)
    for key, value in result.state.items():
        work.state[key].copy_(value)  # in place: a checkpoint or a graph may hold the tensor
    return result.step_size
