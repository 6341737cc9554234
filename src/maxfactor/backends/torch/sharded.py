"""Sharded parameters: the equations of `rule.py` on local shards, with few and small messages.

A step has three rounds, each with at most one all-reduce for each process group:

    1  sums       of G^2 by rows and columns, of W^2, of R (or v) before the step; what is finite
    2  maxima     of R in (6)
    3  maxima     of |U|, of its rows where columns are cut; sums of U^2 and those of FAM's bands

Each parameter is a generator that yields what it needs of the other ranks; all of them go through
the rounds together. Means and factors are those of the whole tensor, so nothing depends on how it
was cut but the order of the sums. Copies (DDP, HSDP, plain tensors) need no messages. Matrices in
the orthogonal direction are dealt out over the ranks, see `deal.py`: two more messages.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.backends.step_io import Outcome
from maxfactor.backends.torch import tasks
from maxfactor.distributed.owner_exchange import Part, orthogonalize_, whole
from maxfactor.distributed.placement import is_sharded, local, moved, positions, shards_of
from maxfactor.distributed.reductions import Share, combined
from maxfactor.rule import reference as rule
from maxfactor.rule.fam import band_totals
from maxfactor.rule.momentum import Memory, kept, memory_of, recalled
from maxfactor.rule.reference import Scalar, host_scalar
from maxfactor.rule.rounding import is_stochastic, rounded
from maxfactor.settings import FLOAT32_TINY, MaxFactorHyper
from maxfactor.state import Factoring, State, factoring

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.placement_types import Placement

    from maxfactor.backends.step_io import Pending, Work

    Rounds = Generator[list[Share], list[Tensor], Scalar]

ROUNDS = 3


def step(works: Sequence[Work], *, check: bool) -> Outcome:
    """Take one step for each parameter; with `check`, none at all if a gradient is not finite."""
    groups = process_groups(works)
    shards = [Shard(*each) for each in zip(works, local_gradients(works), strict=True)]
    rounds = [shard.rounds() for shard in shards]
    shares = [next(each) for each in rounds]
    bad = torch.stack([~own[0].value.isfinite().to(works[0].param.device) for own in shares])
    flags = Share(bad.to(torch.float32), groups)  # over all groups: no rank goes on alone
    *got, flagged = combined([*(share for own in shares for share in own), flags], groups)
    answers = dealt(got, shares)
    if check:
        overflown = torch.stack([~own[0].isfinite().to(flagged.device) for own in answers])
        # The one wait for the device: nothing may be written before this is known.
        failed = ((flagged > 0) | overflown).tolist()
        if any(failed):
            return Outcome(nonfinite=[w.name for w, f in zip(works, failed, strict=True) if f])
    for _ in range(ROUNDS - 1):
        shares = [each.send(own) for each, own in zip(rounds, answers, strict=True)]
        answers = dealt(combined([share for own in shares for share in own], groups), shares)
    orthogonalize_([shard.part for shard in shards if shard.part is not None])  # (9)
    return Outcome([finished(each, own) for each, own in zip(rounds, answers, strict=True)])


def dealt(values: list[Tensor], shares: list[list[Share]]) -> list[list[Tensor]]:
    """The combined values as each parameter asked for them."""
    rest = iter(values)
    return [[next(rest) for _ in own] for own in shares]


def finished(rounds: Rounds, answer: list[Tensor]) -> Scalar:
    """Let a parameter finish its step, and return its step size."""
    try:
        rounds.send(answer)
    except StopIteration as end:
        size: Scalar = end.value
        return size
    raise AssertionError("a step has three rounds")


def process_groups(works: Sequence[Pending]) -> list[ProcessGroup]:
    """The groups over which anything is cut, in the same order on every rank."""
    found: dict[ProcessGroup, None] = {}
    for work in works:
        found.update(dict.fromkeys(groups_over(work.param, range(work.param.dim()))))
    return list(found)


def groups_over(param: Tensor, dims: Sequence[int]) -> list[ProcessGroup]:
    """The groups whose ranks hold different parts of the given dimensions."""
    if not is_sharded(param):
        return []
    return [param.device_mesh.get_group(i) for i, dim in shards_of(param) if dim in dims]


def local_gradients(works: Sequence[Pending]) -> list[Tensor]:
    """What this rank has of each gradient, placed as its parameter.

    Sums that nobody has taken yet, of sequence-parallel layers, are taken together.
    """
    shares = []
    for work in works:
        groups = groups_to_sum(work)
        grad = local(work.grad).to(torch.float32) if groups else local(moved(work.grad, work.param))
        shares.append(Share(grad, groups))
    return combined(shares, list(dict.fromkeys(g for share in shares for g in share.groups)))


def groups_to_sum(work: Pending) -> list[ProcessGroup]:
    """The groups over which a gradient is still to be summed, if nothing else is to be done."""
    grad, param = work.grad, work.param
    if not is_sharded(grad) or not is_sharded(param) or grad.device_mesh != param.device_mesh:
        return []
    pairs = list(zip(grad.placements, param.placements, strict=True))
    if not all(have == want or is_sum(have, want) for have, want in pairs):
        return []
    return [grad.device_mesh.get_group(i) for i, (have, want) in enumerate(pairs) if have != want]


def is_sum(have: Placement, want: Placement) -> bool:
    """Whether parts of a sum over a mesh dimension are to become copies of it."""
    return want.is_replicate() and getattr(have, "reduce_op", None) == "sum"


def without_gradient(works: Sequence[Pending]) -> bool:
    """Whether every gradient is zero, on all ranks."""
    largest = torch.stack(
        [largest_of(local(work.grad).reshape(-1), -1).to(torch.float32) for work in works]
    )
    groups = process_groups(works)
    groups += {g: None for work in works for g in groups_to_sum(work) if g not in groups}
    (found,) = combined([Share(largest, groups, is_sum=False)], groups)
    # Asked for only before the first step, and with a learning rate of 0.
    return not any(found.reshape(-1).tolist())


class Shard:
    """One parameter's shard."""

    def __init__(self, work: Work, grad: Tensor) -> None:
        self.work, self.hyper = work, work.hyper
        self.t = host_scalar(work.state["step"]) + 1
        self.layout = factoring(tuple(work.param.shape), work.hyper.factor)
        self.w = local(work.param)
        self.state: State = {key: local(value) for key, value in work.state.items()}
        own = None if self.layout is None else self.layout.of_shard(tuple(self.w.shape))
        self.shape = (1, self.w.numel()) if own is None else own.matrix
        g = grad.to(torch.float32).reshape(self.shape)
        self.g = -g if work.hyper.maximize else g
        self.m, self.n = (1, work.param.numel()) if self.layout is None else self.layout.matrix[-2:]
        self.part: Part | None = None
        if self._is_orthogonal and self.layout is not None and work.param.numel():
            self.part = Part(work.param, self.layout)
        self._find_groups(self.layout)

    def _find_groups(self, layout: Factoring | None) -> None:
        dims = range(self.work.param.dim())
        self.everywhere = groups_over(self.work.param, dims)
        self.along_rows, self.along_columns = self.everywhere, []
        if layout is not None:  # by the dimensions that the other factor does not have
            rows, columns = layout.row_dims, layout.col_dims
            param = self.work.param
            self.along_rows = groups_over(param, [d for d in dims if d not in rows])
            self.along_columns = groups_over(param, [d for d in dims if d not in columns])

    @property
    def is_vector(self) -> bool:
        """Whether it has no rows and columns."""
        return self.layout is None

    @property
    def is_factored(self) -> bool:
        """Whether V is kept by rows and columns."""
        return "row_var" in self.state

    def rounds(self) -> Rounds:
        """The step; what is yielded comes back combined with that of the other ranks."""
        if self.work.param.numel() == 0:
            yield from self._nothing()
            self.state["step"].add_(1.0)
            return 0.0
        hyper = self.hyper
        got = yield self._sums()
        self.state["step"].add_(1.0)
        alpha, keep = self._rates(got[1])  # (2) (3) (4)
        mean = self._averages(got)  # (5)
        row = yield from self._relative_rows(mean)  # round 2
        if hyper.is_filtered(is_vector=self.is_vector):
            mean_square = got[0] / self.work.param.numel()
            move = yield from self._filtered(row, mean, mean_square)  # round 3
        else:
            move = yield from self._published(row)  # round 3
        self._write(keep, alpha * move)
        return alpha

    def _nothing(self) -> Generator[list[Share], list[Tensor], None]:
        zero = torch.zeros((), dtype=torch.float32, device=self.w.device)
        yield [Share(zero, [])]
        yield []
        yield []

    # ------------------------------------------------------------------------------- round 1

    def _sums(self) -> list[Share]:
        """Sums of G^2, of W^2, of the moments before; for a factored matrix also by its factors."""
        row_sum = rule.sum_of_squares(self.g, dim=-1)  # (..., m, 1)
        shares = [Share(row_sum.sum(), self.everywhere), Share(self._weight_sum(), self.everywhere)]
        if not self.is_factored:
            return [*shares, Share(self.state["variance"].sum(), self.everywhere)]
        within = [*self.along_columns, *self.along_rows]  # not those that cut a batch
        return [
            *shares,
            Share(self._row_var().sum(dim=-2, keepdim=True), self.along_columns),
            Share(row_sum.sum(dim=-2, keepdim=True), within),
            Share(row_sum, self.along_rows),
            Share(rule.sum_of_squares(self.g, dim=-2), self.along_columns),
        ]

    def _weight_sum(self) -> Tensor:
        """The sum of W^2; 0 where (3) keeps to what it was at the first step."""
        if self.t != 1 and tasks.keep_to_first([self.work]):
            return torch.zeros((), dtype=torch.float32, device=self.w.device)
        wide = torch.promote_types(self.w.dtype, torch.float32)
        norm: Tensor = vector_norm(self.w, dtype=wide)
        return norm.square().to(torch.float32)

    def _rates(self, w_sum: Tensor) -> tuple[Scalar, Scalar]:
        """Equations (2) to (4)."""
        size = (w_sum / self.work.param.numel()).sqrt()
        size, initial = rule.weight_size(size, self.state.get("initial_rms"), self.t)
        if initial:
            self.state["initial_rms"].copy_(initial["initial_rms"])
        return tasks.rates(size, self.t, self.hyper)

    def _averages(self, got: list[Tensor]) -> Tensor:
        """Equation (5), written to the state; returns mean R, or mean v.

        A mean of averages is the average of the means: it needs no message after this one.
        """
        hyper = self.hyper
        total, _, before, *sums = got
        kappa = tasks.statistic_weight(self.t, hyper)  # (1)
        offset = 0.0 if isinstance(hyper, MaxFactorHyper) else hyper.eps1
        if not self.is_factored:
            count = self.work.param.numel()
            if isinstance(hyper, MaxFactorHyper):
                kappa = 1 - hyper.gamma  # (5')
            v = self.state["variance"].view(self.shape)
            v.copy_((1 - kappa) * v + kappa * (self.g * self.g + offset))
            return (1 - kappa) * (before / count) + kappa * (total / count + offset)
        eps = hyper.count_eps if isinstance(hyper, MaxFactorHyper) else 0.0
        matrix_sum, row_sum, col_sum = sums
        self._row_var().lerp_(row_sum / (self.n + eps) + offset, kappa)
        self._col_var().lerp_(col_sum / (self.m + eps) + offset, kappa)
        newest = matrix_sum / (self.m * (self.n + eps)) + offset
        return torch.lerp(before / self.m, newest, kappa)

    def _row_var(self) -> Tensor:
        return self.state["row_var"].view(*self.shape[:-1], 1)

    def _col_var(self) -> Tensor:
        return self.state["col_var"].view(*self.shape[:-2], 1, self.shape[-1])

    # ------------------------------------------------------------------------------- round 2

    def _relative_rows(self, mean: Tensor) -> Generator[list[Share], list[Tensor], Tensor]:
        """Equation (6): the rows' factor of V, (..., m, 1); v itself where nothing is factored."""
        hyper = self.hyper
        if not self.is_factored:
            yield []
            return self.state["variance"].view(self.shape)
        row_var = self._row_var()
        filtered = hyper.is_filtered(is_vector=False)
        if not isinstance(hyper, MaxFactorHyper) or filtered or hyper.direction == "factored":
            yield []
            return row_var / mean.clamp(min=FLOAT32_TINY)
        if not hyper.max_norm:
            yield []
            return row_var
        (largest,) = yield [Share(largest_of(row_var, -2), self.along_columns, is_sum=False)]
        return row_var / largest.clamp(min=hyper.floor)

    # ------------------------------------------------------------------------------- round 3

    def _published(self, row: Tensor) -> Generator[list[Share], list[Tensor], Tensor]:
        """Equations (7) to (9) without momentum, and Adafactor's update."""
        hyper = self.hyper
        if isinstance(hyper, MaxFactorHyper) and hyper.is_boosted_scalar(self.work.param.numel()):
            yield []
            return rule.boosted_scalar(self.g, self._variance(row), hyper)
        move = yield from self._directed(self._update(row), [])
        return move[0]

    def _update(self, row: Tensor) -> Tensor:
        """Equation (7) before it is scaled."""
        return self.g * self._variance(row).clamp(min=tasks.variance_floor(self.hyper)).rsqrt()

    def _variance(self, row: Tensor) -> Tensor:
        """V from the rows' factor of it, or v."""
        return row * self._col_var() if self.is_factored else row

    def _directed(
        self, update: Tensor, others: list[Share]
    ) -> Generator[list[Share], list[Tensor], tuple[Tensor, list[Tensor]]]:
        """Equations (7) to (9) of an update that is not yet scaled; `others` travel with it."""
        hyper = self.hyper
        by_sign = tasks.moves_by_sign(hyper, is_vector=self.is_vector)
        row_max = largest_of(update, -1)  # (..., m, 1)
        shares = [
            Share(largest_of(row_max.reshape(-1), -1), self.everywhere, is_sum=False),
            Share(rule.sum_of_squares(update.reshape(-1), dim=-1), self.everywhere),
            Share(row_max, self.along_rows, is_sum=False),
        ]
        needed = [tasks.needs_largest(hyper), tasks.needs_norm(hyper), by_sign]
        asked = [share for share, need in zip(shares, needed, strict=True) if need]
        answers = iter((yield [*asked, *others]))
        largest, square, row_max = (
            next(answers) if need else share.value
            for share, need in zip(shares, needed, strict=True)
        )
        norm, count = square.sqrt(), self.work.param.numel()
        scale = tasks.update_scale(hyper, largest, norm, norm / math.sqrt(count))  # (7) (8)
        return (update.sign() * row_max if by_sign else update) * scale, list(answers)

    def _filtered(
        self, row: Tensor, mean: Tensor, mean_square: Tensor
    ) -> Generator[list[Share], list[Tensor], Tensor]:
        """Equations (10) to (13), then (7) to (9)."""
        hyper = self.hyper
        assert isinstance(hyper, MaxFactorHyper)
        sums, memory = self.state.get("band_sums"), None
        if hyper.momentum is not None:
            memory = memory_of(hyper, self.t, self.shape[-1], sums)
        y, agreed = self._seen(row, mean, mean_square, memory)
        others = [] if agreed is None or sums is None else [Share(agreed, self.everywhere)]
        if self.part is not None:
            self.part.value = y.reshape(self.w.shape)
            del y  # only one copy of all matrices while they travel
            totals = yield others
            move = whole(self.part).reshape(self.shape)
        else:
            move, totals = yield from self._directed(y, others)
        if memory is not None and sums is not None and hyper.fam is not None:
            sums.copy_(memory.next_sums(sums, totals[0], (self.m, self.n), hyper.fam))  # (11)
        return move

    @property
    def _is_orthogonal(self) -> bool:
        return getattr(self.hyper, "direction", None) == "orthogonal" and not self.is_vector

    def _seen(
        self, row: Tensor, mean: Tensor, mean_square: Tensor, memory: Memory | None
    ) -> tuple[Tensor, Tensor | None]:
        """What is turned in (7) to (9), whitened if it must be, and this shard's sums for (11)."""
        hyper, variance = self.hyper, self._variance(row)
        assert isinstance(hyper, MaxFactorHyper)
        divisor = (mean if self._is_orthogonal else variance).clamp(min=hyper.variance_floor)
        clip = (mean_square / mean.clamp(min=FLOAT32_TINY)).sqrt().clamp(min=1.0)  # s_z
        y, agreed = self.g * (divisor.rsqrt() / clip), None  # (10)
        if memory is not None:
            y, agreed = self._remembered(memory, y)
            if memory.bands > 1:
                y = rule.without_leaks(y, variance)
        if self._is_orthogonal:
            white = variance.clamp(min=hyper.variance_floor).rsqrt()
            y = y * (mean.sqrt() * white)
        return y, agreed

    def _remembered(self, memory: Memory, x: Tensor) -> tuple[Tensor, Tensor]:
        """Equations (12) and (13), and the sums over bands of this shard for (11)."""
        if x.numel() == 0:
            return x, x.new_zeros(2, memory.bands)
        x = memory.enter(x)
        before = recalled(self.state, tuple(x.shape))
        totals = band_totals(x, before, memory.bands)  # now, as `before` may be the state itself
        store = self.hyper.momentum_store(is_vector=self.is_vector)
        assert store is not None
        for key, value in kept(memory.absorbed(before, x), store).items():  # (12)
            self.state[key].copy_(value.view_as(self.state[key]))
        y = memory.leave(memory.seen(recalled(self.state, tuple(x.shape)), x))  # (13)
        return y, totals

    # ---------------------------------------------------------------------------------- write

    def _write(self, keep: Scalar, move: Tensor) -> None:
        """W <- keep * W - move, (4) and (9)."""
        w = self.w.to(torch.promote_types(self.w.dtype, torch.float32))
        w = w * keep - move.reshape(w.shape)
        start: Tensor | int = 0
        if is_stochastic(self.w.dtype, self.hyper):
            start = positions(self.work.param)
        self.w.copy_(rounded(w, self.w.dtype, self.hyper, self.t, start))


def largest_of(x: Tensor, dim: int) -> Tensor:
    """The largest magnitude along `dim`, kept as 1; 0 where there is none."""
    if x.numel() == 0:
        shape = list(x.shape)
        shape[dim] = 1
        return x.new_zeros(shape)
    return x.abs().amax(dim=dim, keepdim=True)
