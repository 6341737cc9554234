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
