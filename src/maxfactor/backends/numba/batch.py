"""The equations for large float32 matrices of any shapes, by compiled passes.

A `MatrixBatch` takes the same three rounds as a `Batch` of torch operations, and both are part of
one step. Numbers for a matrix, such as its step size, come from the reference; `kernels.py` has
what is done to its entries. No buffer has the size of a matrix.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maxfactor.backends.numba import kernels
from maxfactor.backends.numba.threads import launch, thread_count
from maxfactor.distributed.reductions import Reduction
from maxfactor.rule import fam, reference
from maxfactor.rule.momentum import memory_of
from maxfactor.rule.reference import Scalar, host_scalar
from maxfactor.settings import FLOAT32_MAX, FLOAT32_TINY
from maxfactor.state import factoring

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from maxfactor.backends.step_io import StepInput
    from maxfactor.backends.torch.record import BatchRecord
    from maxfactor.settings import FAM

    Rounds = Generator[list[Reduction], list[Tensor], list[Scalar]]

Array = NDArray[Any]
Shapes = tuple[tuple[int, int], ...]

TASK_SIZE = 1 << 16  # elements: W and G of a task fit into a core's cache


class Layout(NamedTuple):
    """Where matrices of some shapes lie in flat arrays, and the tasks that they are cut into."""

    tasks: Array
    matrices: Array  # without addresses
    parts: int  # floats of the sums by column, of all tasks
    task_ends: list[int]  # the last task of each thread
    matrix_ends: list[int]  # the last matrix of each thread

    @property
    def rows(self) -> int:
        """The number of rows of all matrices."""
        return int(self.matrices["m"].sum())

    @property
    def columns(self) -> int:
        """The number of columns of all matrices."""
        return int(self.matrices["n"].sum())


@lru_cache(maxsize=64)
def layout_of(shapes: Shapes, size: int, threads: int) -> Layout:
    """Cut matrices into tasks of about `size` elements, and share them out."""
    tasks: list[tuple[int, ...]] = []
    matrices = np.zeros(len(shapes), kernels.MATRIX)
    row = column = part = 0
    for index, (m, n) in enumerate(shapes):
        own, first = matrices[index], len(tasks)
        step = max(1, size // n)
        for start in range(0, m, step):
            tasks.append((index, start, min(m, start + step), part))
            part += n
        own["m"], own["n"], own["first_row"], own["first_column"] = m, n, row, column
        own["first_task"], own["last_task"] = first, len(tasks)
        row, column = row + m, column + n
    table = np.array(tasks, kernels.TASK)
    elements = (table["stop"] - table["start"]) * matrices["n"][table["matrix"]]
    lines = matrices["m"] + matrices["n"]
    return Layout(table, matrices, part, shared(elements, threads), shared(lines, threads))


def shared(sizes: Array, threads: int) -> list[int]:
    """Where to end consecutive parts of a list, one for each thread, of about equal size."""
    reached = np.cumsum(sizes)
    wanted = reached[-1] * np.arange(1, threads + 1) / threads
    ends = np.minimum(np.searchsorted(reached, wanted) + 1, sizes.size)
    return [*map(int, ends[:-1]), int(sizes.size)]


class Written(NamedTuple):
    """The sum of W^2 that the last step left, for as long as autograd counts no other write."""

    param: Tensor
    version: int
    address: int
    squares: float

    def holds(self) -> bool:
        """Whether nobody wrote the parameter since then."""
        return (self.param._version, self.param.data_ptr()) == (self.version, self.address)


class MatrixBatch:
    """Matrices of one rule, learning rate and step count; see `dispatch.is_compiled`.

    Args:
        inputs: The parameters with their states.
        grads: Their gradients.
        t: The number of this step.
        written: What earlier steps left, by the ids of parameters; this one adds to it.
    """

    def __init__(
        self,
        inputs: Sequence[StepInput],
        grads: Sequence[Tensor],
        t: float,
        written: dict[int, Written],
    ) -> None:
        self.inputs, self.grads, self.t, self.written = inputs, grads, t, written
        self.rule, self.lr = inputs[0].rule, host_scalar(inputs[0].lr)
        self.record: BatchRecord | None = None  # set in a recorded step
        self.layout = layout_of(tuple(map(matrix_shape, inputs)), TASK_SIZE, thread_count())
        self.matrices = with_addresses(self.layout.matrices, inputs, grads)
        shape = self.matrices["m"] * self.matrices["n"]
        self.counts = torch.from_numpy(shape.astype(np.float64))  # (k,)

    def rounds(self) -> Rounds:
        """Run the step; return the step sizes."""
        row_sums, parts = floats(self.layout.rows), floats(self.layout.parts)
        totals, known = np.empty(len(self.inputs)), self._known_squares()
        squares = np.zeros(self.layout.tasks.size)  # of W, by task
        self._run(kernels.sums, row_sums, parts, squares, np.isnan(known))
        self._run_by_matrix(kernels.totals_of, self.matrices, row_sums, totals)
        total = torch.from_numpy(totals).to(torch.float32)  # (k,); inf if the sum overflows
        yield [Reduction(total.view(-1, 1, 1))]
        before = [each.param.clone() for each in self.inputs] if self.record is not None else []
        torch._foreach_add_([each.state["step"] for each in self.inputs], 1)
        found = np.where(np.isnan(known), self._by_matrix(squares), known)
        alpha, keep = self._rates(found)
        update = Update(self, self._update_moments(row_sums, parts), total)
        yield []
        scale = update.measure()
        yield []
        uphill = -1.0 if self.rule.maximize else 1.0
        sizes = self._column(alpha)
        update.write(scale * sizes.double() * uphill, self._column(keep), squares)
        self._remember(squares)
        if self.record is not None:
            self._record(self.record, before, total, update)
        return list(sizes.unbind())

    def _known_squares(self) -> Array:
        """The sum of W^2 of each matrix: NaN if it must be computed, 0 if it is not needed."""
        count = len(self.inputs)
        if self._keeps_to_first():
            return np.zeros(count)
        known = [self.written.get(id(each.param)) for each in self.inputs]
        return np.array([one.squares if one and one.holds() else np.nan for one in known])

    def _remember(self, squares: Array) -> None:
        """Tell autograd that the parameters were written, and note the sums of their squares."""
        increment_version([each.param for each in self.inputs])
        if self.rule.keeps_initial_rms:
            return
        for each, total in zip(self.inputs, self._by_matrix(squares), strict=True):
            param = each.param
            new = Written(param, param._version, param.data_ptr(), float(total))
            self.written[id(param)] = new

    def _by_matrix(self, values: Array) -> Array:
        """Sums of the values of each matrix's tasks."""
        found: Array = np.add.reduceat(values, self.matrices["first_task"])
        return found

    def _run(self, kernel: Any, *arguments: Any) -> None:
        """Run a kernel for all tasks."""
        launch(kernel, self.layout.task_ends, self.layout.tasks, self.matrices, *arguments)

    def _run_by_matrix(self, kernel: Any, *arguments: Any) -> None:
        """Run a kernel for all matrices."""
        launch(kernel, self.layout.matrix_ends, *arguments)

    def _column(self, value: Scalar) -> Tensor:
        """A number, or one for each matrix, as float32 (k,)."""
        own = torch.as_tensor(value, dtype=torch.float32)
        return own.reshape(-1).expand(len(self.inputs)).contiguous()

    def _state(self, key: str) -> Tensor:
        return torch.stack([each.state[key] for each in self.inputs])

    # ------------------------------------------------------------------------------ (2) to (6)

    def _keeps_to_first(self) -> bool:
        """Whether (3) uses the stored initial RMS alone."""
        if not self.rule.keeps_initial_rms or self.t == 1:
            return False
        return bool((self._state("initial_rms") > 0).all())  # free on the CPU

    def _rates(self, weight_squares: Array) -> tuple[Scalar, Scalar]:
        """The step size of (2) (3) and the decay factor of (4): numbers, or (k,)."""
        rule, t = self.rule, self.t
        size = (torch.from_numpy(weight_squares) / self.counts).sqrt().to(torch.float32)
        if rule.keeps_initial_rms:
            size, now = reference.weight_size(size, self._state("initial_rms"), t, rule)
            kept = [each.state["initial_rms"] for each in self.inputs]
            torch._foreach_copy_(kept, list(now["initial_rms"].unbind()))
        alpha = reference.step_size(size, t, self.lr, rule)
        return alpha, reference.decay_factor(alpha, t, self.lr, rule)

    def _update_moments(self, row_sums: Array, parts: Array) -> Roots:
        """Equations (5) and (6), with R and C written to the state."""
        rule, layout = self.rule, self.layout
        roots = Roots(floats(layout.rows), floats(layout.columns), floats(len(self.inputs)))
        kappa = reference.statistic_weight(self.t, rule)
        floor = rule.floor if rule.divides_by_max else FLOAT32_TINY
        numbers = np.array([kappa, rule.count_eps, rule.offset, floor], np.float32)
        self._run_by_matrix(
            kernels.moments, layout.tasks, self.matrices, row_sums, parts, *roots, numbers,
            rule.divides_by_max,
        )  # fmt: skip
        return roots

    def _record(
        self, record: BatchRecord, before: Sequence[Tensor], total: Tensor, update: Update
    ) -> None:
        """What the step did, as `BatchRecord.add_write` measures it."""
        record.begin(total, self.rule)
        record.add_clip(update.clip)
        record.beta = record.beta if update.beta is None else update.beta
        pairs = zip(self.inputs, before, strict=True)
        record.changes = torch.stack([norm(each.param - old) for each, old in pairs]).square()
        record.weights = torch.stack([norm(each.param) for each in self.inputs]).square()


class Roots(NamedTuple):
    """1 / sqrt(V) of (6) as factors, flat over all matrices, and the mean of R of each."""

    rows: Array
    columns: Array
    means: Array


class Update:
    """Equations (7) to (13) for all matrices of a batch."""

    def __init__(self, batch: MatrixBatch, roots: Roots, total: Tensor) -> None:
        self.batch, self.rule, self.roots = batch, batch.rule, roots
        count, tasks = len(batch.inputs), batch.layout.tasks.size
        self.factors = np.ones(count, np.float32)
        self.memory = np.zeros((count, 3), np.float32)  # beta, the factor of M in (13), mu
        self.totals = np.zeros((tasks, 2))  # of FAM
        self.peaks = floats(batch.layout.rows)  # the largest |U| of each row
        self.clip: Scalar = 1.0
        self.beta: Tensor | None = None
        if self.rule.has_momentum:
            self._prepare_momentum(total)

    def _prepare_momentum(self, total: Tensor) -> None:
        """The numbers of (10) to (13)."""
        batch, rule = self.batch, self.rule
        mean = torch.from_numpy(self.roots.means)
        mean_square = total / batch.counts.to(torch.float32)
        self.factors = reference.input_factor(mean_square, mean, rule).numpy()  # (10)
        self.clip = reference.input_clip(mean_square, mean)
        sums = None if rule.fam is None else batch._state("band_sums")
        memory = memory_of(rule, batch.t, 1, sums)
        ahead = (1 - memory.mix) / batch._column(memory.correction)
        columns = (batch._column(memory.beta), ahead, batch._column(memory.mix))
        self.memory = torch.stack(columns, dim=1).numpy()
        self.beta = None if memory.band_beta is None else memory.band_beta.mean(dim=-1)

    @property
    def _of_variance(self) -> tuple[Any, ...]:
        cap = np.float32(self.rule.variance_floor**-0.5)
        return self.roots.rows, self.roots.columns, cap

    def measure(self) -> Tensor:
        """The pass for (7) and (8), if they need one; returns their factor of U, (k,), float64."""
        rule, batch = self.rule, self.batch
        scale = torch.ones(len(batch.inputs), dtype=torch.float64)
        if not (rule.divides_by_peak or rule.needs_norm):
            return scale
        squares, needs = np.zeros(batch.layout.tasks.size), (rule.divides_by_peak, rule.needs_norm)
        batch._run(kernels.measure, *self._of_variance, self.peaks, squares, *needs)
        if rule.divides_by_peak:
            peaks = np.maximum.reduceat(self.peaks, batch.matrices["first_row"])
            scale = 1.0 / torch.from_numpy(peaks).double().clamp(min=rule.floor)  # (7)
        if rule.needs_norm:
            rms = (torch.from_numpy(batch._by_matrix(squares)) / batch.counts).sqrt() * scale
            bound = (rms / rule.rms_bound).clamp(min=1.0)
            scale, self.clip = scale / bound, self.clip * bound  # (8)
        return scale

    def write(self, coefficient: Tensor, keep: Tensor, squares: Array) -> None:
        """Equation (9), and with FAM its sums for the next step.

        Args:
            coefficient: What multiplies U, or its sign and row maximum, (k,).
            keep: The factor of W, (k,).
            squares: For the sums of the new W^2, by task.
        """
        rule, batch = self.rule, self.batch
        by_row = np.repeat(coefficient.numpy(), batch.matrices["m"])
        if rule.moves_by_sign:
            by_row *= self.peaks
        # For a zero gradient and a zero floor it may be inf, and 0 * inf is NaN.
        by_row = by_row.clip(-FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
        arguments = by_row, keep.numpy(), squares, not rule.keeps_initial_rms
        if rule.moves_by_sign:
            batch._run(kernels.write_by_sign, *arguments)
            return
        of_momentum = self.factors, self.memory, self.totals
        batch._run(kernels.write, *arguments, *self._of_variance, *of_momentum)
        if rule.fam is not None:
            self._update_sums(rule.fam)

    def _update_sums(self, settings: FAM) -> None:
        """Equation (11): A, P and c of the next step."""
        batch, sums = self.batch, self.batch._state("band_sums")
        totals = torch.from_numpy(np.add.reduceat(self.totals, batch.matrices["first_task"]))
        means = (totals / batch.counts.unsqueeze(1)).to(torch.float32).unsqueeze(-1)  # (k, 2, 1)
        beta = torch.from_numpy(self.memory[:, :1])
        new = fam.next_sums(sums, beta, means, settings)
        torch._foreach_copy_([each.state["band_sums"] for each in batch.inputs], list(new.unbind()))


def matrix_shape(each: StepInput) -> tuple[int, int]:
    """The rows and columns of a parameter as a matrix."""
    layout = factoring(tuple(each.param.shape), each.rule.factor)
    assert layout is not None
    m, n = layout.matrix
    return m, n


def with_addresses(matrices: Array, inputs: Sequence[StepInput], grads: Sequence[Tensor]) -> Array:
    """The table of the matrices, with the addresses of their tensors; 0 for what they lack."""
    table: Array = matrices.copy()
    table["grad"] = [grad.data_ptr() for grad in grads]
    table["param"] = [each.param.data_ptr() for each in inputs]
    for key in ("row_var", "col_var", "momentum", "momentum_scale"):
        if key in inputs[0].state:
            table[key] = [each.state[key].data_ptr() for each in inputs]
    return table


def floats(size: int) -> Array:
    """A float32 array with arbitrary content."""
    return np.empty(size, np.float32)


def norm(x: Tensor) -> Tensor:
    """The norm of a matrix; row by row first, as one long float32 sum would lose digits."""
    own: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1))
    return own


def increment_version(params: list[Tensor]) -> None:
    """Tell autograd that kernels wrote the parameters, as an in-place operation would."""
    try:
        torch.autograd.graph.increment_version(params)
    except (AttributeError, TypeError, RuntimeError):  # an older torch takes one at a time
        for param in params:
            torch.autograd.graph.increment_version(param)
