"""The directory of checkpoints: names, the commit by rename, what a kill leaves behind.

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
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import warnings
from pathlib import Path

from lamina.checkpoint.storage.locations import LocalLocation, Location
from lamina.checkpoint.storage.manifest import Manifest

__all__ = ["LocalStore", "WritingDirectory", "fsync_directory"]

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
