"""Several processes: what a rank holds, sums and maxima over ranks, whole matrices."""
