"""A batch whose passes over G, W and M are compiled; the equations are those of `Batch`.

The matrices of a batch stay where they are: compiled passes get their addresses. So large matrices
of one shape are one batch, too, without copies.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import cached_property, lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor

from maxfactor.backends.step_io import increment_version
from maxfactor.backends.torch.batch import Batch, Update
from maxfactor.backends.torch.blocks import FactoredVariance
from maxfactor.backends.torch.compiled import passes
from maxfactor.distributed.reductions import Reduction
from maxfactor.rule import squares

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from maxfactor.backends.step_io import StepInput
    from maxfactor.backends.torch.batch import Variance
    from maxfactor.backends.torch.blocks import Scratch
    from maxfactor.backends.torch.weight_sums import WeightSums
    from maxfactor.rule.reference import Scalar

UNIT = 1 << 16  # elements of a unit of work: G and W of it fit into a core's cache
LEAST_ROWS = 64  # of a unit: each has a row of sums, which shall be small beside it
ONE_AT_A_TIME = Lock()  # Numba's fallback for threads ends the process if two callers use it


@contextmanager
def threads_of_torch() -> Iterator[None]:
    """Run passes in as many threads as torch uses for its operations."""
    with ONE_AT_A_TIME:
        threads, before = torch.get_num_threads(), numba.get_num_threads()
        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        numba.set_num_threads(min(threads, most))
        try:
            yield
        finally:
            numba.set_num_threads(before)
            if torch.get_num_threads() != threads:  # both may use one library for threads
                torch.set_num_threads(threads)


class CompiledBatch(Batch):
    """float32 matrices of one shape on a CPU, in one process."""

    def __init__(
        self,
        inputs: Sequence[StepInput],
        grads: Sequence[Tensor],
        t: Scalar,
        scratch: Scratch,
        weight_sums: WeightSums,
    ) -> None:
        whole = [grad.resolve_neg().contiguous() for grad in grads]  # as it is in memory
        super().__init__(inputs, whole, t, math.prod(inputs[0].param.shape), scratch)
        self.units, self.weight_sums = units_of(*self.shape), weight_sums
        # Nothing may depend on which matrices are in one batch: no number is read to save a pass.
        self.is_small = True

    def _run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a pass over all units."""
        function(self.units, *arguments)

    @cached_property
    def _g_at(self) -> Any:
        return addresses(self.grads)

    @cached_property
    def _w_at(self) -> Any:
        return addresses(self.params)

    def _squares_by_row_and_column(self) -> tuple[Tensor, Tensor]:
        k, m, n = self.shape
        by_row = new((k, m, 1))
        by_column = new((len(self.units), n))
        self._run(passes.gradient_squares, self._g_at, n, by_row.numpy()[..., 0], by_column.numpy())
        return by_row, by_column.view(k, -1, n).sum(dim=1, keepdim=True)

    def _weight_squares(self) -> Tensor:
        if self._keeps_to_first:
            return super()._weight_squares()
        found = self.weight_sums.find(self.params)
        if found is None:
            found = new((len(self.units),), torch.float64)
            self._run(passes.weight_squares, self._w_at, self.shape[2], found.numpy())
        return self._parts(found, self.params, lambda _, w: w)

    def _parts(
        self, sums: Tensor, tensors: Sequence[Tensor], values: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Sums of squares by unit as the parts of each matrix, (k, 1, 1, 3).

        Where squares in float32 may have overflowed, or have lost digits that count, they are
        summed anew.

        Args:
            sums: What a pass has found, (units,).
            tensors: One for each matrix; where it is 0 everywhere, so are the values.
            values: The values that were squared, by the number and the tensor (m, n) of a matrix.
        """
        total = sums.view(self.shape[0], -1).sum(dim=-1)
        parts = squares.usual_parts(total.to(torch.float32))
        for i, each in enumerate(total.tolist()):  # reading is free on the CPU
            is_usual = squares.LOW**2 <= each <= squares.HIGH**2
            if is_usual or (each == 0.0 and not tensors[i].any()):
                continue
            exact = values(i, tensors[i].view(self.shape[1:]))
            parts[i] = squares.parts_by_row(exact, may_read=True).sum(dim=-2)
        return parts.view(-1, 1, 1, 3)

    def _row_factor(self, variance: Variance) -> Tensor | float:  # noqa: ARG002
        return 1.0

    # ------------------------------------------------------------------------------- round 3

    def _directed_step(
        self, variance: Variance, mean: Tensor | None, total: Tensor, alpha: Scalar, keep: Scalar
    ) -> Generator[list[Reduction], list[Tensor], None]:
        if not self.rule.has_momentum:
            yield from super()._directed_step(variance, mean, total, alpha, keep)
            return
        # Nothing is measured before W is written, see `compiled_obstacle`.
        update = Update(self, variance, mean, total)
        update.totals = self._filter_and_write(update, alpha, keep)
        update.finish((yield update.reductions()))

    def _measure(self, update: Update) -> dict[str, Reduction]:
        found = dict[str, Reduction]()
        if self.rule.needs_norm:
            sums = new((len(self.units),), torch.float64)
            self._run(passes.update_squares, self._g_at, *self._roots(update), sums.numpy())
            row, col = _roots_of(update.variance)
            most = self.rule.variance_floor**-0.5

            def values(i: int, g: Tensor) -> Tensor:
                return g * (row[i] * col[i]).clamp(max=most)

            found["squares"] = Reduction(self._parts(sums, self.grads, values))
        if self.rule.divides_by_peak:
            row_max = self._new_column()
            out = row_max.numpy()[..., 0]
            self._run(passes.row_peaks, self._g_at, *self._roots(update), out)
            found["largest"] = Reduction(row_max.amax(dim=self.tensor_dims, keepdim=True))
            if self.rule.moves_by_sign:
                found["row_max"] = Reduction(row_max)
        return found

    def _apply(
        self,
        update: Update,
        coef: Tensor | Scalar,
        power: Tensor | None,  # noqa: ARG002  # none with signs, see `has_compiled_passes`
        keep: Scalar,
    ) -> None:
        k, m, n = self.shape
        # With the initial RMS no later step asks for them.
        needed = 0 if self.rule.keeps_initial_rms else len(self.units)
        found = new((needed,), torch.float64)
        by_matrix = self._by_matrix(keep)
        if self.rule.moves_by_sign:
            assert isinstance(coef, Tensor)  # it has the maxima of rows
            by_row = coef.expand(k, m, 1)[..., 0].contiguous()
            given: tuple[Any, ...] = (n, by_row.numpy(), by_matrix, found.numpy())
            self._run(passes.write_signs, self._g_at, self._w_at, *given)
        else:
            given = (*self._roots(update), self._by_matrix(coef), by_matrix, found.numpy())
            self._run(passes.write_updates, self._g_at, self._w_at, *given)
        increment_version(self.params)
        if needed:
            self.weight_sums.keep(self.params, found)

    def _filter_and_write(self, update: Update, alpha: Scalar, keep: Scalar) -> Tensor:
        """Equations (10) to (13) and the write, in one pass; returns the sums of FAM's band."""
        memory = update.memory
        assert memory is not None
        k, _, _ = self.shape
        of_average = (1 - memory.mix) / memory.correction
        given = (update.factor, 1 - memory.beta, of_average, memory.mix, alpha, keep)
        scalars = np.stack([self._by_matrix(each) for each in given], axis=-1)
        totals = new((len(self.units), 2), torch.float64)
        codes = addresses([state["momentum"] for state in self.states])
        scales = addresses([state["momentum_scale"] for state in self.states])
        self._run(
            passes.write_filtered, self._g_at, self._w_at, codes, scales,
            *self._roots(update), scalars, totals.numpy(),
        )  # fmt: skip
        increment_version(self.params)
        return totals.view(k, -1, 2, 1).sum(dim=1).to(torch.float32)

    def _roots(self, update: Update) -> tuple[int, Any, Any, np.float32]:
        """The length of a row, and 1 / sqrt(V) by rows, by columns, and its largest value."""
        (k, m, n), (row, col) = self.shape, _roots_of(update.variance)
        most = np.float32(self.rule.variance_floor**-0.5)
        return n, row.reshape(k, m).numpy(), col.reshape(k, n).numpy(), most

    def _by_matrix(self, value: Tensor | Scalar) -> Any:
        """A number, or one of each matrix, as (k,) in float32."""
        tensor = torch.as_tensor(value, dtype=torch.float32, device="cpu").reshape(-1)
        return tensor.expand(self.shape[0]).contiguous().numpy()


def _roots_of(variance: Variance) -> tuple[Tensor, Tensor]:
    assert isinstance(variance, FactoredVariance)  # see `has_compiled_passes`
    return variance.roots()


@lru_cache(maxsize=256)
def units_of(k: int, m: int, n: int) -> Any:
    """The units of k matrices, all with the same number of them, (units, 3)."""
    rows = max(LEAST_ROWS, UNIT // n // 4 * 4)
    return np.array(
        [(i, start, min(start + rows, m)) for i in range(k) for start in range(0, m, rows)],
        dtype=np.int64,
    )


def new(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor on the CPU, whatever torch's defaults are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def addresses(tensors: Sequence[Tensor]) -> Any:
    """Where contiguous tensors begin, (k,)."""
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
