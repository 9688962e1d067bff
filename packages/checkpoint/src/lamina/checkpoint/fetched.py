"""Chunks of a remote checkpoint between their check and their use.

No tensor may change before every rank has checked what it will read, and what comes over a network
should come once. So a rank keeps what it has checked in a temporary file of its own.
"""

from __future__ import annotations

import mmap
import tempfile
import zlib
from typing import BinaryIO

from lamina.checkpoint.places import pieces_of


class Fetched:
    """Keeps chunks in a nameless file in Python's temporary directory (`TMPDIR`).

    It grows to what this rank reads. Where there is no room, nothing is kept: `holds` is then
    False, and chunks are read again from where they came.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], int] = {}
        self._end = 0
        self._map: memoryview | None = None
        try:
            self._file: BinaryIO | None = tempfile.TemporaryFile()  # noqa: SIM115
        except OSError:
            self._file = None

    def keep(self, name: str, file: BinaryIO, offset: int, length: int) -> int:
        """Read a chunk of a file, keep it, and return its CRC-32."""
        start, crc = self._end, 0
        for piece in pieces_of(file, offset, length):
            crc = zlib.crc32(piece, crc)
            self._write(piece)
        self._places[name, offset] = start
        return crc

    def _write(self, piece: bytes) -> None:
        try:
            if self._file is not None:
                self._end += self._file.write(piece)
                self._file.flush()  # here, where an error means no room
        except OSError:  # no room
            self._file = None

    def holds(self, name: str, offset: int) -> bool:
        """Whether a chunk is here."""
        return self._file is not None and (name, offset) in self._places

    def read(self, name: str, offset: int, length: int) -> memoryview:
        """Return a chunk that `holds`; it shares the file's pages."""
        if self._file is None:
            raise KeyError(name)
        if self._map is None:
            self._map = memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY))
        start = self._places[name, offset]
        return self._map[start : start + length]
