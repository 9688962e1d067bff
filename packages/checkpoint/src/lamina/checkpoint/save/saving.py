"""One save from plan to commit, in the training loop's thread or beside it."""

import atexit
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lamina.checkpoint.progress import Progress, SaveReport
from lamina.checkpoint.ranks import Ranks, own_error
from lamina.checkpoint.save.phases import Phases
from lamina.checkpoint.save.staging import Stage, Staged, StagedPlanner, signature
from lamina.checkpoint.save.writer import Save, Writer
from lamina.checkpoint.storage.locations import Location
from lamina.checkpoint.storage.manifest import Manifest
from lamina.checkpoint.storage.stores import Store
from lamina.collectives.engine import Job
from lamina.mesh.engine import ends_before_groups, group_ref, live_group

_PATIENCE = 8.0  # seconds without progress, when the program ends
_PLANS = 7.0  # seconds more until ranks have planned, as some may still come to the save


class Saver:
    """Writes saves, one at a time; `in_background` in a thread, over a process group of its own.

    `committed` is called on the first rank after each commit, with what was committed. It is a
    method, whose object is held by saves that are being written only. A bar of progress is shown
    there too.
    """

    def __init__(
        self,
        store: Store,
        ranks: Ranks,
        in_background: bool,
        committed: Callable[[Manifest], None],
        progress: bool,
    ) -> None:
        # Held strongly it would be a cycle, which keeps the sockets of groups open until Python
        # collects it. Other ranks learn from these sockets that this one has left.
        self._committed = weakref.WeakMethod(committed)
        self._store, self._ranks = store, ranks
        self._progress = progress
        self._stage = Stage() if in_background else None
        group = ranks.second_group() if in_background else ranks.group
        self._group = group_ref(group)
        directory = str(store.expected(0).address)
        self._background = Background()
        self._phases = Phases(group, directory)
        self._background.words = self._phases.words
        if in_background:
            ends_before_groups(self._background)
        self.last: SaveReport | None = None

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory that this rank keeps for staging."""
        return 0 if self._stage is None else self._stage.bytes

    def wait(self) -> None:
        """Wait for the save in the background, and raise what it raised."""
        self._background.wait()

    def close(self) -> None:
        """Wait, and let go of the memory for staging."""
        try:
            self.wait()
        finally:
            if self._stage is not None:
                self._stage.release()

    def save(self, save: Save) -> SaveReport:
        """Write, or stage and begin to write."""
        if self._stage is None:
            return self._write(save, save.offered.tensors, DefaultSavePlanner(), blocked=None)[1]
        return self._begin(save, self._stage)

    def _begin(self, save: Save, stage: Stage) -> SaveReport:
        ranks = self._ranks
        offer = ranks.together(lambda: stage.plan(save.offered.tensors, ranks.is_first))
        (changed,) = ranks.any([not stage.is_known(offer)])
        staged: Staged = ranks.together(lambda: stage.copy(offer, known=not changed))
        blocked = time.perf_counter() - save.started
        # The thread holds copies only: what was made for this save may go before it is written.
        without_tensors = replace(save, offered=replace(save.offered, tensors={}))
        offered = signature(offer[1])

        def write(_committed: object = self._committed()) -> None:
            writer, _ = self._write(without_tensors, {}, StagedPlanner(staged), blocked=blocked)
            if changed:
                stage.finished(offered, writer.assigned)

        path = self._store.expected(save.step).address
        self.last = SaveReport(save.step, path, staged.bytes, blocked, blocked, complete=False)
        self._background.start(write)
        return self.last

    def _write(
        self,
        save: Save,
        tensors: dict[str, Any],
        planner: DefaultSavePlanner,
        blocked: float | None,
    ) -> tuple[Writer, SaveReport]:
        shown = self._progress and self._ranks.is_first and blocked is None
        bar = Progress(f"saving step {save.step}", _bytes(tensors) if shown else 0, shown)

        def wrote(size: int, pause: float) -> None:
            self._background.moved_at = time.monotonic() + pause
            bar.advance(size)

        writer = Writer(self._store, save, wrote, self._phases.reach)
        wrote(0, _PLANS)
        try:
            with self._phases.watched(save.step, self._background.idle):
                metadata = _dcp_save(tensors, writer, planner, live_group(self._group))
        except BaseException as error:
            writer.abandon()
            raise own_error(f"saving step {save.step}", error) from error
        finally:
            bar.close()
        location = cast(Location, writer.final)
        size = _size(location, metadata) if writer.manifest is None else writer.manifest.bytes
        if writer.manifest is not None:
            self._retire(writer.manifest)
        seconds = time.perf_counter() - save.started
        blocked = seconds if blocked is None else blocked
        self.last = SaveReport(save.step, location.address, size, seconds, blocked, complete=True)
        return writer, self.last

    def _retire(self, saved: Manifest) -> None:
        """Delete what is no longer kept. The save is complete: no failure of this is its own."""
        committed = self._committed()
        if committed is None:
            return
        try:
            committed(saved)
        except Exception as error:
            warnings.warn(
                f"step {saved.step} is saved, but older checkpoints could not be deleted: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )


def _dcp_save(
    tensors: dict[str, Any],
    writer: Writer,
    planner: DefaultSavePlanner,
    group: dist.ProcessGroup | None,
) -> Metadata:
    with warnings.catch_warnings():
        if group is None:  # a world of one has no process group, which here is a choice
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        saved: Metadata = dcp_save(
            tensors,
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )
    return saved


def _size(location: Location, metadata: Metadata) -> int:
    """Bytes of a complete checkpoint on a rank that did not commit it.

    That rank may not see the manifest (another machine's cache, a timeout): then its tensors'.
    """
    try:
        return Manifest.read(location).bytes
    except Exception:  # the checkpoint is complete whatever this rank sees of it
        return sum(info.length for info in (metadata.storage_data or {}).values())


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, dict):
        return sum(_bytes(value) for value in tensors.values())
    local = tensors.to_local() if hasattr(tensors, "to_local") else tensors
    return int(local.numel() * local.element_size())


class Background:
    """Runs one task at a time on another thread.

    A program that ends without waiting still finishes its save, and a failure that nobody has
    collected by then is printed. A save without progress (another rank is stopped) is given up, and
    ends the process: its thread waits in code that cannot be told to stop.

    The task made progress last at `moved_at`, or later if it may pause without being stuck. `words`
    says what it waits for.
    """

    # Note [Threads end before atexit]
    # Functions of `atexit` run after Python has joined its threads, and then no thread starts any
    # more. So a save that was waited for there could not write in several. What is registered with
    # `threading` runs before. See also Note [Python 3.12 starts no thread while it ends].

    def __init__(self) -> None:
        self.moved_at = 0.0
        self.words: Callable[[], str] = str
        self._job: Job | None = None
        self._failure: list[BaseException] = []
        self._last_words = weakref.finalize(self, _tell, self._failure)
        threading._register_atexit(_finish_at_exit, weakref.ref(self))  # type: ignore[attr-defined]

    def start(self, task: Callable[[], object]) -> None:
        """Run a task; RuntimeError if another one runs."""
        if self._job is not None and not self._job.wait(0):
            raise RuntimeError("a task is running: wait() first")
        failure, self.moved_at = self._failure, time.monotonic()

        def run() -> None:
            try:
                task()
            except BaseException as error:
                failure.append(error)

        self._job = Job(run)
        self._job.start()

    def idle(self) -> float:
        """Seconds without progress; below 0 while the task may pause."""
        return time.monotonic() - self.moved_at

    def finish(self, patience: float) -> bool:
        """Wait for the task as long as it makes progress, and return whether it has ended."""
        while self._job is not None and not self._job.wait(0.05):
            if self.idle() > patience:
                return False
        return True

    def wait(self) -> None:
        """Wait for the task, and raise what it raised; each failure is raised once."""
        if self._job is not None:
            self._job.wait()
            self._job = None
        if self._failure:
            raise self._failure.pop()


def _finish_at_exit(reference: weakref.ref[Background]) -> None:
    background = reference()
    if background is not None and not background.finish(_PATIENCE):
        # The program's own threads end before that.
        atexit.register(_give_up, background.idle(), background.words())


def _give_up(idle: float, words: str) -> None:
    text = f"a save in the background made no progress for {idle:.0f} s: it is given up"
    text += f"; {words}" if words else ""
    print(f"lamina.checkpoint: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def _tell(failure: list[BaseException]) -> None:
    for error in failure:
        print(f"lamina.checkpoint: a save in the background failed: {error}", file=sys.stderr)
