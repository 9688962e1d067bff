"""Layers that tensor parallelism knows: linear, embedding, norms, loss."""
