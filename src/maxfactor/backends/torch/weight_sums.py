"""Sums of W^2 that were found while matrices were written, for their next step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Written(NamedTuple):
    """Parameters as a step left them. It keeps them alive, so that no other gets their id."""

    params: Sequence[Tensor]
    places: list[tuple[int, int]]
    sums: Tensor


class WeightSums:
    """What the last step found. Weights that somebody else wrote since are not known.

    Torch counts writes, but not those through `param.data`: their sums are one step old.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], Written] = {}
        self._now: dict[tuple[int, ...], Written] = {}

    def begin(self) -> None:
        """Begin a step; what the step before the last one found is forgotten."""
        self._last, self._now = self._now, {}

    def find(self, params: Sequence[Tensor]) -> Tensor | None:
        """The sums of these matrices, if the last step wrote just them and nobody did since."""
        written = self._last.get(tuple(map(id, params)))
        if written is None or written.places != _places(params):
            return None
        return written.sums

    def keep(self, params: Sequence[Tensor], sums: Tensor) -> None:
        """Keep the sums of matrices that this step has just written."""
        self._now[tuple(map(id, params))] = Written(params, _places(params), sums)


def _places(params: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where parameters are, and how often they were written."""
    return [(param.data_ptr(), param._version) for param in params]
