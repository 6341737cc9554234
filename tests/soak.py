"""How much the tests of faults and long runs do: a little in `make test`, a lot in `make soak`."""

from __future__ import annotations

import os

IS_SOAK = os.environ.get("MAXFACTOR_SOAK") == "1"


def amount(usual: int, soak: int) -> int:
    """The first number in `make test`, the second in `make soak`."""
    return soak if IS_SOAK else usual
