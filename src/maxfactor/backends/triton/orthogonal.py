"""The orthogonal direction between the launches of the fused kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxfactor.backends.triton.kernels import layout as K  # noqa: N812
from maxfactor.backends.triton.tables import KINDS, Part, flags_of, matrices_of
from maxfactor.rule.newton_schulz import orthogonalize_

if TYPE_CHECKING:
    from collections.abc import Sequence

WHITENED_AT_ONCE = 1 << 26  # elements
GRAIN = 8  # elements: 16 bytes at least, on which the kernels take aligned matrices to begin


class Whitening:
    """The buffer that orthogonal directions go through, and their iteration.

    `filtered` writes into it what is to be orthogonalised, matrices of equal shape side by side;
    `apply` reads the directions. It is there only for the time of a step.
    """

    def __init__(self, works: Sequence[Part]) -> None:
        self.device = works[0].param.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.kind = KINDS[self.dtype]
        shapes: dict[tuple[int, int], list[int]] = {}
        for index, work in enumerate(works):
            if work.param.numel() and flags_of(work) & K.WHITENS.value:
                m, n, _ = matrices_of(work)[0]
                shapes.setdefault((m, n), []).append(index)
        self.groups: list[tuple[tuple[int, int], list[int], int]] = []  # and where each begins
        self.numel = 0
        for (m, n), members in shapes.items():
            self.groups.append(((m, n), members, self.numel))
            self.numel += -(-m * n * len(members) // GRAIN) * GRAIN
        self.buffer: Tensor | None = None

    def addresses(self, count: int) -> list[int]:
        """Make the buffer; where each tensor's matrix is in it, 0 for those that have none."""
        places = [0] * count
        if not self.groups:
            return places
        self.buffer = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        for (m, n), members, start in self.groups:
            for number, index in enumerate(members):
                at = (start + number * m * n) * self.buffer.element_size()
                places[index] = self.buffer.data_ptr() + at
        return places

    def run(self) -> None:
        """Orthogonalise everything in the buffer, in batches of a bounded size."""
        for (m, n), members, start in self.groups:
            assert self.buffer is not None
            matrices = self.buffer[start : start + m * n * len(members)].view(-1, m, n)
            for batch in matrices.split(max(1, WHITENED_AT_ONCE // (m * n))):
                orthogonalize_(batch)

    def release(self) -> None:
        """Give the memory back to torch."""
        self.buffer = None
