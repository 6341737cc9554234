"""How the orthogonal matrices of a step are cut into batches, and the memory that a batch needs.

Nothing here needs Triton or a device, so that a step's memory can be told beforehand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from maxfactor.rule.newton_schulz import AT_A_TIME, WIDE

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_BYTES = 254 << 20  # at most borrowed for batches, unless a single tensor needs more
LANES = 2  # batches that are worked on side by side, in parts of this memory; see `lane_sizes`
ROUND_ELEMENTS = 26 << 20  # at most gathered by a rank at a time, unless a tensor has more
GRAIN = 64  # elements: matrices of a kind begin on 128 bytes at least

# A symmetric product runs in waves of tiles. An H100 or H200 has 132 multiprocessors and room for
# two tiles on each; a wave takes almost as long if only some of that is used.
TILE_SIDE = 128  # of `symmetric_product`, for large matrices
WAVE = 264  # tiles
BATCHES_PER_WAVE = 4  # the launches of this many batches take about as long as a wave

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


class Alike(NamedTuple):
    """Tensors of one shape, side by side in the plan."""

    m: int
    n: int
    each: int  # matrices of a tensor
    parts: list[int]  # tensors that cuBLAS multiplies at a time
    dtype: torch.dtype  # of the iteration

    def layout(self, parts: Sequence[int]) -> Layout:
        """The layout of some of the parts."""
        return layout(self.m, self.n, [self.each * part for part in parts], self.dtype)

    def most(self, size: int) -> int:
        """Tensors that are best worked on at a time in `size` bytes."""
        fitting = max(1, size // max(1, self.layout([1]).nbytes))
        tiles = self.each * triangle(-(-min(self.m, self.n) // TILE_SIDE))
        return batch_size(sum(self.parts), fitting, tiles)

    def fitting(self, first: int, size: int) -> list[int]:
        """The first part, and as many of those that follow as are best worked on with it."""
        end = first + 1
        # Where a part begins decides, too, how it is read.
        if self.m * self.n % GRAIN == 0 and min(self.m, self.n) ** 2 % GRAIN == 0:
            most = self.most(size)
            while end < len(self.parts) and sum(self.parts[first : end + 1]) <= most:
                end += 1
        return self.parts[first:end]


class LaneParts(NamedTuple):
    """A batch: which lane works on it, and its parts."""

    lane: int
    parts: list[int]


def alike(m: int, n: int, runs: Sequence[int], each: int, dtype: torch.dtype) -> Alike:
    """Cut runs of equal tensors, of `each` matrices, into parts.

    A run is what a window has of these tensors. A part is a run, or as much of it as memory allows,
    whatever the other runs are: cuBLAS may choose another algorithm for another number of matrices.

    Example:
        >>> alike(1280, 1280, [8, 6, 9, 31], 1, torch.float16).parts
        [8, 6, 9, 15, 16]
    """
    most = max(1, BATCH_BYTES // max(1, layout(m, n, [each], dtype).nbytes))
    parts = [part for run in runs for part in even_parts(run, most)]
    return Alike(m, n, each, parts, dtype)


@lru_cache(maxsize=1024)
def batch_size(count: int, most: int, tiles: int) -> int:
    """How many of `count` tensors to work on at a time, so that products fill the device.

    Args:
        count: All tensors of a kind.
        most: For how many of them there is memory.
        tiles: Of a symmetric product of one tensor.

    Example:
        >>> batch_size(384, 27, tiles=55), batch_size(25, 27, tiles=55)
        (24, 25)
    """

    def cost(size: int) -> int:
        """Of the waves and launches of a product, in launches."""
        whole, rest = divmod(count, size)
        waves = whole * waves_of(size * tiles) + waves_of(rest * tiles)
        return BATCHES_PER_WAVE * waves + whole + (rest > 0)

    return min(range(1, min(count, most) + 1), key=lambda size: (cost(size), -size))


def waves_of(tiles: int) -> int:
    """In how many waves tiles are worked on."""
    return -(-tiles // WAVE)


def triangle(side: int) -> int:
    """The tiles on the diagonal or below."""
    return side * (side + 1) // 2


def packed(runs: Sequence[int], most: int) -> list[int]:
    """Order runs, so that those that follow each other make few batches of at most `most`.

    It is the order of first-fit decreasing: a run goes to the first batch with room for it, the
    longest run first. The first of a batch never fits into the batch before it, so to fill one
    batch after the other in this order leads to the same batches.

    Returns:
        The indices of the runs.

    Example:
        >>> packed([2, 2, 1, 1, 2], most=3)
        [0, 2, 1, 3, 4]
    """
    batches: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(runs)), key=lambda index: -runs[index]):
        for number, (used, own) in enumerate(batches):
            if used + runs[index] <= most:
                batches[number] = used + runs[index], [*own, index]
                break
        else:
            batches.append((runs[index], [index]))
    return [index for _, own in batches for index in own]


def batches_of(kinds: Sequence[Alike]) -> list[list[LaneParts]]:
    """The batches of each kind of tensors, in the order of their parts; see `Alike.fitting`.

    Lanes are worked on side by side. A batch goes to the lane with the least to do so far.

    Example:
        >>> for batch in batches_of([alike(1280, 1280, [4, 4, 8, 2, 9], 1, torch.float16)])[0]:
        ...     print(batch.lane, batch.parts)
        0 [4, 4]
        1 [8]
        0 [2]
        1 [9]
    """
    largest = max((kind.layout([part]).nbytes for kind in kinds for part in kind.parts), default=0)
    sizes = lane_sizes(largest)
    elements = [0] * len(sizes)  # that each lane has to do
    found: list[list[LaneParts]] = []
    for kind in kinds:
        found.append([])
        done = 0
        while done < len(kind.parts):
            part = kind.layout(kind.parts[done : done + 1])
            lanes = [lane for lane, size in enumerate(sizes) if part.nbytes <= size]
            lane = min(lanes, key=elements.__getitem__)
            parts = kind.fitting(done, sizes[lane])
            elements[lane] += sum(parts) * kind.each * kind.m * kind.n
            found[-1].append(LaneParts(lane, parts))
            done += len(parts)
    return found


def lane_sizes(largest: int) -> list[int]:
    """Bytes of each lane, BATCH_BYTES in all.

    Each batch alone leaves the device partly idle: the last tiles of a product do not fill it, and
    reading G and writing W leaves the multiplying units without work. Batches side by side fill
    these gaps. The first lane must hold the largest part. There is only one if others would be less
    than half as large: small batches cost more than they gain.

    Args:
        largest: Bytes of the largest part.

    Example:
        >>> [size >> 20 for size in lane_sizes(0)], [size >> 20 for size in lane_sizes(180 << 20)]
        ([127, 127], [254])
    """
    for others in range(LANES - 1, 0, -1):
        first = max(largest, BATCH_BYTES // (others + 1))
        share = (BATCH_BYTES - first) // others
        if 2 * share >= first:
            return [first] + [share] * others
    return [max(largest, BATCH_BYTES)]


def lane_size() -> int:
    """Bytes of a lane, if all are equal."""
    return BATCH_BYTES // LANES


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
