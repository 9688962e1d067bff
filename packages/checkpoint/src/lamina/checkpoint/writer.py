"""Writing: DCP's own file format, with checksums taken as the bytes pass and a commit at the end.

torch.distributed.checkpoint plans who writes what and gathers the results on the coordinator. The
writer here rides on that: the coordinator's plan carries the name of the directory to the ranks,
the ranks' results carry checksums back, and `finish`, which the coordinator runs while the others
wait for its word, writes the manifest and renames. So a save needs no collective of its own, and
on every rank `save` returns only once the checkpoint is complete.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystem,
    FileSystemWriter,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lamina.checkpoint.directory import WritingDirectory
from lamina.checkpoint.errors import CheckpointDamagedError
from lamina.checkpoint.manifest import FileSum, Manifest, sum_of_file, write_synced

METADATA = ".metadata"
VALUES = "values.json"


class _SummingFile(io.RawIOBase):
    """A file that sums what is written to it and is on the disk once closed."""

    def __init__(self, path: Path, sums: dict[str, FileSum]) -> None:
        super().__init__()
        self._path, self._sums = path, sums
        # Buffered, for DCP writes tensors through torch.save in small pieces.
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115 (closed by close)
        self._crc = self._length = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._crc = zlib.crc32(view, self._crc)
        self._length += len(view)
        self._file.write(view)
        return len(view)

    def tell(self) -> int:
        return self._length

    def close(self) -> None:
        if self.closed:
            return
        # DCP syncs a stream before it flushes it, so its last bytes are not synced; here they are.
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._sums[self._path.name] = FileSum(self._length, self._crc)
        super().close()


class _SummingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            raise ValueError(f"the writer opens files for writing only, not with mode {mode!r}")
        stream = _SummingFile(Path(path), self.sums)
        try:
            yield stream
        finally:
            stream.close()


@dataclasses.dataclass
class _Assignment:
    """What the coordinator's plan tells a rank: the directory, and the prefix of its files."""

    directory: str
    prefix: str


class _Results(list[WriteResult]):
    """DCP's results of one rank, with the sums of the files that it wrote."""

    def __init__(self, results: list[WriteResult], sums: dict[str, FileSum]) -> None:
        super().__init__(results)
        self.sums = sums


class Writer(FileSystemWriter):
    """One save: makes the directory, writes, verifies, commits.

    Args:
        root: the directory of checkpoints.
        step: training step.
        values: the bytes of `values.json` (read on the coordinator only).
        overwrite: replace a complete checkpoint of the same step.
        verify: read every file back from the disk and compare before committing.
        threads: files, and threads writing them, per rank.

    """

    def __init__(
        self, root: Path, step: int, values: bytes, *, overwrite: bool, verify: bool, threads: int
    ) -> None:
        # sync_files=False: _SummingFile syncs, after its last byte.
        super().__init__(root, single_file_per_rank=True, sync_files=False, thread_count=threads)
        self.fs: _SummingFileSystem = _SummingFileSystem()
        self._root, self._step, self._values = root, step, values
        self._overwrite, self._verify = overwrite, verify
        self._directory: WritingDirectory | None = None
        self.bytes_written = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Keep the path: a Writer serves one save (DCP calls this before each)."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Do nothing yet: only the coordinator makes the directory."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory (coordinator) and tell every rank its name."""
        self._directory = WritingDirectory(self._root, self._step)
        name = str(self._directory.path)
        return [
            dataclasses.replace(plan, storage_data=_Assignment(name, f"__{rank}_"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, sync them, read them back."""
        assignment = cast(_Assignment, plan.storage_data)
        self.path = Path(assignment.directory)
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"{self.path} was made by the coordinator but can't be seen from this rank: the "
                "directory of checkpoints must be on a file system that all ranks share"
            )
        prefix = _StoragePrefix(assignment.prefix)
        results = super().write_data(dataclasses.replace(plan, storage_data=prefix), planner).wait()
        if self._verify:
            for name, written in self.fs.sums.items():
                _verify_written(self.path / name, written)
        self.bytes_written = sum(file.bytes for file in self.fs.sums.values())
        future: Future[list[WriteResult]] = Future()
        future.set_result(_Results(results, dict(self.fs.sums)))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata, values and manifest, and give the checkpoint its name (coordinator)."""
        if self._directory is None:
            raise RuntimeError("finish() ran before prepare_global_plan()")
        path = self._directory.path
        files: dict[str, FileSum] = {}
        for of_rank in cast(list[_Results], results):
            files.update(of_rank.sums)
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {r.index: r.storage_data for ranks in results for r in ranks}
        metadata.storage_meta = None  # it would hold the temporary path
        files[METADATA] = write_synced(path / METADATA, pickle.dumps(metadata))
        files[VALUES] = write_synced(path / VALUES, self._values)
        if self._verify:
            _verify_written(path / METADATA, files[METADATA])
            _verify_written(path / VALUES, files[VALUES])
        manifest = Manifest(self._step, len(results), torch.__version__, files)
        manifest.check_sizes(path)  # sees that every rank wrote where the coordinator looks
        manifest.write(path)
        self._directory.commit(self._overwrite)

    def abandon(self) -> None:
        """Remove what a failed save wrote (does something on the coordinator only)."""
        if self._directory is not None:
            self._directory.abandon()


def _verify_written(path: Path, written: FileSum) -> None:
    found = sum_of_file(path, from_disk=True)
    if found != written:
        raise CheckpointDamagedError(
            f"{path} reads back as {found.bytes} bytes with CRC-32 {found.crc32:08x}, written were "
            f"{written.bytes} bytes with {written.crc32:08x}: the disk or its connection is faulty"
        )
