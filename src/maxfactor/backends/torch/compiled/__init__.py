"""Passes over float32 matrices on a CPU, compiled by Numba, which comes with the extra `cpu`."""
