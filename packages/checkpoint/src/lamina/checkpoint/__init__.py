"""Atomic, verified, reshardable distributed checkpoints for PyTorch."""

__all__: list[str] = []
