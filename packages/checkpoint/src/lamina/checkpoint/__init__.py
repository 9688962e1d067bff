"""Atomic, verified, reshardable distributed checkpoints for PyTorch."""

from lamina.checkpoint.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointUnsafeError,
)
from lamina.checkpoint.manager import CheckpointManager, SaveReport

__all__ = [
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointUnsafeError",
    "SaveReport",
]
