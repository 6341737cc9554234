"""What backends share: tasks and how they are run, and the equations of a task's scalars.

A step has two stages. The first reads every gradient once, for its sums of squares; they also
tell whether it is finite, before anything has changed. The second does the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.backends.step_io import Outcome
from maxfactor.distributed.placement import local
from maxfactor.rule import reference as rule
from maxfactor.rule.reference import Scalar, host_scalar, larger
from maxfactor.settings import FLOAT32_TINY, AdafactorHyper, Hyper, MaxFactorHyper
from maxfactor.state import factoring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from maxfactor.backends.step_io import Work


class Task(Protocol):
    """Parameters that are stepped together. Making the task is its first stage."""

    works: Sequence[Work]

    def sums_of_squares(self) -> Tensor:
        """One for each gradient."""

    def finish(self) -> Sequence[Scalar]:
        """The second stage: write parameters and state, return the step sizes."""


def run(tasks: Iterable[Task], works: Sequence[Work], *, check: bool) -> Outcome:
    """Finish the tasks into which the works were sorted, unless a gradient forbids it."""
    if check:  # without it each task is finished while its gradient is still in the cache
        tasks = list(tasks)
        if bad := nonfinite(tasks):
            return Outcome(nonfinite=[work.name for work in works if id(work) in bad])
    sizes: dict[int, Scalar] = {}
    for task in tasks:
        sizes.update(zip(map(id, task.works), task.finish(), strict=True))
    return Outcome([sizes[id(work)] for work in works])


def nonfinite(tasks: Sequence[Task]) -> set[int]:
    """The ids of the works whose gradient has a sum of squares that is not finite.

    A finite gradient can have one, too: its statistics would be lost for good.
    """
    works = [work for task in tasks for work in task.works]
    sums = [task.sums_of_squares() for task in tasks]
    finite = torch.cat([each.to(sums[0].device) for each in sums]).isfinite()
    # The one wait for the device: nothing may be written before this is known.
    return {id(work) for work, good in zip(works, finite.tolist(), strict=True) if not good}


def matrix_shape(work: Work) -> tuple[int, int] | None:
    """(m, n) of one factored matrix, (1, n) of a vector; None for what is rare."""
    param, hyper = work.param, work.hyper
    if param.dtype == torch.float64 or param.numel() == 0:
        return None
    layout = factoring(tuple(param.shape), hyper.factor)
    if layout is None:
        boosted = isinstance(hyper, MaxFactorHyper) and hyper.is_boosted_scalar(param.numel())
        return None if boosted else (1, param.numel())
    if "row_var" not in work.state or len(layout.matrix) > 2:
        return None
    return layout.matrix[0], layout.matrix[1]


def is_contiguous(work: Work) -> bool:
    """Whether parameter and gradient can be viewed as a matrix."""
    return work.param.is_contiguous() and work.grad.is_contiguous()


def is_filtered(work: Work) -> bool:
    """Whether a parameter takes the tasks of `filtered.py`."""
    return work.hyper.is_filtered(is_vector=work.param.dim() < 2)


def grouped(
    works: Sequence[Work], key: Callable[[Work], object], *, by_count: bool = True
) -> Iterator[tuple[Scalar, list[Work]]]:
    """The next step's number, and the works with one key that are stepped by the same numbers.

    A counter on the device is not read: such a work stays alone, or, without `by_count`, among
    others whose counters it may differ from. The number is then of no use.
    """
    groups: dict[object, tuple[Scalar, list[Work]]] = {}
    for work in works:
        t = host_scalar(work.state["step"])
        when: object = t
        if isinstance(t, Tensor):
            when = id(work) if by_count else "device"
        alike = (key(work), id(work.hyper), work.param.dtype, work.grad.dtype, work.param.device)
        groups.setdefault((alike, when), (t + 1, []))[1].append(work)
    yield from groups.values()


def chunks(works: Sequence[Work], limit: int) -> Iterator[list[Work]]:
    """Cut a list into parts of at most `limit` elements, but at least one tensor."""
    chunk: list[Work] = []
    elements = 0
    for work in works:
        elements += work.param.numel()
        if chunk and elements > limit:
            yield chunk
            chunk, elements = [], work.param.numel()
        chunk.append(work)
    yield chunk


class Other:
    """A parameter that takes the simple way."""

    def __init__(self, work: Work) -> None:
        self.works: Sequence[Work] = [work]

    def sums_of_squares(self) -> Tensor:
        """A pass of its own over the gradient."""
        norm: Tensor = vector_norm(self.works[0].grad.to(torch.float32))
        return norm.square().reshape(1)

    def finish(self) -> list[Scalar]:
        """One step of `rule`."""
        (work,) = self.works
        result = rule.step(work.param, work.grad, work.state, work.hyper)
        work.param.copy_(result.param)
        for key, value in result.state.items():
            work.state[key].copy_(value)  # in place: a checkpoint or a graph may hold the tensor
        return [result.step_size]


# -------------------------------------------------- equations of either rule, of one W or of many


def weight_sizes(works: Sequence[Work], t: Scalar, measure: Callable[[], Tensor]) -> Tensor:
    """The RMS of each W that (3) scales by, (k,), where `measure` returns the present ones.

    With scale="initial" nothing is measured after the first step where all of them began with a
    size, and that can be known without waiting for the device.
    """
    if not works[0].hyper.keeps_initial_rms:
        return measure()
    kept = [work.state["initial_rms"] for work in works]
    first = torch.stack(kept)
    if not isinstance(t, Tensor) and t != 1 and keep_to_first(works):
        return first
    t = t.reshape(-1) if isinstance(t, Tensor) else t
    sizes, now = rule.weight_size(measure(), first, t)
    torch._foreach_copy_(kept, now["initial_rms"].unbind())
    return sizes


def keep_to_first(works: Sequence[Work]) -> bool:
    """Whether (3) scales all of them by the RMS of their first step; False where a GPU knows."""
    if not works[0].hyper.keeps_initial_rms:
        return False
    kept = [local(work.state["initial_rms"]) for work in works]
    # Numbers of the CPU are read, as is the counter of steps.
    return all(not one.is_cuda and one.item() > 0 for one in kept)


def rates(size: Scalar, t: Scalar, hyper: Hyper) -> tuple[Scalar, Scalar]:
    """The step size (2) (3), and what decay leaves of W (4); `size` is RMS(W)."""
    if isinstance(hyper, AdafactorHyper):
        alpha, decay = rule.adafactor_rates(size, t, hyper)
    else:
        assert isinstance(hyper, MaxFactorHyper)
        lr = host_scalar(hyper.lr)
        alpha = rule.step_size(size, t, lr, hyper)
        decay = rule.decay_rate(alpha, t, lr, hyper) * hyper.weight_decay
    return alpha, 1.0 if hyper.weight_decay == 0.0 else 1 - decay


def downhill(alpha: Scalar, hyper: Hyper) -> Scalar:
    """The step size with the sign of the move."""
    return alpha if hyper.maximize else -alpha


def statistic_weight(t: Scalar, hyper: Hyper) -> Scalar:
    """Equation (1)."""
    if isinstance(hyper, MaxFactorHyper):
        return rule.statistic_weight(t, hyper)
    return t**hyper.beta2_decay


def means_of_squares(row_sum: Tensor, col_sum: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """What (5) averages, from the sums of squares (..., m, 1) and (..., 1, n)."""
    m, n = row_sum.shape[-2], col_sum.shape[-1]
    if isinstance(hyper, MaxFactorHyper):
        return row_sum / (n + hyper.count_eps), col_sum / (m + hyper.count_eps)
    return row_sum / n + hyper.eps1, col_sum / m + hyper.eps1


def relative_rows(row_var: Tensor, hyper: Hyper) -> Tensor:
    """Equation (6): the rows' factor of V, (..., m, 1)."""
    if not isinstance(hyper, MaxFactorHyper) or hyper.direction == "factored":
        return rule.relative_to_mean(row_var)
    if not hyper.max_norm:
        return row_var
    return row_var / row_var.amax(dim=-2, keepdim=True).clamp(min=hyper.floor)


def variance_floor(hyper: Hyper) -> float:
    """The smallest V."""
    return hyper.variance_floor if isinstance(hyper, MaxFactorHyper) else FLOAT32_TINY


def needs_largest(hyper: Hyper) -> bool:
    """Whether max|U| plays a part: the other updates are scaled by their norm alone."""
    return isinstance(hyper, MaxFactorHyper) and hyper.direction != "factored"


def needs_norm(hyper: Hyper) -> bool:
    """Whether ||U|| plays a part: with d >= 1 equation (8) is idle, as RMS(U) <= max|U| = 1."""
    if isinstance(hyper, MaxFactorHyper) and hyper.direction != "factored":
        return hyper.d < 1.0 or hyper.clip_threshold > 0.0
    return True


def update_scale(hyper: Hyper, largest: Scalar, norm: Scalar, rms: Scalar) -> Scalar:
    """What U = G / sqrt(V) is multiplied by, from max|U|, ||U|| and RMS(U)."""
    if isinstance(hyper, AdafactorHyper):
        return 1.0 / larger(rms / hyper.clip_threshold, 1.0)
    assert isinstance(hyper, MaxFactorHyper)
    if hyper.direction == "factored":
        return 1.0 / larger(rms / hyper.d, 1.0)  # (9)
    scale = 1.0 / larger(largest, hyper.floor)  # (7)
    if hyper.clip_threshold > 0.0:
        scale = scale * (hyper.clip_threshold / larger(norm * scale, hyper.clip_threshold))
    if hyper.d < 1.0:
        scale = scale / larger(rms * scale / hyper.d, 1.0)  # (8)
    return scale


def moves_by_sign(hyper: Hyper, *, is_vector: bool) -> bool:
    """Equation (9): whether a row moves by sign(U) times its largest entry, or by U itself."""
    if not isinstance(hyper, MaxFactorHyper) or hyper.direction == "factored":
        return False
    return hyper.vector_direction == "sign_max" if is_vector else hyper.max_norm
