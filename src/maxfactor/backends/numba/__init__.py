"""The compiled form for large float32 matrices on a CPU, by numba."""
