"""The manifest: which files a checkpoint has, how long they are and what they sum to.

CRC-32 finds every flipped byte and truncation (a random change slips through once in four
thousand million); it is no defence against someone who forges files on purpose.
"""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lamina.checkpoint.errors import CheckpointDamagedError, CheckpointError
from lamina.checkpoint.storage.locations import FileSum, Location, sum_of, write_whole

MANIFEST = "manifest.json"
METADATA = ".metadata"
VALUES = "values.json"
CHUNKS = "chunks.json"
FORMAT = 2
_Text = bytes  # the classes below have properties of that name
_READ = (1, 2)  # format 1 had no sums per chunk


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint says about itself.

    Its files are all but the manifest, by name relative to the checkpoint. `world_size` ranks wrote
    it, with this version of torch. The metric is what `save` was given, for `keep_best`, and so is
    `healthy`: whether the last step before it was, or None if nobody said.
    """

    step: int
    world_size: int
    torch: str
    files: dict[str, FileSum]
    metric: float | None = None
    healthy: bool | None = None

    @property
    def bytes(self) -> int:
        """Total length of the files, in bytes."""
        return sum(file.bytes for file in self.files.values())

    def encoded(self) -> _Text:
        """Return the text of `manifest.json`."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        text = json.dumps({"crc32": zlib.crc32(body.encode()), "body": json.loads(body)}, indent=1)
        return text.encode()

    def write(self, location: Location) -> None:
        """Write `manifest.json` durably."""
        write_whole(location, MANIFEST, self.encoded())

    @classmethod
    def read(cls, location: Location) -> Manifest:
        """Read `manifest.json`.

        CheckpointDamagedError says that it is missing or altered, CheckpointError that a newer
        lamina-checkpoint wrote it.
        """
        where = f"{location}/{MANIFEST}"
        try:
            parsed = json.loads(location.read(MANIFEST))
            body = parsed["body"]
            if zlib.crc32(json.dumps(body, sort_keys=True).encode()) != parsed["crc32"]:
                raise ValueError("its checksum does not fit its text")
            if body["format"] not in _READ:  # no damage: nothing may pass over or replace it
                raise CheckpointError(
                    f"{where} has format {body['format']}, this lamina-checkpoint reads "
                    f"{_READ}: install a newer one"
                )
            files = {name: FileSum(**entry) for name, entry in body["files"].items()}
            if outside := [name for name in files if Path(name).name != name]:
                raise ValueError(f"it lists files outside the checkpoint: {outside}")
            said = body.get("metric"), body.get("healthy")
            return cls(body["step"], body["world_size"], body["torch"], files, *said)
        except FileNotFoundError:
            raise CheckpointDamagedError(
                f"{where} is missing: not a checkpoint of lamina, or an incomplete copy of one"
            ) from None
        except OSError as error:
            raise unreadable(where, error) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointDamagedError(f"{where} can't be read: {error}") from error

    def check_sizes(self, location: Location) -> None:
        """Raise CheckpointDamagedError unless every file is there, as long as it was."""
        damaged = self.wrong_size(location)
        if damaged is not None:
            raise CheckpointDamagedError(damaged[2])

    def wrong_size(self, location: Location) -> tuple[str, int, str] | None:
        """Return the first file that is missing or of another length: name, bytes, a message."""
        for name, expected in self.files.items():
            try:
                size = location.size(name)
            except FileNotFoundError:
                message = f"{location}/{name} is missing; it should have {expected.bytes} bytes"
                return name, 0, message
            except OSError as error:
                raise unreadable(f"{location}/{name}", error) from error
            if size != expected.bytes:
                message = f"{location}/{name} has {size} bytes, the manifest says {expected.bytes}"
                return name, size, message
        return None

    def check_file(
        self,
        location: Location,
        name: str,
        *,
        moved: Callable[[int], None] = lambda _: None,
        from_disk: bool = False,
    ) -> None:
        """Read a whole file; CheckpointDamagedError if its checksum differs, or it is not there."""
        with self._reading(location, name):
            file_sum = sum_of(location, name, moved=moved, from_disk=from_disk)
        self._compare(location, name, file_sum)

    def read_file(self, location: Location, name: str) -> _Text:
        """Read a small file; CheckpointDamagedError if its checksum differs, or it is not there."""
        with self._reading(location, name):
            data = location.read(name)  # once: over a network it may not be the same twice
        self._compare(location, name, FileSum(len(data), zlib.crc32(data)))
        return data

    @contextmanager
    def _reading(self, location: Location, name: str) -> Iterator[None]:
        if name not in self.files:
            raise CheckpointDamagedError(f"{location}/{name} is used but not in {MANIFEST}")
        try:
            yield
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{location}/{name} is missing") from None
        except OSError as error:
            raise unreadable(f"{location}/{name}", error) from error

    def _compare(self, location: Location, name: str, file_sum: FileSum) -> None:
        expected = self.files[name]
        if file_sum != expected:
            raise CheckpointDamagedError(
                f"{location}/{name} is damaged: {file_sum.bytes} bytes with CRC-32 "
                f"{file_sum.crc32:08x}, written were {expected.bytes} bytes with "
                f"{expected.crc32:08x}"
            )


_DAMAGE = {
    errno.EIO: "the disk is faulty there",
    errno.EACCES: "this user may not read it",
    errno.EPERM: "this user may not read it",
    errno.ENOTDIR: "a file is where a directory should be",
    errno.EISDIR: "a directory is where a file should be",
    errno.EINVAL: "it is no regular file",
    errno.EFBIG: "it is larger than any that this layer writes",
    errno.ELOOP: "its links go in a circle",
    errno.ENXIO: "nobody writes to it",
}


def unreadable(where: str, error: OSError) -> Exception:
    """Return what to raise: what no later try can read is damage; a lost connection is none."""
    if error.errno not in _DAMAGE:
        return error
    return CheckpointDamagedError(f"{where} can't be read: {error}: {_DAMAGE[error.errno]}")


class ChunkSums:
    """Checksums of the chunks that a checkpoint's data files are rows of.

    Each chunk is one box of one tensor. `chunks.json` holds, per file, `[length, CRC-32]` of its
    chunks in order; offsets follow.
    """

    def __init__(self, files: dict[str, list[list[int]]]) -> None:
        self._sums = {}
        for name, chunks in files.items():
            offset = 0
            for length, crc in chunks:
                self._sums[name, offset] = FileSum(length, crc)
                offset += length

    @classmethod
    def read(cls, manifest: Manifest, location: Location) -> ChunkSums:
        """Read `chunks.json`, which format 1 lacks; CheckpointDamagedError if it is altered."""
        if CHUNKS not in manifest.files:
            return cls({})
        try:
            return cls(json.loads(manifest.read_file(location, CHUNKS)))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointDamagedError(f"{location}/{CHUNKS} can't be read: {error}") from error

    def of(self, name: str, offset: int) -> FileSum | None:
        """Return length and CRC-32 of the chunk at an offset, or None if none begins there."""
        return self._sums.get((name, offset))
