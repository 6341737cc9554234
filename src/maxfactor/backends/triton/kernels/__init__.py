"""Triton kernels of the fused backend, each found by what it does.

A step is four launches over all tensors of a launch group:

1. `statistics.statistics` reads G: sums of squares of each row (over a strip of columns) and each
   column (over the rows of a tile), whether G is finite, the largest |G| / sqrt(C) of each row and
   strip, with the C of the previous step, and the signs of G, packed into bits.
2. `statistics.finalize` adds the partial sums, equations (1) to (5), and records how much C has
   changed.
3. `maxima.maxima` finds the row maxima of |U|, (6) and (7). It reads little of G again: a strip is
   skipped if its largest value, by the old C and the largest change of C, cannot exceed the value
   of another strip of the row.
4. `weights.apply` reads W and the signs and writes W, (4), (8) and (9), and sums the squares of the
   new W for the next step's (3). A tile of G with a zero, whose sign no bit can tell, is read
   again.

With momentum, or an orthogonal direction, `momentum.with_momentum` replaces `maxima`: it reads G
and M, writes M, (10) to (13), and packs the signs of y instead of those of G. If signs are not
enough, `apply` computes y again from G and the stored M. `maxima.rescale` takes what (8) and FAM
need of whole tensors.

Orthogonal matrices are filtered and applied batch by batch, before the others. In between,
`directions.normalize` gives y its norm and dtype, `products.symmetric_product` does most of the
iteration, and `directions.measure_directions` takes the size of the result, which `apply` reads.
Matrices that are cut into blocks take the sizes of these: see `blocks`.

Determinism: sums are taken in two stages in a fixed order. Maxima are integer atomics on the bits
of floats that are not negative. Results repeat bit for bit.

Rounding: all arithmetic is float32, and a product and a sum may be fused into one rounding. A
result is rounded once when it is written, see `rounding`.

No autotuning: see `layout.Size`.
"""
