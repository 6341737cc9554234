"""Counts the steps that are skipped because a gradient is not finite."""

from __future__ import annotations

LIMIT = 20  # skipped steps in a row that raise an error
SHOWN = 5  # most names in an error message


class Guard:
    """Counts skipped steps on the host, and raises after too many in a row."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0

    def passed(self) -> None:
        """Record a step that was taken."""
        self.in_a_row = 0

    def failed(self, names: list[str], mode: str) -> None:
        """Record a skipped step; raise with mode="raise", or after `LIMIT` of them in a row."""
        if mode == "raise":
            raise refused(names)
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= LIMIT:
            raise given_up(self.in_a_row, names)


def refused(names: list[str]) -> FloatingPointError:
    """The error for a skipped step, with nonfinite="raise"."""
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
    """The first names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
