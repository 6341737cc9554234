"""Passes over float32 matrices on a CPU, compiled by Numba, which is an extra: `maxfactor[cpu]`."""
