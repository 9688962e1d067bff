"""Reading: nothing in a checkpoint is executed, nothing is loaded before its checksum fits."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from lamina.checkpoint.errors import CheckpointDamagedError, CheckpointUnsafeError
from lamina.checkpoint.manifest import Manifest

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"

# What DCP's metadata is made of: records and constants, whose making runs no code of the file's.
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_FILES, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
}
_DTYPES = frozenset(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool "
    "complex128 complex64 complex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2".split()
)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise CheckpointUnsafeError(
            f"the checkpoint's metadata asks for {module}.{name}, which metadata never needs: "
            "it was forged or comes from another version of torch; nothing of it was executed"
        )


def read_metadata(path: Path) -> Metadata:
    """Read DCP's `.metadata` of the checkpoint at `path`, a pickle, without executing any of it.

    Raises:
        CheckpointUnsafeError: it names anything but metadata's own classes.
        CheckpointDamagedError: it is no metadata.

    """
    file = path / ".metadata"
    try:
        metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
    except CheckpointUnsafeError:
        raise
    except Exception as error:  # an altered pickle may raise nearly anything
        raise CheckpointDamagedError(f"{file} can't be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointDamagedError(f"{file} holds a {type(metadata).__name__}, not metadata")
    return metadata


class Reader(FileSystemReader):
    """Reads what a plan asks for, after checking every file the plan touches.

    The check runs while DCP plans, before it writes into any tensor; a failure on one rank reaches
    all ranks by DCP's own exchange of plans.
    """

    def __init__(self, path: Path, metadata: Metadata, manifest: Manifest) -> None:
        super().__init__(path)
        self._metadata, self._manifest = metadata, manifest

    def read_metadata(self) -> Metadata:
        """Return the metadata read before."""
        # Its signature must not have **kwargs, or DCP takes an error for an older file layout.
        if getattr(self._metadata, "storage_meta", None) is None:
            self._metadata.storage_meta = StorageMeta()
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check the files that this rank is about to read."""
        if any(item.type == LoadItemType.BYTE_IO for item in plan.items):
            raise CheckpointUnsafeError(f"{self.path} holds pickled objects where tensors belong")
        files = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        for name in sorted(files):
            self._manifest.check_file(cast(Path, self.path), name)
        return plan
