"""The equations in torch operations, for one process and for shards alike.

A `Batch` is k tensors of one shape, (k, m, n), or one large matrix that is processed in blocks of
rows. Its step is a generator of three rounds. Each round yields local sums and maxima, and receives
those over all ranks that hold a shard of the tensor. In one process both are the same.

    1  sums     of G^2 by rows and columns, of W^2, of R (or v) before the step
    2  maxima   of R in (6)
    3  maxima   of |U|, and of its rows; sums of U^2, and of FAM's bands

Nothing is written before the end of round 1, which also shows whether the gradient is finite.
Means and factors are those of the whole tensor, so sharding changes only the order of the sums.
With several blocks the last pass computes U again, from G or from the stored momentum, so that no
buffer has the size of the tensor.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.backends.torch.blocks import (
    DenseVariance,
    FactoredVariance,
    Scratch,
    as_batch,
    write_back,
)
from maxfactor.distributed.owner_exchange import ExchangedMatrix
from maxfactor.distributed.placement import is_sharded, local, positions
from maxfactor.distributed.reductions import Reduction, groups_over
from maxfactor.rule import reference, squares
from maxfactor.rule.fam import band_totals
from maxfactor.rule.int8 import dequantize, quantize_
from maxfactor.rule.momentum import memory_of
from maxfactor.rule.newton_schulz import orthogonal
from maxfactor.rule.reference import Scalar, host_scalar, larger
from maxfactor.rule.rounding import rounded
from maxfactor.settings import FLOAT32_MAX, FLOAT32_TINY
from maxfactor.state import block_shape, factoring

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from maxfactor.backends.step_io import StepInput
    from maxfactor.backends.torch.record import BatchRecord
    from maxfactor.rule.momentum import Memory

    Rounds = Generator[list[Reduction], list[Tensor], list[Scalar]]
    Variance = DenseVariance | FactoredVariance

SMALL = 1 << 15  # elements; below, the overhead of a call exceeds a pass over the tensor


class Batch:
    """Tensors of one shape, rule, dtype and step count, or this rank's shard of one tensor.

    Args:
        inputs: The tensors. A sharded tensor is a batch of its own.
        grads: Their local gradients.
        t: The number of this step; (k, 1, 1) if the counters are on the device.
        block: Elements of a block of rows. Only a single matrix is split into blocks.
        scratch: Temporary buffers.
    """

    def __init__(
        self,
        inputs: Sequence[StepInput],
        grads: Sequence[Tensor],
        t: Scalar,
        block: int,
        scratch: Scratch,
    ) -> None:
        first = inputs[0]
        self.inputs, self.grads, self.t = inputs, grads, t
        self.rule, self.lr = first.rule, host_scalar(first.lr)
        self.block, self.scratch = block, scratch
        self.params = [local(each.param) for each in inputs]
        self.states = [each.state for each in inputs]
        if is_sharded(first.param):
            self.states = [{key: local(x) for key, x in each.state.items()} for each in inputs]
        self.count = first.param.numel()  # of the whole tensor
        self.is_small = self.count <= SMALL
        self.may_read = self.params[0].device.type == "cpu"  # where reading a value is free
        self._find_shape()
        self._find_groups()
        self.stacked: Tensor | None = None  # gradients of small tensors, as a batch
        self.weights: Tensor | None = None  # as a batch, once they were read
        self.record: BatchRecord | None = None  # set in a recorded step
        self.exchanged: ExchangedMatrix | None = None
        self.orthogonal_block = block_shape(tuple(first.param.shape), self.rule)
        if self.rule.is_orthogonal and self.everywhere:
            layout = factoring(tuple(first.param.shape), self.rule.factor)
            assert layout is not None
            self.exchanged = ExchangedMatrix(first.param, layout, self.orthogonal_block)

    def _find_shape(self) -> None:
        """Set the local shape (k, m, n), the whole matrix's m and n, and the dims of one tensor."""
        param, own = self.inputs[0].param, self.params[0]
        layout = factoring(tuple(param.shape), self.rule.factor)
        self.tensor_dims: tuple[int, ...] = (-2, -1)
        self.m, self.n = 1, self.count
        self.shape = (len(self.inputs), 1, own.numel())
        if layout is None:
            return
        *batch, m, n = layout.of_shard(tuple(own.shape)).matrix
        self.m, self.n = layout.matrix[-2:]
        self.shape = (len(self.inputs), m, n)
        if batch:  # factor="last": the matrices of one tensor
            self.shape, self.tensor_dims = (batch[0], m, n), (-3, -2, -1)

    def _find_groups(self) -> None:
        """Set the process groups of the reductions; there are none in one process."""
        param = self.inputs[0].param
        layout, dims = factoring(tuple(param.shape), self.rule.factor), range(param.dim())
        self.everywhere = groups_over(param, dims)
        self.along_rows, self.along_columns = self.everywhere, []
        if layout is not None:  # sums for R run over the dimensions that R lacks; so for C
            self.along_rows = groups_over(param, set(dims) - set(layout.row_dims))
            self.along_columns = groups_over(param, set(dims) - set(layout.col_dims))

    # ------------------------------------------------------------------------------ the step

    def rounds(self) -> Rounds:
        """Run the step; return the step sizes."""
        rule = self.rule
        reductions = self._sums()
        if self.everywhere:
            reductions.append(Reduction(self._weight_squares(), self.everywhere))
        got = yield reductions
        if self.record is not None:
            self.record.begin(got[0], rule)
        torch._foreach_add_([state["step"] for state in self.states], 1)
        weight_squares = got.pop() if self.everywhere else self._weight_squares()
        alpha, keep = self._rates(weight_squares)
        mean = self._update_moments(got)
        variance = yield from self._variance(mean)
        if rule.boost is not None:
            yield []
            self._write_boosted(alpha, keep)
        elif rule.is_orthogonal:
            yield from self._orthogonal_step(variance, mean, got[0], alpha, keep)
        else:
            yield from self._directed_step(variance, mean, got[0], alpha, keep)
        self.stacked = self.weights = None  # free the memory for other batches
        if isinstance(alpha, Tensor) and alpha.dim():
            return list(alpha.expand(len(self.inputs), 1, 1).unbind())
        return [alpha] * len(self.inputs)

    # ------------------------------------------------------------------------------- round 1

    def _sums(self) -> list[Reduction]:
        """Sums of G^2, for factored matrices also by row and by column, and of the old moments."""
        row_sum, col_sum = self._squares_by_row_and_column()
        # Over the whole tensor, also with factor="last".
        total = row_sum.sum(dim=self.tensor_dims, keepdim=True).reshape(-1, 1, 1)
        found = [Reduction(total, self.everywhere)]
        if self.rule.dense:
            if self.rule.needs_mean:
                before = self._state("variance", self.shape).sum(dim=(-2, -1), keepdim=True)
                found.append(Reduction(before, self.everywhere))
            return found
        found += [Reduction(row_sum, self.along_rows), Reduction(col_sum, self.along_columns)]
        if self.rule.needs_mean:
            # Without the groups that shard the batch dimension.
            within = [*self.along_columns, *self.along_rows]
            before = self._state("row_var", self._rows).sum(dim=-2, keepdim=True)
            found.append(Reduction(before, self.along_columns))
            found.append(Reduction(row_sum.sum(dim=-2, keepdim=True), within))
        return found

    def _squares_by_row_and_column(self) -> tuple[Tensor, Tensor]:
        """Sums of G^2 by row, (k, m, 1), and by column, (k, 1, n); zeros of a dense v."""
        row_norm = self._new_column()
        squares: Tensor | None = None  # summed over blocks: row i of it sums row i of every block
        for rows, g in self._gradient_blocks():
            vector_norm(g, dim=-1, keepdim=True, out=row_norm[:, rows])
            if self.rule.dense:
                continue
            if squares is None:
                squares = torch.mul(g, g, out=self.scratch(0, g))
            else:
                squares[:, : g.shape[1]].addcmul_(g, g)
        if squares is None:
            return row_norm.square_(), row_norm.new_zeros(self._cols)
        return row_norm.square_(), squares.sum(dim=-2, keepdim=True)

    def _weight_squares(self) -> Tensor:
        """The sum of W^2 of each tensor in parts, (k, 1, 1, 3); zeros if unused.

        See `_keeps_to_first`, and `rule/squares.py` for the parts.
        """
        shape = (len(self.inputs), 1, 1, 3)
        if self._keeps_to_first:
            return torch.zeros(shape, dtype=torch.float32, device=self.params[0].device)
        wide = torch.promote_types(self.params[0].dtype, torch.float32)
        weights = self.weights = as_batch(self.params, self.shape)
        if self.may_read or weights.dtype == torch.float16:  # whose squares are always usual
            # Row by row first: one long float32 sum would lose digits and run on one thread.
            by_row: Tensor = vector_norm(weights, dim=-1, keepdim=True, dtype=wide)
            norm: Tensor = vector_norm(by_row, dim=self.tensor_dims)
            if not self.may_read or squares.are_usual(norm, weights):
                return squares.usual_parts(norm.square().to(torch.float32)).reshape(shape)
        parts = self._new_parts()
        for rows in self._row_blocks():
            own = squares.parts_by_row(weights[:, rows], may_read=False)
            parts[:, :, rows, 0] = own.movedim(-1, 0)
        return self._sum_of_rows(parts)

    def _sum_of_rows(self, parts: Tensor) -> Tensor:
        """The sums of each tensor, (k, 1, 1, 3), from parts by row, (3, k, m, 1)."""
        sums = [part.sum(dim=self.tensor_dims, keepdim=True) for part in parts]
        return torch.stack(sums, dim=-1).reshape(-1, 1, 1, 3)

    @cached_property
    def _keeps_to_first(self) -> bool:
        """Whether (3) uses the stored initial RMS alone; False if only the device knows."""
        if not self.rule.keeps_initial_rms or isinstance(self.t, Tensor) or self.t == 1:
            return False
        kept = [state["initial_rms"] for state in self.states]
        # .item() is free on the CPU; a CUDA tensor is never read.
        return all(not each.is_cuda and each.item() > 0 for each in kept)

    def _rates(self, weight_squares: Tensor) -> tuple[Scalar, Scalar]:
        """The step size of (2) (3) and the decay factor of (4): numbers, or (k, 1, 1)."""
        rule, t = self.rule, self.t
        root = squares.root_of(weight_squares / self.count)
        size = root.factor * root.unit
        if rule.keeps_initial_rms:
            kept = [state["initial_rms"] for state in self.states]
            first = torch.stack(kept).reshape(size.shape)
            if self._keeps_to_first:
                size = first
            else:
                size, now = reference.weight_size(size, first, t, rule)
                torch._foreach_copy_(kept, list(now["initial_rms"].reshape(-1).unbind()))
        # A single large tensor on the CPU uses Python floats; values on a device stay there.
        scale: Scalar = size if self.is_small or len(self.inputs) > 1 else host_scalar(size)
        alpha = reference.step_size(scale, t, self.lr, rule)
        return alpha, reference.decay_factor(alpha, t, self.lr, rule)

    def _update_moments(self, got: list[Tensor]) -> Tensor | None:
        """Equation (5), written to the state; returns mean R, or mean v, if it is needed.

        (5) is linear, so the mean follows from the sums of round 1, without another message.
        """
        rule = self.rule
        kappa = reference.statistic_weight(self.t, rule)
        if rule.dense:
            return self._update_dense(got, kappa)
        _, row_sum, col_sum, *sums = got
        row_var, col_var = self._state("row_var", self._rows), self._state("col_var", self._cols)
        row_var.lerp_(row_sum / (self.n + rule.count_eps) + rule.offset, kappa)  # (5)
        col_var.lerp_(col_sum / (self.m + rule.count_eps) + rule.offset, kappa)
        self._save("row_var", row_var)
        self._save("col_var", col_var)
        self.row_var, self.col_var = row_var, col_var
        if not sums:
            return None
        before, matrix_sum = sums
        newest = matrix_sum / (self.m * (self.n + rule.count_eps)) + rule.offset
        return torch.lerp(before / self.m, newest, kappa)

    def _update_dense(self, got: list[Tensor], kappa: Scalar) -> Tensor | None:
        rule = self.rule
        weight = kappa if rule.gamma is None else 1 - rule.gamma
        v = self._state("variance", self.shape)
        g = self._whole_gradient()
        if rule.gamma is None:
            v.lerp_((g * g).add_(rule.offset), weight)
        else:
            v.mul_(rule.gamma).addcmul_(g, g, value=1 - rule.gamma)  # (5')
        self._save("variance", v)
        self.v = v
        if not rule.needs_mean:
            return None
        total, before = got
        newest = total / self.count + rule.offset
        return (1 - weight) * (before / self.count) + weight * newest

    # ------------------------------------------------------------------------------- round 2

    def _variance(self, mean: Tensor | None) -> Generator[list[Reduction], list[Tensor], Variance]:
        """Equation (6)."""
        rule = self.rule
        if rule.dense:
            yield []
            return DenseVariance(self.v, rule.variance_floor)
        row = self.row_var
        if rule.divides_by_mean:
            assert mean is not None
            yield []
            row = row / mean.clamp(min=FLOAT32_TINY)  # (6)
        elif rule.divides_by_max:
            largest = Reduction(largest_of(row, -2), self.along_columns, is_sum=False)
            (divisor,) = yield [largest]
            row = row / divisor.clamp(min=rule.floor)
        else:
            yield []
        # .item() is free on the CPU, and the smallest V may save passes over a large matrix.
        may_read = row.device.type == "cpu" and not self.is_small
        may_overflow = not (rule.divides_by_max or rule.divides_by_mean)
        return FactoredVariance(
            row, self.col_var, rule.variance_floor, may_read=may_read, may_overflow=may_overflow
        )

    # ------------------------------------------------------------------------------- round 3

    def _directed_step(
        self, variance: Variance, mean: Tensor | None, total: Tensor, alpha: Scalar, keep: Scalar
    ) -> Generator[list[Reduction], list[Tensor], None]:
        """Equations (7) to (9), after (10) to (13) with momentum."""
        rule = self.rule
        update = Update(self, variance, mean, total)
        asked = self._measure(update)
        answers = yield [*asked.values(), *update.reductions()]
        got = dict(zip(asked, answers, strict=False))
        update.finish(answers[len(asked) :])
        coef: Tensor | Scalar = 1.0 if rule.has_momentum else self._row_factor(variance)
        scale, power = self._update_scale(got), None
        if rule.divides_by_peak and not (rule.moves_by_sign or rule.has_momentum):
            # 1 / max|U| times alpha may underflow, so a power of two of it multiplies U itself.
            power = squares.power_of_two(got["largest"].clamp(min=rule.floor))
            scale = scale * power
        # Row maximum times scale first: scale * alpha may overflow, and 0 * inf is NaN.
        coef = (got["row_max"] if rule.moves_by_sign else coef) * scale
        coef = coef * (alpha if rule.has_momentum else alpha * self._uphill)
        if isinstance(coef, Tensor):
            # For a zero gradient and a zero floor coef is inf, and 0 * inf is NaN.
            coef = coef.clamp(-FLOAT32_MAX, FLOAT32_MAX)
        self._apply(update, coef, power, keep)

    def _row_factor(self, variance: Variance) -> Tensor | float:
        """The factor of 1 / sqrt(V) that the last pass leaves out."""
        return variance.row_factor()

    def _apply(
        self, update: Update, coef: Tensor | Scalar, power: Tensor | None, keep: Scalar
    ) -> None:
        """The last pass: W <- keep * W - coef * U / power, or with the sign of U."""
        by_row = isinstance(coef, Tensor) and coef.dim() == 3 and coef.shape[1] > 1
        for rows, g in self._gradient_blocks():
            own = coef[:, rows] if by_row else coef  # type: ignore[index]  # a tensor then
            u = update.last_pass(rows, g)
            u = u if power is None else u.div_(power)
            self._write(rows, u.mul_(-own), keep)  # (9)

    def _measure(self, update: Update) -> dict[str, Reduction]:
        """The first pass: the maxima and the norm of U that (7) to (9) need."""
        rule, found = self.rule, dict[str, Reduction]()
        row_max = self._new_column() if rule.divides_by_peak else None
        parts = self._new_parts() if rule.needs_norm else None
        factor = 1.0 if rule.has_momentum else update.variance.row_factor()
        for rows, g in self._gradient_blocks():
            u = update.first_pass(rows, g)
            if parts is not None:
                of_rows = factor[:, rows] if isinstance(factor, Tensor) else None
                own = squares.parts_by_row(u, of_rows, may_read=self.may_read)
                parts[:, :, rows, 0] = own.movedim(-1, 0)
            if row_max is not None:
                magnitude = torch.abs(u, out=self.scratch(4, u))
                torch.amax(magnitude, dim=-1, keepdim=True, out=row_max[:, rows])
        if self.everywhere:
            self.scratch.release()  # other batches run before this one continues
        if row_max is not None:
            row_max.mul_(factor)
            largest = largest_of(row_max, self.tensor_dims)
            found["largest"] = Reduction(largest, self.everywhere, is_sum=False)
            if rule.moves_by_sign:
                found["row_max"] = Reduction(row_max, self.along_rows, is_sum=False)
        if parts is not None:
            found["squares"] = Reduction(self._sum_of_rows(parts), self.everywhere)
        return found

    @property
    def _uphill(self) -> float:
        return -1.0 if self.rule.maximize else 1.0

    def _update_scale(self, got: dict[str, Tensor]) -> Scalar:
        """The factor of U = G / sqrt(V) in (7) and (8), from max|U| and the sum of U^2."""
        rule = self.rule
        scale: Scalar = 1.0
        if rule.divides_by_peak:
            scale = 1.0 / larger(got["largest"], rule.floor)  # (7)
        if not rule.needs_norm:
            return scale
        peaked, (norm, unit) = scale, squares.root_of(got["squares"])
        if rule.norm_clip > 0.0:
            scale = scale * (rule.norm_clip / larger(norm * scale * unit, rule.norm_clip))
        if rule.rms_bound < math.inf:
            rms = norm / math.sqrt(self.count) * scale * unit
            scale = scale / larger(rms / rule.rms_bound, 1.0)  # (8)
        if self.record is not None:
            self.record.add_clip(peaked / scale)
        return scale

    def _orthogonal_step(
        self, variance: Variance, mean: Tensor | None, total: Tensor, alpha: Scalar, keep: Scalar
    ) -> Generator[list[Reduction], list[Tensor], None]:
        """Equations (10) to (13), then the orthogonal direction of (14), from whole matrices."""
        assert mean is not None
        update = Update(self, variance, mean, total)
        rows = slice(0, self.shape[1])
        y = update.first_pass(rows, self._whole_gradient())
        y = variance.normalize(y.mul_(mean.sqrt()), rows, y).mul_(variance.row_factor())
        if self.exchanged is not None:
            self.exchanged.value = y.reshape(self.params[0].shape)
            del y  # the exchange holds the only copy
        update.finish((yield update.reductions()))
        if self.exchanged is None:
            move = orthogonal(y, self.orthogonal_block)
        else:
            move = self.exchanged.shard().reshape(self.shape)
        self._write(rows, move.mul_(-alpha), keep)

    # --------------------------------------------------------------------------------- write

    def _write(self, rows: slice, move: Tensor, keep: Scalar) -> None:
        """W <- keep * W + move for some rows."""
        dtype = self.params[0].dtype
        if self.weights is None:
            self.weights = as_batch(self.params, self.shape)
        w = self.weights[:, rows]
        is_wide = dtype in (torch.float32, torch.float64)
        before = w.clone() if self.record is not None else None
        wide = w if is_wide else self.scratch(2, w).copy_(w)
        if isinstance(keep, Tensor):  # one for each tensor, or on the device: not read back
            wide.mul_(keep).add_(move)
        else:
            torch.add(move, wide, alpha=keep, out=wide)  # one pass for both
        if not is_wide:
            w.copy_(self._rounded(rows, wide, dtype))
        if self.record is not None and before is not None:
            self.record.add_write(before, wide, w)
        if rows.stop == self.shape[1]:
            write_back(self.params, self.weights)

    def _rounded(self, rows: slice, wide: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.rule.is_stochastic(dtype):
            return wide.to(dtype)
        if len(self.inputs) == 1:
            start: Tensor | int = rows.start * self.shape[2]
            if self.everywhere:
                start = positions(self.inputs[0].param).view(self.shape)[:, rows]
            t = self.t if not isinstance(self.t, Tensor) else self.t.reshape(())
            return rounded(wide, dtype, self.rule, t, start)
        times = self.t if isinstance(self.t, Tensor) else [self.t] * len(wide)
        # Positions count from 0 in each tensor.
        each = [
            rounded(w, dtype, self.rule, host_scalar(t)) for w, t in zip(wide, times, strict=True)
        ]
        return torch.stack(each)

    def _write_boosted(self, alpha: Scalar, keep: Scalar) -> None:
        """Version 0.3's rule for parameters with one element."""
        rule, rows = self.rule, slice(0, self.shape[1])
        assert rule.boost is not None
        root = (self.v.sqrt() + rule.eps1).clamp_(min=FLOAT32_TINY)
        g = self._whole_gradient()
        self._write(rows, (g / root).mul_(-rule.boost * self._uphill).mul_(alpha), keep)

    # -------------------------------------------------------------------- gradients and state

    def _gradient_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of rows of the gradient in float32, (k, rows, n); read-only."""
        whole = self._gradient()
        for rows in self._row_blocks():
            g = whole[:, rows]
            yield rows, g if g.dtype == torch.float32 else self.scratch(1, g).copy_(g)

    def _row_blocks(self) -> Iterator[slice]:
        """The rows of each block; none of an empty tensor."""
        _, m, n = self.shape
        if math.prod(self.shape) == 0:
            return
        step = m
        if len(self.inputs) == 1 and len(self.tensor_dims) == 2 and not self.rule.is_orthogonal:
            step = min(m, max(1, self.block // n))
        for start in range(0, m, step):
            yield slice(start, min(start + step, m))

    def _whole_gradient(self) -> Tensor:
        """The gradient in float32; read-only."""
        return self._gradient().to(torch.float32)

    def _gradient(self) -> Tensor:
        if self.stacked is not None:
            return self.stacked
        batch = as_batch(self.grads, self.shape)
        if len(self.inputs) > 1 and self.is_small:
            self.stacked = batch
        return batch

    @property
    def _rows(self) -> tuple[int, int, int]:
        return self.shape[0], self.shape[1], 1

    @property
    def _cols(self) -> tuple[int, int, int]:
        return self.shape[0], 1, self.shape[2]

    def _state(self, key: str, shape: tuple[int, int, int]) -> Tensor:
        """The state tensors of one key as a batch, see `as_batch`."""
        return as_batch([state[key] for state in self.states], shape)

    def _save(self, key: str, batch: Tensor) -> None:
        write_back([state[key] for state in self.states], batch)

    def _new_parts(self) -> Tensor:
        """Sums of squares by row, in parts, (3, k, m, 1), each contiguous."""
        return self._new_column().expand(3, *self._rows).clone()

    def _new_column(self) -> Tensor:
        return torch.zeros(self._rows, dtype=torch.float32, device=self.params[0].device)


class Update:
    """The input of (7) to (9), block by block: U = G / sqrt(V), or y of (10) to (13)."""

    def __init__(
        self, batch: Batch, variance: Variance, mean: Tensor | None, total: Tensor
    ) -> None:
        self.batch, self.rule, self.variance = batch, batch.rule, variance
        self.kept: Tensor | None = None  # the result, if there is only one block
        self.totals: Tensor | None = None
        self.memory: Memory | None = None
        self.factor: Scalar = 1.0
        if not self.rule.is_filtered:
            return
        assert mean is not None
        factor = reference.input_factor(total / batch.count, mean, self.rule)
        self.factor = factor * batch._uphill  # with maximize, M averages -G
        if self.rule.has_momentum:
            self.memory = memory_of(self.rule, batch.t, batch.shape[2], self._band_sums())
        if batch.record is not None:
            batch.record.add_clip(reference.input_clip(total / batch.count, mean, self.rule))
            if self.memory is not None and self.memory.band_beta is not None:
                batch.record.beta = self.memory.band_beta.mean(dim=-1)

    def _band_sums(self) -> Tensor | None:
        states = self.batch.states
        if "band_sums" not in states[0]:
            return None
        return torch.stack([state["band_sums"] for state in states])

    @cached_property
    def codes(self) -> Tensor:
        """The momentum as it is stored, (k, m, n)."""
        return self.batch._state("momentum", self.batch.shape)

    @cached_property
    def scales(self) -> Tensor | None:
        """The scales of an int8 momentum, (k, m, blocks)."""
        k, m, _ = self.batch.shape
        if "momentum_scale" not in self.batch.states[0]:
            return None
        blocks = self.batch.states[0]["momentum_scale"].numel() // max(m, 1)
        return self.batch._state("momentum_scale", (k, m, blocks))

    def first_pass(self, rows: slice, g: Tensor) -> Tensor:
        """U or y of a block; updates M if there is momentum."""
        batch = self.batch
        out = batch.scratch(0, g)
        is_whole = g.shape[1] == batch.shape[1]
        if not self.rule.is_filtered:
            u = self.variance.normalize(g, rows, out)
        else:
            u = self._filter(rows, self._input(rows, g, out), is_first=True)
        if is_whole:
            self.kept = u
        return u

    def last_pass(self, rows: slice, g: Tensor) -> Tensor:
        """U or y again, or its sign for sign updates. The caller may overwrite the result."""
        by_sign, out = self.rule.moves_by_sign, self.batch.scratch(0, g)
        if self.kept is not None:
            u = self.kept
        elif self.rule.is_filtered:
            u = self._filter(rows, self._input(rows, g, out), is_first=False)
        elif by_sign:
            return torch.sign(g, out=out)  # sign(U) = sign(G)
        else:
            u = self.variance.normalize(g, rows, out)
        return u.sign_() if by_sign else u

    def _input(self, rows: slice, g: Tensor, out: Tensor) -> Tensor:
        """Equation (10)."""
        if self.rule.is_orthogonal:
            return torch.mul(g, self.factor, out=out)
        x = self.variance.normalize(g, rows, out)  # (10)
        row = self.variance.row_factor()
        return x.mul_((row[:, rows] if isinstance(row, Tensor) else row) * self.factor)

    def _filter(self, rows: slice, x: Tensor, *, is_first: bool) -> Tensor:
        """Equations (11) to (13) for a block of rows."""
        memory = self.memory
        if memory is None or x.numel() == 0:
            return x
        x = memory.to_bands(x)
        momentum = self._decode(rows, x)
        if is_first:
            if memory.band_beta is not None:
                own = band_totals(x, momentum, memory.bands)
                self.totals = own if self.totals is None else self.totals + own
            memory.average_(momentum, x)
            self._encode_(rows, momentum)
        y = memory.from_bands(memory.lookahead_(momentum, x))
        if memory.bands > 1 and (touched := self.variance.is_touched(rows)) is not None:
            y = torch.where(touched, y, 0.0)
        return y

    def _decode(self, rows: slice, like: Tensor) -> Tensor:
        """A float32 copy of a block of the momentum."""
        out = self.batch.scratch(3, like)
        if self.scales is None:
            return out.copy_(self.codes[:, rows])
        return dequantize(self.codes[:, rows], self.scales[:, rows], out)

    def _encode_(self, rows: slice, momentum: Tensor) -> None:
        """Store a block of the momentum; overwrites it with the stored values."""
        if self.scales is None:
            self.codes[:, rows].copy_(momentum)
            momentum.copy_(self.codes[:, rows])
        else:
            codes, scales = quantize_(momentum)
            self.codes[:, rows].copy_(codes)
            self.scales[:, rows].copy_(scales)
        if rows.stop == self.batch.shape[1]:
            self.batch._save("momentum", self.codes)
            if self.scales is not None:
                self.batch._save("momentum_scale", self.scales)

    def reductions(self) -> list[Reduction]:
        """The sums over FAM's bands."""
        if self.memory is None or self.memory.band_beta is None:
            return []
        batch = self.batch
        if self.totals is None:  # an empty shard
            self.totals = torch.zeros(
                (len(batch.inputs), 2, self.memory.bands),
                dtype=torch.float32,
                device=batch.params[0].device,
            )
        return [Reduction(self.totals, batch.everywhere)]

    def finish(self, totals: list[Tensor]) -> None:
        """Equation (11): FAM's sums for the next step."""
        if totals:
            sums, batch = self._band_sums(), self.batch
            assert sums is not None
            assert self.memory is not None
            new = self.memory.next_sums(sums, totals[0], (batch.m, batch.n))
            write_back([state["band_sums"] for state in batch.states], new)


def largest_of(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """The largest magnitude along `dims`, with keepdim; 0 for an empty tensor."""
    if x.numel():
        return x.abs().amax(dim=dims, keepdim=True)
    shape = list(x.shape)
    for dim in (dims,) if isinstance(dims, int) else dims:
        shape[dim] = 1
    return x.new_zeros(shape)
