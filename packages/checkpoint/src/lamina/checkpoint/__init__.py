"""Atomic, verified, reshardable distributed checkpoints for PyTorch."""

from lamina.checkpoint.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointUnsafeError,
)
from lamina.checkpoint.huggingface.huggingface import export_huggingface, import_huggingface
from lamina.checkpoint.inspection import Difference, compare_checkpoints, verify_checkpoint
from lamina.checkpoint.manager import CheckpointManager
from lamina.checkpoint.plain_dcp import import_dcp
from lamina.checkpoint.preemption import RESUME_EXIT_CODE, Preemption
from lamina.checkpoint.progress import RestoreReport, SaveReport
from lamina.checkpoint.state.data_position import BatchPart, DataPosition, cut_batch, shuffled
from lamina.checkpoint.state.joined_optimizers import JoinedOptimizers
from lamina.checkpoint.state.per_rank import PerRank, RngState

__all__ = [
    "RESUME_EXIT_CODE",
    "BatchPart",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointUnsafeError",
    "DataPosition",
    "Difference",
    "JoinedOptimizers",
    "PerRank",
    "Preemption",
    "RestoreReport",
    "RngState",
    "SaveReport",
    "compare_checkpoints",
    "cut_batch",
    "export_huggingface",
    "import_dcp",
    "import_huggingface",
    "shuffled",
    "verify_checkpoint",
]
