"""Windows: the consecutive parameters of a group that backends may multiply together.

How matrices are batched can change the last bit of torch's products and sums, so no such batch
crosses a window, and `release_gradients` steps whole windows. A released step and a step at the end
then agree bit for bit. Our own kernels compute a matrix alike in any batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

WINDOW = 1 << 25  # elements: 64 MiB of gradients in 16 bits; a larger tensor has its own window


class Member(NamedTuple):
    """A parameter of an optimizer: its name, its group, and its window."""

    name: str
    param: Tensor
    group: int
    window: int


def members_of(groups: Iterable[Iterable[tuple[str, Tensor]]]) -> list[Member]:
    """The named parameters of all groups, with their windows."""
    found: list[Member] = []
    window = -1
    for index, group in enumerate(groups):
        window, used = window + 1, 0
        for name, param in group:
            count = param.numel()
            if used and used + count > WINDOW:
                window, used = window + 1, 0
            used += count
            found.append(Member(name, param, index, window))
    return found
