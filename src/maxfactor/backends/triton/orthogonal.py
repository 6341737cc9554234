"""The orthogonal direction: batches of matrices are filtered, iterated and applied.

Newton-Schulz iterations as in Jordan et al., "Muon: An optimizer for hidden layers in neural
networks" (2024), https://kellerjordan.github.io/posts/muon/. The iteration is that of
`maxfactor.rule.newton_schulz`, with half the multiplications where a product is symmetric.
"""

from __future__ import annotations

from array import array
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

import torch

from maxfactor.backends.triton.kernels.layout import Column, Flag
from maxfactor.backends.triton.plan import TileRange
from maxfactor.backends.triton.products import multiply, symmetric
from maxfactor.backends.triton.replay import is_in_order
from maxfactor.backends.triton.workspace import (
    INTERPRETED,
    ON_DEVICE,
    Formats,
    Layout,
    alike,
    batches_of,
    lane_size,
    packed,
    up_to_grain,
)
from maxfactor.rule.newton_schulz import by_product

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from maxfactor.backends.triton.local_parameters import LocalParameter
    from maxfactor.backends.triton.plan import LaunchKey, LaunchPlan
    from maxfactor.backends.triton.sharing import Sharing
    from maxfactor.backends.triton.workspace import Alike
    from maxfactor.rule.newton_schulz import Coefficients
    from maxfactor.settings import BlockSide


class Matrices(NamedTuple):
    """The matrices of a tensor that are orthogonalised: one or several, or blocks of one."""

    number: int
    m: int
    n: int
    side: BlockSide | None = None  # along which a matrix is cut into blocks


class Memory(NamedTuple):
    """What is iterated in a batch, as one buffer: the same memory, but for `x` if steps are odd."""

    y: Tensor  # what `with_momentum` writes
    x: Tensor  # where the iteration begins
    o: Tensor  # its result


class Batch(NamedTuple):
    """Tensors of one shape and one launch group, with tiles side by side."""

    key: LaunchKey
    owners: range
    tiles: TileRange
    layout: Layout
    side: BlockSide | None = None  # along which its matrices are cut into blocks
    lane: int = 0  # batches of a lane are worked on one after the other
    first_tile: int = 0  # where the lane begins in `Partials.batch_sums`
    first_block: int = 0  # where it begins in `Partials.block_squares`


class Workspace:
    """The memory in which batches are iterated: in each lane one after the other.

    Args:
        lanes: The layouts of each lane.
        formats: The dtypes of y and of the iteration, of equal size.
        device: The parameters' device.
    """

    def __init__(
        self, lanes: Sequence[Sequence[Layout]], formats: Formats, device: torch.device
    ) -> None:
        sizes = [max((each.nbytes for each in own), default=0) for own in lanes]
        *self.starts, self.nbytes = accumulate(sizes, initial=0)
        self._formats, self._device = formats, device
        self._buffer: Tensor | None = None
        self.sharing: Sharing | None = None  # with other windows

    def allocate(self) -> int:
        """Borrow the memory, from torch or of all windows; return where y and the result are."""
        memory = None
        if self.sharing is not None and is_in_order(self._device):
            memory = self.sharing.memory(self.nbytes)
        if memory is None:
            memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        self._buffer = memory.view(self._formats.o)
        return self._buffer.data_ptr()

    @property
    def address(self) -> int:
        """Where the borrowed memory is; 0 if there is none."""
        return 0 if self._buffer is None else self._buffer.data_ptr()

    def memory_of(self, form: Layout, lane: int = 0) -> Memory:
        """Where the matrices of a batch are before, at the begin and after the iteration."""
        buffer, used = self._buffer_of(lane), form.matrices * form.m * form.n
        o, other = (buffer[first : first + used] for first in (0, form.matrix_space))
        return Memory(o.view(self._formats.y), other if form.shift else o, o)

    def iterate(self, form: Layout, lane: int = 0) -> None:
        """Orthogonalise x, which has its norm; the result is where y was."""
        sizes = [form.matrix_space] * 2 + [form.square_space] * form.squares
        used = self._buffer_of(lane)[: sum(sizes)].split(sizes)
        o, other = (view_as(each, form.matrices, form.m, form.n) for each in used[:2])
        squares = [view_as(each, form.matrices, form.short, form.short) for each in used[2:]]
        x, spare = (other, o) if form.shift else (o, other)
        newton_schulz(x, spare, squares, form, form.norm)

    def _buffer_of(self, lane: int) -> Tensor:
        """The memory of a lane."""
        assert self._buffer is not None
        return self._buffer[self.starts[lane] // self._formats.o.itemsize :]

    def release(self) -> None:
        """Return the memory to torch."""
        self._buffer = None


class OrthogonalBatches:
    """The orthogonal matrices of a plan in batches, and the memory that they need.

    `with_momentum` writes the matrices y of a batch, `normalize` gives them the norm and dtype of
    the iteration, and `apply` reads the directions from where y was. The next batch of the lane has
    the same memory. It is borrowed for the time of a step.
    """

    def __init__(
        self,
        params: Sequence[LocalParameter],
        keys: Sequence[LaunchKey],
        plan: LaunchPlan,
        formats: Formats | None = None,
    ) -> None:
        device = params[0].param.device
        self.formats = formats or formats_on(device)
        found = list(self._batches(params, keys, plan))
        self.tiles = [(each.key, each.tiles) for each in found]
        self.lanes = 1 + max((each.lane for each in found), default=0)
        lanes = [[each.layout for each in found if each.lane == i] for i in range(self.lanes)]
        self.workspace = Workspace(lanes, self.formats, device)
        # Each lane has its own sums. They begin on 16 bytes, as kernels are compiled for that.
        tiles = max((each.tiles.number for each in found), default=0)
        blocked = [each.layout.matrices for each in found if each.side is not None]
        blocks = up_to_grain(max(blocked, default=0))
        self.most_tiles, self.most_blocks = self.lanes * tiles, self.lanes * blocks
        self.batches = [
            each._replace(first_tile=each.lane * tiles, first_block=each.lane * blocks)
            for each in found
        ]
        self._tensors, self._start = len(params), -1
        self._addresses = array("q", bytes(8 * len(params)))

    def _batches(
        self, params: Sequence[LocalParameter], keys: Sequence[LaunchKey], plan: LaunchPlan
    ) -> Iterator[Batch]:
        """Cut each run of tensors of one key and shape into batches."""
        runs, kinds = [], []
        for owners in equal_tensors(range(len(params)), params, keys):
            assert owners == list(range(owners[0], owners[-1] + 1)), "the plan keeps them together"
            runs.append((keys[owners[0]], matrices_of(params[owners[0]]).side, owners[0]))
            kinds.append(kind_of([params[owner] for owner in owners], self.formats.o))
        for (key, side, first), kind, batches in zip(runs, kinds, batches_of(kinds), strict=True):
            for lane, parts in batches:
                row = plan.matrices[plan.first_matrix[first]]
                tensors = sum(parts)
                yield Batch(
                    key,
                    owners=range(first, first + tensors),
                    tiles=TileRange(row[Column.OWNER_TILE], tensors * row[Column.OWNER_TILES]),
                    layout=kind.layout(parts),
                    side=side,
                    lane=lane,
                )
                first += tensors

    def allocate(self) -> array[int]:
        """Allocate the memory; return the address of each tensor's y, 0 without one."""
        if self.batches and (start := self.workspace.allocate()) != self._start:
            self._addresses, self._start = self._addresses_from(start), start
        return self._addresses

    def _addresses_from(self, start: int) -> array[int]:
        """The address of each tensor's y, if the memory is at `start`."""
        addresses, itemsize = [0] * self._tensors, self.formats.o.itemsize
        for batch in self.batches:
            size = batch.layout.matrices // len(batch.owners) * batch.layout.m * batch.layout.n
            first = start + self.workspace.starts[batch.lane]
            end = first + len(batch.owners) * size * itemsize
            addresses[batch.owners.start : batch.owners.stop] = range(first, end, size * itemsize)
        return array("q", addresses)


def is_orthogonal(param: LocalParameter) -> bool:
    """Whether a tensor is orthogonalised by this rank alone."""
    return bool(param.numel and param.flags & Flag.ORTHOGONAL and not param.is_cut)


def matrices_of(param: LocalParameter) -> Matrices:
    """The matrices of a tensor that are orthogonalised."""
    m, n, _ = param.matrices[0]
    if param.block is None:
        return Matrices(len(param.matrices), m, n)
    rows, cols = param.block
    return Matrices((m // rows) * (n // cols), rows, cols, "rows" if cols == n else "columns")


def equal_tensors(
    order: Iterable[int], params: Sequence[LocalParameter], keys: Sequence[LaunchKey]
) -> Iterator[list[int]]:
    """The indices of orthogonal tensors in `order`, those of one key and shape at a time."""
    own = (index for index in order if is_orthogonal(params[index]))
    for _, run in groupby(own, lambda index: (keys[index], matrices_of(params[index]))):
        yield list(run)


def by_window(indices: Iterable[int], params: Sequence[LocalParameter]) -> list[list[int]]:
    """Cut indices where another window begins."""
    return [list(run) for _, run in groupby(indices, lambda index: params[index].window)]


def kind_of(params: Sequence[LocalParameter], dtype: torch.dtype) -> Alike:
    """Tensors of one key and shape, which are iterated in `dtype`."""
    each, m, n, _ = matrices_of(params[0])
    windows = by_window(range(len(params)), params)
    return alike(m, n, [len(own) for own in windows], each, dtype)


def in_batches(
    order: Sequence[int],
    params: Sequence[LocalParameter],
    keys: Sequence[LaunchKey],
    formats: Formats,
) -> list[int]:
    """The order, but windows of equal orthogonal tensors change places so that batches are full."""
    found, at = list(order), {index: place for place, index in enumerate(order)}
    for run in equal_tensors(order, params, keys):
        windows, kind = by_window(run, params), kind_of([params[i] for i in run], formats.o)
        best = packed([len(own) for own in windows], kind.most(lane_size()))
        first = at[run[0]]
        found[first : first + len(run)] = [index for i in best for index in windows[i]]
    return found


def formats_on(device: torch.device) -> Formats:
    """The dtypes of the directions on a device."""
    return ON_DEVICE if device.type == "cuda" else INTERPRETED


def view_as(flat: Tensor, count: int, m: int, n: int) -> Tensor:
    """The first elements as matrices."""
    return flat[: count * m * n].view(count, m, n)


def newton_schulz(
    x: Tensor, spare: Tensor, squares: Sequence[Tensor], form: Layout, norm: float
) -> Tensor:
    """Iterate matrices of a known norm; return the result, which is in `spare` or in `x`.

    All memory is overwritten.

    Args:
        x: (batch, m, n).
        spare: As `x`.
        squares: `form.squares` matrices of the size of A.
        form: The steps, and which side is the shorter.
        norm: The Frobenius norm of each x.
    """
    for coefficients in by_product(form.steps):
        own = squares_for(len(coefficients), spare, squares, form)
        # A = X Xᵀ / norm²
        symmetric(own[0], x, x, alpha=norm**-2, is_tall=form.is_tall)
        factor = product_of_steps(own, coefficients)
        x, spare = multiply(spare, factor, x, form.parts, is_tall=form.is_tall), x
    return x


def squares_for(steps: int, spare: Tensor, squares: Sequence[Tensor], form: Layout) -> list[Tensor]:
    """The matrices of the size of A for some steps: in `spare`, but for that of the product."""
    flat, space = spare.view(-1), form.square_space
    inside = [
        view_as(flat[number * space :], form.matrices, form.short, form.short)
        for number in range(form.inside)
    ]
    *others, product = squares
    found = [*inside, *others]
    found.insert(PRODUCT_AT[steps], product)
    return found


# Which of its matrices `product_of_steps` returns, by the number of steps.
PRODUCT_AT = {1: 1, 2: 3, 3: 2}


def product_of_steps(squares: Sequence[Tensor], coefficients: Sequence[Coefficients]) -> Tensor:
    """The product of the factors P of several steps from A, the first of `squares`.

    It is the one at PRODUCT_AT; the others are overwritten.
    """
    square = squares[0]
    factor = product = polynomial(squares[1], square, coefficients[0])
    for each in coefficients[1:]:
        spare = other_than(squares, square, factor, product)
        symmetric(spare, square, factor)  # A P, which is P A
        symmetric(square, spare, factor)  # P A P
        factor = polynomial(spare, square, each)
        product = symmetric(other_than(squares, square, factor, product), product, factor)
    return product


def polynomial(out: Tensor, square: Tensor, coefficients: Coefficients) -> Tensor:
    """P = aI + bA + cA²."""
    a, b, c = coefficients
    return symmetric(out, square, square, alpha=c, beta=b, gamma=a, added=square)


def other_than(tensors: Sequence[Tensor], *used: Tensor) -> Tensor:
    """The first tensor that is not in use."""
    return next(tensor for tensor in tensors if all(tensor is not other for other in used))
