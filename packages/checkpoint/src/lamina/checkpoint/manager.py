"""CheckpointManager: the one object a training loop needs."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lamina.checkpoint.directory import clean, complete_path, complete_steps, retire
from lamina.checkpoint.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
)
from lamina.checkpoint.manifest import Manifest
from lamina.checkpoint.reader import Reader, read_metadata
from lamina.checkpoint.state import Plan, take
from lamina.checkpoint.values import Json
from lamina.checkpoint.writer import METADATA, VALUES, Writer
from lamina.collectives import all_reduce_small, broadcast

T = TypeVar("T")
_NONE = -1  # a step never is


@dataclass(frozen=True)
class SaveReport:
    """What a save cost.

    Attributes:
        step: training step.
        path: the complete checkpoint.
        bytes: of all its files.
        seconds: that the training loop waited.

    """

    step: int
    path: Path
    bytes: int
    seconds: float


class CheckpointManager:
    """Saves and restores training states in one directory.

    A checkpoint is complete or absent: it is written under a temporary name, synced, read back
    and compared with checksums, and then renamed. Leftovers of killed writers are removed when a
    manager is made. Tensors are stored by torch.distributed.checkpoint, of sharded tensors each
    rank its part, so that any number of ranks and any sharding can load them; other values are
    stored as JSON. Nothing in a checkpoint is ever executed.

    `save`, `restore` and making a manager are collective: every rank calls them, with the same
    arguments. `latest` and `list` only look at the directory.

    Args:
        directory: made if absent; on a file system that every rank sees.
        keep_last: how many checkpoints to keep, the newest; None keeps all.
        async_save: write in the background. Not in this version: True is refused.
        group: the ranks that save together; None is all.
        verify: read every file back from the disk before the checkpoint counts as complete.
        threads: threads (and files) that write per rank.

    Raises:
        ValueError: keep_last or threads below 1.
        NotImplementedError: async_save=True.

    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int | None = None,
        async_save: bool = False,
        group: dist.ProcessGroup | None = None,
        verify: bool = True,
        threads: int = 1,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(
                f"keep_last is {keep_last}: it must be at least 1, or None to keep all"
            )
        if threads < 1:
            raise ValueError(f"threads is {threads}: it must be at least 1")
        if async_save:
            raise NotImplementedError(
                "async_save=True is not in lamina-checkpoint 0.1: saves are synchronous; pass False"
            )
        self.directory = Path(directory)
        self.keep_last = keep_last
        self.verify = verify
        self.threads = threads
        self.last_save: SaveReport | None = None
        started = dist.is_available() and dist.is_initialized()
        self._group = (group or dist.group.WORLD) if started else None
        self._coordinator = self._group is None or self._group.rank() == 0
        self._together(self._clean)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.wait()

    def list(self) -> list[int]:
        """Return the steps of all whole checkpoints, ascending (every file there, and as long)."""
        return [step for step in complete_steps(self.directory) if self._is_whole(step)]

    def latest(self) -> int | None:
        """Return the newest step that has a whole checkpoint, or None."""
        for step in reversed(complete_steps(self.directory)):
            if self._is_whole(step):
                return step
        return None

    def wait(self) -> None:
        """Return when no save is in progress (at once: saves are synchronous in this version)."""

    def save(
        self, step: int, state: Mapping[str, object], *, overwrite: bool = False
    ) -> SaveReport:
        """Save a state; when this returns, the checkpoint is complete and on the disk.

        Args:
            step: training step, 0 or more.
            state: name -> object with state_dict and load_state_dict (model, optimizer, scheduler,
                loader), or plain value: numbers, strings, bytes, tensors, and lists, tuples, sets
                and dicts of them. Plain values are taken from the first rank.
            overwrite: replace a checkpoint of the same step.

        Returns:
            Path, size and time.

        Raises:
            ValueError: a negative step.
            TypeError: something that can't be stored without pickle, by name.
            FileExistsError: the step has been saved (and overwrite is False).
            CheckpointError: a rank could not write, or what it wrote did not read back.

        """
        if step < 0:
            raise ValueError(f"step is {step}: it must be 0 or more")
        started = time.perf_counter()
        if not overwrite:
            self._together(lambda: self._refuse_existing(step))
        tensors, values = self._together(lambda: take(state))
        writer = Writer(
            self.directory,
            step,
            values,
            overwrite=overwrite,
            verify=self.verify,
            threads=self.threads,
        )
        try:
            with _without_dcp_warnings():
                dcp_save(
                    tensors,
                    storage_writer=writer,
                    process_group=self._group,
                    no_dist=self._group is None,
                )
        except BaseException as error:
            writer.abandon()
            raise _own_error(f"saving step {step}", error) from error
        path = complete_path(self.directory, step)
        size = Manifest.read(path).bytes
        if self._coordinator:
            retire(self.directory, self.keep_last, self._is_whole)
        self.last_save = SaveReport(step, path, size, time.perf_counter() - started)
        return self.last_save

    def restore(
        self,
        state: MutableMapping[str, object],
        step: int | None = None,
        *,
        default: int | None = None,
        allow_cast: bool = False,
    ) -> int:
        """Load a checkpoint into `state`.

        Objects get load_state_dict; plain values are replaced in the dict. Entries of the
        checkpoint that `state` does not have are left alone. Checksums of all files that a rank
        needs are compared on that rank before any tensor changes; if one differs, every rank
        raises.

        Args:
            state: as for `save`. On any number of ranks, cut in any way.
            step: which checkpoint; None is the newest.
            default: returned, with nothing loaded, if there is no checkpoint at all; None raises.
            allow_cast: convert tensors that are stored in another dtype.

        Returns:
            The step of the checkpoint that was loaded.

        Raises:
            CheckpointNotFoundError: no such checkpoint.
            CheckpointDamagedError: a file is missing or altered, by name.
            CheckpointUnsafeError: the checkpoint names code.
            CheckpointMismatchError: names, shapes or dtypes that don't fit, by name.

        """
        chosen = self._agree_on_step(step)
        if chosen is None:
            if default is not None:
                return default
            raise CheckpointNotFoundError(f"no complete checkpoint in {self.directory}")
        path = complete_path(self.directory, chosen)
        manifest, metadata, trees = self._together(lambda: self._open(chosen))
        plan = self._together(lambda: Plan(state, trees, metadata, allow_cast=allow_cast))
        if plan.tensors:
            try:
                with _without_dcp_warnings():
                    dcp_load(
                        dict(plan.tensors),
                        storage_reader=Reader(path, metadata, manifest),
                        planner=DefaultLoadPlanner(flatten_state_dict=False),
                        process_group=self._group,
                        no_dist=self._group is None,
                    )
            except BaseException as error:
                raise _own_error(f"restoring step {chosen}", error) from error
        self._together(plan.apply)
        return chosen

    def _clean(self) -> None:
        if self._coordinator:
            clean(self.directory)

    def _refuse_existing(self, step: int) -> None:
        path = complete_path(self.directory, step)
        if self._coordinator and path.exists():
            raise FileExistsError(f"{path} exists: save with overwrite=True to replace it")

    def _is_whole(self, step: int) -> bool:
        path = complete_path(self.directory, step)
        try:
            Manifest.read(path).check_sizes(path)
        except CheckpointDamagedError:
            return False
        return True

    def _agree_on_step(self, step: int | None) -> int | None:
        """Let the first rank choose: directories seen from two machines may differ for a moment."""
        found = step if step is not None else self.latest()
        chosen = torch.tensor([_NONE if found is None else found], dtype=torch.int64)
        broadcast(chosen, self._group, src=0).wait()
        value = int(chosen)
        if value == _NONE:
            return None
        return value

    def _open(self, step: int) -> tuple[Manifest, Metadata, dict[str, Json]]:
        """Read and check the small files of a checkpoint."""
        path = complete_path(self.directory, step)
        if not path.is_dir():
            raise CheckpointNotFoundError(
                f"no complete checkpoint of step {step} in {self.directory}; there are "
                f"{self.list() or 'none'}"
            )
        manifest = Manifest.read(path)
        manifest.check_sizes(path)
        for name in (METADATA, VALUES):
            manifest.check_file(path, name)
        trees = json.loads((path / VALUES).read_bytes())
        return manifest, read_metadata(path), trees

    def _together(self, work: Callable[[], T]) -> T:
        """Run `work`; if it fails on any rank, raise on every rank instead of letting some wait."""
        failure: BaseException | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        failed = torch.zeros(1 if self._group is None else self._group.size(), dtype=torch.uint8)
        failed[0 if self._group is None else self._group.rank()] = failure is not None
        all_reduce_small([failed], self._group, op="max")
        if failure is not None:
            raise failure
        if failed.any():
            raise CheckpointError(
                f"rank {int(failed.nonzero()[0])} of the group failed; its own error says why"
            )
        return cast(T, result)


class _without_dcp_warnings(warnings.catch_warnings):  # noqa: N801 (reads as a statement)
    """DCP warns that a world of one has no process group; here that is a choice."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _own_error(doing: str, error: BaseException) -> BaseException:
    """Turn DCP's collected failures into this layer's errors; others pass as they are."""
    if not isinstance(error, CheckpointException):
        return error
    rank, (first, trace) = min(error.failures.items())
    ranks = ", ".join(map(str, sorted(error.failures)))
    if isinstance(first, (CheckpointError, FileExistsError)):
        return type(first)(f"{doing} failed on rank {ranks}: {first}")
    where = "".join(trace.format()[-1:]).strip() if trace else "unknown place"
    return CheckpointError(
        f"{doing} failed on rank {ranks}; rank {rank}: {type(first).__name__}: {first} ({where})"
    )
