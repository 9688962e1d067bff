"""Process start-up, parallel layout, device meshes, rank RNG and environment checks for PyTorch training."""

__all__: list[str] = []
