"""Products of matrices whose result is symmetric: one triangle is computed, the other mirrored.

The Gram matrix X Xᵀ is symmetric, and so is the product of two polynomials of one symmetric matrix,
because they commute. Half of the multiplications are enough for either.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def symmetric_product(
    out, left, right, added, alpha, n, depth, form: tl.constexpr, tile: tl.constexpr
):
    """One tile of alpha * L Rᵀ + beta * D + gamma * I, and its mirror image, for each matrix.

    A program has a tile on the diagonal or below. Each element is computed once, so the result is
    symmetric to the last bit and repeats. Sums are float32, rounded once when they are stored.

    Args:
        out: (batch, n, n). With `form.descriptors`, this and the next three are descriptors of
            the rows of all matrices, in blocks as a tile needs them.
        left: L, (batch, n, depth), or (batch, depth, n) if `form.transposed`.
        right: R, as L.
        added: D, (batch, n, n); not read if `form.beta` is 0.
        alpha: Factor of the product.
        n: Rows and columns of a result.
        depth: Columns of L and R; rows if `form.transposed`.
        form: `ProductForm`.
        tile: `ProductTile`.
    """
    rows: tl.constexpr = tile.rows
    cols: tl.constexpr = tile.cols
    tiles = triangle_tiles(tl.cdiv(n, rows), cols // rows)
    matrix = tl.program_id(0) // tiles
    down, across = triangle_place(tl.program_id(0) % tiles, cols // rows)
    row, col = down * rows, across * cols
    if form.descriptors:
        first = matrix * (depth if form.transposed else n)
        total = multiply_blocks(left, right, first, row, col, depth, form, tile)
    else:
        start = matrix.to(tl.int64) * n * depth
        total = multiply_rows(left + start, right + start, row, col, n, depth, form, tile)
    total *= alpha
    r, c = row + tl.arange(0, rows), col + tl.arange(0, cols)
    if form.beta != 0.0:
        if form.descriptors:
            d = added.load([matrix * n + row, col])
        else:
            d = load_block(added, matrix, n, row, col, rows, cols)
        total += form.beta * d.to(tl.float32)
    if form.gamma != 0.0:
        total += tl.where(r[:, None] == c[None, :], form.gamma, 0.0)
    value = total.to(out.dtype if form.descriptors else out.dtype.element_ty)
    mirrored = tl.trans(value)
    is_below = col + cols <= row  # wholly below the diagonal
    if form.descriptors:
        if is_below:
            out.store([matrix * n + col, row], mirrored)
        else:
            value = tl.where(r[:, None] >= c[None, :], value, mirrored)
        out.store([matrix * n + row, col], value)
    elif is_below:
        store_block(out, value, matrix, n, row, col, True)
        store_block(out, mirrored, matrix, n, col, row, True)
    elif rows == cols:
        value = tl.where(r[:, None] >= c[None, :], value, mirrored)
        store_block(out, value, matrix, n, row, col, True)
    else:
        store_block(out, value, matrix, n, row, col, r[:, None] >= c[None, :])
        store_block(out, mirrored, matrix, n, col, row, c[:, None] < r[None, :])


@triton.jit
def block_places(pointer, matrix, n, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pointers of a block of a matrix (n, n), and which of them are inside."""
    base = pointer + ((matrix.to(tl.int64) * n + row) * n + col)
    r, c = tl.arange(0, ROWS), tl.arange(0, COLS)
    return base + (r[:, None] * n + c[None, :]), (r < n - row)[:, None] & (c < n - col)[None, :]


@triton.jit
def load_block(pointer, matrix, n, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A block of a matrix (n, n), 0 outside."""
    places, inside = block_places(pointer, matrix, n, row, col, ROWS, COLS)
    return tl.load(places, mask=inside, other=0.0)


@triton.jit
def store_block(pointer, value, matrix, n, row, col, where):
    """Write what is inside a matrix (n, n)."""
    places, inside = block_places(pointer, matrix, n, row, col, value.shape[0], value.shape[1])
    tl.store(places, value, mask=inside & where)


@triton.jit
def multiply_rows(left, right, row, col, n, depth, form: tl.constexpr, tile: tl.constexpr):
    """The products of a tile's rows of L, from `row` on, and of R, from `col` on, in float32."""
    rows: tl.constexpr = tile.rows
    cols: tl.constexpr = tile.cols
    steps: tl.constexpr = tile.depth
    r, c = row + tl.arange(0, rows), col + tl.arange(0, cols)
    k = tl.arange(0, steps)
    if not form.even:  # beyond the last row any row will do: what comes of it is not stored
        r, c = r % n, c % n
    if form.transposed:
        l_places = left + k[:, None] * n + r[None, :]
        r_places = right + k[:, None] * n + c[None, :]
    else:
        l_places = left + r.to(tl.int64)[:, None] * depth + k[None, :]
        r_places = right + c.to(tl.int64)[:, None] * depth + k[None, :]
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
def multiply_blocks(left, right, first, row, col, depth, form: tl.constexpr, tile: tl.constexpr):
    """As `multiply_rows`, by descriptors of all matrices, of which this begins at row `first`."""
    rows: tl.constexpr = tile.rows
    cols: tl.constexpr = tile.cols
    total = tl.zeros([rows, cols], tl.float32)
    for done in range(0, depth, tile.depth):
        if form.transposed:
            l_part, r_part = left.load([first + done, row]), right.load([first + done, col])
            total = tl.dot(tl.trans(l_part), r_part, total)
        else:
            l_part, r_part = left.load([first + row, done]), right.load([first + col, done])
            total = tl.dot(l_part, tl.trans(r_part), total)
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
