"""CheckpointManager: the one object a training loop needs."""

from __future__ import annotations

import math
import operator
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lamina.checkpoint.errors import CheckpointDamagedError, CheckpointNotFoundError
from lamina.checkpoint.load.loading import load, open_step
from lamina.checkpoint.load.restore_plan import Selection
from lamina.checkpoint.progress import RestoreReport, SaveReport
from lamina.checkpoint.ranks import Ranks
from lamina.checkpoint.save.offer import take
from lamina.checkpoint.save.saving import Saver
from lamina.checkpoint.save.writer import Save
from lamina.checkpoint.state.cut_tensors import Hints
from lamina.checkpoint.state.state import check_entries
from lamina.checkpoint.storage.locations import Location, is_url, local_path
from lamina.checkpoint.storage.manifest import Manifest
from lamina.checkpoint.storage.retention import Kept, Retention, whole
from lamina.checkpoint.storage.scrubber import Scrubber
from lamina.checkpoint.storage.stores import store_of
from lamina.mesh import ParallelMesh
from lamina.mesh.engine import check_arguments

_NONE = -1  # a step never is


class CheckpointManager:
    """Saves and restores training states in one directory.

    A checkpoint is complete or absent: it is written under a temporary name, synced, read back
    and compared with checksums, and then renamed. Leftovers of killed writers are removed when a
    manager is made (at a URL, before its first save). Tensors are stored by
    torch.distributed.checkpoint, of sharded tensors each rank its part, so that any number of ranks
    and any sharding can load them; other values are stored as JSON. Nothing in a checkpoint is ever
    executed.

    `save`, `restore` and making a manager are collective: every rank calls them, with the same
    arguments. `latest` and `list` only look at the directory.

    Args:
        directory: made if absent; on a file system that every rank sees. Or a URL of any protocol
            that fsspec knows: there a checkpoint is complete once its manifest is there, which is
            written last, and only one job at a time may write.
        keep_last: how many checkpoints to keep, the newest; None keeps all, or with one of the
            next two the newest only.
        keep_every: keep those whose step is a multiple of this.
        keep_best: keep so many of those that were saved with a metric.
        best_is: whether a small ("min") or a large ("max") metric is good.
        async_save: `save` returns once the state has been copied to CPU memory (pinned with a GPU;
            the buffers are kept for the next save) and writes it in a thread, over a process group
            of its own. The caller may change tensors at once. A failure is raised by the next
            `save`, `restore`, `wait` or `close`. The next save waits for this one, so at most one
            copy exists: of what this rank writes, in the first save of all that it holds.
        group: the ranks that save together; None is all.
        mesh: what the model was built on; needed only for parameters that are marked as cut
            (`lamina.mesh.mark`) in modules that don't hold their axis themselves, and for `PerRank`
            to know each rank's place along pp, cp and tp where no module in the state holds these.
        rename: gives the name in the whole model for a name that a module's parameter or buffer
            has on this rank. For experts that are modules of their own and numbered from 0 on
            every ep rank. They are saved and loaded under the new names; the modules keep theirs.
        verify: read every file back from the disk before the checkpoint counts as complete.
        threads: threads (and files) that write per rank.
        progress: show a bar for saves and loads above a second, on the first rank, on a terminal.
        check_replicas: before writing, compare the first 4 KiB of every weight and state that
            several ranks hold as a whole: different tensors under one name would be lost. False
            stores one of them.
        scrub_rate: bytes per second that the first rank reads of the kept checkpoints, in a thread,
            from its first save until `close`. One that has rotted is told of in a warning, counts
            for no rule of keeping, and may be saved again. None reads nothing.

    Attributes:
        last_save: what the last save cost; not `complete` while it is being written.
        last_restore: what the last restore did.

    Raises:
        ValueError: a number below 1.
        DisagreementError: another directory, or other settings, than other ranks have.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = CheckpointManager(folder, keep_last=2)
        ...     report = manager.save(1, {"model": model})
        ...     print(manager.latest(), manager.restore({"model": model}))
        1 1
    """

    @check_arguments
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best_is: Literal["min", "max"] = "min",
        async_save: bool = False,
        group: dist.ProcessGroup | None = None,
        mesh: ParallelMesh | DeviceMesh | None = None,
        rename: Callable[[str], str] | None = None,
        verify: bool = True,
        threads: int = 1,
        progress: bool = True,
        check_replicas: bool = True,
        scrub_rate: float | None = None,
    ) -> None:
        kept = Kept(keep_last, keep_every, keep_best, best_is)
        if threads < 1:
            raise ValueError(f"threads is {threads}: it must be at least 1")
        if scrub_rate is not None and not scrub_rate > 0:
            raise ValueError(
                f"scrub_rate is {scrub_rate}: it must be above 0, or None for no reads"
            )
        local = None if is_url(directory) else local_path(directory).absolute()
        self.directory: Path | str = str(directory) if local is None else local
        self.async_save, self.verify, self.threads = async_save, verify, threads
        self.last_restore: RestoreReport | None = None
        self._progress, self._check_replicas = progress, check_replicas
        self._hints = Hints(mesh, str if rename is None else rename)
        self._store = store_of(directory)
        self._retention = Retention(self._store, kept)
        self._ranks = Ranks(group)
        self._ranks.require_same(
            "CheckpointManager",
            directory=str(self.directory),
            kept=kept,
            async_save=async_save,
            verify=verify,
            check_replicas=check_replicas,
        )
        self._cleaned = False
        self._ranks.together(self._clean if self._store.has_locks else self._note)
        damaged = self._retention.damaged
        self._scrubber = Scrubber(self._store, damaged, scrub_rate) if scrub_rate else None
        self._saver = Saver(self._store, self._ranks, async_save, self._committed, progress)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def last_save(self) -> SaveReport | None:
        """What the last save cost; of one in the background, until it is `complete`, so far."""
        return self._saver.last

    @property
    def staged_bytes(self) -> int:
        """Bytes of CPU memory that this rank keeps for staging (`async_save`)."""
        return self._saver.staged_bytes

    def list(self) -> list[int]:
        """Return the steps of all whole checkpoints, ascending (every file there, and as long)."""
        return [step for step, location in self._store.locations().items() if whole(location)]

    def latest(self) -> int | None:
        """Return the newest step that has a whole checkpoint, or None."""
        locations = self._store.locations()
        return next((step for step in reversed(locations) if whole(locations[step])), None)

    def wait(self) -> None:
        """Return when no save is in progress.

        Raises:
            CheckpointError: the save in the background failed; raised once.
        """
        self._saver.wait()

    def close(self) -> None:
        """Wait for the save in the background, raise its failure, let go of staging memory."""
        try:
            self._saver.close()
        finally:
            if self._scrubber is not None:
                self._scrubber.stop()

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        metric: float | None = None,
        healthy: bool | None = None,
        overwrite: bool = False,
    ) -> SaveReport:
        """Save a state.

        When this returns, the checkpoint is complete and on the disk; with `async_save`, it is
        staged, and being written.

        Args:
            step: training step, 0 or more: an int, or what counts as one (NumPy's, a tensor).
            state: name -> object with state_dict and load_state_dict (model, optimizer, scheduler,
                loader), or plain value: numbers, strings, bytes, tensors, and lists, tuples, sets
                and dicts of them. Plain values are taken from the first rank; `PerRank` wraps what
                differs from rank to rank.
            metric: how good the state is, for `keep_best`: a number, or a tensor of one; the first
                rank's counts.
            healthy: whether the last step was (`lamina.ddp.HealthMonitor`); stored with the
                checkpoint. Of those saved with True the newest is never deleted, and besides the
                checkpoint just saved the one before it: damage may show in the next step only.
            overwrite: replace a checkpoint of the same step.

        Returns:
            Path, size and times.

        Raises:
            ValueError: a negative step, or a metric that is no number.
            TypeError: something that can't be stored without pickle, by name.
            FileExistsError: the step has been saved (and overwrite is False). A checkpoint of the
                step that is not whole, unhealthy, or that this manager found damaged, is replaced.
            CheckpointError: a rank could not write, or what it wrote did not read back, or ranks
                hold different weights under one name, or other entries; with `async_save`, in the
                save before.
        """
        started = time.perf_counter()

        def ready() -> tuple[int, float | None]:
            """Check the arguments, and end what was before."""
            given = as_step(step), as_metric(metric)
            self.wait()
            self._clean()
            return given

        step, metric = self._ranks.together(ready)
        self._ranks.require_same("save", step=step, overwrite=overwrite, healthy=healthy)
        check_entries(state, self._ranks)
        if not overwrite:
            overwrite = self._ranks.together(lambda: self._replaces(step))
        first, check = self._ranks.is_first, self._check_replicas
        offered = self._ranks.together(lambda: take(state, self._hints, first=first, check=check))
        return self._saver.save(
            Save(step, offered, overwrite, self.verify, self.threads, metric, healthy, started)
        )

    def restore(
        self,
        state: MutableMapping[str, object],
        step: int | None = None,
        *,
        default: int | None = None,
        strict: bool = True,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        allow_cast: bool = False,
        fallback: bool = False,
        healthy: bool = False,
    ) -> int:
        """Load a checkpoint into `state`.

        Objects get load_state_dict; plain values are replaced in the dict. Entries of the
        checkpoint that `state` does not have are left alone. Checksums of all that a rank
        needs are compared on that rank before any tensor changes; if one differs, every rank
        raises.

        Args:
            state: as for `save`. On any number of ranks, cut in any way.
            step: which checkpoint; None is the newest, damaged or not.
            default: returned, with nothing loaded, if there is no checkpoint at all, not even a
                damaged one; None raises.
            strict: refuse names that are on one side only (added or removed layers). With False
                they are left as they are, and `last_restore` lists them.
            include: a pattern (`fnmatch`) of names to load, such as "model.blocks.*" or
                "optimizer", or several; a name selects all beneath it. Empty loads all.
            exclude: a pattern of names to leave alone, or several.
            allow_cast: convert tensors that are stored in another dtype.
            fallback: pass over a damaged checkpoint, or one that lacks a file, with a warning, and
                load the newest good one before it.
            healthy: without a step: pass over checkpoints that were saved with `healthy=False`, and
                warn of them. If there are no others, it is as if there were none.

        Returns:
            The step of the checkpoint that was loaded.

        Raises:
            CheckpointNotFoundError: no such checkpoint.
            CheckpointDamagedError: a file is missing or altered, by name.
            CheckpointUnsafeError: the checkpoint names code.
            CheckpointMismatchError: names, shapes or dtypes that don't fit, by name.
        """
        self._ranks.together(self.wait)
        include, exclude = (
            (given,) if isinstance(given, str) else tuple(given) for given in (include, exclude)
        )
        how = {"strict": strict, "include": include, "exclude": exclude}
        how |= {"fallback": fallback, "healthy": healthy}
        self._ranks.require_same(
            "restore", step=step, default=default, allow_cast=allow_cast, **how
        )
        check_entries(state, self._ranks)
        selection = Selection(strict, include, exclude, allow_cast)
        chosen = self._agree_on_step(step, healthy=healthy)
        if chosen is None and default is not None:
            return default
        choices = () if chosen is None else chain([chosen], self._below(chosen, healthy=healthy))
        remedy = "; to begin anew there, pass default=0"
        return self._load_good(choices, state, selection, fallback=fallback, remedy=remedy)

    def back(self, state: MutableMapping[str, object], before: int) -> int:
        """Return to the last healthy checkpoint, and delete those after it (collective).

        Damaged checkpoints are passed over, with a warning.

        Args:
            state: as for `restore`.
            before: the step whose weights gave a loss or gradients that are not healthy. Its own
                checkpoint is taken only if there is none before it.

        Returns:
            The step of the checkpoint that was loaded.

        Raises:
            CheckpointNotFoundError: there is no good one.
            CheckpointMismatchError: names, shapes or dtypes that don't fit, by name.
        """
        self._ranks.together(self.wait)
        self._ranks.require_same("back", before=before)
        check_entries(state, self._ranks)
        own = (step for step in self._below(before + 1, healthy=True) if step == before)
        choices = chain(self._below(before, healthy=True), own)
        remedy = f" that is healthy, up to step {before}: save one before the first step"
        step = self._load_good(choices, state, Selection(), fallback=True, remedy=remedy)

        def forget() -> None:
            """Delete what the run that goes on from here has not made."""
            for later in self._store.locations() if self._ranks.is_first else ():
                if later > step:
                    self._store.remove(later)

        self._ranks.together(forget)
        return step

    def _load_good(
        self,
        choices: Iterable[int],
        state: MutableMapping[str, object],
        selection: Selection,
        *,
        fallback: bool,
        remedy: str,
    ) -> int:
        """Load the first checkpoint or, with `fallback`, the first undamaged one."""
        skipped: dict[int, str] = {}
        for chosen in choices:
            opened, how = partial(open_step, self._store, chosen), (self._ranks, self._hints)
            try:
                report = load(opened, state, selection, *how, progress=self._progress)
            except CheckpointDamagedError as damage:  # the same kind of error on all ranks
                self._retention.damaged.add(chosen)
                if not fallback:
                    raise
                skipped[chosen] = str(damage)
                warnings.warn(f"step {chosen} is passed over: {damage}", stacklevel=4)
            else:
                self.last_restore = replace(report, skipped=skipped)
                return chosen
        raise CheckpointNotFoundError(
            f"no complete checkpoint in {self.directory}"
            + "".join(f"; step {n}: {why}" for n, why in skipped.items())
            + ("" if skipped else remedy)
        )

    def _committed(self, saved: Manifest) -> None:
        self._retention.retire(saved)
        if self._scrubber is not None:  # on the first rank, as only there a save is committed
            self._scrubber.start()

    def _note(self) -> None:
        if self._ranks.is_first:
            self._store.note_unfinished()

    def _clean(self) -> None:
        if self._ranks.is_first and not self._cleaned:
            self._store.clean()
            self._cleaned = True

    def _replaces(self, step: int) -> bool:
        """Whether what is there of a step is no use: a run that went back comes by it again."""
        if not self._ranks.is_first or not self._store.has(step):
            return False
        manifest = None if step in self._retention.damaged else whole(self._store.location(step))
        if manifest is not None and manifest.healthy is not False:
            raise FileExistsError(
                f"{self._store.location(step)} exists: save with overwrite=True to replace it"
            )
        return True

    def _below(self, below: int, *, healthy: bool) -> Iterator[int]:
        """Yield steps that have a checkpoint, from the newest below a step down (collective)."""
        while (step := self._agree_on_step(None, below, healthy=healthy)) is not None:
            yield step
            below = step

    def _agree_on_step(
        self, step: int | None, below: float = math.inf, *, healthy: bool = False
    ) -> int | None:
        """Let the first rank choose: directories seen from two machines may differ for a moment.

        The newest is the newest that has its name: one that lacks a file must not be passed over
        without a word.
        """

        def chosen() -> int | None:
            if not self._ranks.is_first:
                return None
            locations = self._store.locations()
            newer = [] if step is None else [other for other in locations if other > step]
            if newer and not self._retention.kept.all:
                warnings.warn(
                    f"there are newer checkpoints than step {step}: {newer}. If training goes on "
                    "from here, delete them: keep_last counts them, a restore without step takes "
                    "them, and a save at one of these steps is refused",
                    stacklevel=5,
                )
            if step is not None:
                return step
            usable = (s for s in reversed(locations) if s < below)
            newest = next((s for s in usable if not healthy or _may_be_healthy(locations[s])), None)
            passed = [s for s in locations if newest is None or s > newest]
            if healthy and passed and math.isinf(below):
                why = "because they were saved with healthy=False"
                warnings.warn(f"steps {passed} are passed over, {why}", stacklevel=5)
            return newest

        choice = self._ranks.together(chosen)
        value = self._ranks.first(_NONE if choice is None else choice)
        return None if value == _NONE else value


def _may_be_healthy(location: Location) -> bool:
    """Whether a checkpoint was not saved as unhealthy; of a damaged one nobody knows."""
    try:
        return Manifest.read(location).healthy is not False
    except CheckpointDamagedError:
        return True


def as_step(step: Any) -> int:
    """Return a training step as an int; ValueError if it is no integer, or negative."""
    try:
        number = int(operator.index(step))
    except TypeError:
        raise ValueError(f"step is {step!r}: it must be an integer") from None
    if number < 0:
        raise ValueError(f"step is {number}: it must be 0 or more")
    return number


def as_metric(metric: Any) -> float | None:
    """Return a metric as a float, or None if it is not finite; ValueError if it is no number."""
    if metric is None:
        return None
    try:
        number = float(metric.detach() if isinstance(metric, torch.Tensor) else metric)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"metric is {metric!r:.80}, which is no float: {error}") from None
    return number if math.isfinite(number) else None
