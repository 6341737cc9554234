"""How many examples the fuzz tests try, and which.

Without more, the same ones each time. `MAXFACTOR_FUZZ_EXAMPLES=20000` asks for as many at random,
and `MAXFACTOR_FUZZ_SEED=7` for those of a seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import hypothesis

ASKED = os.environ.get("MAXFACTOR_FUZZ_EXAMPLES")
SEED = os.environ.get("MAXFACTOR_FUZZ_SEED")
EXAMPLES = int(ASKED or 500)


def fuzzed(examples: int, shrinks: bool = True) -> Callable[[Any], Any]:
    """Return a decorator for a test with `given`.

    Args:
        examples: How many to try.
        shrinks: Look for the smallest example that fails; takes long where a failure does.
    """
    phases = set(hypothesis.Phase) - ({hypothesis.Phase.shrink} if not shrinks else set())
    chosen = hypothesis.settings(
        max_examples=examples,
        derandomize=ASKED is None and SEED is None,
        deadline=None,
        database=None,
        phases=sorted(phases, key=lambda phase: phase.value),
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    def decorate(test: Any) -> Any:
        return chosen(test if SEED is None else hypothesis.seed(int(SEED))(test))

    return decorate
