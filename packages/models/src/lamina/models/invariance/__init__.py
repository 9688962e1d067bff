"""Sums whose order is fixed by the model: the same bits for every layout (law 12)."""
