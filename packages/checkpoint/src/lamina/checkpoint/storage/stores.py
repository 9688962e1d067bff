"""The two kinds of directory of checkpoints, and how a checkpoint becomes complete in each.

On a file system a rename is atomic: a checkpoint is written under another name (`directory.py`).
In an object store nothing can be renamed, but one object appears whole or not at all: there a
checkpoint is complete once its manifest is there, which is written last.

    step-00000100/            an attempt; complete if it has manifest.json
    step-00000100-1/          the next attempt at the same step: the highest complete one counts

An object store has no locks either, so nobody can tell a writer at work from one that was killed: a
manager notes what is unfinished when it is made and deletes that before its first save, if it still
is; and one job at a time may write to a URL.
"""

from __future__ import annotations

import os
import re
import warnings

from lamina.checkpoint.storage.directory import LocalStore, WritingDirectory
from lamina.checkpoint.storage.locations import (
    Location,
    RemoteLocation,
    filesystem,
    is_url,
    local_path,
    write_whole,
)
from lamina.checkpoint.storage.manifest import MANIFEST, Manifest

__all__ = ["Attempt", "Store", "store_of"]

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
        found: dict[int, dict[int, bool]] = {}
        try:
            entries = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return {}
        for entry in entries:
            match = _ATTEMPT.fullmatch(str(entry).rstrip("/").rpartition("/")[2])
            if match:
                there = self._is_there(f"{str(entry).rstrip('/')}/{MANIFEST}")
                found.setdefault(int(match[1]), {})[int(match[2] or 0)] = there
        return found

    def locations(self) -> dict[int, Location]:
        """Return the newest complete attempt's prefix of each step that has one."""
        found = sorted(self.attempts().items())
        return {step: self._newest(step, of) for step, of in found if any(of.values())}

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
        found = self.attempts().items()
        self._unfinished = {(step, n) for step, of in found for n, there in of.items() if not there}

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
