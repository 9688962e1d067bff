"""Where the files of one checkpoint lie: a local directory, or a prefix in an object store.

A `Location` can read and write files by name, and no more; how a checkpoint becomes complete is the
business of `stores`.
"""

import errno
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

_SMALL = 1 << 30  # bytes: metadata of a million chunks takes a fifth of it
_SMALLER = {"manifest.json": 1 << 28}  # it has a line for each file: for a million of them
_CHUNK = 4 << 20  # bytes read at a time: large enough for the disk, small beside a tensor
_SHORT_OF_A_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


@dataclass(frozen=True)
class FileSum:
    """The length of a file in bytes and its CRC-32."""

    bytes: int
    crc32: int


class _SyncedFile(io.BufferedWriter):
    """A file that is on the disk once it is closed."""

    def close(self) -> None:
        """Wait until the bytes are on the disk; OSError if they are not."""
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


class LocalLocation:
    """A directory; its `address` is what users call it."""

    def __init__(self, path: Path) -> None:
        self.address = self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes:
        """Return a small file's contents; OSError for one that no save wrote so large."""
        with self.open(name) as file:
            _refuse_large(name, os.fstat(file.fileno()).st_size, str(self.path))
            return cast(io.FileIO, file).readall()

    def size(self, name: str) -> int:
        """Return a file's length in bytes; FileNotFoundError if it is not there."""
        return os.stat(self.path / name).st_size

    def open(self, name: str, *, from_disk: bool = False) -> BinaryIO:
        """Open a file for reading and seeking; `from_disk` drops cached pages first.

        OSError for anything but a regular file: a pipe would be waited for without end.
        """
        file = io.FileIO(os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "not a regular file", str(self.path / name))
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return cast(BinaryIO, file)

    def create(self, name: str) -> BinaryIO:
        """Open a new file that is synced when it is closed."""
        # Buffered, for tensors are written through torch.save in small pieces.
        return cast(BinaryIO, _SyncedFile(io.FileIO(self.path / name, "wb"), 1 << 20))

    def is_there(self) -> bool:
        """Whether the directory exists."""
        return self.path.is_dir()


class RemoteLocation:
    """A prefix of any file system that fsspec knows, as a `LocalLocation`."""

    def __init__(self, url: str) -> None:
        self.address = self.url = url.rstrip("/")
        self.fs, self._root = filesystem(self.url)

    def __str__(self) -> str:
        return self.url

    def read(self, name: str) -> bytes:
        """Return a small object's contents; OSError for one that no save wrote so large."""
        _refuse_large(name, self.size(name), self.url)
        return bytes(self.fs.cat_file(f"{self._root}/{name}"))

    def size(self, name: str) -> int:
        """Return an object's length in bytes; FileNotFoundError if it is not there."""
        return int(self.fs.info(f"{self._root}/{name}")["size"])

    def open(self, name: str, *, from_disk: bool = False) -> BinaryIO:
        """Open an object for reading."""
        return cast(BinaryIO, self.fs.open(f"{self._root}/{name}", "rb"))

    def create(self, name: str) -> BinaryIO:
        """Open a new object; object stores show it only once it is closed."""
        return cast(BinaryIO, self.fs.open(f"{self._root}/{name}", "wb"))

    def is_there(self) -> bool:
        """Prefixes have no existence of their own."""
        return True


def _refuse_large(name: str, size: int, where: str) -> None:
    if size > _SMALLER.get(name, _SMALL):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), f"{where}/{name}")


Location = LocalLocation | RemoteLocation
"""The files of one checkpoint. `str()` of it is enough to open it in another process."""


def filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it; ImportError without fsspec."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(
            f"{url} is a URL: it needs fsspec (pip install 'lamina-checkpoint[remote]') and the "
            "package of its protocol, such as s3fs or gcsfs"
        ) from error
    fs, path = url_to_fs(url)
    return fs, str(path).rstrip("/")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL (of anything but local files)."""
    return "://" in str(path) and not str(path).startswith(("file://", "local://"))


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a local path without `file://`; ValueError for a `Path` made from a URL."""
    text = os.fspath(path)
    if not isinstance(path, str) and _SHORT_OF_A_SLASH.match(text):
        raise ValueError(
            f"{path!r} was a URL: Path() takes one of its slashes; pass the URL as a string"
        )
    for prefix in ("file://", "local://"):
        text = text.removeprefix(prefix)
    return Path(text)


def location_of(path: str | os.PathLike[str]) -> Location:
    """Return the location that a path or URL names."""
    return RemoteLocation(str(path)) if is_url(path) else LocalLocation(local_path(path))


def sum_of(
    location: Location,
    name: str,
    *,
    from_disk: bool = False,
    moved: Callable[[int], None] = lambda _: None,
) -> FileSum:
    """Read a file and sum it; `moved` is called with the bytes of each piece."""
    crc, length = 0, 0
    with location.open(name, from_disk=from_disk) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            length += len(chunk)
            moved(len(chunk))
    return FileSum(length, crc)


def pieces_of(file: BinaryIO, offset: int, length: int) -> Iterator[bytes]:
    """Read a stretch of an open file, a piece at a time; a shorter file ends the stretch."""
    file.seek(offset)
    while length > 0 and (piece := file.read(min(length, _CHUNK))):
        yield piece
        length -= len(piece)


def crc_of(file: BinaryIO, offset: int, length: int) -> int:
    """Sum a stretch of an open file."""
    crc = 0
    for piece in pieces_of(file, offset, length):
        crc = zlib.crc32(piece, crc)
    return crc


def write_whole(location: Location, name: str, data: bytes) -> FileSum:
    """Write a small file durably and return its sum."""
    with location.create(name) as file:
        file.write(data)
    return FileSum(len(data), zlib.crc32(data))
