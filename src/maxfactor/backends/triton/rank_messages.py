"""What ranks send in each round of a step: which sums and maxima, over which process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maxfactor.backends.triton.kernels.layout import (
    Column,
    Extreme,
    Flag,
    GradientSum,
    RowSum,
    Square,
    UpdateSum,
)
from maxfactor.backends.triton.messages import Message
from maxfactor.backends.triton.settings_rows import is_general
from maxfactor.distributed.reductions import groups_over
from maxfactor.state import factoring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.backends.step_io import StepInput
    from maxfactor.backends.triton.plan import LaunchPlan

BY_MEAN = Flag.ADAFACTOR | Flag.FACTORED | Flag.WITH_MOMENTUM  # R is divided by its mean


class RankMessages:
    """What is sent in each round, laid out in the optimizer's order, the same on every rank.

    Args:
        step_io: What the optimizer collected, in its order.
        owner_of: The tensor, in the order of the kernels, of each of them.
        plan: The plan.
        combined: The rows of the combined table.
        starts: Where the parts of the buffers of sums begin.
    """

    def __init__(
        self,
        step_io: Sequence[StepInput],
        owner_of: Sequence[int],
        plan: LaunchPlan,
        combined: list[list[int]],
        starts: dict[str, int],
    ) -> None:
        self._plan, self._combined, self._starts = plan, combined, starts
        self.sums, self.update_sums = (Message(is_sum=True) for _ in range(2))
        self.max_rows, self.max_updates, self.max_by_row = (Message(is_sum=False) for _ in range(3))
        self.rescales = False
        for each, owner in zip(step_io, owner_of, strict=True):
            self._add_tensor(each, owner)
            self._add_matrices(each, owner)
        messages = [self.sums, self.update_sums, self.max_rows, self.max_updates, self.max_by_row]
        for message in messages:
            message.finish(step_io[0].param.device)

    def _rows_of(self, owner: int) -> list[list[int]]:
        """The combined rows of a tensor's matrices."""
        return [self._combined[k] for k in self._plan.matrices_of(owner)]

    def _add_tensor(self, step_io: StepInput, owner: int) -> None:
        """The sums and the largest update of a tensor."""
        flags = self._rows_of(owner)[0][Column.FLAGS]
        everywhere = groups_over(step_io.param, range(step_io.param.dim()))
        weights = self._starts["weights"] + owner * len(Square)
        gradients = self._starts["gradients"] + owner * len(GradientSum)
        self.sums.add(everywhere, range(weights, weights + len(Square)))
        if flags & Flag.WITH_MOMENTUM:
            self.sums.add(everywhere, range(gradients, gradients + GradientSum.UNUSED))
        if not flags & Flag.ORTHOGONAL:
            self.max_updates.add(everywhere, range(owner, owner + 1))
        updates = range(owner * len(UpdateSum), (owner + 1) * len(UpdateSum))
        if flags & Flag.ADAPTIVE:
            self.update_sums.add(everywhere, updates[UpdateSum.XM : UpdateSum.YY])
        needs_norm = is_general(step_io.rule)
        if needs_norm:
            squares = self._starts["updates"] + owner * len(Square)
            self.update_sums.add(everywhere, updates[UpdateSum.YY :])
            self.update_sums.add(everywhere, range(squares, squares + len(Square)))
        self.rescales |= bool(flags & Flag.WITH_MOMENTUM) or needs_norm

    def _add_matrices(self, step_io: StepInput, owner: int) -> None:
        """The sums and maxima of a tensor's rows and columns."""
        param = step_io.param
        layout = factoring(tuple(param.shape), step_io.rule.factor)
        if layout is None:
            return
        dims = range(param.dim())
        across = groups_over(param, [d for d in dims if d not in layout.row_dims])
        down = groups_over(param, [d for d in dims if d not in layout.col_dims])
        rows, own = self._rows_of(owner), self._plan.matrices_of(owner)
        flags = rows[0][Column.FLAGS]
        if flags & Flag.SIGN and not flags & Flag.ORTHOGONAL:
            self.max_by_row.add(across, *spans(rows, Column.ROW_SPACE, Column.ROWS))
        if flags & Flag.DENSE:
            return
        self.sums.add(across, *spans(rows, Column.ROW_PART, Column.ROWS))
        self.sums.add(down, *spans(rows, Column.COL_PART, Column.COLS))
        if flags & BY_MEAN:
            start, size = self._starts["matrices"], len(RowSum)
            places = range(start + own.start * size, start + own.stop * size)
            self.sums.add(down, places[RowSum.BEFORE :: size])
            self.sums.add([*down, *across], places[RowSum.NEWEST :: size])
        elif flags & Flag.MAX_NORM:
            size = len(Extreme)
            self.max_rows.add(down, range(own.start * size, own.stop * size, size))


def spans(rows: Sequence[list[int]], first: Column, count: Column) -> list[range]:
    """The places from `first` on, of each row of the table."""
    return [range(row[first], row[first] + row[count]) for row in rows]
