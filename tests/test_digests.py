"""Results stay as they are: every recipe, backend and dtype against the stored digests."""

from __future__ import annotations

import json
from typing import Any

import pytest

import digests

STORED: dict[str, dict[str, Any]] = json.loads(digests.FILE.read_text())

# Triton's interpreter is slow; `python tests/digests.py --check` goes through all of them.
FUSED = ["published-1.0", "quality"]
CASES = [
    case
    for case in digests.cases()
    if case[1] != "fused" or (case[0] in FUSED and case[2] == "float32")
]


@pytest.mark.parametrize("case", CASES, ids=" / ".join)
@pytest.mark.usefixtures("one_rank")
def test_results_are_those_of_before(case: tuple[str, str, str]) -> None:
    """Equal bits, or numbers within the tolerance where the order of a sum changed."""
    difference = digests.difference(digests.digest(*case), STORED[" / ".join(case)])
    assert difference <= 1.0
