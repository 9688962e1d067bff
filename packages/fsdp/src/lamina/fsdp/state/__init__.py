"""State dicts of a sharded model, and how they meet tensor parallelism."""
