"""An object store that several processes share, without a network: ``objects:///directory``.

What S3 and its like have in common, on top of a local directory: an object appears whole when it is
closed, or not at all; there is no rename, no lock, no sync; directories are what names have in
front; and each process keeps listings it has seen until it is told to forget them.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Upload(io.FileIO):
    """An object on its way: elsewhere until it is closed, gone if the process dies before."""

    def __init__(self, path: str) -> None:
        self._path = path
        handle, self._temporary = tempfile.mkstemp(prefix="upload-", dir=os.environ.get("UPLOADS"))
        os.close(handle)
        super().__init__(self._temporary, "wb")

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            os.replace(self._temporary, self._path)


class Objects(LocalFileSystem):
    protocol = ("objects",)
    fetched: ClassVar[dict[str, int]] = {}
    """Bytes read of each object, by this process."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(os.fspath(path).removeprefix("objects://"))

    def unstrip_protocol(self, name: str) -> str:
        return f"objects://{self._strip_protocol(name)}"

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "wb":
            self.invalidate_cache(path)
            return Upload(path)
        assert mode == "rb", mode
        return Download(path)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        assert start is None
        assert end is None
        with self._open(self._strip_protocol(path)) as file:
            return file.read()

    def ls(self, path: str, detail: bool = False, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True)
        found = self.dircache[path]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: Any, **options: Any) -> dict[str, Any]:
        if isinstance(path, os.DirEntry):  # while listing
            return super().info(path, **options)
        path = self._strip_protocol(path)
        listed = self.dircache.get(os.path.dirname(path))
        if listed is None:
            return super().info(path, **options)
        with contextlib.suppress(StopIteration):
            return next(entry for entry in listed if entry["name"] == path)
        raise FileNotFoundError(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def rm_file(self, path: str) -> None:
        self.invalidate_cache()
        super().rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        self.invalidate_cache()
        super().rm(path, recursive=recursive, maxdepth=maxdepth)

    def mv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("nothing can be renamed here")

    mv_file = rename = move = mv

    def created(self, path: str) -> Any:
        raise NotImplementedError("nothing has a date here")

    modified = created


class Download(io.FileIO):
    """An object being read, in unbuffered pieces that are counted."""

    def _count(self, number: int | None) -> None:
        name = str(self.name)
        Objects.fetched[name] = Objects.fetched.get(name, 0) + (number or 0)

    def readinto(self, buffer: Any, /) -> int | None:
        number = super().readinto(buffer)
        self._count(number)
        return number

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        self._count(len(data))
        return data

    def fileno(self) -> int:
        raise io.UnsupportedOperation("an object is no file: it can be neither mapped nor synced")


fsspec.register_implementation("objects", Objects, clobber=True)
