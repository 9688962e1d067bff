"""Gradients of one group: accumulated, summed over ranks, ready for the optimizer."""
