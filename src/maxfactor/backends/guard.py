"""Counting the steps that were skipped because a gradient was not finite."""

from __future__ import annotations

LIMIT = 20  # skipped steps in a row before the run is given up
SHOWN = 5  # parameters that an error names


class Guard:
    """Counts skipped steps on the host, and gives up after too many in a row."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0

    def passed(self) -> None:
        """A step was taken."""
        self.in_a_row = 0

    def failed(self, names: list[str], mode: str) -> None:
        """A step was not taken; raise if that was asked for, or if it happens again and again."""
        if mode == "raise":
            raise refused(names)
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= LIMIT:
            raise given_up(self.in_a_row, names)


def refused(names: list[str]) -> FloatingPointError:
    """The error of a step that was not taken, where one was asked for."""
    return FloatingPointError(
        f"the gradient of {listed(names)} is not finite; the step was not taken and nothing "
        "was changed"
    )


def given_up(steps: int, names: list[str]) -> FloatingPointError:
    """The error after too many skipped steps in a row."""
    return FloatingPointError(
        f"{steps} steps in a row were skipped because the gradient of {listed(names)} is not "
        "finite; lower the learning rate, clip the gradients, or look for the NaN in the model"
    )


def listed(names: list[str]) -> str:
    """A few names and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
