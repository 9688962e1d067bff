"""Sums over ranks: the fixed tree on CPU and in Triton, and the backend's own reductions."""
