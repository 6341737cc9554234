"""The orthogonal direction between the launches of the kernels.

Newton-Schulz iterations as in Jordan et al., "Muon: An optimizer for hidden layers in neural
networks" (2024), https://kellerjordan.github.io/posts/muon/. The iteration is that of
`maxfactor.rule.newton_schulz`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from maxfactor.backends.triton.kernels.layout import Flag
from maxfactor.rule.newton_schulz import orthogonalize_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.backends.triton.local_parameters import LocalParameter

BATCH_NUMEL = 1 << 26  # elements that are orthogonalised at a time
GRAIN = 8  # elements: 16 bytes at least, on which the kernels expect aligned matrices to begin


class EqualMatrices(NamedTuple):
    """Matrices of one shape, side by side in the buffer."""

    m: int
    n: int
    owners: list[int]  # the tensors they belong to
    start: int  # position of the first element in the buffer


class OrthogonalBuffer:
    """The buffer of the orthogonal directions of a step, and their iteration.

    `with_momentum` writes the matrices that are to be orthogonalised; `apply` reads the directions.
    The memory is borrowed for the time of a step.
    """

    def __init__(self, params: Sequence[LocalParameter]) -> None:
        self.device = params[0].param.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        owners_of: dict[tuple[int, int, int], list[int]] = {}  # by window, m and n
        for owner, param in enumerate(params):
            if param.param.numel() and param.flags & Flag.ORTHOGONAL:
                m, n, _ = param.matrices[0]
                owners_of.setdefault((param.window, m, n), []).append(owner)
        self._shapes: list[EqualMatrices] = []
        self._numel = 0
        for (_, m, n), owners in owners_of.items():
            self._shapes.append(EqualMatrices(m, n, owners, self._numel))
            self._numel += -(-m * n * len(owners) // GRAIN) * GRAIN
        self._buffer: Tensor | None = None

    def allocate(self, tensors: int) -> list[int]:
        """Allocate the buffer; return the address of each tensor's matrix, 0 without one."""
        addresses = [0] * tensors
        if not self._shapes:
            return addresses
        self._buffer = torch.empty(self._numel, dtype=self.dtype, device=self.device)
        for m, n, owners, start in self._shapes:
            for number, owner in enumerate(owners):
                at = (start + number * m * n) * self._buffer.element_size()
                addresses[owner] = self._buffer.data_ptr() + at
        return addresses

    def orthogonalize(self) -> None:
        """Orthogonalise all matrices in the buffer, in batches of bounded size."""
        for m, n, owners, start in self._shapes:
            assert self._buffer is not None
            matrices = self._buffer[start : start + m * n * len(owners)].view(-1, m, n)
            for batch in matrices.split(max(1, BATCH_NUMEL // (m * n))):
                orthogonalize_(batch)

    @property
    def borrowed_bytes(self) -> int:
        """What a step on a GPU borrows: the buffer, and the iteration's copies of one batch."""
        batches = []
        for m, n, owners, _ in self._shapes:
            count, short = min(len(owners), max(1, BATCH_NUMEL // (m * n))), min(m, n)
            batches.append(count * (2 * m * n + 3 * short * short))  # X twice; A, P, a product
        return torch.bfloat16.itemsize * (self._numel + max(batches, default=0))

    def release(self) -> None:
        """Return the memory to torch."""
        self._buffer = None
