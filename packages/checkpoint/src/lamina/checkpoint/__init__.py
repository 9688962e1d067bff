"""Atomic, verified, reshardable distributed checkpoints for PyTorch."""

from lamina.checkpoint.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointUnsafeError,
)
from lamina.checkpoint.huggingface import (
    HuggingFaceWeights,
    WeightLink,
    export_huggingface,
    import_huggingface,
)
from lamina.checkpoint.inspection import (
    Difference,
    compare_checkpoints,
    verify_checkpoint,
)
from lamina.checkpoint.manager import CheckpointManager
from lamina.checkpoint.per_rank import PerRank, RngState
from lamina.checkpoint.progress import RestoreReport, SaveReport

__all__ = [
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointUnsafeError",
    "Difference",
    "HuggingFaceWeights",
    "PerRank",
    "RestoreReport",
    "RngState",
    "SaveReport",
    "WeightLink",
    "compare_checkpoints",
    "export_huggingface",
    "import_huggingface",
    "verify_checkpoint",
]
