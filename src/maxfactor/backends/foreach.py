"""The foreach backend."""

from __future__ import annotations

from maxfactor.backends.plain import step

__all__ = ["step"]
