"""How the orthogonal matrices of a step are cut into batches, and the memory that a batch needs.

Nothing here needs Triton or a device, so that a step's memory can be told beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from maxfactor.rule.newton_schulz import AT_A_TIME, WIDE

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_BYTES = 197 << 20  # at most borrowed for a batch, unless a single tensor needs more
ROUND_ELEMENTS = 26 << 20  # at most gathered by a rank at a time, unless a tensor has more
GRAIN = 64  # elements: matrices of a kind begin on 128 bytes at least

# Steps that are merged into one product with a wide X. A = X Xᵀ holds squares of singular values:
# an error of A grows tenfold with each merged step. Float16 has the digits for three of them, from
# the start on too; with bfloat16 the first steps, which raise small singular values, stay single.
AT_A_TIME_IF_WIDE = {
    torch.float32: (2, 3),
    torch.float16: (2, 3),
    torch.bfloat16: (1, 1, 3),
}


class Formats(NamedTuple):
    """The dtypes of the directions: y as it is filtered, and the iteration and its result.

    Float16 suffices for the iteration, because nothing in it grows or vanishes. Singular values
    of X are at most 1.21 and its norm is about sqrt(short side), see `norm_of`, so an entry is
    1 / sqrt(long side) on average. Eigenvalues of A are at most 1.5, and products of up to three
    factors P at most 3.45³ = 41. Entries of A that are subnormal are off by at most 3e-8, next to
    eigenvalues of 1 / short side on average. Only y has any size at all, so it is kept in bfloat16.
    Bfloat16 serves as the format of the iteration too, with more products and fewer digits.
    """

    y: torch.dtype
    o: torch.dtype


ON_DEVICE = Formats(torch.bfloat16, torch.float16)
INTERPRETED = Formats(torch.float32, torch.float32)


class Layout(NamedTuple):
    """A batch of matrices (m, n) of one shape, and what their iteration needs."""

    m: int
    n: int
    parts: tuple[int, ...]  # how many of the matrices cuBLAS multiplies at a time
    steps: tuple[int, ...]  # merged into each product with X
    dtype: torch.dtype  # of the iteration

    @property
    def matrices(self) -> int:
        """How many there are."""
        return sum(self.parts)

    @property
    def short(self) -> int:
        """The size of A."""
        return min(self.m, self.n)

    @property
    def is_tall(self) -> bool:
        """Whether A = Xᵀ X."""
        return self.m > self.n

    @property
    def squares(self) -> int:
        """How many matrices of the size of A need memory of their own; see `inside`."""
        return squares_of(max(self.steps)) - self.inside

    @property
    def inside(self) -> int:
        """How many are where the next X will be. The factor of X is not, so that X can be."""
        elements = self.matrices * self.m * self.n
        return min(squares_of(max(self.steps)) - 1, elements // self.square_space)

    @property
    def matrix_space(self) -> int:
        """Elements of all X of the batch."""
        return up_to_grain(self.matrices * self.m * self.n)

    @property
    def square_space(self) -> int:
        """Elements of all A of the batch."""
        return up_to_grain(self.matrices * self.short**2)

    @property
    def shift(self) -> int:
        """How many bytes behind y the iteration begins, so that it ends where y was."""
        is_odd = len(self.steps) % 2 == 1
        return self.matrix_space * self.dtype.itemsize if is_odd else 0

    @property
    def norm(self) -> float:
        """The norm that X has at first."""
        return norm_of(self.short)

    @property
    def nbytes(self) -> int:
        """Of X, of its successor and of the squares."""
        elements = 2 * self.matrix_space + self.squares * self.square_space
        return elements * self.dtype.itemsize


def squares_of(steps: int) -> int:
    """How many matrices of the size of A a product of several steps needs."""
    return 2 if steps == 1 else 4


def layout(m: int, n: int, parts: Sequence[int], dtype: torch.dtype) -> Layout:
    """The layout of a batch."""
    is_wide = max(m, n) >= WIDE * min(m, n)
    steps = AT_A_TIME_IF_WIDE[dtype] if is_wide else AT_A_TIME
    return Layout(m, n, tuple(parts), steps, dtype)


def batches_of(
    m: int, n: int, runs: Sequence[int], each: int, dtype: torch.dtype
) -> list[list[int]]:
    """Cut runs of equal tensors, of `each` matrices, into few batches; return their parts.

    A run is what a window has of these tensors. A part is a run, or as much of it as memory allows,
    whatever the other runs are: cuBLAS may choose another algorithm for another number of matrices.
    A batch has as many parts as memory allows.

    Example:
        >>> batches_of(1280, 1280, [8, 6, 9, 31], 1, torch.float16)
        [[8, 6], [9], [15], [16]]
    """
    most = max(1, BATCH_BYTES // max(1, layout(m, n, [each], dtype).nbytes))
    # Where a part begins decides, too, how it is read.
    is_aligned = m * n % GRAIN == 0 and min(m, n) ** 2 % GRAIN == 0
    found: list[list[int]] = []
    for part in (part for run in runs for part in even_parts(run, most)):
        if found and is_aligned and sum(found[-1]) + part <= most:
            found[-1].append(part)
        else:
            found.append([part])
    return found


def even_parts(count: int, most: int) -> list[int]:
    """Cut a number into as few parts as possible, of at most `most`, of even size.

    Example:
        >>> even_parts(51, 20)
        [17, 17, 17]
    """
    parts = -(-count // most)
    return [(count + i) // parts for i in range(parts)]


def norm_of(short: int) -> float:
    """The norm that X gets: sqrt(short side), to a power of two, so that float16 has its digits."""
    return float(1 << (short.bit_length() // 2))


def up_to_grain(elements: int) -> int:
    """Round up to GRAIN."""
    return -(-elements // GRAIN) * GRAIN
