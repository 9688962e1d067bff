"""The manifest: which files a checkpoint has, how long they are and what they sum to.

CRC-32 finds every flipped byte and truncation (a random change slips through once in four
thousand million); it is no defence against someone who forges files on purpose.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from lamina.checkpoint.errors import CheckpointDamagedError

MANIFEST = "manifest.json"
FORMAT = 1
_CHUNK = 4 << 20  # bytes read at a time: large enough for the disk, small beside a tensor


@dataclass(frozen=True)
class FileSum:
    """The length of a file in bytes and its CRC-32."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint says about itself.

    Attributes:
        step: the training step it was saved at.
        world_size: ranks that wrote it.
        torch: the version of torch that wrote it.
        files: by name relative to the checkpoint, every file but the manifest.

    """

    step: int
    world_size: int
    torch: str
    files: dict[str, FileSum]

    @property
    def bytes(self) -> int:
        """Total length of the files, in bytes."""
        return sum(file.bytes for file in self.files.values())

    def write(self, directory: Path) -> None:
        """Write `manifest.json` and sync it to the disk."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        text = json.dumps({"crc32": zlib.crc32(body.encode()), "body": json.loads(body)}, indent=1)
        write_synced(directory / MANIFEST, text.encode())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read `manifest.json`.

        Raises:
            CheckpointDamagedError: it is missing or altered.

        """
        path = directory / MANIFEST
        try:
            parsed = json.loads(path.read_bytes())
            body = parsed["body"]
            if zlib.crc32(json.dumps(body, sort_keys=True).encode()) != parsed["crc32"]:
                raise ValueError("its checksum does not fit its text")
            if body["format"] != FORMAT:
                raise ValueError(f"it has format {body['format']}, this version reads {FORMAT}")
            files = {name: FileSum(**entry) for name, entry in body["files"].items()}
            if outside := [name for name in files if Path(name).name != name]:
                raise ValueError(f"it lists files outside the checkpoint: {outside}")
            return cls(body["step"], body["world_size"], body["torch"], files)
        except FileNotFoundError:
            raise CheckpointDamagedError(
                f"{path} is missing: not a checkpoint of lamina, or an incomplete copy of one"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointDamagedError(f"{path} can't be read: {error}") from error

    def check_sizes(self, directory: Path) -> None:
        """Check that every file is there and as long as it was (cheap: reads no data).

        Raises:
            CheckpointDamagedError: naming the first that is not.

        """
        for name, expected in self.files.items():
            try:
                found = os.stat(directory / name).st_size
            except FileNotFoundError:
                raise CheckpointDamagedError(
                    f"{directory / name} is missing; it should have {expected.bytes} bytes"
                ) from None
            if found != expected.bytes:
                raise CheckpointDamagedError(
                    f"{directory / name} has {found} bytes, the manifest says {expected.bytes}"
                )

    def check_file(self, directory: Path, name: str) -> None:
        """Read a whole file and compare its checksum.

        Raises:
            CheckpointDamagedError: it differs, is missing, or is not in the manifest.

        """
        if name not in self.files:
            raise CheckpointDamagedError(f"{directory / name} is used but not in {MANIFEST}")
        expected = self.files[name]
        try:
            found = sum_of_file(directory / name)
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{directory / name} is missing") from None
        if found != expected:
            raise CheckpointDamagedError(
                f"{directory / name} is damaged: {found.bytes} bytes with CRC-32 "
                f"{found.crc32:08x}, written were {expected.bytes} bytes with {expected.crc32:08x}"
            )


def sum_of_file(path: Path, from_disk: bool = False) -> FileSum:
    """Read a file and sum it.

    Args:
        path: the file.
        from_disk: drop its clean pages from the page cache first (where the system can), so that
            what is summed is what the disk holds and not what memory remembers.

    """
    crc, length = 0, 0
    with open(path, "rb", buffering=0) as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            length += len(chunk)
    return FileSum(length, crc)


def write_synced(path: Path, data: bytes) -> FileSum:
    """Write a small file, sync it to the disk, and return its sum."""
    with open(path, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    return FileSum(len(data), zlib.crc32(data))
