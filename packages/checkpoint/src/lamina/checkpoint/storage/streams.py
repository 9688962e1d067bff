"""Chunks in a file: written with checksums as the bytes pass, read back as tensors."""

import ctypes
import io
import math
import pickle
import sys
import zipfile
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any, BinaryIO, cast

import torch

from lamina.checkpoint.errors import CheckpointUnsafeError
from lamina.checkpoint.storage.locations import FileSum


class SummingStream(io.RawIOBase):
    """Passes bytes on to a file, and sums them chunk by chunk."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._length = self._crc = 0  # of the chunk that is being written
        self._before = self._total = 0  # length and sum of the finished ones
        self.chunks: list[list[int]] = []

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Write and sum."""
        view = memoryview(data).cast("B")
        self._crc = zlib.crc32(view, self._crc)
        self._length += len(view)
        self._file.write(view)
        return len(view)

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self._before + self._length

    def end_chunk(self) -> int:
        """Finish a chunk; return its length in bytes."""
        length = self._length
        self.chunks.append([length, self._crc])
        self._total = combine(self._total, self._crc, length)
        self._before += length
        self._length = self._crc = 0
        return length

    @property
    def sum(self) -> FileSum:
        """Length and CRC-32 of all finished chunks."""
        return FileSum(self._before, self._total)


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU tensor with storage of its own: torch.save writes whole storages."""
    tensor = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which must outlive the view; needs no NumPy."""
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("the memory of a conjugated or negated view has other values")
    if not tensor.numel():
        return memoryview(b"")
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def tensor_in(chunk: memoryview, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    """Return the tensor in a chunk that this layer wrote, sharing the chunk's memory if it can.

    A chunk is what torch.save wrote: a zip file with one uncompressed record of the elements. A
    contiguous tensor's record is its elements in order. Read-only bytes are fine, for the result is
    only read.
    """
    with zipfile.ZipFile(_Window(chunk)) as archive:
        records = [i for i in archive.infolist() if i.filename.split("/")[-2:-1] == ["data"]]
    numel = math.prod(sizes)
    whole = len(records) == 1 and records[0].file_size == numel * dtype.itemsize
    if whole and numel and sys.byteorder == "little":
        header = records[0].header_offset  # 30 bytes, then a name and padding of these lengths
        name, extra = (
            int.from_bytes(chunk[header + i : header + i + 2], "little") for i in (26, 28)
        )
        start = header + 30 + name + extra
        return torch.frombuffer(chunk, dtype=dtype, count=numel, offset=start).view(tuple(sizes))
    return safely_loaded(cast(BinaryIO, _Window(chunk)))


def safely_loaded(file: BinaryIO) -> torch.Tensor:
    """Load what torch.save wrote; CheckpointUnsafeError if it is not a tensor and no more."""
    try:
        loaded: torch.Tensor = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointUnsafeError(
            f"a chunk is no tensor, and nothing of it was executed: {error}"
        ) from error
    if not isinstance(loaded, torch.Tensor):
        raise CheckpointUnsafeError(f"a chunk holds a {type(loaded).__name__}, not a tensor")
    return loaded


class _Window(io.RawIOBase):
    """Bytes in memory as a file, without a copy of all of them."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Copy the next bytes, as many as fit; 0 at the end."""
        target = memoryview(buffer).cast("B")
        piece = self._view[self._at : self._at + len(target)]
        target[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


_POLYNOMIAL = 0xEDB88320  # CRC-32 of zlib, bits reversed: the highest bit is x^0


def combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of `a + b` from those of a and of b, which has `length` bytes.

    Source: Mark Adler's crc32_combine in zlib: appending n zero bytes multiplies a CRC by x^(8n).
    """
    for power in _powers():
        if length & 1:
            first = _times(power, first)
        length >>= 1
    return first ^ second


def _times(factor: int, other: int) -> int:
    """Multiply two polynomials over GF(2), modulo that of the CRC."""
    product = 0
    for bit in range(31, -1, -1):
        if factor >> bit & 1:
            product ^= other
        other = other >> 1 ^ _POLYNOMIAL * (other & 1)
    return product


@cache
def _powers() -> list[int]:
    """Return x^8, x^16, x^32, ...: what appending 1, 2, 4, ... zero bytes multiplies by."""
    powers = [1 << 31 - 8]
    while len(powers) < 48:
        powers.append(_times(powers[-1], powers[-1]))
    return powers
