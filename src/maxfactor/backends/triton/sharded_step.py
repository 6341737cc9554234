"""The step of sharded parameters: `FusedStep` finds the shards itself."""

from __future__ import annotations

from maxfactor.backends.triton.step import FusedStep

FusedShards = FusedStep
