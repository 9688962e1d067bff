"""Atomic, verified, reshardable distributed checkpoints for PyTorch."""

from lamina.checkpoint.data_position import DataPosition, shuffled
from lamina.checkpoint.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointUnsafeError,
)
from lamina.checkpoint.huggingface import export_huggingface, import_huggingface
from lamina.checkpoint.inspection import (
    Difference,
    compare_checkpoints,
    verify_checkpoint,
)
from lamina.checkpoint.joined import JoinedOptimizers
from lamina.checkpoint.manager import CheckpointManager
from lamina.checkpoint.per_rank import PerRank, RngState
from lamina.checkpoint.plain_dcp import import_dcp
from lamina.checkpoint.preemption import RESUME_EXIT_CODE, Preemption
from lamina.checkpoint.progress import RestoreReport, SaveReport
from lamina.checkpoint.weight_links import HuggingFaceLink, HuggingFaceWeights

__all__ = [
    "RESUME_EXIT_CODE",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointUnsafeError",
    "DataPosition",
    "Difference",
    "HuggingFaceLink",
    "HuggingFaceWeights",
    "JoinedOptimizers",
    "PerRank",
    "Preemption",
    "RestoreReport",
    "RngState",
    "SaveReport",
    "compare_checkpoints",
    "export_huggingface",
    "import_dcp",
    "import_huggingface",
    "shuffled",
    "verify_checkpoint",
]
