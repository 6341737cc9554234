"""Results stay as they are: every recipe, backend and dtype against the stored digests."""

from __future__ import annotations

import json
from typing import Any

import pytest

import digests

STORED: dict[str, dict[str, Any]] = json.loads(digests.FILE.read_text())


@pytest.mark.parametrize("case", list(digests.cases()), ids=" / ".join)
@pytest.mark.usefixtures("one_rank")
def test_results_are_those_of_before(case: tuple[str, str, str]) -> None:
    """Equal bits, or numbers within 1e-6 where the order of a sum changed."""
    found, stored = digests.digest(*case), STORED[" / ".join(case)]
    if found["hash"] == stored["hash"]:
        return
    assert found["numbers"].keys() == stored["numbers"].keys()
    for key, (norm, projection) in stored["numbers"].items():
        assert found["numbers"][key] == pytest.approx([norm, projection], abs=1e-6 * norm), key
