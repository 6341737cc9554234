"""Counts the steps that are skipped because a gradient is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

OVERFLOWS, NOT_FINITE = 1, 2  # marks of a gradient that stops a step
LIMIT = 20  # skipped steps in a row that raise an error
SHOWN = 5  # most names in an error message


class BadGradients(NamedTuple):
    """Names of the parameters whose gradients stop a step: those that are not finite, if any."""

    names: list[str]
    overflow: bool = False  # they are finite, but their sums of squares overflow


def bad_gradients(marks: Iterable[tuple[str, float]]) -> BadGradients | None:
    """What stops a step, from the names of all parameters and their marks; 0 for a good one."""
    found = [(name, mark) for name, mark in marks if mark]
    if not found:
        return None
    worst = max(mark for _, mark in found)
    names = [name for name, mark in found if mark == worst]
    return BadGradients(names, overflow=worst < NOT_FINITE)


class Guard:
    """Counts skipped steps on the host, and raises after too many in a row."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0

    def passed(self) -> None:
        """Record a step that was taken."""
        self.in_a_row = 0

    def failed(self, bad: BadGradients, mode: str) -> None:
        """Record a skipped step; raise with mode="raise", or after `LIMIT` of them in a row."""
        if mode == "raise":
            raise refused(bad)
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= LIMIT:
            raise given_up(self.in_a_row, bad)


def refused(bad: BadGradients) -> FloatingPointError:
    """The error for a skipped step, with nonfinite="raise"."""
    whose = listed(bad.names)
    if bad.overflow:
        return FloatingPointError(
            f"the gradient of {whose} is finite, but so large, about 1e18 or more, that the sum "
            "of its squares overflows float32; the step was not taken and nothing was changed"
        )
    return FloatingPointError(
        f"the gradient of {whose} is not finite; the step was not taken and nothing was changed"
    )


def given_up(steps: int, bad: BadGradients) -> FloatingPointError:
    """The error after too many skipped steps in a row."""
    whose = listed(bad.names)
    if bad.overflow:
        return FloatingPointError(
            f"{steps} steps in a row were skipped because the gradient of {whose} is finite, but "
            "so large, about 1e18 or more, that the sum of its squares overflows float32; scale "
            "the loss down, or clip the gradients"
        )
    return FloatingPointError(
        f"{steps} steps in a row were skipped because the gradient of {whose} is not finite; "
        "lower the learning rate, clip the gradients, or look for the NaN in the model"
    )


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
