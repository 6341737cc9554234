"""What the tests of faults and long runs step: a little in `make test`, a lot in `make soak`."""

from __future__ import annotations

import os
from typing import Any

from maxfactor import FAM, Adafactor, MaxFactor

RULES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "published": (MaxFactor, {}),
    "fam": (MaxFactor, {"momentum": FAM(), "momentum_dtype": "int8", "scale": "initial"}),
    "orthogonal": (
        MaxFactor,
        {"direction": "orthogonal", "momentum": 0.95, "momentum_dtype": "int8", "scale": "initial"},
    ),
    "adafactor": (Adafactor, {}),
}
IS_SOAK = os.environ.get("MAXFACTOR_SOAK") == "1"


def amount(usual: int, soak: int) -> int:
    """The first number in `make test`, the second in `make soak`."""
    return soak if IS_SOAK else usual
