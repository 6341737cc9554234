"""Descriptors: what belongs together, as one argument of a kernel.

Triton takes a named tuple apart when it compiles a kernel, so a field costs what a plain argument
does. The host builds each tuple once and keeps it for as long as its tensors stay the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# ------------------------------------------------------------------- arguments of kernels


class Tables(NamedTuple):
    """What the kernels read to find their tensors and settings."""

    signs_at: Tensor  # (1,) int64: the address of the sign bits, int32 of the size of a piece each
    pointers: Tensor  # (tensors, Address) int64
    matrices: Tensor  # (matrices, Column) int64
    settings: Tensor  # (groups, Setting) float32
    seed_keys: Tensor  # (groups,) int32: seeds of the rounding noise
    tile_matrix: Tensor  # (tiles,) int32: the matrix of each tile
    first_matrix: Tensor  # (tensors,) int32: the first matrix of each tensor
    tasks: Tensor  # (tasks, TaskColumn) int32: the programs of `finalize`


class Partials(NamedTuple):
    """Sums and peaks over parts of a tensor. One program writes each of them."""

    row_squares: Tensor  # float32, G² per row: for each matrix (strips, m)
    # int32, as `row_squares` with two values each, see `two_peaks`; none of tensors with momentum
    row_peaks: Tensor
    col_squares: Tensor  # float32, G² per column: for each matrix (tiles down, n)
    gradient_sums: Tensor  # (tiles, GradientSum) float32; empty if no tensor has momentum
    update_sums: Tensor  # (tiles, UpdateSum) float32; empty if no tensor has momentum
    weight_squares: Tensor  # (tiles, Square) float32: W² after the last step
    update_squares: Tensor  # (blocks, Square) float32: U² before it is normalised
    unsigned: Tensor  # (tiles,) int8: 1 where the packed signs cannot be used
    batch_sums: Tensor  # (tiles of a batch in each lane * parts, BatchSum) float32
    block_squares: Tensor  # (blocks of a batch in each lane,) float32: of y * RANGE, then of O
    measures: Tensor  # (tiles * parts, Measure) float32; empty unless the step is recorded


class Results(NamedTuple):
    """What was found for whole matrices and tensors. Maxima are the bits of floats."""

    extremes: Tensor  # (matrices, Extreme) int32: max R, min R, min C
    row_var_sums: Tensor  # (row chunks,) float32: sums of R
    col_changes: Tensor  # (column chunks, 2) float32: bounds of how 1 / sqrt(C) changed
    row_max: Tensor  # (rows,) int32: max |U| of each row
    update_max: Tensor  # (tensors,) int32: max |U|
    scalars: Tensor  # (tensors, Scalar) float32
    nonfinite: Tensor  # (tensors,) int32: marks of gradients that stop the step, see `guard`
    counters: Tensor  # (Counter,) int32


class RankSums(NamedTuple):
    """Sums over what this rank has. The first three are sent to the other ranks."""

    squares: Tensor  # float32, G² of each row and each column, at the places in `combined`
    weight_squares: Tensor  # (tensors, Square) float32, flat
    gradient_sums: Tensor  # (tensors, GradientSum) float32, flat
    chunk_sums: Tensor  # (row chunks, RowSum) float32


class ProductForm(NamedTuple):
    """What `symmetric_product` is compiled for, besides the dtypes."""

    beta: float  # factor of D
    gamma: float  # factor of I
    transposed: bool  # Lᵀ R instead of L Rᵀ
    even: bool  # all sizes are multiples of those of a tile
    descriptors: bool  # the copy engine moves blocks; only if even, and tiles are square


class ProductTile(NamedTuple):
    """What a program of `symmetric_product` works on."""

    rows: int
    cols: int  # 1 or 2 times the rows
    depth: int  # of the products that are taken at a time


class Spec(NamedTuple):
    """What the kernels are compiled for. All are compile-time constants."""

    p_dtype: Any  # Triton's dtype of W
    g_dtype: Any  # of G
    y_dtype: Any  # of what is orthogonalised
    o_dtype: Any  # of the orthogonal directions
    store: Any  # of the stored momentum
    stored: bool  # there is a stored momentum
    aligned: bool  # rows start on 16 bytes
    general: bool  # some tensor needs more than signs and row maxima
    momentum: bool  # there is momentum, or an orthogonal direction
    dense: bool  # some tensor has a full variance
    orthogonal: bool  # this is a batch of orthogonal matrices
    peaks: bool  # some update is divided by its maximum
    direct: bool  # W moves by y as it is, so `with_momentum` writes it
    parts: int  # programs that share a tile; several in a batch
    records: bool = False  # this is a recorded step
    row_blocks: bool = False  # blocks of rows are orthogonalised one by one
    col_blocks: bool = False  # blocks of columns
    sharded: bool = False  # these are shards, and what the owners return has RMS 1

    @property
    def blocked(self) -> bool:
        """Whether blocks are orthogonalised one by one."""
        return self.row_blocks or self.col_blocks

    @property
    def signed(self) -> bool:
        """Whether signs are packed into bits; not where G is needed anyway."""
        return not self.general


# ---------------------------------------------------------------- values within a kernel
# No field may be called `values` or `type`: Triton's tuples have attributes of these names.


class Piece(NamedTuple):
    """Some rows and columns of a matrix."""

    rows: Any  # indices, int32
    cols: Any  # indices, int32
    m: Any  # rows of the matrix
    n: Any  # columns of the matrix


class RowsOfG(NamedTuple):
    """Some rows of G and the column statistics of their matrix."""

    pointer: Any  # address of G
    col_var: Any  # pointer to C, (n,) float32
    rows: Any  # indices, int32
    m: Any  # rows of the matrix
    n: Any  # columns of the matrix


class BlockGrid(NamedTuple):
    """How a matrix is cut into blocks."""

    rows: Any  # of a block
    cols: Any  # of a block
    squares: Any  # pointer to the sums of squares of its blocks


class TileSpan(NamedTuple):
    """The part of a matrix that a tile covers."""

    first_row: Any
    pieces: Any  # how many
    cols: Any  # indices, int32


class MatrixEntry(NamedTuple):
    """A matrix, and what the tables say about it."""

    k: Any  # its index
    entry: Any  # pointer to its row of `Tables.matrices`
    setting: Any  # pointer to the settings of its group
    scalar: Any  # pointer to the scalars of its tensor
    owner: Any  # its tensor
    flags: Any


class StepSize(NamedTuple):
    """What a direction is multiplied by."""

    alpha: Any
    scale: Any  # alpha times what the direction is normalised by, times a power of two
    inverse: Any  # the inverse of that power
    t: Any  # the step


class Target(NamedTuple):
    """The weights of a tile, and how they are written."""

    pointer: Any  # address of W
    span: Any  # `TileSpan`
    m: Any  # rows of the matrix
    n: Any  # columns of the matrix
    keep: Any  # what W is multiplied by: the decay
    noise: Any  # `Noise`
    measures: Any  # pointer to the tile's row of `Partials.measures`


class Noise(NamedTuple):
    """What rounds a matrix: see `rounding.rounded`."""

    key: Any  # of this step
    origin: Any  # position of the first element in the whole tensor
    stride: Any  # from row to row
    flags: Any


class StoredMomentum(NamedTuple):
    """Where the momentum of a matrix is stored."""

    pointer: Any  # address
    scales: Any  # address; int8 only
