"""What the callbacks of all trainers log of a step."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import maxfactor

OPTIMIZERS = (maxfactor.MaxFactor, maxfactor.Adafactor)


def record(optimizer: maxfactor.MaxFactor | maxfactor.Adafactor, *, on: bool) -> None:
    """Record the coming steps, or end that. Shards, which cannot be recorded, are left alone."""
    with suppress(RuntimeError):
        optimizer.record_metrics(every=int(on))


def step_logs(optimizer: maxfactor.MaxFactor | maxfactor.Adafactor) -> dict[str, float]:
    """The step sizes of the last step, and the summary of its metrics if it was recorded."""
    rates = {
        f"effective_lr/{_label(group, index)}": rate
        for index, (group, rate) in enumerate(
            zip(optimizer.param_groups, optimizer.effective_lr(), strict=True)
        )
    }
    return rates | _summary(optimizer)


def _summary(optimizer: maxfactor.MaxFactor | maxfactor.Adafactor) -> dict[str, float]:
    try:
        metrics = optimizer.metrics()
    except RuntimeError:  # nothing was recorded
        return {}
    if metrics.age:
        return {}
    numbers = metrics.summary().items()
    # Step sizes are in the logs by group.
    return {f"optimizer/{key}": value for key, value in numbers if not key.endswith("/step_size")}


def _label(group: dict[str, Any], index: int) -> str:
    """The kind of a group, such as `hidden`, with its blocks, such as `hidden_64_rows`.

    Matrices that have their inputs first, as in GPT-2, are `hidden_transposed`.
    """
    parts = [group.get("kind", index), *reversed(group.get("blocks") or ())]
    if group.get("transposed"):
        parts.append("transposed")
    return "_".join(map(str, parts))
