"""The last launch of a step: new weights, equations (4) and (9)."""

from __future__ import annotations

import triton
import triton.language as tl

from maxfactor.backends.triton.kernels.blocks import (
    grid_of,
    inverse_rms_of_blocks,
    load_from_blocks,
)
from maxfactor.backends.triton.kernels.descriptors import MatrixEntry, Noise, StepSize, Target
from maxfactor.backends.triton.kernels.directions import inverse_rms
from maxfactor.backends.triton.kernels.layout import (
    ADDRESS,
    BATCH_SUM,
    COLUMN,
    COLUMNS,
    COUNTER,
    FLAG,
    MEASURE,
    PARTS,
    SCALAR,
    SETTING,
    SQUARE,
    TINY,
)
from maxfactor.backends.triton.kernels.maxima import update_divisor
from maxfactor.backends.triton.kernels.momentum import decode_momentum, stored_momentum
from maxfactor.backends.triton.kernels.rounding import (
    change_of,
    noise_key,
    store_measures,
    write_weights,
)
from maxfactor.backends.triton.kernels.squares import (
    inverse_of,
    power_of_two,
    store_weight_squares,
)
from maxfactor.backends.triton.kernels.tiles import (
    address_of,
    inverse_root,
    load_tile,
    part_of,
    piece_of,
    sign_places,
    span_of,
    step_place,
    store_tile,
    with_signs,
)
from maxfactor.backends.triton.kernels.variance import (
    dense_variance,
    factor_roots,
    inverse_roots,
    row_divisor,
)


@triton.jit(do_not_specialize=["first_tile", "measure"])
def apply(
    tables,
    partials,
    results,
    grad_scale,
    first_tile,
    measure,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    spec: tl.constexpr,
):
    """Write the new weights of a tile, and the sum of their squares for the next step's (3).

    With `measure` it takes only the sum, before a step, after somebody else wrote W. The same
    kernel does both, so that the sum has the same last bit. W is computed in float32 and rounded
    once; no atomics are used.

    Args:
        tables: `Tables`.
        partials: `Partials`; writes `weight_squares` or, in a batch, `batch_sums`.
        results: `Results`; reads maxima and `scalars`.
        grad_scale: (1,) float32 by which G was multiplied, if SCALED.
        first_tile: The first tile of this launch.
        measure: Not 0 to take only the sum of squares.
        SCALED: Whether `grad_scale` counts.
        STAGES: Pieces that are prefetched from memory.
        spec: `Spec`.
    """
    if measure == 0:
        if tl.program_id(0) == 0:
            tl.store(results.counters + COUNTER.SEEN, 0)  # for the next step; this has SKIP
        if tl.load(results.counters + COUNTER.SKIP) != 0:
            return
    tile = first_tile + tl.program_id(0) // spec.parts
    k = tl.load(tables.tile_matrix + tile).to(tl.int64)
    entry = tables.matrices + k * COLUMN.COUNT
    group = tl.load(entry + COLUMN.GROUP)
    setting = tables.settings + group * SETTING.COUNT
    flags = tl.load(entry + COLUMN.FLAGS)
    owner = tl.load(entry + COLUMN.OWNER)
    m = tl.load(entry + COLUMN.ROWS)
    n = tl.load(entry + COLUMN.COLS)
    span = span_of(entry, tile, m)
    if spec.orthogonal:
        span = part_of(span, tl.program_id(0) % spec.parts, spec.parts)
    scalar = results.scalars + owner * SCALAR.COUNT
    keep = tl.load(scalar + SCALAR.KEEP)
    alpha = tl.load(scalar + SCALAR.ALPHA)
    t = tl.load(scalar + SCALAR.TIME)
    key = noise_key(tables.seed_keys, group, scalar)
    origin, stride = tl.load(entry + COLUMN.ORIGIN), tl.load(entry + COLUMN.STRIDE)
    w_pointer = address_of(tables.pointers, entry, ADDRESS.WEIGHT, spec.p_dtype)
    part = tile * PARTS + tl.program_id(0) % spec.parts
    noise, measures = Noise(key, origin, stride, flags), partials.measures + part * MEASURE.COUNT
    target = Target(w_pointer, span, m, n, keep, noise, measures)
    row_max = results.row_max + tl.load(entry + COLUMN.ROW_SPACE)
    # U is divided by a power of two near its maximum, and the scale multiplied by it: alpha times
    # the scale alone may leave the range of float32. It rounds nothing.
    divisor = update_divisor(setting, results.update_max, owner)
    by_mean = (flags & (FLAG.ADAFACTOR | FLAG.FACTORED)) != 0  # U is not divided by its maximum
    power = tl.where(by_mean, 1.0, power_of_two(divisor))
    if spec.general:
        scale = alpha * (tl.load(scalar + SCALAR.SCALE) * power)
    else:
        scale = alpha / (divisor * inverse_of(power))  # RMS(U) <= 1 <= d
    if not spec.momentum:  # which negates G itself, as M keeps it
        if (flags & FLAG.MAXIMIZE) != 0:
            scale = -scale
    grid = 0
    if spec.blocked:
        grid = grid_of(entry, partials.block_squares, first_tile)
    by_signs = False
    if spec.signed:
        dense = spec.dense and (flags & FLAG.DENSE) != 0
        by_signs = (dense == 0) & (tl.load(partials.unsigned + tile) == 0)
    if measure != 0:
        total = measure_weights(target, STAGES, spec)
    elif spec.orthogonal:
        pointer = address_of(tables.pointers, entry, ADDRESS.ORTHOGONAL, spec.o_dtype)
        scale = alpha
        if not (spec.blocked or spec.sharded):
            scale *= inverse_rms(entry, partials.batch_sums, first_tile, m, n, spec.parts)
        total = move_by_direction(target, pointer, scale, grid, STAGES, spec)
    elif by_signs:
        signs = tl.load(sign_places(tables.signs_at, tile)).to(tl.uint32, bitcast=True)
        total = move_by_signs(target, signs, row_max, inverse_of(power), scale, STAGES, spec)
    else:
        matrix = MatrixEntry(k, entry, setting, scalar, owner, flags)
        size = StepSize(alpha, scale, inverse_of(power), t)
        total = move_by_update(
            tables, results, matrix, target, size, row_max, grad_scale, SCALED, STAGES, spec
        )
    if spec.orthogonal:
        place = partials.batch_sums + tl.program_id(0) * BATCH_SUM.COUNT + BATCH_SUM.WEIGHTS
    else:
        place = partials.weight_squares + tile * SQUARE.COUNT
    store_weight_squares(place, target, total, spec.p_dtype, spec.aligned)
    first = tl.load(entry + COLUMN.OWNER_TILE) * spec.parts
    number = first_tile * spec.parts + tl.program_id(0)
    if (number == first) & (measure == 0):  # one program counts for the tensor
        tl.store(step_place(entry), tl.load(step_place(entry)) + 1)


@triton.jit
def measure_weights(target, STAGES: tl.constexpr, spec: tl.constexpr):
    """Sums of W² of a tile, by column."""
    total = tl.zeros([COLUMNS], tl.float32)
    for number in tl.range(0, target.span.pieces, num_stages=STAGES):
        piece = piece_of(target.span, number, target.m, target.n)
        w = load_tile(target.pointer, piece, spec.p_dtype, spec.aligned)
        total += tl.sum(w * w, axis=0)
    return total


@triton.jit
def move_by_signs(target, signs, row_max, inverse, scale, STAGES: tl.constexpr, spec: tl.constexpr):
    """Move a tile by row maxima and packed signs; sums of the new W², by column."""
    span, n = target.span, target.n
    total = tl.zeros([COLUMNS], tl.float32)
    changes, lost = tl.zeros_like(total), tl.zeros_like(total)
    for number in tl.range(0, span.pieces, num_stages=STAGES):
        piece = piece_of(span, number, target.m, n)
        w = load_tile(target.pointer, piece, spec.p_dtype, spec.aligned)
        bits = tl.load(row_max + piece.rows, mask=piece.rows < target.m, other=0)
        size = (bits.to(tl.float32, bitcast=True) * inverse * scale)[:, None]
        move = with_signs(size, signs, number, span.pieces)  # (9)
        new = write_weights(target, w, move, piece, spec.p_dtype, spec.aligned)
        if spec.records:
            change, few = change_of(target, w, move, new, piece, spec.p_dtype)
            changes, lost = changes + change, lost + few
        total += tl.sum(new * new, axis=0)
    total = tl.where(span.cols < n, total, 0.0)  # outside, W was 0 and moved
    if spec.records:
        store_measures(target, changes, total, lost)
    return total


@triton.jit
def move_by_direction(target, pointer, scale, grid, STAGES: tl.constexpr, spec: tl.constexpr):
    """Move a tile by an orthogonal direction; sums of the new W², by column.

    `grid` is a `BlockGrid` if the matrix is cut into blocks, each with a size of its own.
    """
    cols = target.span.cols
    if spec.col_blocks:
        col_scale = scale * inverse_rms_of_blocks(grid, cols // grid.cols, cols < target.n)
    total = tl.zeros([COLUMNS], tl.float32)
    changes, lost = tl.zeros_like(total), tl.zeros_like(total)
    for number in tl.range(0, target.span.pieces, num_stages=STAGES):
        piece = piece_of(target.span, number, target.m, target.n)
        w = load_tile(target.pointer, piece, spec.p_dtype, spec.aligned)
        if spec.col_blocks:
            move = load_from_blocks(pointer, piece, grid, spec.o_dtype) * col_scale[None, :]
        else:
            move = load_tile(pointer, piece, spec.o_dtype, spec.aligned)
            if spec.row_blocks:
                rows = piece.rows
                inverse = inverse_rms_of_blocks(grid, rows // grid.rows, rows < target.m)
                move *= (scale * inverse)[:, None]
            else:
                move *= scale
        new = write_weights(target, w, move, piece, spec.p_dtype, spec.aligned)
        if spec.records:
            change, few = change_of(target, w, move, new, piece, spec.p_dtype)
            changes, lost = changes + change, lost + few
        total += tl.sum(new * new, axis=0)
    if spec.records:
        store_measures(target, changes, total, lost)
    return total


@triton.jit
def move_by_update(
    tables,
    results,
    matrix,
    target,
    step,
    row_max,
    grad_scale,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    spec: tl.constexpr,
):
    """Move a tile by an update that is computed from G; sums of the new W², by column."""
    entry, setting, flags = matrix.entry, matrix.setting, matrix.flags
    span, m, n = target.span, target.m, target.n
    vector = spec.dense and (flags & FLAG.VECTOR) != 0
    dense = spec.dense and (flags & FLAG.DENSE) != 0
    total = tl.zeros([COLUMNS], tl.float32)
    changes, lost = tl.zeros_like(total), tl.zeros_like(total)
    g_pointer = address_of(tables.pointers, entry, ADDRESS.GRAD, spec.g_dtype)
    floor = tl.load(setting + SETTING.VARIANCE_FLOOR)
    whole = tl.load(results.update_max + matrix.owner)
    inverse_scale = 1.0
    if SCALED:
        inverse_scale = 1.0 / tl.load(grad_scale)
    if spec.momentum:
        gain, share = tl.load(matrix.scalar + SCALAR.GAIN), tl.load(setting + SETTING.MIX)
        factor, mean = tl.load(matrix.scalar + SCALAR.FACTOR), tl.load(matrix.scalar + SCALAR.MEAN)
        stored = stored_momentum(entry, spec.store)
        divisor = tl.maximum(mean, TINY)
    elif spec.general:
        divisor = row_divisor(entry, setting, matrix.k, results, flags)
    if spec.momentum or spec.general:
        r_pointer, r_end = tl.load(entry + COLUMN.ROW_VAR), tl.where(dense, 0, m)
        c_pointer = tl.load(entry + COLUMN.COL_VAR)
        col_roots = factor_roots(c_pointer, span.cols, tl.where(dense, 0, n), 1.0)
        root_of_floor = inverse_root(floor)
    for number in tl.range(0, span.pieces, num_stages=STAGES):
        piece = piece_of(span, number, m, n)
        rows = piece.rows
        g = load_tile(g_pointer, piece, spec.g_dtype, spec.aligned) * inverse_scale
        w = load_tile(target.pointer, piece, spec.p_dtype, spec.aligned)
        bits = tl.where(vector, whole, tl.load(row_max + rows, mask=rows < m, other=0))
        size = (bits.to(tl.float32, bitcast=True) * step.inverse * step.scale)[:, None]
        u, v = g, g
        if dense:
            v = dense_variance(entry, setting, step.t, g, piece, spec.aligned)
            store_tile(tl.load(entry + COLUMN.COL_VAR), v, piece, tl.float32, spec.aligned)
        if spec.momentum:  # the update once more
            if dense:
                u *= factor * tl.rsqrt(tl.maximum(v, floor))
            else:
                row_roots = factor_roots(r_pointer, rows, r_end, divisor)
                u *= factor * inverse_roots(row_roots, col_roots, root_of_floor)
            if spec.stored:
                momentum = decode_momentum(stored, piece, spec.store, spec.aligned)
                u = momentum * gain + share * u
        move = tl.where(u > 0.0, size, tl.where(u < 0.0, -size, 0.0))  # (9)
        if spec.momentum:
            if (flags & FLAG.SIGN) == 0:
                move = u * step.inverse * step.scale
        elif dense:
            if spec.general:
                if (flags & FLAG.SIGN) == 0:
                    move = g * tl.rsqrt(tl.maximum(v, floor)) * step.inverse * step.scale
                if (flags & FLAG.BOOSTED) != 0:
                    root = tl.maximum(tl.sqrt_rn(v) + tl.load(setting + SETTING.EPS1), TINY)
                    up = tl.where((flags & FLAG.MAXIMIZE) != 0, -step.alpha, step.alpha)
                    move = g / root * tl.load(setting + SETTING.BOOST) * up
        elif spec.general:
            if (flags & FLAG.SIGN) == 0:
                row_roots = factor_roots(r_pointer, rows, r_end, divisor)
                roots = inverse_roots(row_roots, col_roots, root_of_floor)
                if (flags & (FLAG.ADAFACTOR | FLAG.FACTORED)) != 0:
                    move = g * (step.scale * roots)
                else:
                    move = g * roots * step.inverse * step.scale
        new = write_weights(target, w, move, piece, spec.p_dtype, spec.aligned)
        if spec.records:
            change, few = change_of(target, w, move, new, piece, spec.p_dtype)
            changes, lost = changes + change, lost + few
        total += tl.sum(new * new, axis=0)  # 0 outside the matrix, where W and G were read as 0
    if spec.records:
        store_measures(target, changes, total, lost)
    return total
