"""The products of the Newton-Schulz iteration: tiles by architecture, and their launches."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from maxfactor.backends.triton.kernels.descriptors import ProductForm, ProductTile
from maxfactor.backends.triton.kernels.products import symmetric_product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]
except ImportError:  # before Triton 3.4
    TensorDescriptor = None


class Tuning(NamedTuple):
    """How `symmetric_product` is launched."""

    tile: ProductTile
    warps: int
    stages: int  # parts of a product that are prefetched
    descriptors: bool = False  # load by the copy engine, of Hopper and later, where sizes allow


# The fastest by benchmarks/timing/newton_schulz.py; there is no autotuning at run time.
LARGE = {
    9: Tuning(ProductTile(128, 128, 64), 4, 3, descriptors=True),
    8: Tuning(ProductTile(128, 128, 32), 4, 3),
}
DEFAULT = LARGE[8]
SMALL = Tuning(ProductTile(64, 64, 32), 4, 3)  # where large tiles would be few, or mostly empty
SMALL_SIDE = 256  # largest matrix with small tiles
IN_INTERPRETER = Tuning(ProductTile(32, 32, 32), 1, 1)


@lru_cache(maxsize=256)
def tuning_for(n: int, device: torch.device) -> Tuning:
    """The tiles for results of n rows and columns."""
    if device.type != "cuda":
        return IN_INTERPRETER
    if n <= SMALL_SIDE:
        return SMALL
    major = torch.cuda.get_device_capability(device)[0]
    return LARGE.get(min(major, max(LARGE)), DEFAULT)


@lru_cache(maxsize=1024)
def tiles_of(n: int, tile: ProductTile) -> int:
    """Tiles of one result, on the diagonal or below."""
    ratio = tile.cols // tile.rows
    return sum(down // ratio + 1 for down in range(-(-n // tile.rows)))


def symmetric(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
    added: Tensor | None = None,
    is_tall: bool = False,
    tuning: Tuning | None = None,
) -> Tensor:
    """Write alpha * L Rᵀ + beta * D + gamma * I, which must be symmetric, to `out`.

    Args:
        out: (batch, n, n), contiguous as all others; may not be L or R.
        left: (batch, n, depth); (batch, depth, n) if `is_tall`.
        right: As `left`.
        alpha: Factor of the product.
        beta: Factor of `added`.
        gamma: Factor of the identity.
        added: D, (batch, n, n).
        is_tall: Compute Lᵀ R instead.
        tuning: Not the table's.
    """
    batch, n, _ = out.shape
    depth = left.shape[1 if is_tall else 2]
    tile, warps, stages, by_descriptor = tuning or tuning_for(n, out.device)
    even = n % tile.rows == n % tile.cols == depth % tile.depth == 0
    # A mirrored block must have the shape of a tile.
    has_blocks = even and tile.rows == tile.cols and TensorDescriptor is not None
    by_descriptor = by_descriptor and has_blocks
    form = ProductForm(beta, gamma, is_tall, even, by_descriptor)
    operands: list[Any] = [out, left, right, out if added is None else added]
    if by_descriptor:
        rows, cols, k = tile
        part = [k, rows] if is_tall else [rows, k]
        operands[:2] = blocks_of(out, [rows, cols]), blocks_of(left, part)
        operands[2] = operands[1] if right is left else blocks_of(right, part)
        operands[3] = operands[0] if added is None else blocks_of(added, [rows, cols])
    symmetric_product[(tiles_of(n, tile) * batch,)](
        *operands, alpha, n, depth, form=form, tile=tile, num_warps=warps, num_stages=stages
    )
    return out


def blocks_of(x: Tensor, block: list[int]) -> Any:
    """A descriptor of the rows of all matrices, in blocks of one size."""
    count, rows, cols = x.shape
    return TensorDescriptor(x, [count * rows, cols], [cols, 1], block)


def multiply(
    out: Tensor, factor: Tensor, x: Tensor, parts: Sequence[int], *, is_tall: bool
) -> Tensor:
    """Write P X, or X P if X is tall, to `out`; `parts` say how many matrices at a time."""
    left, right = (x, factor) if is_tall else (factor, x)
    for own in zip(left.split(parts), right.split(parts), out.split(parts), strict=True):
        torch.bmm(own[0], own[1], out=own[2])
    return out
