"""Ways to run a step. Each takes the same work and leaves the same parameters and state."""
