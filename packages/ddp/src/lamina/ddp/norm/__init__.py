"""Norms of gradients over ranks, each parameter counted once."""
