"""Where everything is: sizes of tiles, columns of the tables, bits of flags."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from maxfactor.backends.dispatch import is_interpreted
from maxfactor.rule import int8

# A strip is COLUMNS wide. A tile is TILE_ROWS rows of a strip, loaded in PIECES of PIECE_ROWS rows
# each; the signs of a tile are as many words as a piece has elements, with one bit for each piece.
# A block of `maxima` is a few rows in all strips. A program of `finalize` has CHUNK rows, or one
# strip. In the interpreter all are small, so that small tensors have several of each.
INTERPRETED = is_interpreted()
COLUMNS, PIECE_ROWS, PIECES = (64, 4, 4) if INTERPRETED else (256, 4, 32)
CHUNK = COLUMNS
BLOCK = tl.constexpr(int8.BLOCK)  # values of a stored momentum that share a scale
TILE_ROWS = PIECE_ROWS * PIECES
BUNDLE, STRIPS_AT_ONCE = 8, 8  # `maxima` reads bundles of so many columns, of so many strips


class Shape(NamedTuple):
    """What a kernel works on at a time, and with what. The fastest on an H200."""

    rows: int
    warps: int
    stages: int = 3  # pieces under way from memory
    registers: int | None = None  # of a thread, at most

    @property
    def options(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        options = {"ROWS_": self.rows, "STAGES_": self.stages, "num_warps": self.warps}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


STATISTICS = Shape(PIECE_ROWS, 1, stages=4)  # one warp: sums over a row need not leave it
APPLY_SIGNS = Shape(PIECE_ROWS, 1, stages=4)  # and sums over a column need not leave a thread
APPLY_GENERAL = Shape(PIECE_ROWS, 1)
FILTERED_SHAPE = Shape(PIECE_ROWS, 1, stages=2)
MAXIMA, MAXIMA_GENERAL = (Shape(4, 1), Shape(4, 1)) if INTERPRETED else (Shape(16, 1), Shape(8, 1))
FINALIZE_WARPS, PARTS_AT_ONCE = 2, 8  # partial sums that `finalize` adds at a time
MAXIMA_WIDTH = 32  # columns that `maxima` reads at a time, where it cannot do with bundles


def constants(count: int) -> list[tl.constexpr]:
    """0, 1, 2, … as Triton wants its global constants."""
    return [tl.constexpr(i) for i in range(count)]


# Columns of the int64 table, one row for each matrix: a tensor, one matrix of a batch, or a piece
# of a vector. `pointers` is a table of its own, (W, G, O) of each tensor, since they move; O is the
# orthogonal direction.
POINTERS = tl.constexpr(3)
(
    ROW_VAR, COL_VAR, STEP, LR, MOMENTUM, MOMENTUM_SCALE, BAND_SUMS, INITIAL_RMS,  # addresses
    ROWS, COLS, NUMEL,  # of the matrix, and elements of the whole tensor
    START,  # position of the first element in the tensor
    ALL_ROWS, ALL_COLS,  # of the matrix of which this is a shard, or which this is
    ORIGIN, STRIDE,  # position of the first element in the whole tensor, and from row to row
    FLAGS, GROUP,
    OWNER, OWNER_TILE, OWNER_TILES, OWNER_BLOCK, OWNER_BLOCKS,  # the tensor, its tiles and blocks
    FIRST_TILE, FIRST_BLOCK, DOWN, STRIPS,  # DOWN: tiles one below the other
    ROW_SPACE, ROW_PART, COL_PART, ROW_CHUNK, ROW_CHUNKS, COL_CHUNK,  # places in the work space
    TABLE,
) = constants(34)  # fmt: skip

# Columns of the float32 table of settings, one row for each group.
(
    BETA2_DECAY, EPS1, EPS2, FLOOR, VARIANCE_FLOOR, D, WEIGHT_DECAY, GAMMA, ONE_MINUS_GAMMA,
    MIN_LR, COUNT_EPS, OFFSET, KAPPA_LOW, KAPPA_HIGH, CLIP, BOOST,
    FIXED_BETA, LOG_BETA, BETA_MIN, BETA_MAX, WARMUP, THETA, MIX,
    SETTINGS,
) = constants(24)  # fmt: skip

# Columns of the float32 scalars of a tensor.
# The last four are the filter's: beta, (1 - mu)/c of (13), what x is G times, and mean R.
ALPHA, KEEP, TIME, SCALE, BETA, GAIN, FACTOR, MEAN, SCALARS = constants(9)

# Sums of a tile that `filtered` leaves behind: of x M, of x^2, of y^2.
XM, XX, YY, SUMS = constants(4)

# Slots of the int32 status: a non-finite gradient seen, this step is skipped, counters.
SEEN, SKIP, SKIPPED, IN_A_ROW, STATUS = constants(5)

# Kinds of a task of `finalize`.
OF_ROWS, OF_COLS, OF_TENSOR, OF_EMPTY = constants(4)

# Bits of FLAGS.
(
    DENSE,  # a full variance in COL_VAR instead of factors
    VECTOR,  # the whole tensor is one row
    SIGN,  # direction sign(U) * row maximum, else U itself
    MAXIMIZE,
    MAX_NORM,  # R / max R in (6), R / mean R for Adafactor
    BOOSTED,  # version 0.3's rule for a single value
    ADAFACTOR,
    RAMP,  # version 0.2's step size
    DECAY_BY_LR,  # else by alpha, or
    DECAY_BY_RHO,  # by the relative step
    ABSOLUTE,  # Adafactor's step size is lr itself
    STOCHASTIC,  # rounding
    FACTORED,  # direction "factored": U divided by its RMS where that is more than d
    FILTERED,  # momentum, or orthogonal
    WHITENS,  # orthogonal
    ADAPTIVE,  # FAM, with sums of its own
    INITIAL,  # the step size is scaled by the RMS(W) of the beginning
) = (tl.constexpr(1 << bit) for bit in range(17))
INFINITY_BITS = tl.constexpr(0x7F800000)
TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32
