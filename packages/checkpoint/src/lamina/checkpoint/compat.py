"""What a checkpoint takes from torch that torch does not promise: its private names.

No other module of this layer uses one (tests/test_compat.py), so what a new torch breaks is here.
"""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatCode  # noqa: N811
from torch.serialization import _get_layout as get_layout

__all__ = ["MemoryFormatCode", "StorageInfo", "get_layout"]
