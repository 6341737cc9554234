"""Comparison of optimizers: the same data, seeds and budget for each, and a report."""
