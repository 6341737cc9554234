"""Several processes: local shards, reductions over ranks, and the exchange of whole matrices."""
