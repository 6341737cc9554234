"""Comparisons of arrays that have the time to explain themselves only when they fail."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_close(ours: Any, theirs: Any, *, rtol: float, atol: float, err_msg: str) -> None:
    """As `np.testing.assert_allclose`, ten times as fast where it holds."""
    with np.errstate(invalid="ignore"):  # infinities are left to NumPy
        holds = np.abs(ours - theirs) <= atol + rtol * np.abs(theirs)
    if np.shape(ours) != np.shape(theirs) or not holds.all():
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=err_msg)


def assert_less(smaller: Any, larger: Any, *, err_msg: str) -> None:
    """As `np.testing.assert_array_less`, ten times as fast where it holds."""
    if np.shape(smaller) != np.shape(larger) or not np.less(smaller, larger).all():
        np.testing.assert_array_less(smaller, larger, err_msg=err_msg)
