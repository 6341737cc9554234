"""Triton kernels of the fused backend. `fused.py` builds their tables and launches them.

A step is four launches over all tensors of a kind (one kind: one pair of dtypes):

1. `statistics` reads G: sums of squares of each row (over a strip of columns) and of each column
   (over the rows of a tile), whether anything is not finite, the largest |G| / sqrt(C) of each row
   and strip, with the C of the step before, and the signs of G, packed into bits.
2. `finalize` adds the partial sums, equations (1) to (5), and notes by how much C has changed.
3. `maxima` finds the row maxima of |U|, (6) and (7). Most of G need not be read again for that: a
   strip whose largest value, by the C of before and the most that C has changed, cannot reach what
   another strip of the row has, does not hold the maximum.
4. `apply` reads W and the signs and writes W, (4) (8) (9), and sums the squares of the new W for
   the next step's (3). A tile of G with a zero in it, whose sign no bit can tell, is read again.

Where there is momentum, or an orthogonal direction, `filtered` takes the place of `maxima`: it
reads G and M, writes M, (10) to (13), and packs the signs of y instead of G's. `apply` makes y anew
from G and the stored M where signs do not do, and takes an orthogonal direction from a buffer.

Sums are taken in two stages in a fixed order, maxima by integer atomics on the bits of floats that
are not negative: results repeat bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from maxfactor import quantize
from maxfactor.backends.choice import is_interpreted

# A strip is COLUMNS wide. A tile is TILE_ROWS rows of a strip, loaded in PIECES of PIECE_ROWS rows
# each; the signs of a tile are as many words as a piece has elements, with one bit for each piece.
# A block of `maxima` is a few rows in all strips. A program of `finalize` has CHUNK rows, or one
# strip. In the interpreter all are small, so that small tensors have several of each.
INTERPRETED = is_interpreted()
COLUMNS, PIECE_ROWS, PIECES = (64, 4, 4) if INTERPRETED else (256, 4, 32)
CHUNK = COLUMNS
BLOCK = tl.constexpr(quantize.BLOCK)  # values of a stored momentum that share a scale
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
APPLY, APPLY_GENERAL = Shape(PIECE_ROWS, 1), Shape(PIECE_ROWS, 1)
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
    DECAY_BY_LR,
    ABSOLUTE,  # Adafactor's step size is lr itself
    STOCHASTIC,  # rounding
    FACTORED,  # direction "factored": U divided by its RMS where that is more than d
    FILTERED,  # momentum, or orthogonal
    WHITENS,  # orthogonal
    ADAPTIVE,  # FAM, with sums of its own
    INITIAL,  # the step size is scaled by the RMS(W) of the beginning
) = (tl.constexpr(1 << bit) for bit in range(16))
INFINITY_BITS = tl.constexpr(0x7F800000)
TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32


@triton.jit
def places_of(pointer, rows, cols, m, n, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers and mask of a tile.

    ALIGNED: rows start on 16 bytes and have whole pieces of 8 elements. The shifts then change
    nothing, but they let the compiler see it and move 16 bytes at a time.
    """
    if ALIGNED:
        pointer = (pointer >> 4) << 4
        n = (n >> 3) << 3
        base = tl.multiple_of(pointer.to(tl.pointer_type(KIND)), 16)
    else:
        base = pointer.to(tl.pointer_type(KIND))
    places = base + (rows.to(tl.int64)[:, None] * n + cols[None, :])
    return places, (rows < m)[:, None] & (cols < n.to(tl.int32))[None, :]


@triton.jit
def load_tile(pointer, rows, cols, m, n, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """A piece as float32, 0 outside the matrix."""
    places, inside = places_of(pointer, rows, cols, m, n, KIND, ALIGNED)
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(pointer, tile, rows, cols, m, n, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Write a piece that already has its final values."""
    places, inside = places_of(pointer, rows, cols, m, n, KIND, ALIGNED)
    tl.store(places, tile.to(KIND), mask=inside)


@triton.jit
def address(pointers, entry, column: tl.constexpr, KIND: tl.constexpr):
    """Where a matrix of W (column 0) or of G (column 1) begins."""
    bytes_: tl.constexpr = KIND.primitive_bitwidth // 8
    base = tl.load(pointers + tl.load(entry + OWNER) * POINTERS + column)
    return base + tl.load(entry + START) * bytes_


@triton.jit
def mix(x):
    """A bijection of 32 bits; `rounding.mix` in unsigned arithmetic."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def rounded(w, rows, cols, n, start, key, KIND: tl.constexpr):
    """Stochastic rounding of a piece, bit for bit as `rounding.rounded`.

    `start` and `n` place it in the whole tensor: where the first row begins, and the next after it.
    """
    first = start + rows.to(tl.int64) * n  # 64 bits only for what a row shares
    word = first.to(tl.uint32) * 0x9E3779B1 + (first >> 32).to(tl.uint32) * 0x7FEB352D + key
    noise = word[:, None] + (cols.to(tl.uint32) * 0x9E3779B1)[None, :]
    if (start + tl.max(rows, axis=0) * n + n) >> 32 != (start + tl.min(rows, axis=0) * n) >> 32:
        carried = (first & 0xFFFFFFFF)[:, None] + cols[None, :] > 0xFFFFFFFF  # into the high word
        noise += tl.where(carried, 0x7FEB352D, 0).to(tl.uint32)
    noise = (noise ^ (noise >> 16)) * 0x85EBCA6B
    bits = w.to(tl.uint32, bitcast=True)
    if KIND == tl.bfloat16:
        low = ((bits + (noise >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        normal = ((bits + (noise >> 19)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        share = (noise >> 9).to(tl.float32) * 1.1920928955078125e-07  # 2^-23
        tiny = tl.floor(w * 16777216.0 + share) * 5.9604644775390625e-08  # spacing 2^-24
        low = tl.where(tl.abs(w) < 6.103515625e-05, tiny, normal)
    return tl.where(tl.abs(w) < float("inf"), low, w)


@triton.jit
def inverse_root(x):
    """1 / sqrt(x), finite for 0."""
    return tl.rsqrt(tl.maximum(x, TINY))


@triton.jit(do_not_specialize=["first_tile"])
def statistics(
    pointers,
    table,
    tile_matrix,
    row_part,
    row_peak,
    col_part,
    extremes,
    signs,
    unsigned,
    tile_sums,
    settings,
    bad,
    status,
    grad_scale,
    first_tile,
    CHECK: tl.constexpr,
    SCALED: tl.constexpr,
    SIGNED: tl.constexpr,
    FILTERS: tl.constexpr,
    VARIANCES: tl.constexpr,
    G_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
    BUNDLE_: tl.constexpr,
    TILE: tl.constexpr,
    STAGES_: tl.constexpr,
):
    """Partial sums of G^2 over one tile, and the signs of G."""
    tile = first_tile + tl.program_id(0)
    k = tl.load(tile_matrix + tile).to(tl.int64)
    entry = table + k * TABLE
    m = tl.load(entry + ROWS)
    n = tl.load(entry + COLS)
    strips = tl.load(entry + STRIPS)
    local = tile - tl.load(entry + FIRST_TILE)
    strip = local % strips
    first_row = local // strips * TILE
    cols = (strip * COLS_).to(tl.int32) + tl.arange(0, COLS_)
    pointer = address(pointers, entry, 1, G_KIND)
    place = tl.load(entry + ROW_PART) + strip * m
    dense = (tl.load(entry + FLAGS) & DENSE) != 0
    scale = 1.0
    if SCALED:
        scale = 1.0 / tl.load(grad_scale)
    if local == 0:
        tl.store(extremes + k * 3, 0)  # `finalize` takes max R, min R and min C into them
        tl.store(extremes + k * 3 + 1, INFINITY_BITS)
        tl.store(extremes + k * 3 + 2, INFINITY_BITS)

    col_end = tl.where(dense, 0, n)
    col_pointer = tl.load(entry + COL_VAR).to(tl.pointer_type(tl.float32))
    old_root = inverse_root(tl.load(col_pointer + cols, mask=cols < col_end, other=1.0))
    total = tl.zeros([COLS_], tl.float32)
    least = tl.full([COLS_], float("inf"), tl.float32)  # 0 where the sign of a zero is no sign
    marks = tl.zeros([ROWS_, COLS_], tl.uint32)
    if VARIANCES:
        variances = tl.zeros([COLS_], tl.float32)
    setting = settings + tl.load(entry + GROUP) * SETTINGS
    pieces = tl.cdiv(tl.minimum(m - first_row, TILE), ROWS_).to(tl.int32)
    for piece in tl.range(0, pieces, num_stages=STAGES_):
        rows = (first_row + piece * ROWS_ + tl.arange(0, ROWS_)).to(tl.int32)
        g = load_tile(pointer, rows, cols, m, n, G_KIND, ALIGNED) * scale
        square = g * g
        total += tl.sum(square, axis=0)
        if SIGNED:
            marks = marked(marks, g)
            least = tl.minimum(least, tl.min(tl.abs(g), axis=0))
        if not dense:
            tl.store(row_part + place + rows, tl.sum(square, axis=1), mask=rows < m)
        elif VARIANCES:
            v = dense_variance(entry, setting, 1.0, g, rows, cols, m, n, ALIGNED)
            variances += tl.sum(v, axis=0)
        if (not dense) and (not FILTERS):
            peak, second = two_peaks(tl.abs(g) * old_root[None, :], ROWS_, COLS_, BUNDLE_)
            tl.store(row_peak + (place + rows) * 2, peak, mask=rows < m)
            tl.store(row_peak + (place + rows) * 2 + 1, second, mask=rows < m)
    if not dense:
        tl.store(
            col_part + tl.load(entry + COL_PART) + (local // strips) * n + cols,
            total,
            mask=cols < n,
        )
    everything = tl.sum(total, axis=0)
    finite = everything < float("inf")  # false for NaN too
    if SIGNED:
        tl.store(unsigned + tile, (has_zeros(least, cols, n) | (finite == 0)).to(tl.int8))
        if not dense:
            tl.store(sign_places(signs, tile, ROWS_, COLS_), marks.to(tl.int32, bitcast=True))
    if FILTERS:
        tl.store(tile_sums + tile * SUMS, everything)
        if VARIANCES:
            tl.store(tile_sums + tile * SUMS + 1, tl.sum(variances, axis=0))
    if CHECK:
        if finite == 0:
            tl.store(status + SEEN, 1)
            tl.store(bad + tl.load(entry + OWNER), 1)


@triton.jit
def marked(marks, values):
    """The signs of a tile's pieces so far, and of one more: the last piece has the lowest bit."""
    return (marks << 1) | (values.to(tl.uint32, bitcast=True) >> 31)


@triton.jit
def negated(size, marks, piece, pieces):
    """`size`, which is one value for each row, with the signs of a piece."""
    sign = (marks << (32 - pieces + piece).to(tl.uint32)) & 0x80000000
    return (size.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def has_zeros(least, cols, n):
    """Whether a tile has a zero. Rows beyond the last read as zeros: slower then, not wrong."""
    return tl.min(tl.where(cols < n, least, 1.0), axis=0) == 0.0


@triton.jit
def two_peaks(values, ROWS_: tl.constexpr, COLS_: tl.constexpr, BUNDLE_: tl.constexpr):
    """The largest value of each row with the number of its bundle, and the largest of all others.

    Values are not negative, so their bits order as they do. The number takes the lowest bits.
    """
    bundles: tl.constexpr = COLS_ // BUNDLE_
    highest = tl.max(tl.reshape(values, [ROWS_, bundles, BUNDLE_]), axis=2)
    bits = (highest.to(tl.int32, bitcast=True) & ~(bundles - 1)) | tl.arange(0, bundles)[None, :]
    peak = tl.max(bits, axis=1)
    return peak, tl.max(tl.where(bits == peak[:, None], 0, bits), axis=1)


@triton.jit
def sign_places(signs, tile, ROWS_: tl.constexpr, COLS_: tl.constexpr):
    """Where the sign bits of a tile are kept."""
    within = tl.arange(0, ROWS_)[:, None] * COLS_ + tl.arange(0, COLS_)[None, :]
    return signs + tile.to(tl.int64) * (ROWS_ * COLS_) + within


@triton.jit
def statistic_weight(t, setting):
    """Equation (1)."""
    power = tl.exp2(tl.load(setting + BETA2_DECAY) * tl.log2(t))
    power = tl.maximum(power, tl.load(setting + KAPPA_LOW))
    return tl.minimum(power, tl.load(setting + KAPPA_HIGH))


@triton.jit
def sum_of(values, first, count, stride=1):
    """The sum of `count` partial sums from `first` on, always in the same order."""
    total = tl.zeros([1024], tl.float32)
    for i in range(0, count, 1024):
        at = i + tl.arange(0, 1024)
        total += tl.load(values + (first + at) * stride, mask=at < count, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def sum_down(part, parts, length, at, CHUNK_: tl.constexpr, PARTS_: tl.constexpr):
    """The sum of `parts` vectors that lie one behind the other, always in the same order."""
    total = tl.zeros([PARTS_, CHUNK_], tl.float32)
    for i in range(0, parts, PARTS_):
        which = i + tl.arange(0, PARTS_)
        inside = (which < parts)[:, None] & (at < length)[None, :]
        total += tl.load(part + which[:, None] * length + at[None, :], mask=inside, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def tensor_scalars(entry, setting, squares, scalars, skip):
    """Equations (2) (3), the factor of (4), and the memory of (11) for one tensor."""
    flags = tl.load(entry + FLAGS)
    total = sum_of(squares, tl.load(entry + OWNER_TILE), tl.load(entry + OWNER_TILES))
    mean = total / tl.load(entry + NUMEL).to(tl.float32)
    t = tl.load(tl.load(entry + STEP).to(tl.pointer_type(tl.float32))) + 1.0
    size = tl.sqrt_rn(mean)
    if (flags & INITIAL) != 0:
        initial = tl.load(entry + INITIAL_RMS).to(tl.pointer_type(tl.float32))
        size = tl.where(t == 1.0, size, tl.load(initial))
        if skip == 0:
            tl.store(initial, size)
    size = tl.maximum(size, tl.load(setting + EPS2))
    lr = tl.load(tl.load(entry + LR).to(tl.pointer_type(tl.float32)))
    root = 1.0 / tl.sqrt_rn(t)
    rho = tl.maximum(tl.minimum(lr, root), tl.load(setting + MIN_LR))  # (2)
    alpha = tl.where(lr > 0.0, rho * size, 0.0)  # (3)
    alpha = tl.where((flags & RAMP) != 0, tl.minimum(size * tl.minimum(1e-6 * t, root), lr), alpha)
    alpha = tl.where((flags & ABSOLUTE) != 0, lr, alpha)
    decay = tl.where((flags & DECAY_BY_LR) != 0, lr, alpha)
    place = scalars + tl.load(entry + OWNER) * SCALARS
    tl.store(place + ALPHA, alpha)
    tl.store(place + KEEP, 1.0 - decay * tl.load(setting + WEIGHT_DECAY))  # (4)
    tl.store(place + TIME, t)
    if (flags & FILTERED) != 0:
        beta = tl.load(setting + FIXED_BETA)
        correction = one_minus_exp(t * tl.load(setting + LOG_BETA))
        if (flags & ADAPTIVE) != 0:
            sums = tl.load(entry + BAND_SUMS).to(tl.pointer_type(tl.float32))
            adapted = 1.0 - tl.load(sums) / tl.maximum(tl.load(sums + 1), TINY)  # (11)
            adapted = tl.maximum(adapted, tl.load(setting + BETA_MIN))
            adapted = tl.minimum(adapted, tl.load(setting + BETA_MAX))
            beta = tl.where(t <= tl.load(setting + WARMUP), beta, adapted)
            correction = beta * tl.load(sums + 2) + (1.0 - beta)  # (12)
        tl.store(place + BETA, beta)
        tl.store(place + GAIN, (1.0 - tl.load(setting + MIX)) / correction)


@triton.jit
def one_minus_exp(z):
    """1 - e^z for z <= 0, with all its digits near 0 too."""
    series = 1.0 + z / 5.0 * (1.0 + z / 6.0 * (1.0 + z / 7.0 * (1.0 + z / 8.0)))
    series = 1.0 + z / 2.0 * (1.0 + z / 3.0 * (1.0 + z / 4.0 * series))
    return tl.where(z > -0.5, -z * series, 1.0 - tl.exp(z))


@triton.jit
def finalize(
    table,
    settings,
    tasks,
    row_part,
    col_part,
    extremes,
    row_sum_var,
    squares,
    scalars,
    update_max,
    ratios,
    row_max,
    bad,
    status,
    found_inf,
    SCALED: tl.constexpr,
    CHUNK_: tl.constexpr,
    PARTS_: tl.constexpr,
):
    """Equations (1) to (5) for a chunk of rows, for a strip of columns, or for a tensor."""
    task = tl.program_id(0)
    k = tl.load(tasks + task * 3).to(tl.int64)
    kind = tl.load(tasks + task * 3 + 1)
    chunk = tl.load(tasks + task * 3 + 2)
    entry = table + k * TABLE
    setting = settings + tl.load(entry + GROUP) * SETTINGS
    seen = tl.load(status + SEEN)
    skip = seen
    if SCALED:
        overflow = (tl.load(found_inf) != 0.0).to(tl.int32)
        skip += overflow
        seen = tl.where(overflow != 0, 0, seen)  # GradScaler's own business: not counted
    if task == 0:
        tl.store(status + SKIP, skip)
        tl.store(status + SKIPPED, tl.load(status + SKIPPED) + seen)
        run = tl.load(status + IN_A_ROW) + seen
        tl.store(status + IN_A_ROW, tl.where(skip != 0, run, 0))
    at = chunk * CHUNK_ + tl.arange(0, CHUNK_)
    m = tl.load(entry + ROWS)
    n = tl.load(entry + COLS)
    if kind == OF_EMPTY:
        place = tl.load(entry + STEP).to(tl.pointer_type(tl.float32))
        tl.store(place, tl.load(place) + tl.where(skip == 0, 1.0, 0.0))
    elif kind == OF_TENSOR:
        owner = tl.load(entry + OWNER)
        tl.store(update_max + owner, 0)
        if seen == 0:
            tl.store(bad + owner, 0)
        tensor_scalars(entry, setting, squares, scalars, skip)
    else:
        t = tl.load(tl.load(entry + STEP).to(tl.pointer_type(tl.float32))) + 1.0
        kappa = statistic_weight(t, setting)  # (1)
        if kind == OF_ROWS:
            inside = at < m
            part = row_part + tl.load(entry + ROW_PART)
            parts = tl.load(entry + STRIPS)
            length, count = m, tl.load(entry + ALL_COLS)
            place = tl.load(entry + ROW_VAR).to(tl.pointer_type(tl.float32))
        else:
            inside = at < n
            part = col_part + tl.load(entry + COL_PART)
            parts = tl.load(entry + DOWN)
            length, count = n, tl.load(entry + ALL_ROWS)
            place = tl.load(entry + COL_VAR).to(tl.pointer_type(tl.float32))
        total = sum_down(part, parts, length, at, CHUNK_, PARTS_)
        mean = total / (count.to(tl.float32) + tl.load(setting + COUNT_EPS))
        mean += tl.load(setting + OFFSET)
        old = tl.load(place + at, mask=inside, other=0.0)
        new = tl.where(kappa == 1.0, mean, old + kappa * (mean - old))  # (5)
        if skip == 0:
            tl.store(place + at, new, mask=inside)
        if kind == OF_ROWS:
            smallest = tl.min(tl.where(inside, new, float("inf")), axis=0)
            new = tl.where(inside, new, 0.0)
            largest = tl.max(new, axis=0)
            tl.atomic_max(extremes + k * 3, largest.to(tl.int32, bitcast=True), sem="relaxed")
            tl.atomic_min(extremes + k * 3 + 1, smallest.to(tl.int32, bitcast=True), sem="relaxed")
            tl.store(row_sum_var + tl.load(entry + ROW_CHUNK) + chunk, tl.sum(new, axis=0))
            tl.store(row_max + tl.load(entry + ROW_SPACE) + at, 0, mask=inside)
        else:
            ratio = inverse_root(new) / inverse_root(old)  # by how much 1 / sqrt(C) has changed
            spot = ratios + (tl.load(entry + COL_CHUNK) + chunk) * 2
            tl.store(spot, tl.min(tl.where(inside, ratio, float("inf")), axis=0))
            tl.store(spot + 1, tl.max(tl.where(inside, ratio, 0.0), axis=0))
            smallest = tl.min(tl.where(inside, new, float("inf")), axis=0)
            tl.atomic_min(extremes + k * 3 + 2, smallest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def mean_row_var(entry, row_sum_var):
    """The mean of R."""
    total = sum_of(row_sum_var, tl.load(entry + ROW_CHUNK), tl.load(entry + ROW_CHUNKS))
    return total / tl.load(entry + ALL_ROWS).to(tl.float32)


@triton.jit
def row_scale(entry, setting, k, extremes, row_sum_var, flags):
    """What R is divided by in (6): max R, or mean R for Adafactor, or nothing."""
    largest = tl.load(extremes + k * 3).to(tl.float32, bitcast=True)
    scale = tl.maximum(largest, tl.load(setting + FLOOR))
    if (flags & (ADAFACTOR | FACTORED)) != 0:
        scale = tl.maximum(mean_row_var(entry, row_sum_var), TINY)
    return tl.where((flags & MAX_NORM) != 0, scale, 1.0)


@triton.jit
def dense_variance(entry, setting, t, g, rows, cols, m, n, ALIGNED: tl.constexpr):
    """Equation (5') for a tile of a tensor that keeps a full variance."""
    pointer = tl.load(entry + COL_VAR)
    old = load_tile(pointer, rows, cols, m, n, tl.float32, ALIGNED)
    square = g * g
    if (tl.load(entry + FLAGS) & ADAFACTOR) != 0:
        kappa = statistic_weight(t, setting)
        square += tl.load(setting + OFFSET)
        new = tl.where(kappa == 1.0, square, old + kappa * (square - old))
    else:
        gamma = tl.load(setting + GAMMA)
        new = gamma * old + tl.load(setting + ONE_MINUS_GAMMA) * square
    return new


@triton.jit
def is_floored(setting, k, extremes, scale):
    """Whether the floor of (6) acts somewhere in a matrix."""
    least_r = tl.load(extremes + k * 3 + 1).to(tl.float32, bitcast=True)
    least_c = tl.load(extremes + k * 3 + 2).to(tl.float32, bitcast=True)
    return least_r / scale * least_c < tl.load(setting + VARIANCE_FLOOR)


@triton.jit
def pruned_row_maxima(
    pointer,
    peaks,
    changes,
    col_pointer,
    rows,
    m,
    n,
    strips,
    inverse_scale,
    G_KIND: tl.constexpr,
    COLS_: tl.constexpr,
    BUNDLE_: tl.constexpr,
    STRIPS_: tl.constexpr,
    WIDTH_: tl.constexpr,
):
    """The largest |G| / sqrt(C) of each row, reading little of G.

    `peaks` has, by the C of the step before, the largest of each strip with its bundle of columns,
    and the largest outside that bundle. How much 1 / sqrt(C) has changed lies between the bounds in
    `changes`. First the likeliest bundle is read, then what bundles, and what else of a strip, may
    still have more; the slack covers rounding and the bits that the bundle's number took.
    """
    bundles: tl.constexpr = COLS_ // BUNDLE_
    many = tl.arange(0, STRIPS_)
    start = rows.to(tl.int64) * n  # of each row
    likeliest = tl.zeros_like(rows)
    least = tl.zeros_like(rows).to(tl.float32)
    for first in range(0, strips, STRIPS_):
        which = first + many
        peak = strip_values(peaks, which, rows, m, strips)
        low = tl.load(changes + which * 2, mask=which < strips, other=0.0)
        value = peak.to(tl.float32, bitcast=True) * low[:, None]
        highest, column = highest_of(
            value, which[:, None] * COLS_ + (peak & (bundles - 1)) * BUNDLE_
        )
        likeliest = tl.where(highest > least, column, likeliest)
        least = tl.maximum(least, highest)
    real = rows < m
    by_row = largest_in(pointer, col_pointer, start, likeliest, real, n, G_KIND, BUNDLE_)
    by_row *= inverse_scale
    for first in range(0, strips, STRIPS_):
        which = first + many
        high = tl.load(changes + which * 2 + 1, mask=which < strips, other=0.0)[:, None] * 1.0001
        peak = strip_values(peaks, which, rows, m, strips)
        columns = which[:, None] * COLS_ + (peak & (bundles - 1)) * BUNDLE_
        most = peak.to(tl.float32, bitcast=True) * high
        most = tl.where(columns == likeliest[None, :], 0.0, most)  # this one is read
        highest, column = highest_of(most, columns)
        while tl.max((highest > by_row).to(tl.int32), axis=0) != 0:
            needed = real & (highest > by_row)
            found = largest_in(pointer, col_pointer, start, column, needed, n, G_KIND, BUNDLE_)
            by_row = tl.maximum(by_row, found * inverse_scale)
            most = tl.where(columns == column[None, :], 0.0, most)
            highest, column = highest_of(most, columns)
        other = strip_values(peaks + 1, which, rows, m, strips)
        most = other.to(tl.float32, bitcast=True) * high
        columns = which[:, None] * COLS_ + tl.zeros_like(peak)
        highest, column = highest_of(most, columns)
        while tl.max((highest > by_row).to(tl.int32), axis=0) != 0:
            needed = real & (highest > by_row)
            for at in range(0, COLS_, WIDTH_):
                found = largest_in(
                    pointer, col_pointer, start, column + at, needed, n, G_KIND, WIDTH_
                )
                by_row = tl.maximum(by_row, found * inverse_scale)
            most = tl.where(columns == column[None, :], 0.0, most)
            highest, column = highest_of(most, columns)
    return by_row


@triton.jit
def strip_values(values, which, rows, m, strips):
    """One of the two values of each strip (down) and row (across) in `peaks`."""
    inside = (which < strips)[:, None] & (rows < m)[None, :]
    return tl.load(values + (which[:, None] * m + rows[None, :]) * 2, mask=inside, other=0)


@triton.jit
def highest_of(values, columns):
    """The highest value over the strips, for each row, and the column that goes with it."""
    highest = tl.max(values, axis=0)
    return highest, tl.max(tl.where(values == highest[None, :], columns, 0), axis=0)


@triton.jit
def largest_in(
    pointer, col_pointer, start, first, needed, n, G_KIND: tl.constexpr, WIDTH_: tl.constexpr
):
    """The largest |G| / sqrt(C) of WIDTH_ columns from `first` on, 0 for rows not needed."""
    cols = first[:, None] + tl.arange(0, WIDTH_)[None, :]
    inside = needed[:, None] & (cols < n)
    base = pointer.to(tl.pointer_type(G_KIND))
    g = tl.load(base + (start[:, None] + cols), mask=inside, other=0.0).to(tl.float32)
    c = tl.load(col_pointer + cols, mask=inside, other=1.0)
    return tl.max(tl.abs(g) * inverse_root(c), axis=1)


@triton.jit
def maxima(
    pointers,
    table,
    settings,
    block_matrix,
    row_peak,
    ratios,
    extremes,
    row_sum_var,
    row_max,
    update_max,
    update_squares,
    scalars,
    status,
    grad_scale,
    SCALED: tl.constexpr,
    G_KIND: tl.constexpr,
    GENERAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
    BUNDLE_: tl.constexpr,
    STRIPS_: tl.constexpr,
    WIDTH_: tl.constexpr,
    STAGES_: tl.constexpr,
):
    """Maxima of |U| before it is normalised, (6) and the left of (7), for a block of rows."""
    if tl.load(status + SKIP) != 0:
        return
    block = tl.program_id(0)
    k = tl.load(block_matrix + block).to(tl.int64)
    entry = table + k * TABLE
    setting = settings + tl.load(entry + GROUP) * SETTINGS
    flags = tl.load(entry + FLAGS)
    m = tl.load(entry + ROWS)
    n = tl.load(entry + COLS)
    strips = tl.load(entry + STRIPS).to(tl.int32)
    local = (block - tl.load(entry + FIRST_BLOCK)).to(tl.int32)
    rows = local * ROWS_ + tl.arange(0, ROWS_)
    pointer = address(pointers, entry, 1, G_KIND)
    inverse_scale = 1.0
    if SCALED:
        inverse_scale = 1.0 / tl.load(grad_scale)
    t = tl.load(scalars + tl.load(entry + OWNER) * SCALARS + TIME)
    dense = (flags & DENSE) != 0
    row_end, col_end = tl.where(dense, 0, m), tl.where(dense, 0, n)
    scale = row_scale(entry, setting, k, extremes, row_sum_var, flags)
    floor = tl.load(setting + VARIANCE_FLOOR)
    row_pointer = tl.load(entry + ROW_VAR).to(tl.pointer_type(tl.float32))
    col_pointer = tl.load(entry + COL_VAR).to(tl.pointer_type(tl.float32))
    r = tl.load(row_pointer + rows, mask=rows < row_end, other=1.0) / scale
    total = tl.zeros([ROWS_], tl.float32)
    by_row = tl.zeros([ROWS_], tl.float32)
    # Where the floor of (6) acts nowhere, the root of R can wait until after the maximum.
    separate = (dense == 0) & (is_floored(setting, k, extremes, scale) == 0)
    if separate & (GENERAL == 0):
        by_row = pruned_row_maxima(
            pointer,
            row_peak + tl.load(entry + ROW_PART) * 2,
            ratios + tl.load(entry + COL_CHUNK) * 2,
            col_pointer,
            rows,
            m,
            n,
            strips,
            inverse_scale,
            G_KIND,
            COLS_,
            BUNDLE_,
            STRIPS_,
            WIDTH_,
        )
        by_row *= inverse_root(r)
    elif separate:
        for strip in tl.range(0, strips, num_stages=STAGES_):
            cols = strip * COLS_ + tl.arange(0, COLS_)
            g = load_tile(pointer, rows, cols, m, n, G_KIND, ALIGNED)
            c = tl.load(col_pointer + cols, mask=cols < n, other=1.0)
            u = tl.abs(g) * inverse_root(c)[None, :]
            by_row = tl.maximum(by_row, tl.max(u, axis=1))
            if GENERAL:
                total += tl.sum(u * u, axis=1)
        by_row *= inverse_root(r) * inverse_scale
        total *= inverse_root(r) * inverse_root(r) * inverse_scale * inverse_scale
    else:
        for first in range(0, n.to(tl.int32), WIDTH_):
            cols = first + tl.arange(0, WIDTH_)
            g = load_tile(pointer, rows, cols, m, n, G_KIND, ALIGNED) * inverse_scale
            if dense:
                v = dense_variance(entry, setting, t, g, rows, cols, m, n, ALIGNED)
            else:
                c = tl.load(col_pointer + cols, mask=cols < col_end, other=1.0)
                v = r[:, None] * c[None, :]
            u = tl.abs(g) * tl.rsqrt(tl.maximum(v, floor))
            by_row = tl.maximum(by_row, tl.max(u, axis=1))
            if GENERAL:
                total += tl.sum(u * u, axis=1)
    bits = by_row.to(tl.int32, bitcast=True)
    tl.store(row_max + tl.load(entry + ROW_SPACE) + rows, bits, mask=rows < m)
    tl.atomic_max(update_max + tl.load(entry + OWNER), tl.max(bits, axis=0), sem="relaxed")
    if GENERAL:
        tl.store(update_squares + tl.load(entry + OWNER_BLOCK) + local, tl.sum(total, axis=0))


@triton.jit
def divisor_of(setting, update_max, owner):
    """The divisor of (7)."""
    bits = tl.load(update_max + owner)
    return tl.maximum(bits.to(tl.float32, bitcast=True), tl.load(setting + FLOOR))


@triton.jit
def rescale(table, settings, first_of, update_max, update_squares, filter_sums, scalars, status):
    """What a tensor's direction is multiplied by, (7) (8) and the clip; FAM's sums, (11)."""
    owner = tl.program_id(0)
    entry = table + tl.load(first_of + owner).to(tl.int64) * TABLE
    setting = settings + tl.load(entry + GROUP) * SETTINGS
    flags = tl.load(entry + FLAGS)
    scale = 1.0 / divisor_of(setting, update_max, owner)  # (7)
    numel = tl.maximum(tl.load(entry + NUMEL).to(tl.float32), 1.0)
    first, count = tl.load(entry + OWNER_TILE), tl.load(entry + OWNER_TILES)
    if (flags & FILTERED) != 0:
        squares = sum_of(filter_sums + YY, first, count, SUMS)
    else:
        squares = sum_of(
            update_squares, tl.load(entry + OWNER_BLOCK), tl.load(entry + OWNER_BLOCKS)
        )
    clip = tl.load(setting + CLIP)
    if (flags & (ADAFACTOR | FACTORED)) != 0:
        bound = tl.where((flags & FACTORED) != 0, tl.load(setting + D), clip)
        scale = 1.0 / tl.maximum(1.0, tl.sqrt_rn(squares / numel) / bound)
    else:
        norm = tl.sqrt_rn(squares) * scale
        shrink = tl.where(clip > 0.0, clip / tl.maximum(tl.maximum(norm, clip), TINY), 1.0)
        s = tl.maximum(1.0, norm * shrink / tl.sqrt_rn(numel) / tl.load(setting + D))  # (8)
        scale = scale * shrink / s
    tl.store(scalars + owner * SCALARS + SCALE, scale)
    if ((flags & ADAPTIVE) != 0) & (count > 0) & (tl.load(status + SKIP) == 0):
        sums = tl.load(entry + BAND_SUMS).to(tl.pointer_type(tl.float32))
        theta, beta = tl.load(setting + THETA), tl.load(scalars + owner * SCALARS + BETA)
        before = tl.load(sums + 2)
        agreement = sum_of(filter_sums + XM, first, count, SUMS) / numel
        agreement /= tl.maximum(before, TINY)
        power = sum_of(filter_sums + XX, first, count, SUMS) / numel
        tl.store(sums, theta * tl.load(sums) + (1.0 - theta) * agreement)  # (11)
        tl.store(sums + 1, theta * tl.load(sums + 1) + (1.0 - theta) * power)
        tl.store(sums + 2, beta * before + (1.0 - beta))  # (12)


# ------------------------------------------------------------------- momentum, orthogonal


@triton.jit
def input_scale(entry, setting, flags, tile_sums, row_sum_var):
    """What of (10) is one number for each tensor: (factor of G, mean R or mean v)."""
    first, count = tl.load(entry + OWNER_TILE), tl.load(entry + OWNER_TILES)
    numel = tl.load(entry + NUMEL).to(tl.float32)
    mean_square = sum_of(tile_sums, first, count, SUMS) / numel
    if (flags & DENSE) != 0:
        mean = sum_of(tile_sums + 1, first, count, SUMS) / numel
    else:
        mean = mean_row_var(entry, row_sum_var)
    clip = tl.maximum(tl.sqrt_rn(mean_square / tl.maximum(mean, TINY)), 1.0)
    if (flags & WHITENS) != 0:
        clip *= tl.sqrt_rn(tl.maximum(mean, tl.load(setting + VARIANCE_FLOOR)))
    return tl.where((flags & MAXIMIZE) != 0, -1.0, 1.0) / clip, mean


@triton.jit
def factor_roots(pointer, at, end, divisor):
    """1 / sqrt of some of R or C, infinite where they are 0, and where the other is R / divisor."""
    values = tl.load(pointer.to(tl.pointer_type(tl.float32)) + at, mask=at < end, other=1.0)
    return tl.where(values > 0.0, inverse_root(values / divisor), float("inf"))


@triton.jit
def capped(row_roots, col_roots, root_of_floor):
    """1 / sqrt(V) of a piece, where V = R C is never below its floor."""
    return tl.minimum(row_roots[:, None] * col_roots[None, :], root_of_floor)


@triton.jit
def scale_places(scales, rows, cols, m, n, COLS_: tl.constexpr):
    """Where the scales of a piece's stored momentum are, and which of them exist."""
    blocks = (n + BLOCK - 1) // BLOCK
    block = tl.min(cols, axis=0) // BLOCK + tl.arange(0, COLS_ // BLOCK)
    base = scales.to(tl.pointer_type(tl.float32))
    places = base + (rows.to(tl.int64)[:, None] * blocks + block[None, :])
    return places, (rows < m)[:, None] & (block < blocks)[None, :]


@triton.jit
def spread(scales, ROWS_: tl.constexpr, COLS_: tl.constexpr):
    """A value of each block as one of each column."""
    blocks: tl.constexpr = COLS_ // BLOCK
    wide = tl.broadcast_to(tl.expand_dims(scales, 2), [ROWS_, blocks, BLOCK])
    return tl.reshape(wide, [ROWS_, COLS_])


@triton.jit
def momentum_places(entry, STORE: tl.constexpr):
    """Where a matrix's stored momentum and its scales begin."""
    bytes_: tl.constexpr = STORE.primitive_bitwidth // 8
    pointer = tl.load(entry + MOMENTUM) + tl.load(entry + START) * bytes_
    return pointer, tl.load(entry + MOMENTUM_SCALE)


@triton.jit
def recalled(
    pointer,
    scales,
    rows,
    cols,
    m,
    n,
    STORE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
):
    """A piece of the momentum as it was stored; STORE is its dtype."""
    momentum = load_tile(pointer, rows, cols, m, n, STORE, ALIGNED)
    if STORE == tl.int8:
        places, real = scale_places(scales, rows, cols, m, n, COLS_)
        momentum *= spread(tl.load(places, mask=real, other=0.0), ROWS_, COLS_)
    return momentum


@triton.jit
def remembered(
    pointer,
    scales,
    momentum,
    rows,
    cols,
    m,
    n,
    STORE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
):
    """Store a piece of the momentum, return what was stored; `quantize.quantized`."""
    if STORE == tl.int8:
        blocks: tl.constexpr = COLS_ // BLOCK
        largest = tl.max(tl.reshape(tl.abs(momentum), [ROWS_, blocks, BLOCK]), axis=2)
        step = largest * 0.007874015748031496  # 1 / 127
        places, real = scale_places(scales, rows, cols, m, n, COLS_)
        tl.store(places, step, mask=real)
        codes = momentum * spread(1.0 / tl.maximum(step, TINY), ROWS_, COLS_)
        codes += 12582912.0  # 1.5 * 2^23: the nearest whole, ties to even, is in the lowest bits
        bytes_ = codes.to(tl.int32, bitcast=True).to(tl.int8)
        store_tile(pointer, bytes_, rows, cols, m, n, tl.int8, ALIGNED)
        momentum = (codes - 12582912.0) * spread(step, ROWS_, COLS_)
    else:
        store_tile(pointer, momentum, rows, cols, m, n, STORE, ALIGNED)
        momentum = momentum.to(STORE).to(tl.float32)
    return momentum


@triton.jit
def filtered(
    pointers,
    table,
    settings,
    tile_matrix,
    row_sum_var,
    row_max,
    update_max,
    tile_sums,
    filter_sums,
    scalars,
    signs,
    unsigned,
    status,
    grad_scale,
    first_tile,
    SCALED: tl.constexpr,
    SIGNED: tl.constexpr,
    GENERAL: tl.constexpr,
    VARIANCES: tl.constexpr,
    WHITENING: tl.constexpr,
    STORE: tl.constexpr,
    KEEPS: tl.constexpr,
    O_KIND: tl.constexpr,
    G_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
    TILE: tl.constexpr,
    STAGES_: tl.constexpr,
):
    """The momentum, (10) to (13), maxima and signs of y, or what is to be orthogonalised."""
    if tl.load(status + SKIP) != 0:
        return
    tile = first_tile + tl.program_id(0)
    k = tl.load(tile_matrix + tile).to(tl.int64)
    entry = table + k * TABLE
    setting = settings + tl.load(entry + GROUP) * SETTINGS
    flags = tl.load(entry + FLAGS)
    owner = tl.load(entry + OWNER)
    m = tl.load(entry + ROWS)
    n = tl.load(entry + COLS)
    strips = tl.load(entry + STRIPS).to(tl.int32)
    local = (tile - tl.load(entry + FIRST_TILE)).to(tl.int32)
    first_row = local // strips * TILE
    pieces = tl.cdiv(tl.minimum(m.to(tl.int32) - first_row, TILE), ROWS_)
    cols = local % strips * COLS_ + tl.arange(0, COLS_)
    scalar = scalars + owner * SCALARS
    beta, gain = tl.load(scalar + BETA), tl.load(scalar + GAIN)
    share = tl.load(setting + MIX)
    t = tl.load(scalar + TIME)
    floor = tl.load(setting + VARIANCE_FLOOR)
    pointer = address(pointers, entry, 1, G_KIND)
    factor, mean = input_scale(entry, setting, flags, tile_sums, row_sum_var)
    if tile == tl.load(entry + OWNER_TILE):
        tl.store(scalar + FACTOR, factor)
        tl.store(scalar + MEAN, mean)
    inverse_scale = 1.0
    if SCALED:
        inverse_scale = 1.0 / tl.load(grad_scale)
    whitens = WHITENING and (flags & WHITENS) != 0
    dense = VARIANCES and (flags & DENSE) != 0
    r_pointer, r_end = tl.load(entry + ROW_VAR), tl.where(dense, 0, m)
    col_roots = factor_roots(tl.load(entry + COL_VAR), cols, tl.where(dense, 0, n), 1.0)
    divisor, root_of_floor = tl.maximum(mean, TINY), inverse_root(floor)
    kept, scales = momentum_places(entry, STORE)
    o_pointer = address(pointers, entry, 2, O_KIND)
    place = row_max + tl.load(entry + ROW_SPACE)
    root_of_mean = tl.sqrt_rn(mean)
    agreement = tl.zeros([COLS_], tl.float32)
    power = tl.zeros([COLS_], tl.float32)
    squares = tl.zeros([COLS_], tl.float32)
    least = tl.full([COLS_], float("inf"), tl.float32)
    marks = tl.zeros([ROWS_, COLS_], tl.uint32)
    highest = tl.zeros([ROWS_], tl.float32)
    for piece in tl.range(0, pieces, num_stages=STAGES_):
        rows = first_row + piece * ROWS_ + tl.arange(0, ROWS_)
        g = load_tile(pointer, rows, cols, m, n, G_KIND, ALIGNED)
        roots = capped(factor_roots(r_pointer, rows, r_end, divisor), col_roots, root_of_floor)
        if dense:
            whole = g * inverse_scale
            v = dense_variance(entry, setting, t, whole, rows, cols, m, n, ALIGNED)
            roots = tl.rsqrt(tl.maximum(v, floor))
        x = g * (factor * inverse_scale)
        if not whitens:
            x *= roots  # (10)
        y = x
        if KEEPS:
            momentum = recalled(kept, scales, rows, cols, m, n, STORE, ALIGNED, ROWS_, COLS_)
            agreement += tl.sum(x * momentum, axis=0)
            power += tl.sum(x * x, axis=0)
            momentum = beta * momentum + (1.0 - beta) * x  # (12)
            momentum = remembered(
                kept, scales, momentum, rows, cols, m, n, STORE, ALIGNED, ROWS_, COLS_
            )
            y = momentum * gain + share * x  # (13)
        if whitens:
            y *= roots * root_of_mean
            store_tile(o_pointer, y, rows, cols, m, n, O_KIND, ALIGNED)
        else:
            by_row = tl.max(tl.abs(y), axis=1)  # 0 outside the matrix, where G and M were read as 0
            highest = tl.maximum(highest, by_row)
            if not dense:
                bits = by_row.to(tl.int32, bitcast=True)
                tl.atomic_max(place + rows, bits, mask=rows < m, sem="relaxed")
            if GENERAL:
                squares += tl.sum(y * y, axis=0)
            if SIGNED:
                marks = marked(marks, y)
                least = tl.minimum(least, tl.min(tl.abs(y), axis=0))
    sums = filter_sums + tile * SUMS
    tl.store(sums + XM, tl.sum(agreement, axis=0))
    tl.store(sums + XX, tl.sum(power, axis=0))
    tl.store(sums + YY, tl.sum(squares, axis=0))
    most = tl.max(highest, axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(update_max + owner, most, sem="relaxed")
    if SIGNED:
        tl.store(unsigned + tile, (has_zeros(least, cols, n) | whitens).to(tl.int8))
        if (not dense) & (not whitens):
            tl.store(sign_places(signs, tile, ROWS_, COLS_), marks.to(tl.int32, bitcast=True))


# ------------------------------------------------------------------------------- weights


@triton.jit
def write_weights(
    pointer,
    w,
    move,
    keep,
    key,
    origin,
    stride,
    rows,
    cols,
    m,
    n,
    flags,
    P_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The end of (4) and (9) for a piece: round, write, return what was written as float32."""
    w = w * keep - move
    if P_KIND != tl.float32:
        if (flags & STOCHASTIC) != 0:
            w = rounded(w, rows, cols, stride, origin, key, P_KIND)
        else:
            w = w.to(P_KIND).to(tl.float32)
    store_tile(pointer, w, rows, cols, m, n, P_KIND, ALIGNED)
    return w


@triton.jit(do_not_specialize=["first_tile", "measure"])
def apply(
    pointers,
    table,
    settings,
    tile_matrix,
    extremes,
    row_sum_var,
    row_max,
    update_max,
    squares,
    scalars,
    signs,
    unsigned,
    status,
    grad_scale,
    seed_keys,
    first_tile,
    measure,
    SCALED: tl.constexpr,
    SIGNED: tl.constexpr,
    FILTERS: tl.constexpr,
    VARIANCES: tl.constexpr,
    WHITENING: tl.constexpr,
    STORE: tl.constexpr,
    KEEPS: tl.constexpr,
    O_KIND: tl.constexpr,
    P_KIND: tl.constexpr,
    G_KIND: tl.constexpr,
    GENERAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_: tl.constexpr,
    COLS_: tl.constexpr,
    TILE: tl.constexpr,
    STAGES_: tl.constexpr,
):
    """New weights, (4) and (9), and the sum of their squares for the next step's (3).

    With `measure` only the sum, before a step, when somebody else wrote W. It is this kernel and
    no other, so that the sum has the same last bit.
    """
    if measure == 0:
        if tl.program_id(0) == 0:
            tl.store(status + SEEN, 0)  # for the next step; SKIP says what happens in this one
        if tl.load(status + SKIP) != 0:
            return
    tile = first_tile + tl.program_id(0)
    k = tl.load(tile_matrix + tile).to(tl.int64)
    entry = table + k * TABLE
    group = tl.load(entry + GROUP)
    setting = settings + group * SETTINGS
    flags = tl.load(entry + FLAGS)
    owner = tl.load(entry + OWNER)
    m = tl.load(entry + ROWS)
    n = tl.load(entry + COLS)
    strips = tl.load(entry + STRIPS).to(tl.int32)
    local = (tile - tl.load(entry + FIRST_TILE)).to(tl.int32)
    first_row = local // strips * TILE
    pieces = tl.cdiv(tl.minimum(m.to(tl.int32) - first_row, TILE), ROWS_)
    cols = local % strips * COLS_ + tl.arange(0, COLS_)
    scalar = scalars + owner * SCALARS
    keep = tl.load(scalar + KEEP)
    alpha = tl.load(scalar + ALPHA)
    t = tl.load(scalar + TIME)
    key = mix(tl.load(seed_keys + group).to(tl.uint32) + t.to(tl.uint32))
    origin, stride = tl.load(entry + ORIGIN), tl.load(entry + STRIDE)
    w_pointer = address(pointers, entry, 0, P_KIND)
    place = row_max + tl.load(entry + ROW_SPACE)
    if GENERAL:
        scale = alpha * tl.load(scalar + SCALE)
    else:
        scale = alpha / divisor_of(setting, update_max, owner)  # (7), and (8) is 1
    if not FILTERS:  # there G itself is negated, as M remembers it
        if (flags & MAXIMIZE) != 0:
            scale = -scale
    vector = VARIANCES and (flags & VECTOR) != 0
    dense = VARIANCES and (flags & DENSE) != 0
    total = tl.zeros([COLS_], tl.float32)
    by_signs = False
    if SIGNED:
        by_signs = (dense == 0) & (tl.load(unsigned + tile) == 0)
    if measure != 0:
        for piece in tl.range(0, pieces, num_stages=STAGES_):
            rows = first_row + piece * ROWS_ + tl.arange(0, ROWS_)
            w = load_tile(w_pointer, rows, cols, m, n, P_KIND, ALIGNED)
            total += tl.sum(w * w, axis=0)
    elif by_signs:
        marks = tl.load(sign_places(signs, tile, ROWS_, COLS_)).to(tl.uint32, bitcast=True)
        for piece in tl.range(0, pieces, num_stages=STAGES_):
            rows = first_row + piece * ROWS_ + tl.arange(0, ROWS_)
            w = load_tile(w_pointer, rows, cols, m, n, P_KIND, ALIGNED)
            bits = tl.load(place + rows, mask=rows < m, other=0)
            size = (bits.to(tl.float32, bitcast=True) * scale)[:, None]
            move = negated(size, marks, piece, pieces)  # (9)
            w = write_weights(
                w_pointer, w, move, keep, key, origin, stride, rows, cols, m, n, flags,
                P_KIND, ALIGNED,
            )  # fmt: skip
            total += tl.sum(w * w, axis=0)
        total = tl.where(cols < n, total, 0.0)  # outside, W was 0 and moved
    else:
        g_pointer = address(pointers, entry, 1, G_KIND)
        floor = tl.load(setting + VARIANCE_FLOOR)
        whole = tl.load(update_max + owner)
        inverse_scale = 1.0
        if SCALED:
            inverse_scale = 1.0 / tl.load(grad_scale)
        whitens = WHITENING and (flags & WHITENS) != 0
        if FILTERS:
            gain, share = tl.load(scalar + GAIN), tl.load(setting + MIX)
            factor, mean = tl.load(scalar + FACTOR), tl.load(scalar + MEAN)
            kept, scales = momentum_places(entry, STORE)
            o_pointer = address(pointers, entry, 2, O_KIND)
            divisor = tl.maximum(mean, TINY)
        elif GENERAL:
            divisor = row_scale(entry, setting, k, extremes, row_sum_var, flags)
        if FILTERS or GENERAL:
            r_pointer, r_end = tl.load(entry + ROW_VAR), tl.where(dense, 0, m)
            col_roots = factor_roots(tl.load(entry + COL_VAR), cols, tl.where(dense, 0, n), 1.0)
            root_of_floor = inverse_root(floor)
        for piece in tl.range(0, pieces, num_stages=STAGES_):
            rows = first_row + piece * ROWS_ + tl.arange(0, ROWS_)
            g = load_tile(g_pointer, rows, cols, m, n, G_KIND, ALIGNED) * inverse_scale
            w = load_tile(w_pointer, rows, cols, m, n, P_KIND, ALIGNED)
            bits = tl.where(vector, whole, tl.load(place + rows, mask=rows < m, other=0))
            size = (bits.to(tl.float32, bitcast=True) * scale)[:, None]
            u, v = g, g
            if dense:
                v = dense_variance(entry, setting, t, g, rows, cols, m, n, ALIGNED)
                store_tile(tl.load(entry + COL_VAR), v, rows, cols, m, n, tl.float32, ALIGNED)
            if FILTERS:  # y of (13) once more, or O
                if whitens:
                    u = load_tile(o_pointer, rows, cols, m, n, O_KIND, ALIGNED)
                else:
                    if dense:
                        u *= factor * tl.rsqrt(tl.maximum(v, floor))
                    else:
                        row_roots = factor_roots(r_pointer, rows, r_end, divisor)
                        u *= factor * capped(row_roots, col_roots, root_of_floor)
                    if KEEPS:
                        stored = recalled(
                            kept, scales, rows, cols, m, n, STORE, ALIGNED, ROWS_, COLS_
                        )
                        u = stored * gain + share * u
            move = tl.where(u > 0.0, size, tl.where(u < 0.0, -size, 0.0))  # (9)
            if FILTERS:
                if whitens:
                    move = u * alpha
                elif (flags & SIGN) == 0:
                    move = u * scale
            elif dense:
                if GENERAL:
                    if (flags & SIGN) == 0:
                        move = g * tl.rsqrt(tl.maximum(v, floor)) * scale
                    if (flags & BOOSTED) != 0:
                        root = tl.maximum(tl.sqrt_rn(v) + tl.load(setting + EPS1), TINY)
                        up = tl.where((flags & MAXIMIZE) != 0, -alpha, alpha)
                        move = g / root * tl.load(setting + BOOST) * up
            elif GENERAL:
                if (flags & SIGN) == 0:
                    row_roots = factor_roots(r_pointer, rows, r_end, divisor)
                    move = g * (scale * capped(row_roots, col_roots, root_of_floor))
            w = write_weights(
                w_pointer, w, move, keep, key, origin, stride, rows, cols, m, n, flags,
                P_KIND, ALIGNED,
            )  # fmt: skip
            total += tl.sum(w * w, axis=0)  # 0 outside the matrix, where W and G were read as 0
    tl.store(squares + tile, tl.sum(total, axis=0))
    if (tile == tl.load(entry + OWNER_TILE)) & (measure == 0):
        tl.store(tl.load(entry + STEP).to(tl.pointer_type(tl.float32)), t)
