"""Errors of this layer, one class for each thing that can be wrong with a checkpoint."""

from collections.abc import Sequence


class CheckpointError(RuntimeError):
    """Base of every error that this layer raises about a checkpoint."""


class CheckpointDamagedError(CheckpointError):
    """A file of a checkpoint is missing, truncated or altered; the message names it."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is whole but does not fit the objects it is loaded into."""


class CheckpointUnsafeError(CheckpointDamagedError):
    """The checkpoint names something that loading it would have to execute."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint of that step, or none at all."""


def shortened(names: Sequence[str], limit: int = 8) -> str:
    """Join `names` with commas; past `limit` only how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
