"""Contiguous parameter and gradient buffers: layouts, placements, flat buffers and storage pools for PyTorch."""

__all__: list[str] = []
