"""The equations in torch operations, for one process and for shards."""
