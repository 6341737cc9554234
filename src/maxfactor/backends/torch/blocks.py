"""Tensors as batches (k, m, n), scratch buffers, and 1 / sqrt(V) for blocks of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

Shape = tuple[int, int, int]


def as_batch(tensors: Sequence[Tensor], shape: Shape) -> Tensor:
    """The tensors as one batch (k, m, n): a view of a single contiguous tensor, else a copy."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(shape)
    # A stack of channels_last tensors is not contiguous.
    return torch.stack(list(tensors)).reshape(shape).contiguous()


def write_back(tensors: Sequence[Tensor], batch: Tensor) -> None:
    """Copy a batch back to its tensors, unless it is a view of them."""
    if len(tensors) == 1 and tensors[0].data_ptr() == batch.data_ptr():
        return
    parts = batch.reshape(len(tensors), *tensors[0].shape).unbind()
    torch._foreach_copy_(list(tensors), list(parts))


class Scratch:
    """Buffers for one block, reused for every block of every batch of a step."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, index: int, like: Tensor) -> Tensor:
        """Buffer `index` in the shape of `like`, with arbitrary content."""
        size, key = like.numel(), (index, like.device)
        found = self._buffers.get(key)
        if found is None or found.numel() < size:
            found = self._buffers[key] = torch.empty(size, dtype=torch.float32, device=like.device)
        return found[:size].view(like.shape)

    def release(self) -> None:
        """Drop the buffers; views that are still in use stay valid."""
        self._buffers.clear()


class FactoredVariance:
    """V = max(R C, floor). If the floor is active nowhere, 1 / sqrt(V) is a product too.

    Args:
        row: The row factor of (6), (k, m, 1).
        col: C, (k, 1, n).
        floor: The smallest V.
        may_read: Whether to read the smallest V, to learn whether the floor is active.
        may_overflow: Whether R C may overflow, as it does where nothing divides R.
    """

    def __init__(
        self, row: Tensor, col: Tensor, floor: float, *, may_read: bool, may_overflow: bool
    ) -> None:
        self.floor, self.by_roots = floor, may_overflow
        self.is_separable = may_read and smallest_product(row, col) >= floor
        self.has_roots = self.is_separable or self.by_roots
        self.row = row.rsqrt() if self.has_roots else row
        self.col = col.rsqrt() if self.has_roots else col

    def normalize(self, g: Tensor, rows: slice, out: Tensor) -> Tensor:
        """Write G / sqrt(V) without `row_factor` to `out`, for some rows. `out` may be `g`."""
        if self.is_separable:
            return torch.mul(g, self.col, out=out)
        row = self.row[:, rows]
        if self.by_roots:
            return torch.mul(g, (row * self.col).clamp_(max=self.floor**-0.5), out=out)
        if out is g:
            return g.mul_((row * self.col).clamp_(min=self.floor).rsqrt_())
        return torch.mul(row, self.col, out=out).clamp_(min=self.floor).rsqrt_().mul_(g)

    def row_factor(self) -> Tensor | float:
        """The factor that `normalize` leaves out: (k, m, 1), or 1."""
        return self.row if self.is_separable else 1.0

    def roots(self) -> tuple[Tensor, Tensor]:
        """1 / sqrt of both factors of V without its floor, (k, m, 1) and (k, 1, n)."""
        return (self.row, self.col) if self.has_roots else (self.row.rsqrt(), self.col.rsqrt())

    def is_touched(self, rows: slice) -> Tensor | None:
        """Mask of R C > 0: rows and columns that ever had a gradient; None for all entries."""
        return None if self.is_separable else self.row[:, rows] * self.col > 0


class DenseVariance:
    """V = max(v, floor) of tensors that keep a full v, (k, m, n)."""

    def __init__(self, v: Tensor, floor: float) -> None:
        self.v, self.floor = v, floor

    def normalize(self, g: Tensor, rows: slice, out: Tensor) -> Tensor:
        """Write G / sqrt(V) to `out`, for some rows. `out` may be `g`."""
        return torch.mul(g, self.v[:, rows].clamp(min=self.floor).rsqrt_(), out=out)

    def row_factor(self) -> Tensor | float:
        """1, as `normalize` leaves nothing out."""
        return 1.0

    def is_touched(self, rows: slice) -> Tensor | None:
        """Mask of v > 0: entries that ever had a gradient."""
        return self.v[:, rows] > 0


def smallest_product(row: Tensor, col: Tensor) -> float:
    """The smallest entry of row * col in a batch, for factors >= 0; 0 if it is empty."""
    if row.numel() == 0 or col.numel() == 0:
        return 0.0
    return float((row.amin(dim=-2, keepdim=True) * col.amin(dim=-1, keepdim=True)).amin())
