"""Describes an optimizer in a table: groups, settings, bytes of state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maxfactor.state import state_dtypes, state_shapes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from maxfactor.settings import GroupRules, TensorRule
    from maxfactor.state import Shape

EXAMPLES = 3  # most parameters that a row names

HEADER = (
    "group", "tensors", "parameters", "state bytes", "B/param", "lr", "decay", "direction",
    "momentum", "example",
)  # fmt: skip
NUMBERS = 7  # columns before this one, except the first, are right-aligned


@dataclass(frozen=True)
class Row:
    """One parameter group, or all of them together.

    Attributes:
        group: Its kind, or its index if it has none.
        tensors: Number of tensors.
        parameters: Number of elements, over all shards.
        state_bytes: Bytes of state once each tensor has stepped, over all shards.
        lr: The learning rate; None for Adafactor's own.
        weight_decay: The weight decay.
        direction: "sign_max", "factored" or "orthogonal", the latter with the blocks that matrices
            are cut into, such as "orthogonal 64 rows".
        momentum: Beta or FAM, and the dtype of the momentum; "none" without momentum.
        examples: Some names and shapes.
    """

    group: str
    tensors: int
    parameters: int
    state_bytes: int
    lr: float | None = None
    weight_decay: float | None = None
    direction: str = ""
    momentum: str = ""
    examples: tuple[str, ...] = ()

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of state per element."""
        return self.state_bytes / self.parameters if self.parameters else 0.0

    def cells(self) -> tuple[str, ...]:
        """The row as the table prints it."""
        more = ", …" if self.tensors > 1 else ""
        return (
            self.group,
            f"{self.tensors:,}",
            f"{self.parameters:,}",
            f"{self.state_bytes:,}",
            f"{self.bytes_per_parameter:.3f}",
            "" if self.lr is None else f"{self.lr:.6g}",
            "" if self.weight_decay is None else f"{self.weight_decay:.6g}",
            self.direction,
            self.momentum,
            f"{self.examples[0]}{more}" if self.examples else "",
        )


class Description(list[Row]):
    """One row for each group of an optimizer; prints as a table with a total.

    Attributes:
        left_out: Trainable parameters of the model that the optimizer leaves alone, and why.
    """

    def __init__(self, rows: Iterable[Row] = (), left_out: Mapping[str, str] | None = None) -> None:
        super().__init__(rows)
        self.left_out = dict(left_out or {})

    @property
    def total(self) -> Row:
        """All groups together."""
        return Row(
            "total",
            tensors=sum(row.tensors for row in self),
            parameters=sum(row.parameters for row in self),
            state_bytes=sum(row.state_bytes for row in self),
        )

    def __str__(self) -> str:
        lines = [HEADER, *(row.cells() for row in self), self.total.cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        told = [f"left out: {name} ({why})" for name, why in self.left_out.items()]
        return "\n".join([*(_line(cells, widths) for cells in lines), *told])

    __repr__ = __str__  # for notebooks and the prompt


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.rjust(width) if 0 < column < NUMBERS else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def describe_group(
    label: str, named: Sequence[tuple[str, Tensor]], rules: GroupRules, lr: float | Tensor | None
) -> Row:
    """Describe a group from shapes and settings alone, so also before its first step."""
    shapes = [tuple(param.shape) for _, param in named]
    # For a group of matrices and vectors, the rule of the matrices.
    rule = rules.vector if all(len(shape) < 2 for shape in shapes) else rules.matrix
    return Row(
        group=label,
        tensors=len(named),
        parameters=sum(math.prod(shape) for shape in shapes),
        state_bytes=sum(state_bytes(shape, rules.of(shape)) for shape in shapes),
        # A host sync if lr is a tensor on the device; only the user calls this.
        lr=None if lr is None else float(lr),
        weight_decay=rule.weight_decay,
        direction=_direction(rule),
        momentum=_momentum(rule),
        examples=tuple(f"{name} {tuple(param.shape)}" for name, param in named[:EXAMPLES]),
    )


def state_bytes(shape: Shape, rule: TensorRule) -> int:
    """The bytes of the state of a parameter of `shape`."""
    dtypes = state_dtypes(shape, rule)
    return sum(
        math.prod(kept) * dtypes[key].itemsize for key, kept in state_shapes(shape, rule).items()
    )


def _direction(rule: TensorRule) -> str:
    if rule.is_orthogonal:
        sizes = {"rows": rule.block_rows, "columns": rule.block_cols}
        blocks = [f"{size} {side}" for side, size in sizes.items() if size]
        return " ".join(["orthogonal", *blocks])
    return "sign_max" if rule.divides_by_peak else "factored"


def _momentum(rule: TensorRule) -> str:
    """Beta or FAM, and the dtype of the momentum."""
    if not rule.has_momentum:
        return "none"
    memory = f"{rule.beta:g}"
    if rule.fam is not None:
        memory = "FAM" if rule.bands == 1 else f"FAM {rule.bands} bands"
    elif rule.looks_ahead:
        memory += " nesterov"
    return f"{memory} {rule.momentum_dtype}"
