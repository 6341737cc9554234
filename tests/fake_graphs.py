"""CUDA graphs for a CPU: what was captured is run again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from maxfactor.backends.triton import replay


class FakeGraph:
    """Runs captured launches again, as a CUDA graph does: with the arguments they had."""

    def __init__(self, launch: Callable[[], object]) -> None:
        self.replay = launch


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture and replay on the CPU."""
    monkeypatch.setattr(replay, "captured", lambda launch, *_: FakeGraph(launch))
    monkeypatch.setattr(replay, "shared_pool", lambda _: None)
    monkeypatch.setattr(replay, "has_graphs", lambda _: True)
    monkeypatch.setattr(replay, "is_default_stream", lambda _: True)
