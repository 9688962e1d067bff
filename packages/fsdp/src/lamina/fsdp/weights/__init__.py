"""Weights that are sharded at rest: gathered, encoded or offloaded."""
