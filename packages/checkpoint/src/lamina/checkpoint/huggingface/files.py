"""Reading and writing the safetensors format, one tensor at a time.

A file is eight bytes (the header's length), a JSON header that says where each tensor lies, and
the tensors' bytes without gaps. Source: https://github.com/huggingface/safetensors, "Format".
Written here because its own library writes a file from a dict that holds all of it in memory.
"""

from __future__ import annotations

import importlib
import json
import math
import mmap
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lamina.checkpoint.errors import CheckpointDamagedError, CheckpointMismatchError
from lamina.checkpoint.storage.streams import memory_of

INDEX = "model.safetensors.index.json"
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
DTYPES = list(_CODES)
"""What the format knows."""


@dataclass(frozen=True)
class Described:
    """Name, shape and dtype of a tensor to come."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its length in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


def divide(tensors: Sequence[Described], limit: int) -> dict[str, list[Described]]:
    """Divide tensors, in order, among files of at most `limit` bytes (or one tensor)."""
    files: list[list[Described]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.bytes > limit:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.bytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": file
        for number, file in enumerate(files, 1)
    }


def index_text(files: Mapping[str, Sequence[Described]]) -> str:
    """Return the text of `model.safetensors.index.json`."""
    total = sum(tensor.bytes for tensors in files.values() for tensor in tensors)
    places = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)


class FileWriter:
    """Writes one file under a temporary name, which `commit` changes to its own."""

    def __init__(self, path: Path, tensors: Sequence[Described]) -> None:
        self._path, self._expected = path, list(tensors)
        self._temporary = path.with_name(f".{path.name}.writing")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in tensors:
            if tensor.dtype not in _CODES:
                raise TypeError(f"'{tensor.name}' is {tensor.dtype}, which safetensors lacks")
            header[tensor.name] = {
                "dtype": _CODES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + tensor.bytes],
            }
            offset += tensor.bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
        self._file = open(self._temporary, "wb", buffering=0)  # noqa: SIM115 (closed by close)
        try:
            self._write(len(text).to_bytes(8, "little") + text)
        except BaseException:
            self.abandon()
            raise

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def add(self, tensor: torch.Tensor) -> None:
        """Write the next tensor."""
        expected = self._expected[0]
        if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype:
            raise ValueError(
                f"'{expected.name}' is {tensor.dtype} {list(tensor.shape)}, planned was "
                f"{expected.dtype} {list(expected.shape)}"
            )
        on_cpu = tensor.detach().cpu().resolve_neg().contiguous()
        self._write(memory_of(on_cpu))
        self._expected.pop(0)

    def close(self) -> None:
        """Sync and close; RuntimeError if a tensor is missing."""
        with self._file:
            if self._expected:
                raise RuntimeError(f"{self._path} was closed without '{self._expected[0].name}'")
            os.fsync(self._file.fileno())

    def commit(self) -> None:
        """Give the closed file its name."""
        self._temporary.replace(self._path)

    def abandon(self) -> None:
        """Remove what was written, if it has not been committed."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)


class Files:
    """The tensors of a directory of safetensors files, or one file, read when they are asked for.

    FileNotFoundError says that there are none, CheckpointDamagedError that one is none or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        names = [path] if path.is_file() else _files_in(path)
        if not names:
            raise FileNotFoundError(f"{path} has no *.safetensors: other formats are not read")
        self._entries: dict[str, tuple[memoryview, dict[str, Any]]] = {}
        for name in names:
            self._open(name)
        self.coded = {
            weight: parts
            for weight, parts in _coded_weights(self._entries.keys()).items()
            if formats().belong_together(*map(self.stored, parts))
        }
        """Of each quantised weight the names of its codes and scales."""

    def _open(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                # Read in pages when touched: private to this process, never written.
                whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            length = int.from_bytes(whole[:8], "little")
            header = dict(json.loads(bytes(whole[8 : 8 + length])))
            header.pop("__metadata__", None)
            data = whole[8 + length :]
            for name, entry in header.items():
                _check_entry(name, entry, len(data))
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{path} is missing, the index names it") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointDamagedError(f"{path} can't be read: {error}") from error
        for name, entry in header.items():
            self._entries[name] = (data, entry)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._entries.clear()

    def names(self) -> Iterable[str]:
        """Return the names of all tensors; a quantised weight is one."""
        parts = {part for pair in self.coded.values() for part in pair}
        return (self._entries.keys() - parts) | self.coded.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that shares the file's pages: what is not touched is not read.

        Of a quantised weight it is a new one, in float32.
        """
        if (weight := self.find(name)) in self.coded:
            numbers: torch.Tensor = formats().dequantised(
                weight, *map(self.stored, self.coded[weight])
            )
            return numbers
        return self.stored(weight)

    def stored(self, name: str) -> torch.Tensor:
        """Return a tensor as it is in the files, codes and scales too."""
        data, entry = self._entries[name]
        dtype, shape = self._stored_dtype(name), entry["shape"]
        start, count = entry["data_offsets"][0], math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        if start % dtype.itemsize == 0:
            return torch.frombuffer(data, dtype=dtype, count=count, offset=start).view(shape)
        raw = bytearray(data[start : start + count * dtype.itemsize])
        return torch.frombuffer(raw, dtype=dtype).view(shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `tensor` gives."""
        weight = self.find(name)
        return torch.float32 if weight in self.coded else self._stored_dtype(weight)

    def leave_coded(self, taken: Collection[str]) -> None:
        """Give codes as they are where the scales are `taken` too: a model that computes so."""
        kept = {name: parts for name, parts in self.coded.items() if parts[1] not in taken}
        self.coded = kept

    def stored_as(self, name: str) -> Described:
        """Return what a tensor is in the files, codes and scales too."""
        return Described(name, tuple(self._entries[name][1]["shape"]), self._stored_dtype(name))

    def _stored_dtype(self, name: str) -> torch.dtype:
        code = self._entries[name][1]["dtype"]
        if code not in _DTYPES:
            raise CheckpointMismatchError(
                f"'{name}' in {self.path} is {code}; known are {', '.join(_DTYPES)}"
            )
        return _DTYPES[code]

    def find(self, name: str) -> str:
        """Return the name that a tensor has in the files, or CheckpointMismatchError.

        A base model's own files leave out a prefix.
        """
        for candidate in (name, name.removeprefix("transformer.").removeprefix("model.")):
            if candidate in self._entries or candidate in self.coded:
                return candidate
        raise CheckpointMismatchError(
            f"'{name}' is in none of the files under {self.path}, which hold {len(self._entries)} "
            "tensors"
        )


def _check_entry(name: str, entry: Mapping[str, Any], length: int) -> None:
    """Refuse a tensor that lies outside its file's data, or is larger than its place there."""
    (start, stop), shape, dtype = entry["data_offsets"], entry["shape"], _DTYPES.get(entry["dtype"])
    if not 0 <= start <= stop <= length:
        raise ValueError(f"'{name}' is at {start} to {stop} of {length} bytes of tensors")
    if any(size < 0 for size in shape):
        raise ValueError(f"'{name}' has shape {shape}")
    if dtype is not None and math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"'{name}' has {stop - start} bytes, which {dtype} {shape} has not")


def _files_in(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"it names files outside its directory: {outside}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(f"{index} can't be read: {error!r}") from error
    return [directory / name for name in names]


def formats() -> Any:
    """The functions of `lamina.models` for codes and scales, which reads such files too."""
    try:
        return importlib.import_module("lamina.models.engine")
    except ImportError as error:
        raise ImportError(
            "quantised weights need lamina-models: pip install 'lamina-checkpoint[models]'"
        ) from error


def _coded_weights(names: Collection[str]) -> Mapping[str, tuple[str, str]]:
    """Of each quantised weight the names of its codes and scales."""
    if not any(name.endswith(("_scale_inv", "_blocks")) for name in names):
        return {}
    coded: Mapping[str, tuple[str, str]] = formats().coded_weights(names)
    return coded
