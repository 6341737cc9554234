"""The plan of a step: which matrices, tiles and blocks there are, and where their results go.

It is made once for a list of tensors and holds for as long as they stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton.language as tl  # type: ignore[import-untyped]

from maxfactor.backends.triton.kernels.descriptors import Spec
from maxfactor.backends.triton.kernels.layout import (
    APPLY_STAGES_GENERAL,
    APPLY_STAGES_SIGNED,
    Column,
    Flag,
    Size,
    Task,
)
from maxfactor.backends.triton.settings_rows import is_direct, is_general, store_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from maxfactor.backends.triton.local_parameters import LocalParameter, Matrix
    from maxfactor.backends.triton.workspace import Formats

STORES = {"int8": tl.int8, "bf16": tl.bfloat16, "fp32": tl.float32}
TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


class LaunchKey(NamedTuple):
    """What tensors must have in common to share their launches."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    aligned: bool  # every row of W, G and the variance starts on 16 bytes
    store: str | None  # see `store_of`
    direct: bool  # see `is_direct`


class TileRange(NamedTuple):
    """Tiles that a launch works on."""

    first: int
    number: int


@dataclass
class LaunchGroup:
    """Tensors that share their launches."""

    key: LaunchKey
    general: bool  # some tensor needs more than signs and row maxima
    dense: bool = False  # some tensor has a full variance
    peaks: bool = False  # some update is divided by its maximum
    blocks: list[tuple[int, int]] = field(default_factory=list)  # (matrix, how many)
    block_count: int = 0
    first_tile: int = 0
    tiles: int = 0
    last_tiles: int = 0  # how many are of tensors with an orthogonal direction

    @property
    def other_tiles(self) -> TileRange:
        """The tiles of tensors without an orthogonal direction."""
        return TileRange(self.first_tile, self.tiles - self.last_tiles)

    @property
    def with_momentum(self) -> bool:
        """Whether there is momentum, or an orthogonal direction."""
        return self.key.store is not None

    @property
    def maxima_rows(self) -> int:
        """Rows of a block of `maxima`."""
        return int(Size.MAXIMA_ROWS_GENERAL if self.general else Size.MAXIMA_ROWS)

    @property
    def maxima_width(self) -> int:
        """Columns that `maxima` reads at a time where neither strips nor bundles are."""
        return int(Size.COLUMNS if self.general else Size.MAXIMA_WIDTH)

    @property
    def apply_stages(self) -> int:
        """Pieces that `apply` prefetches."""
        return APPLY_STAGES_GENERAL if self.general else APPLY_STAGES_SIGNED

    def batch_spec(
        self,
        formats: Formats,
        *,
        rows: bool = False,
        columns: bool = False,
        sharded: bool = False,
    ) -> Spec:
        """What the kernels are compiled for in batches of orthogonal matrices.

        With `rows` or `columns`, of matrices that are cut into blocks of them; with `sharded`, of
        shards of matrices.
        """
        spec = self.spec(formats)
        # Neither signs nor maxima are needed, and settings refuse a full variance.
        spec = spec._replace(general=True, peaks=False, dense=False)
        spec = spec._replace(row_blocks=rows, col_blocks=columns, sharded=sharded)
        return spec._replace(orthogonal=True, parts=int(Size.PARTS))

    def spec(self, formats: Formats) -> Spec:
        """What the kernels are compiled for, except in batches of orthogonal matrices."""
        return Spec(
            p_dtype=TRITON_DTYPES[self.key.param_dtype],
            g_dtype=TRITON_DTYPES[self.key.grad_dtype],
            y_dtype=TRITON_DTYPES[formats.y],
            o_dtype=TRITON_DTYPES[formats.o],
            store=STORES.get(self.key.store or "", tl.float32),
            stored=self.key.store in STORES,
            aligned=self.key.aligned,
            general=self.general,
            momentum=self.with_momentum,
            dense=self.dense,
            orthogonal=False,
            peaks=self.peaks,
            direct=self.key.direct,
            parts=1,
        )


@dataclass
class BufferSizes:
    """How many entries the buffers have; see `Partials` and `Results`."""

    rows: int = 0
    row_part: int = 0
    row_peaks: int = 0  # as `row_part`, up to the last matrix without momentum
    col_part: int = 0
    row_chunks: int = 0
    col_chunks: int = 0

    def reserve(self, name: str, count: int) -> int:
        """Add `count` entries; return the place of the first."""
        place: int = getattr(self, name)
        setattr(self, name, place + count)
        return place


class LaunchPlan:
    """Matrices, tiles and blocks of a list of parameters, in the order of `launch_order`.

    Args:
        params: Those of equal keys side by side, orthogonal ones last, those of a shape together.
        keys: The launch key of each.
        rate_addresses: Where the learning rate of each group of settings is.
        idle: Parameters that are not stepped but choose the kernels together with `params`.
    """

    def __init__(
        self,
        params: Sequence[LocalParameter],
        keys: Sequence[LaunchKey],
        rate_addresses: Sequence[int],
        idle: Sequence[tuple[LaunchKey, LocalParameter]] = (),
    ) -> None:
        self.matrices: list[list[int]] = []  # rows of `Tables.matrices`
        self.tiles: list[tuple[int, int]] = []  # (matrix, how many)
        self.tile_count = self.block_count = 0
        self.first_matrix: list[int] = []  # of each tensor
        self.tasks: list[tuple[int, int, int]] = []  # rows of `Tables.tasks`
        self.sizes = BufferSizes()
        own = zip(keys, params, strict=True)
        self._general = {key for key, param in (*own, *idle) if is_general(param.rule)}
        self._groups: dict[LaunchKey, LaunchGroup] = {}
        for owner, (param, key) in enumerate(zip(params, keys, strict=True)):
            rate = rate_addresses[param.group]
            common = {Column.OWNER: owner, Column.GROUP: param.group, Column.LR: rate}
            self._add(param, key, {**common, **columns_of(param)})
        for key, param in idle:
            if key in self._groups and param.matrices:
                self._group(key, param.flags)
        self.groups = [group for group in self._groups.values() if group.tiles > 0]

    def matrices_of(self, owner: int) -> range:
        """The rows of a tensor's matrices."""
        is_last = owner + 1 == len(self.first_matrix)
        end = len(self.matrices) if is_last else self.first_matrix[owner + 1]
        return range(self.first_matrix[owner], end)

    def _add(self, param: LocalParameter, key: LaunchKey, common: dict[Column, int]) -> None:
        """Add a parameter; all of its matrices have the `common` columns."""
        first = len(self.matrices)
        self.first_matrix.append(first)
        if not param.matrices:
            task = Task.EMPTY if param.numel == 0 else Task.TENSOR
            self.tasks.append((first, task, 0))
            self._append(common)
            return
        group = self._group(key, param.flags)
        first_tile, first_block = self.tile_count, group.block_count
        for batch, matrix in enumerate(param.matrices):
            self._add_matrix(param, matrix, batch, common, group)
        tiles, blocks = self.tile_count - first_tile, group.block_count - first_block
        for row in self.matrices[first:]:
            row[Column.OWNER_TILE], row[Column.OWNER_TILES] = first_tile, tiles
            row[Column.OWNER_BLOCK] = self.block_count + row[Column.FIRST_BLOCK] - first_block
            row[Column.OWNER_BLOCKS] = blocks
        self.block_count += blocks
        group.tiles += tiles
        if param.flags & Flag.ORTHOGONAL:
            group.last_tiles += tiles
        self.tasks.append((first, Task.TENSOR, 0))

    def _group(self, key: LaunchKey, flags: Flag) -> LaunchGroup:
        """The group of a key, with a tensor of these flags in it."""
        if key not in self._groups:
            general = key in self._general
            self._groups[key] = LaunchGroup(key, general, first_tile=self.tile_count)
        group = self._groups[key]
        group.dense |= bool(flags & Flag.DENSE)
        group.peaks |= not flags & (Flag.FACTORED | Flag.ORTHOGONAL)
        return group

    def _add_matrix(
        self,
        param: LocalParameter,
        matrix: Matrix,
        batch: int,
        common: dict[Column, int],
        group: LaunchGroup,
    ) -> None:
        """Add a matrix of a parameter."""
        m, n, start = matrix
        k = len(self.matrices)
        strips, down = ceil_div(n, Size.COLUMNS), ceil_div(m, Size.TILE_ROWS)
        row = {Column.ROWS: m, Column.COLS: n, Column.START: start}
        row |= {Column.STRIPS: strips, Column.DOWN: down, Column.FIRST_TILE: self.tile_count}
        row |= {Column.ROW_SPACE: self.sizes.reserve("rows", m)}
        row |= {Column.FIRST_BLOCK: group.block_count, **param.place_in_whole(matrix, batch)}
        if param.flags & Flag.DENSE:
            row[Column.COL_VAR] = param.state["variance"].data_ptr() + 4 * start
        else:
            row |= self._add_factors(param, matrix, batch, (strips, down))
            if not group.with_momentum:
                self.sizes.row_peaks = self.sizes.row_part
        self.tiles.append((k, down * strips))
        self.tile_count += down * strips
        group.blocks.append((k, ceil_div(m, group.maxima_rows) if n else 0))
        group.block_count += group.blocks[-1][1]
        self._append({**common, **row})

    def _add_factors(
        self, param: LocalParameter, matrix: Matrix, batch: int, tiles: tuple[int, int]
    ) -> dict[Column, int]:
        """Places of a factored matrix's statistics and partial sums; `tiles` across and down."""
        (m, n, _), (strips, down), k = matrix, tiles, len(self.matrices)
        row_chunks, col_chunks = ceil_div(m, Size.CHUNK), ceil_div(n, Size.CHUNK)
        self.tasks += [(k, Task.ROWS, chunk) for chunk in range(row_chunks)]
        self.tasks += [(k, Task.COLS, chunk) for chunk in range(col_chunks)]
        return {
            Column.ROW_VAR: param.state["row_var"].data_ptr() + 4 * batch * m,
            Column.COL_VAR: param.state["col_var"].data_ptr() + 4 * batch * n,
            Column.ROW_PART: self.sizes.reserve("row_part", strips * m),
            Column.COL_PART: self.sizes.reserve("col_part", down * n),
            Column.ROW_CHUNK: self.sizes.reserve("row_chunks", row_chunks),
            Column.ROW_CHUNKS: row_chunks,
            Column.COL_CHUNK: self.sizes.reserve("col_chunks", col_chunks),
        }

    def _append(self, row: dict[Column, int]) -> None:
        self.matrices.append([row.get(column, 0) for column in Column])


def columns_of(param: LocalParameter) -> dict[Column, int]:
    """What all matrices of a parameter have in common: its flags, size and state."""
    found = {Column.FLAGS: int(param.flags), Column.NUMEL: param.numel}
    if param.block is not None:
        found |= {Column.BLOCK_ROWS: param.block[0], Column.BLOCK_COLS: param.block[1]}
    columns = [Column.STEP, Column.MOMENTUM, Column.MOMENTUM_SCALE]
    for column in [*columns, Column.BAND_SUMS, Column.INITIAL_RMS]:
        if (key := column.name.lower()) in param.state:
            found[column] = param.state[key].data_ptr()
    return found


def keys_of(params: Sequence[LocalParameter]) -> list[LaunchKey]:
    """The launch key of each tensor, whatever the others are."""
    return [
        LaunchKey(
            param_dtype=param.param.dtype,
            grad_dtype=param.grad.dtype,
            aligned=param.is_aligned,
            store=store_of(param.rule),
            direct=is_direct(param.rule),
        )
        for param in params
    ]


def launch_order(
    params: Sequence[LocalParameter],
    keys: Sequence[LaunchKey],
    round_of: Mapping[int, int] = MappingProxyType({}),
) -> list[int]:
    """The order of tensors in the plan: their indices. Those of a round are side by side.

    Tensors without momentum come first: `Partials.row_peaks` has entries for no others.
    """

    def place(index: int) -> tuple[object, ...]:
        param = params[index]
        is_last = bool(param.flags & Flag.ORTHOGONAL)
        shape = param.matrices[:1] if is_last else []
        key = keys[index].store is not None, str(keys[index])
        return *key, is_last, round_of.get(index, -1), shape, len(param.matrices)

    return sorted(range(len(params)), key=lambda index: (*place(index), index))


def ceil_div(a: int, b: int) -> int:
    """How many pieces of b it takes to hold a."""
    return -(-a // int(b))


def repeat_values(runs: Sequence[tuple[int, int]]) -> Tensor:
    """Each value of (value, count) as often as its count says."""
    table = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 2)
    values, counts = table.unbind(dim=1)
    return torch.repeat_interleave(values, counts)
