"""Checks of single settings: each returns the value, or raises an error with the remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def check_number(name: str, value: object) -> float:
    """Return `value` as a float; refuse other types than numbers."""
    if isinstance(value, bool) or not isinstance(value, Real):
        remedy = "; convert it with float() first" if isinstance(value, str) else ""
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}){remedy}")
    return float(value)


def check_not_negative(name: str, value: object) -> float:
    """Return `value` as a finite float of at least 0."""
    number = check_number(name, value)
    if not (math.isfinite(number) and number >= 0.0):
        raise ValueError(f"{name} must be finite and not negative, got {number}")
    return number


def check_positive(name: str, value: object) -> float:
    """Return `value` as a finite float above 0."""
    number = check_number(name, value)
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"{name} must be finite and positive, got {number}")
    return number


def check_above_zero(name: str, value: object) -> float:
    """Return `value` as a float above 0; it may be infinite."""
    number = check_number(name, value)
    if not number > 0.0:
        raise ValueError(f"{name} must be positive, got {number}")
    return number


def check_choice(name: str, value: object, known: tuple[str, ...]) -> str:
    """Return `value` if it is one of `known`."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    return value


def check_flag(name: str, value: object) -> bool:
    """Return `value` if it is True or False; 0, 1 and "no" are refused as likely mistakes."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


def check_pair(name: str, value: object) -> tuple[Any, Any]:
    """Return the two entries of a tuple or another sequence, as configuration files give them."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or len(value) != 2:
        raise ValueError(f"{name} must be a pair such as (1e-10, 1e-3), got {value!r}")
    return value[0], value[1]


def check_share(name: str, value: object) -> float:
    """Return `value` as a float in [0, 1), such as a beta."""
    number = check_number(name, value)
    if not 0.0 <= number < 1.0:
        raise ValueError(f"{name} must lie in [0, 1), got {number}")
    return number


def check_whole(name: str, value: object) -> int:
    """Return `value` as an int if it is a whole number, of numpy too."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    return int(value)


def check_count(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` as an int if it is a whole number of at least `low` and at most `high`."""
    count = check_whole(name, value)
    if count < low or (high is not None and count > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {bounds}, got {count}")
    return count
