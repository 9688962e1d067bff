"""Writing: DCP's own file format, with checksums taken as the bytes pass and a commit at the end.

Note [A save has no collectives of its own]
torch.distributed.checkpoint plans who writes what and gathers the results on the coordinator. The
writer sends its messages with these: the coordinator's plan carries the name of the location to
the ranks, the ranks' results carry checksums back, and the coordinator commits in `finish`, for
whose end DCP lets the others wait. So on every rank a save ends only once the checkpoint is
complete. See docs/decisions/0701-commit-rides-on-dcp.md.

Note [Python 3.12 starts no thread while it ends]
A save in the background is waited for when the program ends, and goes on until then. Python 3.11
and 3.13 let it start threads so long; Python 3.12 raises RuntimeError from the first moment of the
end. So what cannot have a thread runs on the one that asks for it. An executor is no way to do so:
work that it has queued before the error is run by the threads that it has.
"""

import dataclasses
import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import BinaryIO, TypeVar, cast

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lamina.checkpoint.compat import StorageInfo
from lamina.checkpoint.errors import CheckpointDamagedError, CheckpointError
from lamina.checkpoint.save.offer import Digests, Offered, compare
from lamina.checkpoint.save.phases import Phase
from lamina.checkpoint.storage.locations import (
    FileSum,
    LocalLocation,
    Location,
    location_of,
    sum_of,
    write_whole,
)
from lamina.checkpoint.storage.manifest import CHUNKS, METADATA, VALUES, Manifest
from lamina.checkpoint.storage.stores import Attempt, Store
from lamina.checkpoint.storage.streams import SummingStream, own_memory

T = TypeVar("T")

_SLOW_DISK = 8 << 20  # bytes per second that any disk writes


@dataclasses.dataclass(frozen=True)
class Save:
    """One save: of a training step, of what this rank offers to write.

    `overwrite` replaces a complete checkpoint of the same step. `verify` reads every file back and
    compares before committing. Each rank writes so many files, each in a thread. The metric and
    `healthy` are for the manifest. `started` is `time.perf_counter()` when the caller asked for it.
    """

    step: int
    offered: Offered
    overwrite: bool
    verify: bool
    threads: int
    metric: float | None
    healthy: bool | None
    started: float


@dataclasses.dataclass
class _Assignment:
    """What the coordinator's plan tells a rank: where to write, where that will be, and more.

    `trees_crc` is the checksum of the coordinator's trees. `largest` is how many bytes the rank
    writes that has the most to write.
    """

    location: str
    final: str
    rank: int
    trees_crc: int
    largest: int


@dataclasses.dataclass
class _File:
    """A file that was written: its checksum, and those of its chunks."""

    sum: FileSum
    chunks: list[list[int]]


class _Results(list[WriteResult]):
    """DCP's results of one rank, with what else the coordinator needs of it."""

    def __init__(
        self, results: list[WriteResult], files: dict[str, _File], rank: int, trees: bytes | None
    ) -> None:
        super().__init__(results)
        self.files, self.rank, self.trees = files, rank, trees


class Writer(StorageWriter):
    """One save: makes the location, writes, verifies, commits.

    `wrote` is called with the bytes of each chunk written, and the seconds that may pass until the
    next call: one tensor or one sync may take long, and so may a rank that has more to write.
    `reached` is called whenever this rank has come to another phase.
    """

    def __init__(
        self,
        store: Store,
        save: Save,
        wrote: Callable[[int, float], None] = lambda *_: None,
        reached: Callable[[Phase], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._store, self._save, self._wrote, self._reached = store, save, wrote, reached
        self._values = save.offered.trees
        self._attempt: Attempt | None = None
        self._location: Location | None = None
        self._pause = 0.0
        #: what this rank was given to write, once DCP has planned
        self.assigned: frozenset[MetadataIndex] = frozenset()
        #: the manifest of the finished checkpoint (coordinator)
        self.manifest: Manifest | None = None
        #: where the checkpoint is once the save has ended well
        self.final: Location | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a Writer is made with its store."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Keep everything: a Writer serves one save (DCP calls this before each)."""

    def storage_meta(self) -> StorageMeta | None:
        """Return nothing: it would hold a temporary path."""
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Do nothing: the coordinator is who runs prepare_global_plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tell the coordinator what is offered as whole; only it makes the location."""
        self._reached(Phase.PLANNED)
        return dataclasses.replace(plan, storage_data=self._save.offered.digests)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Compare what ranks offer, make the location (coordinator), tell every rank its name."""
        written = {item.index.fqn: rank for rank, plan in enumerate(plans) for item in plan.items}
        compare([cast(Digests, plan.storage_data) for plan in plans], written)
        self._attempt = self._store.begin(self._save.step)
        location, final = str(self._attempt.location), str(self._attempt.final)
        facts = self._values.crc32, max(sum(map(_bytes_of, plan.items)) for plan in plans)
        return [
            dataclasses.replace(plan, storage_data=_Assignment(location, final, rank, *facts))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors durably, read them back."""
        assignment = cast(_Assignment, plan.storage_data)
        self._reached(Phase.WRITING)
        self._pause = assignment.largest / _SLOW_DISK
        self._wrote(0, self._pause)
        self._location, self.final = location_of(assignment.location), location_of(assignment.final)
        if not self._location.is_there():
            raise FileNotFoundError(
                f"{self._location} was made by the coordinator but can't be seen from this rank: "
                "the directory of checkpoints must be on a file system that all ranks share"
            )
        self.assigned = frozenset(item.index for item in plan.items)
        shares = _shares(plan.items, self._save.threads)
        names = [f"__{assignment.rank}_{number}.distcp" for number in range(len(shares))]
        if len(shares) > 1 and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Each thread has a current stream of its own, which does not wait for this one's.
            torch.cuda.current_stream().synchronize()
        written = in_threads(
            [
                partial(self._write_file, name, share, planner)
                for name, share in zip(names, shares, strict=True)
            ]
        )
        files = {name: file for name, (file, _) in zip(names, written, strict=True)}
        results = [result for _, of_file in written for result in of_file]
        differs = assignment.trees_crc != self._values.crc32
        trees = self._values.for_coordinator(differs)
        self._reached(Phase.WRITTEN)
        future: Future[list[WriteResult]] = Future()
        future.set_result(_Results(results, files, assignment.rank, trees))
        return future

    def _write_file(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> tuple[_File, list[WriteResult]]:
        location = cast(Location, self._location)
        results = []
        needed = sum(map(_bytes_of, items))
        with _full_disk_in_words(location, needed), location.create(name) as raw:
            stream = SummingStream(raw)
            for item in items:
                offset = stream.tell()
                data = own_memory(cast(torch.Tensor, planner.resolve_data(item)))
                torch.save(data, cast(BinaryIO, stream))
                length = stream.end_chunk()
                results.append(WriteResult(item.index, length, StorageInfo(name, offset, length)))
                self._wrote(length, self._pause)
        if self._save.verify:
            _verify_written(location, name, stream.sum, lambda _: self._wrote(0, self._pause))
        return _File(stream.sum, stream.chunks), results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata, values and manifest, and commit (coordinator)."""
        if self._attempt is None:
            raise RuntimeError("finish() ran before prepare_global_plan()")
        location = self._attempt.location
        ranks = sorted(cast(list[_Results], results), key=lambda of_rank: of_rank.rank)
        files = {name: file.sum for of_rank in ranks for name, file in of_rank.files.items()}
        chunks = {name: file.chunks for of_rank in ranks for name, file in of_rank.files.items()}
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {r.index: r.storage_data for of_rank in ranks for r in of_rank}
        metadata.storage_meta = None
        small: Mapping[str, bytes] = {
            CHUNKS: json.dumps(chunks).encode(),
            METADATA: pickle.dumps(metadata),
            VALUES: self._values.merged([of_rank.trees for of_rank in ranks]),
        }
        for name, data in small.items():
            with _full_disk_in_words(location, len(data)):
                files[name] = write_whole(location, name, data)
            if self._save.verify:
                _verify_written(location, name, files[name])
        said = self._save.metric, self._save.healthy
        manifest = Manifest(self._save.step, len(ranks), torch.__version__, files, *said)
        manifest.check_sizes(location)  # sees that every rank wrote where the coordinator looks
        self._attempt.commit(manifest, overwrite=self._save.overwrite)
        self.manifest = manifest

    def abandon(self) -> None:
        """Remove what a failed save wrote (does something on the coordinator only)."""
        if self._attempt is not None and self.manifest is None:
            self._attempt.abandon()


def in_threads(work: Sequence[Callable[[], T]]) -> list[T]:
    """Run all at once and return what they return, in their order.

    Raises:
        BaseException: the error of the first that failed, once all have ended.
    """
    if len(work) == 1:
        return [work[0]()]
    results: list[futures.Future[T]] = [futures.Future() for _ in work]
    threads = []
    for act, result in zip(work, results, strict=True):
        thread = Thread(target=_complete, args=(act, result), name="save-file", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # see Note [Python 3.12 starts no thread while it ends]
            _complete(act, result)
        else:
            threads.append(thread)
    # Also where one has failed: nothing may be written to a save that is abandoned.
    for thread in threads:
        thread.join()
    return [result.result() for result in results]


def _complete(act: Callable[[], T], result: futures.Future[T]) -> None:
    try:
        result.set_result(act())
    except BaseException as error:
        result.set_exception(error)


@contextmanager
def _full_disk_in_words(location: Location, needed: int) -> Iterator[None]:
    """Tell what is needed and what is free; torch.save hides the error behind one of its own."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and getattr(cause, "errno", None) not in _FULL:
            cause = cause.__cause__ or cause.__context__
        if not isinstance(cause, OSError) or not isinstance(location, LocalLocation):
            raise
        free = shutil.disk_usage(location.path).free
        raise CheckpointError(
            f"{location}: {os.strerror(cause.errno or 0)}: this rank writes {needed} bytes of "
            f"tensors and values there, and {free} bytes are free"
        ) from error


_FULL = (errno.ENOSPC, errno.EDQUOT)


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _shares(items: list[WriteItem], number: int) -> list[list[WriteItem]]:
    """Divide items among at most `number` files of about equal size; none without items."""
    shares: list[list[WriteItem]] = [[] for _ in range(min(number, len(items)))]
    if len(shares) == 1:
        return [items]
    sizes = [0] * len(shares)
    for item in sorted(items, key=_bytes_of, reverse=True):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(item)
        sizes[smallest] += _bytes_of(item)
    return shares


def _verify_written(
    location: Location, name: str, written: FileSum, moved: Callable[[int], None] = lambda _: None
) -> None:
    read_back = sum_of(location, name, from_disk=True, moved=moved)
    if read_back != written:
        raise CheckpointDamagedError(
            f"{location}/{name} reads back as {read_back.bytes} bytes with CRC-32 "
            f"{read_back.crc32:08x}, written were {written.bytes} bytes with {written.crc32:08x}: "
            "the disk or its connection is faulty"
        )
