"""Token shards: tokens of a text in a file that is mapped into memory, not read.

    bytes 0..7     the magic "LAMTOK01"
    bytes 8..15    length of the header, little-endian
    then           the header, JSON: {"dtype": "uint8", "vocab_size": 256, "tokens": 123456}
    then           zeros to the next multiple of 64, and the tokens, little-endian

A memory map costs no memory until a page is touched, all ranks of a machine share the pages, and
opening a terabyte takes as long as opening a kilobyte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

MAGIC = b"LAMTOK01"
SUFFIX = ".tokens"
_ALIGNMENT = 64
_DTYPES = {"uint8": 256, "uint16": 1 << 16, "uint32": 1 << 32}


@dataclass(frozen=True)
class Header:
    """What a shard says about itself: the dtype of its tokens, their vocabulary, their number."""

    dtype: str
    vocab_size: int
    tokens: int

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(_DTYPES)}")
        if not 1 <= self.vocab_size <= _DTYPES[self.dtype]:
            raise ValueError(f"a vocabulary of {self.vocab_size} does not fit {self.dtype}")


def dtype_for(vocab_size: int) -> str:
    """Return the smallest dtype that holds every id below `vocab_size`."""
    return next(name for name, limit in _DTYPES.items() if vocab_size <= limit)


def write_shard(path: Path, chunks: Iterable[np.ndarray], vocab_size: int) -> Header:
    """Write the tokens of `chunks`, one after the other, under a temporary name, then rename.

    Raises:
        ValueError: a token is outside the vocabulary.
    """
    dtype = dtype_for(vocab_size)
    temporary = path.with_name(path.name + ".writing")
    tokens = 0
    with open(temporary, "wb") as file:
        file.write(b"\0" * _start_of_tokens(Header(dtype, vocab_size, 1 << 62)))
        for chunk in chunks:
            if chunk.size and int(chunk.max()) >= vocab_size:
                raise ValueError(f"token {int(chunk.max())} in a vocabulary of {vocab_size}")
            file.write(np.ascontiguousarray(chunk, dtype=np.dtype(dtype).newbyteorder("<")))
            tokens += chunk.size
        header = Header(dtype, vocab_size, tokens)
        text = json.dumps(asdict(header)).encode()
        text += b" " * (_header_length(Header(dtype, vocab_size, 1 << 62)) - len(text))
        file.seek(0)
        file.write(MAGIC + len(text).to_bytes(8, "little") + text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    return header


def _header_length(header: Header) -> int:
    return len(json.dumps(asdict(header)))


def _start_of_tokens(header: Header) -> int:
    return -(-(16 + _header_length(header)) // _ALIGNMENT) * _ALIGNMENT


def open_shard(path: Path) -> tuple[Header, np.ndarray]:
    """Map a shard into memory.

    Returns:
        Its header and its tokens, a read-only 1-D array.

    Raises:
        ValueError: it is no shard, or shorter than its header says.
    """
    with open(path, "rb") as file:
        if file.read(8) != MAGIC:
            raise ValueError(f"{path} is not a token shard: it does not begin with {MAGIC!r}")
        length = int.from_bytes(file.read(8), "little")
        header = Header(**json.loads(file.read(length)))
    start = -(-(16 + length) // _ALIGNMENT) * _ALIGNMENT
    dtype = np.dtype(header.dtype).newbyteorder("<")
    expected = start + header.tokens * dtype.itemsize
    if path.stat().st_size < expected:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, its header says {expected}")
    if header.tokens == 0:
        return header, np.zeros(0, dtype)
    return header, np.memmap(path, dtype, mode="r", offset=start, shape=(header.tokens,))
