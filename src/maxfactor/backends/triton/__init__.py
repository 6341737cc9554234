"""The equations in Triton kernels: a fixed number of launches for a step."""
