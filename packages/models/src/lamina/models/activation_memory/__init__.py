"""Less activation memory: recomputation and offload."""
