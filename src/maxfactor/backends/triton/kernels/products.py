"""Products of matrices whose result is symmetric: one triangle is computed, the other mirrored.

The Gram matrix X Xᵀ is symmetric, and so is the product of two polynomials of one symmetric matrix,
because they commute. Half of the multiplications are enough for either.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def symmetric_product(operands, alpha, n, depth, form: tl.constexpr, tile: tl.constexpr):
    """One tile of alpha * L Rᵀ + beta * D + gamma * I, and its mirror image, for each matrix.

    A program has a tile on the diagonal or below. Each element is computed once, so the result is
    symmetric to the last bit and repeats. Sums are float32, rounded once when they are stored.

    Args:
        operands: `Operands`.
        alpha: Factor of the product.
        n: Rows and columns of a result.
        depth: Columns of L and R; rows if `form.transposed`.
        form: `ProductForm`.
        tile: `ProductTile`.
    """
    rows: tl.constexpr = tile.rows
    cols: tl.constexpr = tile.cols
    tiles = triangle_tiles(tl.cdiv(n, rows), cols // rows)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    down, across = triangle_place(tl.program_id(0) % tiles, cols // rows)
    r = down * rows + tl.arange(0, rows)
    c = across * cols + tl.arange(0, cols)
    start = matrix * n * depth
    total = multiply_rows(operands.left + start, operands.right + start, r, c, n, depth, form, tile)
    total *= alpha
    here = r.to(tl.int64)[:, None] * n + c[None, :]
    inside = (r < n)[:, None] & (c < n)[None, :]
    square = matrix * n * n
    if form.beta != 0.0:
        if form.even:
            added = tl.load(operands.added + square + here)
        else:
            added = tl.load(operands.added + square + here, mask=inside, other=0.0)
        total += form.beta * added.to(tl.float32)
    if form.gamma != 0.0:
        total += tl.where(r[:, None] == c[None, :], form.gamma, 0.0)
    out = operands.out + square
    value = total.to(out.dtype.element_ty)
    mirrored = tl.trans(value)
    there = c.to(tl.int64)[:, None] * n + r[None, :]
    if across * cols + cols <= down * rows:  # wholly below the diagonal
        if form.even:
            tl.store(out + here, value)
            tl.store(out + there, mirrored)
        else:
            tl.store(out + here, value, mask=inside)
            tl.store(out + there, mirrored, mask=(c < n)[:, None] & (r < n)[None, :])
    elif rows == cols:
        value = tl.where(r[:, None] >= c[None, :], value, mirrored)
        if form.even:
            tl.store(out + here, value)
        else:
            tl.store(out + here, value, mask=inside)
    else:
        tl.store(out + here, value, mask=inside & (r[:, None] >= c[None, :]))
        above = (r < n)[None, :] & (c[:, None] < r[None, :])
        tl.store(out + there, mirrored, mask=above)


@triton.jit
def multiply_rows(left, right, r, c, n, depth, form: tl.constexpr, tile: tl.constexpr):
    """The products of the rows `r` of L and `c` of R, in float32."""
    steps: tl.constexpr = tile.depth
    k = tl.arange(0, steps)
    if not form.even:  # beyond the last row any row will do: what comes of it is not stored
        r, c = r % n, c % n
    if form.transposed:
        l_places = left + k[:, None] * n + r[None, :]
        r_places = right + k[:, None] * n + c[None, :]
    else:
        l_places = left + r.to(tl.int64)[:, None] * depth + k[None, :]
        r_places = right + c.to(tl.int64)[:, None] * depth + k[None, :]
    rows: tl.constexpr = tile.rows
    cols: tl.constexpr = tile.cols
    total = tl.zeros([rows, cols], tl.float32)
    for done in range(0, depth, steps):
        if form.even:
            l_part, r_part = tl.load(l_places), tl.load(r_places)
        else:
            real = k < depth - done
            real = real[:, None] if form.transposed else real[None, :]
            l_part = tl.load(l_places, mask=real, other=0.0)
            r_part = tl.load(r_places, mask=real, other=0.0)
        if form.transposed:
            total = tl.dot(tl.trans(l_part), r_part, total)
            l_places += steps * n
            r_places += steps * n
        else:
            total = tl.dot(l_part, tl.trans(r_part), total)
            l_places += steps
            r_places += steps
    return total


@triton.jit
def triangle_tiles(down, RATIO: tl.constexpr):
    """How many tiles are on the diagonal or below, of `down` rows of them; see `triangle_place`."""
    whole, rest = down // RATIO, down % RATIO
    return RATIO * whole * (whole + 1) // 2 + rest * (whole + 1)


@triton.jit
def triangle_place(index, RATIO: tl.constexpr):
    """The row and column of a tile, counted row by row; tiles are RATIO times as wide as high."""
    root = tl.sqrt(8.0 / RATIO * index.to(tl.float32) + 1.0)
    band = ((root - 1.0) * 0.5).to(tl.int32)
    band = tl.where(RATIO * band * (band + 1) // 2 > index, band - 1, band)
    band = tl.where(RATIO * (band + 1) * (band + 2) // 2 <= index, band + 1, band)
    within = index - RATIO * band * (band + 1) // 2
    return RATIO * band + within // (band + 1), within % (band + 1)
