"""The two kinds of directory of checkpoints, and how a checkpoint becomes complete in each.

On a file system a checkpoint is written under another name:

    step-00000100/           complete: it got this name only after everything in it was verified
    .making-00000200-9f01/   about to be `.writing-`: its lock is being taken
    .writing-00000200-ab12/  being written, or left by a killed writer
    .replaced-00000100-cd34/ the old checkpoint of a step while a new one takes its name
    .deleting-00000050-ef56/ on its way out

A live writer holds a lock on a file in its `.writing-` directory; the kernel drops the lock of a
killed one, and that is how the next start tells a leftover from a write in progress. So a directory
gets that name only once its lock is held, and a writer whose directory is gone before that tries
again.

Note [A commit is a rename]
A rename within a directory is atomic, so a reader sees a whole checkpoint or none. It is in memory
only until the directory is synced, and it cannot replace a directory that is not empty. So a commit
syncs the new directory, moves an old checkpoint of the step out of the way, renames, and syncs the
directory above. A kill between the two renames leaves `.replaced-` without a `step-`, and the next
start renames it back. After the commit's rename no failure may remove the new checkpoint, as
it may be the only one. See docs/decisions/0701-commit-rides-on-dcp.md.

In an object store nothing can be renamed, but one object appears whole or not at all: there a
checkpoint is complete once its manifest is there, which is written last.

    step-00000100/            an attempt; complete if it has manifest.json
    step-00000100-1/          the next attempt at the same step: the highest complete one counts

An object store has no locks either, so nobody can tell a writer at work from one that was killed: a
manager notes what is unfinished when it is made and deletes that before its first save, if it still
is; and one job at a time may write to a URL.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import warnings
from pathlib import Path

from lamina.checkpoint.storage.locations import (
    LocalLocation,
    Location,
    RemoteLocation,
    filesystem,
    is_url,
    local_path,
    write_whole,
)
from lamina.checkpoint.storage.manifest import MANIFEST, Manifest

_COMPLETE = re.compile(r"step-(\d{8,})")
_PASSING = re.compile(r"\.(making|writing|replaced|deleting)-(\d{8,})-[0-9a-f]{8}")
_LOCK = ".lock"


def _complete_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _passing_path(root: Path, kind: str, step: int) -> Path:
    return root / f".{kind}-{step:08d}-{secrets.token_hex(4)}"


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable: a rename is only in memory until then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse to sync a directory; their renames are synchronous.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _make(root: Path) -> None:
    """Make a directory, with those above it, so that a power cut leaves none of them nameless."""
    made = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for path in made:
        with contextlib.suppress(PermissionError):  # one may write where one may not read
            fsync_directory(path.parent)


class WritingDirectory:
    """The coordinator's hold on one `.writing-` directory, from its making to its rename.

    `final` is the checkpoint's own location, before it is committed too.
    """

    def __init__(self, root: Path, step: int) -> None:
        self.root = root
        self.step = step
        self.final = LocalLocation(_complete_path(root, step))
        self._committed = False
        _make(root)
        self.path = _passing_path(root, "writing", step)
        self._lock = -1
        while self._lock < 0:
            # Until its lock is held, another manager may take a directory for a leftover.
            making = _passing_path(root, "making", step)
            making.mkdir()
            with contextlib.suppress(FileNotFoundError):
                self._take_lock(making)

    def _take_lock(self, making: Path) -> None:
        """Give a directory its name while its lock is held."""
        lock = os.open(making / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            warnings.warn(
                f"{self.path} is on a file system without locks ({error}): don't start a second "
                "CheckpointManager on this directory while one writes",
                stacklevel=2,
            )
        try:
            making.rename(self.path)
        except OSError:
            os.close(lock)
            raise
        self._lock = lock

    @property
    def location(self) -> LocalLocation:
        """Where to write; the checkpoint's own location once it is committed."""
        return LocalLocation(self.path)

    def commit(self, manifest: Manifest, *, overwrite: bool) -> None:
        """Write the manifest and give the directory its complete name, durably.

        See Note [A commit is a rename]. Without `overwrite`, FileExistsError if the step is there
        already.
        """
        manifest.write(self.location)
        final = self.final.path
        fsync_directory(self.path)
        old: Path | None = None
        if final.exists():
            if not overwrite:
                raise FileExistsError(
                    f"{final} exists: save with overwrite=True to replace it, or delete it first"
                )
            old = _passing_path(self.root, "replaced", self.step)
            final.rename(old)
        try:
            self.path.rename(final)
        except OSError:
            if old is not None:
                old.rename(final)
            raise
        self.path, self._committed = final, True
        fsync_directory(self.root)
        self._release()
        if old is not None:
            _discard(self.root, old, self.step)  # what is left goes at the next start

    def abandon(self) -> None:
        """Remove the directory after a failed save; nothing once it has its complete name.

        What fails after the rename (a sync, the deletion of what was replaced) must not take the
        new checkpoint away, which may be the only one.
        """
        if not self._committed:
            shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            # Unlinked only now: without it a live writer would look like a killed one.
            with contextlib.suppress(OSError):
                (self.path / _LOCK).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def _is_being_written(path: Path) -> bool:
    try:
        # For writing, though nothing is written: NFS locks only what is open for that.
        descriptor = os.open(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False  # killed before it made the lock
    except OSError:
        return True  # another user's, or of a file system to read from: not ours to remove
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        warnings.warn(
            f"{path} may be left from a killed writer, but its file system has no locks to tell: "
            "delete it by hand if nothing is writing",
            stacklevel=2,
        )
        return True
    finally:
        os.close(descriptor)
    return False


def _discard(root: Path, path: Path, step: int) -> None:
    """Delete a directory, as far as that goes; what is left of it has a name of no meaning.

    Under its own a `.replaced-` that is half deleted would be taken for the step's checkpoint once
    somebody deletes that.
    """
    doomed = _passing_path(root, "deleting", step)
    with contextlib.suppress(OSError):
        path.rename(doomed)
        fsync_directory(root)
        shutil.rmtree(doomed, ignore_errors=True)


class LocalStore:
    """A directory of checkpoints on a file system that every rank sees."""

    has_locks = True
    """Whether `clean` can tell a writer at work from one that was killed."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()  # for the program may change its working directory

    def locations(self) -> dict[int, Location]:
        """Return step -> directory of all that have a complete name, steps ascending."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return {}
        steps = sorted(int(match[1]) for name in names if (match := _COMPLETE.fullmatch(name)))
        return {step: self.location(step) for step in steps}

    def location(self, step: int) -> LocalLocation:
        """Return the directory of a step, or where it would be."""
        return LocalLocation(_complete_path(self.root, step))

    expected = location

    def has(self, step: int) -> bool:
        """Whether the step's directory exists."""
        return self.location(step).is_there()

    def begin(self, step: int) -> WritingDirectory:
        """Make a directory with a temporary name."""
        return WritingDirectory(self.root, step)

    def remove(self, step: int) -> None:
        """Delete a checkpoint so that no reader sees half of it, not after a power cut."""
        doomed = _passing_path(self.root, "deleting", step)
        self.location(step).path.rename(doomed)
        fsync_directory(self.root)
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed)
        else:  # a stray file under a checkpoint's name
            doomed.unlink()

    def note_unfinished(self) -> None:
        """Do nothing: locks tell who is at work."""

    def clean(self) -> list[str]:
        """Remove what killed writers left, and finish a replacement they had begun; return names.

        What may not be removed (another user's, a file system to read from) is left alone.
        """
        root = self.root
        if not root.is_dir():
            return []
        dealt_with = []
        for name in sorted(os.listdir(root)):
            match = _PASSING.fullmatch(name)
            if match is None:
                continue
            path, kind, final = root / name, match[1], _complete_path(root, int(match[2]))
            if kind in ("making", "writing") and _is_being_written(path):
                continue
            if kind == "replaced" and not final.exists():
                try:
                    path.rename(final)
                except OSError as error:
                    warnings.warn(f"{path} should be {final.name}, but {error}", stacklevel=2)
                    continue
                fsync_directory(root)
            else:
                _discard(root, path, int(match[2]))
            dealt_with.append(name)
        return dealt_with


_ATTEMPT = re.compile(r"step-(\d{8,})(?:-(\d+))?")


class RemoteAttempt:
    """A save in progress, as a `WritingDirectory`."""

    def __init__(self, store: RemoteStore, step: int, number: int) -> None:
        self._store, self._step, self._number = store, step, number
        self._committed = False
        self.location: Location = RemoteLocation(f"{store.url}/{_attempt_name(step, number)}")
        self.final = self.location

    def commit(self, manifest: Manifest, *, overwrite: bool) -> None:
        """Write the manifest, and delete older attempts at the step."""
        if not overwrite and self._store.has(self._step):
            raise FileExistsError(
                f"{self._store.location(self._step)} exists: save with overwrite=True to replace it"
            )
        write_whole(self.location, MANIFEST, manifest.encoded())
        self._committed = True
        try:
            for number in self._store.attempts().get(self._step, {}):
                if number < self._number:
                    self._store.delete(self._step, number)
        except Exception as error:  # the higher number counts; a later save deletes the others
            warnings.warn(f"older attempts at {self.location} are left: {error}", stacklevel=2)

    def abandon(self) -> None:
        """Delete the attempt, unless it is committed."""
        if not self._committed:
            self._store.delete(self._step, self._number)


def _attempt_name(step: int, number: int) -> str:
    """Return the name of the number-th attempt at a step."""
    return f"step-{step:08d}" + (f"-{number}" if number else "")


class RemoteStore:
    """A prefix of an object store, by fsspec: as a `LocalStore`, but without locks."""

    has_locks = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = filesystem(self.url)
        self._unfinished: set[tuple[int, int]] = set()  # attempts of earlier programs

    def _is_there(self, path: str) -> bool:
        """Whether an object or prefix exists. fsspec's `exists` takes any error for a no."""
        try:
            self._fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def attempts(self) -> dict[int, dict[int, bool]]:
        """Return step -> attempt -> whether it has a manifest."""
        self._fs.invalidate_cache()
        attempts: dict[int, dict[int, bool]] = {}
        try:
            entries = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return {}
        for entry in entries:
            match = _ATTEMPT.fullmatch(str(entry).rstrip("/").rpartition("/")[2])
            if match:
                there = self._is_there(f"{str(entry).rstrip('/')}/{MANIFEST}")
                attempts.setdefault(int(match[1]), {})[int(match[2] or 0)] = there
        return attempts

    def locations(self) -> dict[int, Location]:
        """Return the newest complete attempt's prefix of each step that has one."""
        attempts = sorted(self.attempts().items())
        return {step: self._newest(step, of) for step, of in attempts if any(of.values())}

    def location(self, step: int) -> RemoteLocation:
        """Return the newest complete attempt's prefix."""
        return self._newest(step, self.attempts().get(step, {}))

    def expected(self, step: int) -> RemoteLocation:
        """Return the first attempt's prefix."""
        return self._newest(step, {})

    def _newest(self, step: int, attempts: dict[int, bool]) -> RemoteLocation:
        complete = [number for number, there in attempts.items() if there]
        return RemoteLocation(f"{self.url}/{_attempt_name(step, max(complete, default=0))}")

    def has(self, step: int) -> bool:
        """Whether the step has a manifest."""
        return any(self.attempts().get(step, {}).values())

    def begin(self, step: int) -> RemoteAttempt:
        """Choose a prefix that was never used."""
        return RemoteAttempt(self, step, max(self.attempts().get(step, {}), default=-1) + 1)

    def remove(self, step: int) -> None:
        """Delete the manifests first: without them nothing else counts."""
        for number in sorted(self.attempts().get(step, {})):
            self.delete(step, number)

    def delete(self, step: int, number: int) -> None:
        """Delete one attempt, its manifest first."""
        path = f"{self._root}/{_attempt_name(step, number)}"
        self._fs.invalidate_cache()
        try:
            if self._is_there(f"{path}/{MANIFEST}"):
                self._fs.rm_file(f"{path}/{MANIFEST}")
            if self._is_there(path):
                self._fs.rm(path, recursive=True)
        except FileNotFoundError:
            pass
        except Exception as error:
            warnings.warn(f"{path} could not be deleted: {error}", stacklevel=2)

    def note_unfinished(self) -> None:
        """Note the attempts without a manifest: later ones may be another manager's, at work."""
        attempts = self.attempts().items()
        self._unfinished = {
            (step, n) for step, of in attempts for n, there in of.items() if not there
        }

    def clean(self) -> list[str]:
        """Delete noted attempts still without a manifest, and those that a later one replaced."""
        dealt_with = []
        for step, of in self.attempts().items():
            newest = max((n for n, there in of.items() if there), default=None)
            for number, there in of.items():
                replaced = there and newest is not None and number < newest
                if replaced or (not there and (step, number) in self._unfinished):
                    self.delete(step, number)
                    dealt_with.append(_attempt_name(step, number))
        return dealt_with


Attempt = WritingDirectory | RemoteAttempt
"""A save in progress, held by the coordinator."""

Store = LocalStore | RemoteStore
"""A directory of checkpoints."""


def store_of(path: str | os.PathLike[str]) -> Store:
    """Return the store at a path or URL."""
    return RemoteStore(str(path)) if is_url(path) else LocalStore(local_path(path))
