"""The first launches of a step: sums of G^2 and signs of G, then equations (1) to (5)."""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.layout import (
    ABSOLUTE,
    ADAPTIVE,
    ALL_COLS,
    ALL_ROWS,
    ALPHA,
    BAND_SUMS,
    BETA,
    BETA_MAX,
    BETA_MIN,
    COL_CHUNK,
    COL_PART,
    COL_VAR,
    COLS,
    COUNT_EPS,
    DECAY_BY_LR,
    DECAY_BY_RHO,
    DENSE,
    DOWN,
    EPS2,
    FILTERED,
    FIRST_TILE,
    FIXED_BETA,
    FLAGS,
    GAIN,
    GROUP,
    IN_A_ROW,
    INFINITY_BITS,
    INITIAL,
    INITIAL_RMS,
    KEEP,
    LOG_BETA,
    LR,
    MIN_LR,
    MIX,
    NUMEL,
    OF_EMPTY,
    OF_ROWS,
    OF_TENSOR,
    OFFSET,
    OWNER,
    OWNER_TILE,
    OWNER_TILES,
    RAMP,
    ROW_CHUNK,
    ROW_PART,
    ROW_SPACE,
    ROW_VAR,
    ROWS,
    SCALARS,
    SEEN,
    SETTINGS,
    SKIP,
    SKIPPED,
    STEP,
    STRIPS,
    SUMS,
    TABLE,
    TIME,
    TINY,
    WARMUP,
    WEIGHT_DECAY,
)
from maxfactor.backends.triton.kernels.tiles import (
    address,
    has_zeros,
    inverse_root,
    load_tile,
    marked,
    sign_places,
    sum_down,
    sum_of,
)
from maxfactor.backends.triton.kernels.variance import dense_variance, statistic_weight


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
def tensor_scalars(entry, setting, squares, scalars, skip):
    """Equations (2) (3), the factor of (4), and the memory of (11) for one tensor."""
    flags = tl.load(entry + FLAGS)
    total = sum_of(squares, tl.load(entry + OWNER_TILE), tl.load(entry + OWNER_TILES))
    mean = total / tl.load(entry + NUMEL).to(tl.float32)
    t = tl.load(tl.load(entry + STEP).to(tl.pointer_type(tl.float32))) + 1.0
    size = tl.sqrt_rn(mean)
    if (flags & INITIAL) != 0:
        initial = tl.load(entry + INITIAL_RMS).to(tl.pointer_type(tl.float32))
        first = tl.where(t == 1.0, size, tl.load(initial))
        if skip == 0:
            tl.store(initial, first)
        size = tl.where(first > 0.0, first, size)
    size = tl.maximum(size, tl.load(setting + EPS2))
    lr = tl.load(tl.load(entry + LR).to(tl.pointer_type(tl.float32)))
    root = 1.0 / tl.sqrt_rn(t)
    rho = tl.maximum(tl.minimum(lr, root), tl.load(setting + MIN_LR))  # (2)
    alpha = tl.where(lr > 0.0, rho * size, 0.0)  # (3)
    alpha = tl.where((flags & RAMP) != 0, tl.minimum(size * tl.minimum(1e-6 * t, root), lr), alpha)
    alpha = tl.where((flags & ABSOLUTE) != 0, lr, alpha)
    decay = tl.where((flags & DECAY_BY_LR) != 0, lr, alpha)
    decay = tl.where((flags & DECAY_BY_RHO) != 0, tl.where(lr > 0.0, rho, 0.0), decay)
    place = scalars + tl.load(entry + OWNER) * SCALARS
    if skip == 0:  # else nothing is moved by it, and what was used last is still to be told
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
