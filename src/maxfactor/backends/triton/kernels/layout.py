"""Sizes of tiles, and the columns, slots and bits that host and kernels agree on.

Each enumeration is written once. The host uses its members (`Column.ROW_VAR`); the kernels read the
same numbers as compile-time constants from its `DeviceEnum` (`COLUMN.ROW_VAR`).
"""

from __future__ import annotations

from enum import IntEnum, IntFlag, auto
from typing import NamedTuple

import triton.language as tl

from maxfactor.backends.dispatch import is_interpreted
from maxfactor.rule import int8

# ------------------------------------------------------------------------------ tile sizes

INTERPRETED = is_interpreted()


class Size(IntEnum):
    """Sizes of what a program works on; equal numbers share a member.

    A strip is COLUMNS wide. A tile is TILE_ROWS rows of a strip, loaded in PIECES pieces of
    PIECE_ROWS rows each. The signs of a tile are packed into as many words as a piece has elements,
    with one bit per piece. A block of `maxima` is a few rows of all strips. A program of `finalize`
    has CHUNK rows, or CHUNK columns.

    The sizes are the fastest on an H200. There is no autotuning: partial sums are laid out by tile
    size, so another size would change the order of a sum and with it the last bit of a result.
    The interpreter has small sizes, so that small tensors have several of each.
    """

    COLUMNS = 64 if INTERPRETED else 256
    PIECE_ROWS = 4
    PIECES = 4 if INTERPRETED else 32
    PARTS = 2 if INTERPRETED else 4  # of a tile in a batch, whose launches have few tiles
    TILE_ROWS = PIECE_ROWS * PIECES
    CHUNK = COLUMNS
    BLOCK_CHUNK = 64 if INTERPRETED else 2048  # elements of a block at a time
    PARTS_AT_ONCE = 8  # partial sums that `finalize` adds at a time
    BUNDLE = 8  # adjacent columns that `maxima` reads at a time
    STRIPS_AT_ONCE = 8  # strips whose peaks `maxima` compares at a time
    MAXIMA_ROWS = 4 if INTERPRETED else 16
    MAXIMA_ROWS_GENERAL = 4 if INTERPRETED else 8
    MAXIMA_WIDTH = 32  # columns that `maxima` reads at a time where it cannot use bundles
    MOMENTUM_BLOCK = int8.BLOCK  # values of a stored momentum that share a scale


# One warp per tile: sums over a row stay within the warp, sums over a column within a thread.
TILE_WARPS, FINALIZE_WARPS = 1, 2
BLOCK_WARPS = 4
# Pieces that are prefetched from memory.
STATISTICS_STAGES = tl.constexpr(4)
MAXIMA_STAGES = tl.constexpr(3)
MOMENTUM_STAGES = tl.constexpr(2)
APPLY_STAGES_SIGNED, APPLY_STAGES_GENERAL = 4, 3

# Device constants of their own, because shapes must be: `tl.zeros([PIECE_ROWS, COLUMNS])`.
COLUMNS = tl.constexpr(int(Size.COLUMNS))
PIECE_ROWS = tl.constexpr(int(Size.PIECE_ROWS))
TILE_ROWS = tl.constexpr(int(Size.TILE_ROWS))
CHUNK = tl.constexpr(int(Size.CHUNK))
PARTS = tl.constexpr(int(Size.PARTS))
BLOCK_CHUNK = tl.constexpr(int(Size.BLOCK_CHUNK))
PARTS_AT_ONCE = tl.constexpr(int(Size.PARTS_AT_ONCE))
BUNDLE = tl.constexpr(int(Size.BUNDLE))
STRIPS_AT_ONCE = tl.constexpr(int(Size.STRIPS_AT_ONCE))
MOMENTUM_BLOCK = tl.constexpr(int(Size.MOMENTUM_BLOCK))

INFINITY_BITS = tl.constexpr(0x7F800000)  # of a float32
TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
# What y is multiplied by before it is squared: values from 1e-28 to 1e7 count. Larger ones do not
# occur, because x is divided by the size of G; smaller ones do, next to `VARIANCE_FLOOR`.
RANGE = tl.constexpr(1073741824.0)  # 2^30


# ---------------------------------------------------------------------------- enumerations


class DeviceEnum(tl.constexpr):
    """The members of an enumeration as compile-time constants of a kernel, and their COUNT.

    The value is a named tuple of all numbers, so Triton compiles anew when one of them changes.
    """

    def __init__(self, members: type[IntEnum]) -> None:
        numbers = {name: int(member) for name, member in members.__members__.items()}
        numbers["COUNT"] = len(numbers)
        fields = [(name, int) for name in numbers]
        super().__init__(NamedTuple(members.__name__, fields)(**numbers))
        vars(self).update(numbers)  # the interpreter looks for them here


class FromZero(IntEnum):
    """An enumeration that counts from 0, as columns do."""

    @staticmethod
    def _generate_next_value_(name, start, count, last_values):  # noqa: ARG004
        return count


class Address(FromZero):
    """Columns of `Tables.pointers`: addresses of a tensor, which move from step to step."""

    WEIGHT = auto()
    GRAD = auto()
    ORTHOGONAL = auto()  # in the buffer of orthogonal directions


class Column(FromZero):
    """Columns of `Tables.matrices`.

    A row is a matrix: a whole tensor, one matrix of a batch, or a piece of a vector.
    """

    # Addresses.
    ROW_VAR = auto()
    COL_VAR = auto()  # the full variance where there are no factors
    STEP = auto()
    LR = auto()
    MOMENTUM = auto()
    MOMENTUM_SCALE = auto()
    BAND_SUMS = auto()
    INITIAL_RMS = auto()
    # The matrix.
    ROWS = auto()
    COLS = auto()
    NUMEL = auto()  # of the whole tensor
    BLOCK_ROWS = auto()  # of the blocks that are orthogonalised one by one; 0: no blocks
    BLOCK_COLS = auto()
    START = auto()  # position of the first element in the local tensor
    ALL_ROWS = auto()  # of the whole matrix, of which this may be a shard
    ALL_COLS = auto()
    ORIGIN = auto()  # position of the first element in the whole tensor
    STRIDE = auto()  # from row to row in the whole tensor
    FLAGS = auto()  # bits of `Flag`
    GROUP = auto()
    # Its tensor, with the first tile and the first block of that, and how many it has.
    OWNER = auto()
    OWNER_TILE = auto()
    OWNER_TILES = auto()
    OWNER_BLOCK = auto()
    OWNER_BLOCKS = auto()
    # Its own tiles: STRIPS side by side, DOWN one below the other.
    FIRST_TILE = auto()
    FIRST_BLOCK = auto()
    DOWN = auto()
    STRIPS = auto()
    # Where its entries in the buffers begin.
    ROW_SPACE = auto()
    ROW_PART = auto()
    COL_PART = auto()
    ROW_CHUNK = auto()
    ROW_CHUNKS = auto()
    COL_CHUNK = auto()


class Setting(FromZero):
    """Columns of `Tables.settings`, one row per parameter group."""

    BETA2_DECAY = auto()
    EPS1 = auto()
    EPS2 = auto()
    FLOOR = auto()
    VARIANCE_FLOOR = auto()
    D = auto()
    WEIGHT_DECAY = auto()
    GAMMA = auto()
    ONE_MINUS_GAMMA = auto()
    MIN_LR = auto()
    COUNT_EPS = auto()
    OFFSET = auto()
    KAPPA_LOW = auto()
    KAPPA_HIGH = auto()
    CLIP = auto()
    BOOST = auto()
    FIXED_BETA = auto()
    LOG_BETA = auto()
    BETA_MIN = auto()
    BETA_MAX = auto()
    WARMUP = auto()
    THETA = auto()
    MIX = auto()
    LEAST_INPUT = auto()
    USUAL_FROM = auto()


class Scalar(FromZero):
    """Columns of `Results.scalars`, one row per tensor."""

    ALPHA = auto()  # step size
    KEEP = auto()  # what W is multiplied by: the decay
    TIME = auto()  # t of this step, for the equations
    COUNT_BITS = auto()  # the lowest 32 bits of t, for the noise: float32 is exact only to 2^24
    SCALE = auto()  # what the direction is multiplied by
    BETA = auto()
    GAIN = auto()  # of the corrected momentum in the update
    FACTOR = auto()  # what G is multiplied by to give x
    MEAN = auto()  # mean R, or mean of a full variance


class GradientSum(FromZero):
    """Sums of a tile that `statistics` writes for tensors with momentum."""

    SQUARES = auto()
    VARIANCES = auto()
    UNUSED = auto()  # rows are as long as those of `UpdateSum`


class UpdateSum(FromZero):
    """Sums of a tile that `with_momentum` writes: x M, x², y².

    Those of orthogonal matrices are first in `BatchSum`.
    """

    XM = auto()
    XX = auto()
    YY = auto()


class BatchSum(FromZero):
    """Sums of a part of a tile, of a batch of orthogonal matrices."""

    XM = auto()
    XX = auto()
    SQUARES = auto()  # (y * RANGE)², and from `measure_directions` on O²
    WEIGHTS = auto()  # W², in the order of `Square`
    LARGE_WEIGHTS = auto()
    SMALL_WEIGHTS = auto()


class Square(FromZero):
    """Parts of a sum of squares, see `rule/squares.py`."""

    USUAL = auto()
    LARGE = auto()
    SMALL = auto()


class Measure(FromZero):
    """Sums of a part of a tile in a recorded step."""

    GRADIENTS = auto()  # G², in the first part of a tile
    CHANGES = auto()  # (W after - W before)²
    WEIGHTS = auto()  # W² after the step
    LOST = auto()  # entries whose change rounding to nearest would drop


class RowSum(FromZero):
    """Sums over the rows of a chunk or a matrix that ranks exchange."""

    BEFORE = auto()  # R before the step
    NEWEST = auto()  # G²


class Extreme(FromZero):
    """Columns of `Results.extremes`, one row per matrix, as the bits of floats."""

    MAX_ROW = auto()
    MIN_ROW = auto()
    MIN_COL = auto()


class BandSum(FromZero):
    """Entries of the state `band_sums` of a single band."""

    AGREEMENT = auto()
    POWER = auto()
    CORRECTION = auto()


class Counter(FromZero):
    """Slots of `Results.counters`."""

    SEEN = auto()  # a non-finite gradient was seen in this step
    SKIP = auto()  # this step is skipped
    SKIPPED = auto()  # steps skipped so far
    IN_A_ROW = auto()  # steps skipped since the last one that was taken


class Task(FromZero):
    """What a program of `finalize` works on."""

    ROWS = auto()
    COLS = auto()
    TENSOR = auto()
    EMPTY = auto()  # a tensor without elements


class TaskColumn(FromZero):
    """Columns of the table of tasks."""

    MATRIX = auto()
    KIND = auto()
    CHUNK = auto()


class Flag(IntFlag):
    """Bits of `Column.FLAGS`: what a tensor's rule does differently."""

    DENSE = auto()  # a full variance instead of factors
    VECTOR = auto()  # the whole tensor is one row
    SIGN = auto()  # direction sign(U) * row maximum, else U itself
    MAXIMIZE = auto()
    MAX_NORM = auto()  # R is divided by max R, or by mean R for Adafactor
    BOOSTED = auto()  # version 0.3's rule for a single value
    ADAFACTOR = auto()
    RAMP = auto()  # version 0.2's step size
    UNCAPPED = auto()  # the relative step is lr itself
    DECAY_BY_LR = auto()  # else by alpha, or
    DECAY_BY_RHO = auto()  # by the relative step
    DECAY_BY_SQUARE = auto()  # ... times its share of lr
    ABSOLUTE = auto()  # Adafactor's step size is lr itself
    STOCHASTIC = auto()  # rounding
    FACTORED = auto()  # direction "factored": U divided by its RMS if that exceeds d
    WITH_MOMENTUM = auto()  # or with an orthogonal direction
    ORTHOGONAL = auto()
    ADAPTIVE = auto()  # FAM, with sums of its own
    INITIAL = auto()  # the step size is scaled by the initial RMS(W)
    RAISED = auto()  # ... which is at least the size from its shape


ADDRESS = DeviceEnum(Address)
COLUMN = DeviceEnum(Column)
SETTING = DeviceEnum(Setting)
SCALAR = DeviceEnum(Scalar)
GRADIENT_SUM = DeviceEnum(GradientSum)
UPDATE_SUM = DeviceEnum(UpdateSum)
BATCH_SUM = DeviceEnum(BatchSum)
SQUARE = DeviceEnum(Square)
MEASURE = DeviceEnum(Measure)
ROW_SUM = DeviceEnum(RowSum)
EXTREME = DeviceEnum(Extreme)
BAND_SUM = DeviceEnum(BandSum)
COUNTER = DeviceEnum(Counter)
TASK = DeviceEnum(Task)
TASK_COLUMN = DeviceEnum(TaskColumn)
FLAG = DeviceEnum(Flag)
