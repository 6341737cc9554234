"""The momentum, equations (10) to (13), and the input of the orthogonal direction.

The momentum is stored block-wise in eight bits as in Dettmers et al., "8-bit Optimizers via
Block-wise Quantization" (2021), https://arxiv.org/abs/2110.02861, but with linear codes: 64 values
of a row share one float32 scale. The codes are those of `maxfactor.rule.int8`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.blocks import grid_of, store_to_blocks
from maxfactor.backends.triton.kernels.descriptors import Noise, StoredMomentum, Target
from maxfactor.backends.triton.kernels.layout import (
    ADDRESS,
    BAND_SUM,
    BATCH_SUM,
    COLUMN,
    COLUMNS,
    COUNTER,
    FLAG,
    GRADIENT_SUM,
    MEASURE,
    MOMENTUM_BLOCK,
    MOMENTUM_STAGES,
    PARTS,
    PIECE_ROWS,
    RANGE,
    SCALAR,
    SETTING,
    SQUARE,
    TINY,
    UPDATE_SUM,
)
from maxfactor.backends.triton.kernels.rounding import (
    change_of,
    noise_key,
    store_measures,
    write_weights,
)
from maxfactor.backends.triton.kernels.squares import store_weight_squares
from maxfactor.backends.triton.kernels.tiles import (
    address_of,
    append_signs,
    has_zeros,
    inverse_root,
    load_tile,
    part_of,
    piece_of,
    sign_places,
    span_of,
    step_place,
    store_tile,
    sum_of,
)
from maxfactor.backends.triton.kernels.variance import (
    dense_variance,
    factor_roots,
    inverse_roots,
    mean_row_var,
)


@triton.jit(do_not_specialize=["first_tile"])
def with_momentum(
    tables,
    partials,
    results,
    grad_scale,
    first_tile,
    SCALED: tl.constexpr,
    spec: tl.constexpr,
):
    """Update the momentum of a tile; write maxima and signs of y, or what is orthogonalised.

    If `spec.direct`, W moves by y as it is. This kernel then writes W too, and `apply` is not
    needed. Sums are written per tile and added later in a fixed order; maxima are integer atomics
    on the bits of floats that are not negative. Results repeat bit for bit.

    Args:
        tables: `Tables`.
        partials: `Partials`; reads `gradient_sums`, writes `unsigned`, and `update_sums` or, in a
            batch, `batch_sums`.
        results: `Results`; reads `scalars`, writes maxima.
        grad_scale: (1,) float32 by which G was multiplied, if SCALED.
        first_tile: The first tile of this launch.
        SCALED: Whether `grad_scale` counts.
        spec: `Spec`.
    """
    if spec.direct:
        if tl.program_id(0) == 0:
            tl.store(results.counters + COUNTER.SEEN, 0)  # as in `apply`
    if tl.load(results.counters + COUNTER.SKIP) != 0:
        return
    tile = first_tile + tl.program_id(0) // spec.parts
    k = tl.load(tables.tile_matrix + tile).to(tl.int64)
    entry = tables.matrices + k * COLUMN.COUNT
    setting = tables.settings + tl.load(entry + COLUMN.GROUP) * SETTING.COUNT
    flags = tl.load(entry + COLUMN.FLAGS)
    owner = tl.load(entry + COLUMN.OWNER)
    m = tl.load(entry + COLUMN.ROWS)
    n = tl.load(entry + COLUMN.COLS)
    span = span_of(entry, tile, m)
    if spec.orthogonal:
        span = part_of(span, tl.program_id(0) % spec.parts, spec.parts)
    cols = span.cols
    scalar = results.scalars + owner * SCALAR.COUNT
    beta, gain = tl.load(scalar + SCALAR.BETA), tl.load(scalar + SCALAR.GAIN)
    share = tl.load(setting + SETTING.MIX)
    t = tl.load(scalar + SCALAR.TIME)
    floor = tl.load(setting + SETTING.VARIANCE_FLOOR)
    pointer = address_of(tables.pointers, entry, ADDRESS.GRAD, spec.g_dtype)
    factor, mean = input_scale(entry, setting, flags, partials.gradient_sums, results.row_var_sums)
    if tile == tl.load(entry + COLUMN.OWNER_TILE):
        tl.store(scalar + SCALAR.FACTOR, factor)
        tl.store(scalar + SCALAR.MEAN, mean)
    inverse_scale = 1.0
    if SCALED:
        inverse_scale = 1.0 / tl.load(grad_scale)
    dense = spec.dense and (flags & FLAG.DENSE) != 0
    r_pointer, r_end = tl.load(entry + COLUMN.ROW_VAR), tl.where(dense, 0, m)
    c_pointer = tl.load(entry + COLUMN.COL_VAR)
    col_roots = factor_roots(c_pointer, cols, tl.where(dense, 0, n), 1.0)
    divisor, root_of_floor = tl.maximum(mean, TINY), inverse_root(floor)
    stored = stored_momentum(entry, spec.store)
    y_pointer = address_of(tables.pointers, entry, ADDRESS.ORTHOGONAL, spec.y_dtype)
    if spec.col_blocks:
        grid = grid_of(entry, partials.block_squares, first_tile)
    row_max = results.row_max + tl.load(entry + COLUMN.ROW_SPACE)
    root_of_mean = tl.sqrt_rn(mean)
    if spec.direct:
        keep, alpha = tl.load(scalar + SCALAR.KEEP), tl.load(scalar + SCALAR.ALPHA)
        key = noise_key(tables.seed_keys, tl.load(entry + COLUMN.GROUP), scalar)
        origin, stride = tl.load(entry + COLUMN.ORIGIN), tl.load(entry + COLUMN.STRIDE)
        w_pointer = address_of(tables.pointers, entry, ADDRESS.WEIGHT, spec.p_dtype)
        noise = Noise(key, origin, stride, flags)
        measures = partials.measures + tile * PARTS * MEASURE.COUNT
        target = Target(w_pointer, span, m, n, keep, noise, measures)
        changes = tl.zeros([COLUMNS], tl.float32)
        lost = tl.zeros([COLUMNS], tl.float32)
    agreement = tl.zeros([COLUMNS], tl.float32)
    power = tl.zeros([COLUMNS], tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)  # of the squares of y, of y * RANGE, or of the new W
    least = tl.full([COLUMNS], float("inf"), tl.float32)
    signs = tl.zeros([PIECE_ROWS, COLUMNS], tl.uint32)
    highest = tl.zeros([PIECE_ROWS], tl.float32)
    for number in tl.range(0, span.pieces, num_stages=MOMENTUM_STAGES):
        piece = piece_of(span, number, m, n)
        rows = piece.rows
        g = load_tile(pointer, piece, spec.g_dtype, spec.aligned)
        row_roots = factor_roots(r_pointer, rows, r_end, divisor)
        roots = inverse_roots(row_roots, col_roots, root_of_floor)
        v = g
        if dense:
            unscaled = g * inverse_scale
            v = dense_variance(entry, setting, t, unscaled, piece, spec.aligned)
            roots = tl.rsqrt(tl.maximum(v, floor))
        x = g * (factor * inverse_scale)
        if not spec.orthogonal:
            x *= roots  # (10)
        y = x
        if spec.stored:
            momentum = decode_momentum(stored, piece, spec.store, spec.aligned)
            agreement += tl.sum(x * momentum, axis=0)
            power += tl.sum(x * x, axis=0)
            momentum = beta * momentum + (1.0 - beta) * x  # (12)
            momentum = encode_momentum(stored, momentum, piece, spec.store, spec.aligned)
            y = momentum * gain + share * x  # (13)
        if spec.orthogonal:
            y *= roots * root_of_mean
            if spec.col_blocks:
                store_to_blocks(y_pointer, y, piece, grid, spec.y_dtype)
            else:
                store_tile(y_pointer, y, piece, spec.y_dtype, spec.aligned)
            total += tl.sum((y * RANGE) * (y * RANGE), axis=0)
        else:
            if spec.peaks:
                by_row = tl.max(tl.abs(y), axis=1)  # y is 0 outside the matrix, as G and M are
                highest = tl.maximum(highest, by_row)
                if not dense:
                    bits = by_row.to(tl.int32, bitcast=True)
                    tl.atomic_max(row_max + rows, bits, mask=rows < m, sem="relaxed")
            if spec.direct:
                if dense:
                    var_pointer = tl.load(entry + COLUMN.COL_VAR)
                    store_tile(var_pointer, v, piece, tl.float32, spec.aligned)
                w = load_tile(w_pointer, piece, spec.p_dtype, spec.aligned)
                new = write_weights(target, w, y * alpha, piece, spec.p_dtype, spec.aligned)
                total += tl.sum(new * new, axis=0)
                if spec.records:
                    change, few = change_of(target, w, y * alpha, new, piece, spec.p_dtype)
                    changes, lost = changes + change, lost + few
            elif spec.general:
                total += tl.sum(y * y, axis=0)
            if spec.signed:
                signs = append_signs(signs, y)
                least = tl.minimum(least, tl.min(tl.abs(y), axis=0))
    if spec.orthogonal:
        sums = partials.batch_sums + tl.program_id(0) * BATCH_SUM.COUNT
        tl.store(sums + BATCH_SUM.XM, tl.sum(agreement, axis=0))
        tl.store(sums + BATCH_SUM.XX, tl.sum(power, axis=0))
        tl.store(sums + BATCH_SUM.SQUARES, tl.sum(total, axis=0))
    else:
        sums = partials.update_sums + tile * UPDATE_SUM.COUNT
        tl.store(sums + UPDATE_SUM.XM, tl.sum(agreement, axis=0))
        tl.store(sums + UPDATE_SUM.XX, tl.sum(power, axis=0))
        if not spec.direct:
            tl.store(sums + UPDATE_SUM.YY, tl.sum(total, axis=0))
    if spec.direct:
        place = partials.weight_squares + tile * SQUARE.COUNT
        store_weight_squares(place, target, total, spec.p_dtype, spec.aligned)
        if spec.records:
            store_measures(target, changes, total, lost)
        if tile == tl.load(entry + COLUMN.OWNER_TILE):
            tl.store(step_place(entry), tl.load(step_place(entry)) + 1)
    if spec.peaks:
        most = tl.max(highest, axis=0).to(tl.int32, bitcast=True)
        tl.atomic_max(results.update_max + owner, most, sem="relaxed")
    if spec.signed:
        zeros = has_zeros(least, cols, n)
        tl.store(partials.unsigned + tile, zeros.to(tl.int8))
        if not dense:
            tl.store(sign_places(tables.signs_at, tile), signs.to(tl.int32, bitcast=True))


@triton.jit
def input_scale(entry, setting, flags, gradient_sums, row_var_sums):
    """What of (10) is one number per tensor: (factor of G, mean R or mean v)."""
    first, count = tl.load(entry + COLUMN.OWNER_TILE), tl.load(entry + COLUMN.OWNER_TILES)
    numel = tl.load(entry + COLUMN.NUMEL).to(tl.float32)
    mean_square = sum_of(gradient_sums, first, count, GRADIENT_SUM.COUNT) / numel
    if (flags & FLAG.DENSE) != 0:
        variances = gradient_sums + GRADIENT_SUM.VARIANCES
        mean = sum_of(variances, first, count, GRADIENT_SUM.COUNT) / numel
    else:
        mean = mean_row_var(entry, row_var_sums)
    clip = tl.sqrt_rn(mean_square / tl.maximum(mean, TINY))
    if (flags & FLAG.ORTHOGONAL) == 0:
        clip = tl.maximum(clip, 1.0)
    else:
        clip = tl.maximum(clip, tl.load(setting + SETTING.LEAST_INPUT))
        clip *= tl.sqrt_rn(tl.maximum(mean, tl.load(setting + SETTING.VARIANCE_FLOOR)))
    return tl.where((flags & FLAG.MAXIMIZE) != 0, -1.0, 1.0) / clip, mean


# ------------------------------------------------------------------------- the coefficients


@triton.jit
def momentum_scalars(entry, setting, scalar, flags, t):
    """The beta of (12) and the factor of the corrected momentum in (13), for one tensor."""
    beta = tl.load(setting + SETTING.FIXED_BETA)
    correction = one_minus_exp(t * tl.load(setting + SETTING.LOG_BETA))
    if (flags & FLAG.ADAPTIVE) != 0:
        sums = tl.load(entry + COLUMN.BAND_SUMS).to(tl.pointer_type(tl.float32))
        power = tl.maximum(tl.load(sums + BAND_SUM.POWER), TINY)
        adapted = 1.0 - tl.load(sums + BAND_SUM.AGREEMENT) / power  # (11)
        adapted = tl.maximum(adapted, tl.load(setting + SETTING.BETA_MIN))
        adapted = tl.minimum(adapted, tl.load(setting + SETTING.BETA_MAX))
        beta = tl.where(t <= tl.load(setting + SETTING.WARMUP), beta, adapted)
        correction = beta * tl.load(sums + BAND_SUM.CORRECTION) + (1.0 - beta)  # (12)
    tl.store(scalar + SCALAR.BETA, beta)
    tl.store(scalar + SCALAR.GAIN, (1.0 - tl.load(setting + SETTING.MIX)) / correction)


@triton.jit
def update_band_sums(entry, setting, scalar, update_sums, first, count, numel):
    """FAM's sums and correction of one tensor, from the sums over its `count` tiles."""
    sums = tl.load(entry + COLUMN.BAND_SUMS).to(tl.pointer_type(tl.float32))
    theta, beta = tl.load(setting + SETTING.THETA), tl.load(scalar + SCALAR.BETA)
    before = tl.load(sums + BAND_SUM.CORRECTION)
    agreement = sum_of(update_sums + UPDATE_SUM.XM, first, count, UPDATE_SUM.COUNT) / numel
    agreement /= tl.maximum(before, TINY)
    power = sum_of(update_sums + UPDATE_SUM.XX, first, count, UPDATE_SUM.COUNT) / numel
    old = tl.load(sums + BAND_SUM.AGREEMENT)
    tl.store(sums + BAND_SUM.AGREEMENT, theta * old + (1.0 - theta) * agreement)  # (11)
    old = tl.load(sums + BAND_SUM.POWER)
    tl.store(sums + BAND_SUM.POWER, theta * old + (1.0 - theta) * power)
    tl.store(sums + BAND_SUM.CORRECTION, beta * before + (1.0 - beta))  # (12)


@triton.jit
def one_minus_exp(z):
    """1 - e^z for z <= 0, with all its digits near 0 too."""
    series = 1.0 + z / 5.0 * (1.0 + z / 6.0 * (1.0 + z / 7.0 * (1.0 + z / 8.0)))
    series = 1.0 + z / 2.0 * (1.0 + z / 3.0 * (1.0 + z / 4.0 * series))
    return tl.where(z > -0.5, -z * series, 1.0 - tl.exp(z))


# ------------------------------------------------------------------------ the stored values


@triton.jit
def stored_momentum(entry, STORE: tl.constexpr):
    """Where a matrix's stored momentum and its scales begin."""
    bytes_: tl.constexpr = STORE.primitive_bitwidth // 8
    pointer = tl.load(entry + COLUMN.MOMENTUM) + tl.load(entry + COLUMN.START) * bytes_
    return StoredMomentum(pointer, tl.load(entry + COLUMN.MOMENTUM_SCALE))


@triton.jit
def decode_momentum(stored, piece, STORE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a piece of the momentum as float32; STORE is the dtype in memory."""
    momentum = load_tile(stored.pointer, piece, STORE, ALIGNED)
    if tl.int8 == STORE:
        places, real = scale_places(stored.scales, piece)
        momentum *= per_column(tl.load(places, mask=real, other=0.0))
    return momentum


@triton.jit
def encode_momentum(stored, momentum, piece, STORE: tl.constexpr, ALIGNED: tl.constexpr):
    """Store a piece of the momentum; return what was stored, as float32.

    Int8 codes are rounded to nearest, ties to even, as in `maxfactor.rule.int8.quantized`.
    """
    if tl.int8 == STORE:
        blocks: tl.constexpr = COLUMNS // MOMENTUM_BLOCK
        size = tl.abs(momentum)
        largest = tl.max(tl.reshape(size, [PIECE_ROWS, blocks, MOMENTUM_BLOCK]), axis=2)
        step = largest * 0.007874015748031496  # 1 / 127
        places, real = scale_places(stored.scales, piece)
        tl.store(places, step, mask=real)
        codes = momentum * per_column(1.0 / tl.maximum(step, TINY))
        codes += 12582912.0  # 1.5 * 2^23: the lowest bits now hold the nearest integer
        bytes_ = codes.to(tl.int32, bitcast=True).to(tl.int8)
        store_tile(stored.pointer, bytes_, piece, tl.int8, ALIGNED)
        momentum = (codes - 12582912.0) * per_column(step)
    else:
        store_tile(stored.pointer, momentum, piece, STORE, ALIGNED)
        momentum = momentum.to(STORE).to(tl.float32)
    return momentum


@triton.jit
def scale_places(scales, piece):
    """Where the scales of a piece's stored momentum are, and which of them exist."""
    blocks = (piece.n + MOMENTUM_BLOCK - 1) // MOMENTUM_BLOCK
    first = tl.min(piece.cols, axis=0) // MOMENTUM_BLOCK
    block = first + tl.arange(0, COLUMNS // MOMENTUM_BLOCK)
    base = scales.to(tl.pointer_type(tl.float32))
    places = base + (piece.rows.to(tl.int64)[:, None] * blocks + block[None, :])
    return places, (piece.rows < piece.m)[:, None] & (block < blocks)[None, :]


@triton.jit
def per_column(scales):
    """Repeat one value per block for each column of the block."""
    blocks: tl.constexpr = COLUMNS // MOMENTUM_BLOCK
    wide = tl.broadcast_to(tl.expand_dims(scales, 2), [PIECE_ROWS, blocks, MOMENTUM_BLOCK])
    return tl.reshape(wide, [PIECE_ROWS, COLUMNS])
