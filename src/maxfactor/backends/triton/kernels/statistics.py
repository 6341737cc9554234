"""The first launches of a step: sums of G² and signs of G, then equations (1) to (5)."""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor import state
from maxfactor.backends import guard
from maxfactor.backends.triton.kernels.descriptors import Piece
from maxfactor.backends.triton.kernels.layout import (
    ADDRESS,
    BUNDLE,
    CHUNK,
    COLUMN,
    COLUMNS,
    COUNTER,
    EXTREME,
    FLAG,
    FLOAT32_MAX,
    GRADIENT_SUM,
    INFINITY_BITS,
    MEASURE,
    PARTS,
    PIECE_ROWS,
    SCALAR,
    SETTING,
    STATISTICS_STAGES,
    TASK,
    TASK_COLUMN,
    TILE_ROWS,
)
from maxfactor.backends.triton.kernels.momentum import momentum_scalars
from maxfactor.backends.triton.kernels.squares import root_of
from maxfactor.backends.triton.kernels.tiles import (
    address_of,
    append_signs,
    has_zeros,
    inverse_root,
    load_tile,
    sign_places,
    step_place,
    sum_down,
)
from maxfactor.backends.triton.kernels.variance import dense_variance, statistic_weight
from maxfactor.settings import FLOAT32_TINY

TINY = tl.constexpr(FLOAT32_TINY)
NEAR_ZERO = tl.constexpr(state.NEAR_ZERO)
OVERFLOWS, NOT_FINITE = tl.constexpr(guard.OVERFLOWS), tl.constexpr(guard.NOT_FINITE)


@triton.jit(do_not_specialize=["first_tile"])
def statistics(
    tables,
    partials,
    results,
    grad_scale,
    first_tile,
    CHECK: tl.constexpr,
    SCALED: tl.constexpr,
    spec: tl.constexpr,
):
    """Sums of G² over the rows and columns of a tile, the signs of G, and whether G is finite.

    Each program writes sums of its own, and `finalize` adds them in a fixed order: there are no
    float atomics, so results repeat bit for bit.

    Args:
        tables: `Tables`; the signs are written if they are packed.
        partials: `Partials`; writes the sums of squares, `row_peaks`, `unsigned`.
        results: `Results`; resets `extremes`, marks what is not finite.
        grad_scale: (1,) float32 by which G was multiplied, if SCALED.
        first_tile: The first tile of this launch.
        CHECK: Look for values that are not finite.
        SCALED: Whether `grad_scale` counts.
        spec: `Spec`.
    """
    # With momentum, the signs that count are those of y, and |G| has no use.
    signed: tl.constexpr = spec.signed and not spec.momentum
    with_variances: tl.constexpr = spec.momentum and spec.dense
    tile = first_tile + tl.program_id(0)
    k = tl.load(tables.tile_matrix + tile).to(tl.int64)
    entry = tables.matrices + k * COLUMN.COUNT
    m = tl.load(entry + COLUMN.ROWS)
    n = tl.load(entry + COLUMN.COLS)
    strips = tl.load(entry + COLUMN.STRIPS)
    local = tile - tl.load(entry + COLUMN.FIRST_TILE)
    strip = local % strips
    first_row = local // strips * TILE_ROWS
    cols = (strip * COLUMNS).to(tl.int32) + tl.arange(0, COLUMNS)
    pointer = address_of(tables.pointers, entry, ADDRESS.GRAD, spec.g_dtype)
    place = tl.load(entry + COLUMN.ROW_PART) + strip * m
    dense = (tl.load(entry + COLUMN.FLAGS) & FLAG.DENSE) != 0
    scale = 1.0
    if SCALED:
        scale = 1.0 / tl.load(grad_scale)
    if local == 0:  # `finalize` takes maxima and minima into them
        extremes = results.extremes + k * EXTREME.COUNT
        tl.store(extremes + EXTREME.MAX_ROW, 0)
        tl.store(extremes + EXTREME.MIN_ROW, INFINITY_BITS)
        tl.store(extremes + EXTREME.MIN_COL, INFINITY_BITS)

    col_end = tl.where(dense, 0, n)
    col_pointer = tl.load(entry + COLUMN.COL_VAR).to(tl.pointer_type(tl.float32))
    old_root = inverse_root(tl.load(col_pointer + cols, mask=cols < col_end, other=1.0))
    total = tl.zeros([COLUMNS], tl.float32)
    least = tl.full([COLUMNS], float("inf"), tl.float32)  # 0: a zero, whose sign no bit can tell
    signs = tl.zeros([PIECE_ROWS, COLUMNS], tl.uint32)
    if with_variances:
        variances = tl.zeros([COLUMNS], tl.float32)
    setting = tables.settings + tl.load(entry + COLUMN.GROUP) * SETTING.COUNT
    pieces = tl.cdiv(tl.minimum(m - first_row, TILE_ROWS), PIECE_ROWS).to(tl.int32)
    for number in tl.range(0, pieces, num_stages=STATISTICS_STAGES):
        rows = (first_row + number * PIECE_ROWS + tl.arange(0, PIECE_ROWS)).to(tl.int32)
        piece = Piece(rows, cols, m, n)
        g = load_tile(pointer, piece, spec.g_dtype, spec.aligned) * scale
        square = g * g
        total += tl.sum(square, axis=0)
        if signed:
            signs = append_signs(signs, g)
            least = tl.minimum(least, tl.min(tl.abs(g), axis=0))
        if not dense:
            tl.store(partials.row_squares + place + rows, tl.sum(square, axis=1), mask=rows < m)
        elif with_variances:
            v = dense_variance(entry, setting, 1.0, g, piece, spec.aligned)
            variances += tl.sum(v, axis=0)
        if (not dense) and (not spec.momentum):
            peak, second = two_peaks(tl.abs(g) * old_root[None, :])
            tl.store(partials.row_peaks + (place + rows) * 2, peak, mask=rows < m)
            tl.store(partials.row_peaks + (place + rows) * 2 + 1, second, mask=rows < m)
    if not dense:
        col_place = tl.load(entry + COLUMN.COL_PART) + (local // strips) * n + cols
        tl.store(partials.col_squares + col_place, total, mask=cols < n)
    everything = tl.sum(total, axis=0)
    # Neither this sum nor that of all tiles may overflow, on all ranks; false for NaN, too.
    shards = tl.cdiv(tl.load(entry + COLUMN.ALL_ROWS), m) * tl.cdiv(
        tl.load(entry + COLUMN.ALL_COLS), n
    )
    tiles = tl.load(entry + COLUMN.OWNER_TILES) * tl.maximum(shards, 1)
    finite = everything < 1.0 / tiles.to(tl.float32) * FLOAT32_MAX
    if signed:
        zeros = has_zeros(least, cols, n) | (finite == 0)
        tl.store(partials.unsigned + tile, zeros.to(tl.int8))
        if not dense:
            tl.store(sign_places(tables.signs_at, tile), signs.to(tl.int32, bitcast=True))
    if spec.momentum:
        sums = partials.gradient_sums + tile * GRADIENT_SUM.COUNT
        tl.store(sums + GRADIENT_SUM.SQUARES, everything)
        if with_variances:
            tl.store(sums + GRADIENT_SUM.VARIANCES, tl.sum(variances, axis=0))
    if spec.records:
        tl.store(partials.measures + tile * PARTS * MEASURE.COUNT + MEASURE.GRADIENTS, everything)
    if CHECK:
        if finite == 0:
            mark = OVERFLOWS
            for number in range(pieces):  # once more: is it G that is not finite, or its squares?
                rows = (first_row + number * PIECE_ROWS + tl.arange(0, PIECE_ROWS)).to(tl.int32)
                g = load_tile(pointer, Piece(rows, cols, m, n), spec.g_dtype, spec.aligned) * scale
                infinite = tl.where(tl.abs(g) < float("inf"), OVERFLOWS, NOT_FINITE)
                mark = tl.maximum(mark, tl.max(tl.max(infinite, axis=1), axis=0))
            tl.store(results.counters + COUNTER.SEEN, 1)
            owner = tl.load(entry + COLUMN.OWNER)
            tl.atomic_max(results.nonfinite + owner, mark, sem="relaxed")


@triton.jit
def two_peaks(values):
    """The largest value of each row with the number of its bundle, and the largest of the rest.

    Values are not negative, so their bits order as they do. The number takes the lowest bits.
    """
    bundles: tl.constexpr = COLUMNS // BUNDLE
    highest = tl.max(tl.reshape(values, [PIECE_ROWS, bundles, BUNDLE]), axis=2)
    bits = (highest.to(tl.int32, bitcast=True) & ~(bundles - 1)) | tl.arange(0, bundles)[None, :]
    peak = tl.max(bits, axis=1)
    return peak, tl.max(tl.where(bits == peak[:, None], 0, bits), axis=1)


@triton.jit
def finalize(tables, partials, results, found_inf, SCALED: tl.constexpr):
    """Equations (1) to (5) for a chunk of rows, for a chunk of columns, or for a tensor.

    Partial sums are added in a fixed order. Maxima and minima are integer atomics on the bits of
    floats that are not negative, for which the order makes no difference.

    Args:
        tables: `Tables`.
        partials: `Partials`, of this rank or of all ranks.
        results: `Results`; all but `row_max` of tensors with momentum is written or reset.
        found_inf: (1,) float32, not 0 if GradScaler saw an overflow, if SCALED.
        SCALED: Whether `found_inf` counts.
    """
    number = tl.program_id(0)
    task = tables.tasks + number * TASK_COLUMN.COUNT
    k = tl.load(task + TASK_COLUMN.MATRIX).to(tl.int64)
    kind = tl.load(task + TASK_COLUMN.KIND)
    chunk = tl.load(task + TASK_COLUMN.CHUNK)
    entry = tables.matrices + k * COLUMN.COUNT
    setting = tables.settings + tl.load(entry + COLUMN.GROUP) * SETTING.COUNT
    counters = results.counters
    seen = tl.load(counters + COUNTER.SEEN)
    skip = seen
    if SCALED:
        overflow = (tl.load(found_inf) != 0.0).to(tl.int32)
        skip += overflow
        seen = tl.where(overflow != 0, 0, seen)  # GradScaler handles it: not counted
    if number == 0:
        tl.store(counters + COUNTER.SKIP, skip)
        tl.store(counters + COUNTER.SKIPPED, tl.load(counters + COUNTER.SKIPPED) + seen)
        run = tl.load(counters + COUNTER.IN_A_ROW) + seen
        tl.store(counters + COUNTER.IN_A_ROW, tl.where(skip != 0, run, 0))
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    m = tl.load(entry + COLUMN.ROWS)
    n = tl.load(entry + COLUMN.COLS)
    if kind == TASK.EMPTY:
        place = step_place(entry)
        tl.store(place, tl.load(place) + (skip == 0).to(tl.int64))
    elif kind == TASK.TENSOR:
        owner = tl.load(entry + COLUMN.OWNER)
        tl.store(results.update_max + owner, 0)
        if seen == 0:
            tl.store(results.nonfinite + owner, 0)
        tensor_scalars(entry, setting, partials.weight_squares, results.scalars, skip)
    else:
        t = (tl.load(step_place(entry)) + 1).to(tl.float32)
        kappa = statistic_weight(t, setting)
        if kind == TASK.ROWS:
            inside = at < m
            part = partials.row_squares + tl.load(entry + COLUMN.ROW_PART)
            parts = tl.load(entry + COLUMN.STRIPS)
            length, count = m, tl.load(entry + COLUMN.ALL_COLS)
            place = tl.load(entry + COLUMN.ROW_VAR).to(tl.pointer_type(tl.float32))
        else:
            inside = at < n
            part = partials.col_squares + tl.load(entry + COLUMN.COL_PART)
            parts = tl.load(entry + COLUMN.DOWN)
            length, count = n, tl.load(entry + COLUMN.ALL_ROWS)
            place = tl.load(entry + COLUMN.COL_VAR).to(tl.pointer_type(tl.float32))
        total = sum_down(part, parts, length, at)
        mean = total / (count.to(tl.float32) + tl.load(setting + SETTING.COUNT_EPS))
        mean += tl.load(setting + SETTING.OFFSET)
        old = tl.load(place + at, mask=inside, other=0.0)
        new = tl.where(kappa == 1.0, mean, old + kappa * (mean - old))  # (5)
        if skip == 0:
            tl.store(place + at, new, mask=inside)
        extremes = results.extremes + k * EXTREME.COUNT
        if kind == TASK.ROWS:
            smallest = tl.min(tl.where(inside, new, float("inf")), axis=0)
            new = tl.where(inside, new, 0.0)
            most, least = tl.max(new, axis=0), smallest.to(tl.int32, bitcast=True)
            most = most.to(tl.int32, bitcast=True)
            tl.atomic_max(extremes + EXTREME.MAX_ROW, most, sem="relaxed")
            tl.atomic_min(extremes + EXTREME.MIN_ROW, least, sem="relaxed")
            row_chunk = tl.load(entry + COLUMN.ROW_CHUNK) + chunk
            tl.store(results.row_var_sums + row_chunk, tl.sum(new, axis=0))
            tl.store(results.row_max + tl.load(entry + COLUMN.ROW_SPACE) + at, 0, mask=inside)
        else:
            ratio = inverse_root(new) / inverse_root(old)  # by how much 1 / sqrt(C) has changed
            change = results.col_changes + (tl.load(entry + COLUMN.COL_CHUNK) + chunk) * 2
            tl.store(change, tl.min(tl.where(inside, ratio, float("inf")), axis=0))
            tl.store(change + 1, tl.max(tl.where(inside, ratio, 0.0), axis=0))
            smallest = tl.min(tl.where(inside, new, float("inf")), axis=0)
            least = smallest.to(tl.int32, bitcast=True)
            tl.atomic_min(extremes + EXTREME.MIN_COL, least, sem="relaxed")


@triton.jit
def tensor_scalars(entry, setting, weight_squares, scalars, skip):
    """Step size, decay and momentum coefficients of one tensor: (2), (3), (4), (11)."""
    flags = tl.load(entry + COLUMN.FLAGS)
    first, tiles = tl.load(entry + COLUMN.OWNER_TILE), tl.load(entry + COLUMN.OWNER_TILES)
    numel = tl.load(entry + COLUMN.NUMEL).to(tl.float32)
    size = root_of(weight_squares, first, tiles, numel, 1.0)
    count = tl.load(step_place(entry)) + 1
    t = count.to(tl.float32)
    if (flags & FLAG.INITIAL) != 0:
        initial = tl.load(entry + COLUMN.INITIAL_RMS).to(tl.pointer_type(tl.float32))
        at_first = tl.load(initial)
        least = at_first * tl.where((flags & FLAG.RAISED) != 0, 1.0, NEAR_ZERO)
        is_similar = (size >= at_first * tl.load(setting + SETTING.USUAL_FROM)) & (size < at_first)
        is_raised = (size < least) | is_similar
        at_first = tl.where((t == 1.0) & ~is_raised, size, at_first)
        if skip == 0:
            tl.store(initial, at_first)
        size = tl.where(at_first > 0.0, at_first, size)
    size = tl.maximum(size, tl.load(setting + SETTING.EPS2))
    lr = tl.load(tl.load(entry + COLUMN.LR).to(tl.pointer_type(tl.float32)))
    root = 1.0 / tl.sqrt_rn(t)
    cap = tl.where((flags & FLAG.UNCAPPED) != 0, lr, root)
    rho = tl.maximum(tl.minimum(lr, cap), tl.load(setting + SETTING.MIN_LR))  # (2)
    alpha = tl.where(lr > 0.0, rho * size, 0.0)  # (3)
    ramp = tl.minimum(size * tl.minimum(1e-6 * t, root), lr)
    alpha = tl.where((flags & FLAG.RAMP) != 0, ramp, alpha)
    alpha = tl.where((flags & FLAG.ABSOLUTE) != 0, lr, alpha)
    decay = tl.where((flags & FLAG.DECAY_BY_LR) != 0, lr, alpha)
    decay = tl.where((flags & FLAG.DECAY_BY_RHO) != 0, tl.where(lr > 0.0, rho, 0.0), decay)
    share = tl.minimum(tl.div_rn(decay, tl.maximum(lr, TINY)), 1.0)
    decay = tl.where((flags & FLAG.DECAY_BY_SQUARE) != 0, decay * share, decay)
    scalar = scalars + tl.load(entry + COLUMN.OWNER) * SCALAR.COUNT
    if skip == 0:  # else nothing moves, and the step size of the last step is still reported
        tl.store(scalar + SCALAR.ALPHA, alpha)
    tl.store(scalar + SCALAR.KEEP, 1.0 - decay * tl.load(setting + SETTING.WEIGHT_DECAY))
    tl.store(scalar + SCALAR.TIME, t)
    tl.store(scalar + SCALAR.COUNT_BITS, count.to(tl.int32).to(tl.float32, bitcast=True))
    if (flags & FLAG.WITH_MOMENTUM) != 0:
        momentum_scalars(entry, setting, scalar, flags, t)
