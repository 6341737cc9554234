"""The memory that optimizer states take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class HasState(Protocol):
    """An optimizer, as far as its state is concerned."""

    state: Any


def state_bytes(*optimizers: HasState) -> int:
    """Return the bytes of all tensors in optimizer states; shared storage is counted once."""
    storages: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, Mapping):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                visit(inner)
        elif hasattr(value, "__tensor_flatten__"):  # a tensor subclass that wraps others
            for name in value.__tensor_flatten__()[0]:
                visit(getattr(value, name))
        elif isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()

    for optimizer in optimizers:
        visit(optimizer.state)
    return sum(storages.values())
