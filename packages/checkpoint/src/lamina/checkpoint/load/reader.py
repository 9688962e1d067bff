"""Reads chunks of tensors after their checksums fit, and metadata without executing any of it."""

import io
import mmap
import os
import pickle
import pickletools
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from pathlib import PurePath
from typing import Any, BinaryIO, NoReturn, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lamina.buffers.engine import narrowed
from lamina.checkpoint.compat import MemoryFormatCode, StorageInfo, get_layout
from lamina.checkpoint.errors import CheckpointDamagedError, CheckpointUnsafeError
from lamina.checkpoint.storage.locations import LocalLocation, Location, crc_of, pieces_of
from lamina.checkpoint.storage.manifest import METADATA, ChunkSums, Manifest, unreadable
from lamina.checkpoint.storage.streams import safely_loaded, tensor_in

_RECORDS = (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    StorageInfo,
)
_PATHS = {
    ("pathlib", name)  # of a plain DCP checkpoint: where it was saved
    for name in ("PosixPath", "PurePosixPath", "Path", "WindowsPath", "PureWindowsPath")
} | {("pathlib._local", name) for name in ("PosixPath", "Path", "WindowsPath")}
_DTYPES = frozenset(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool "
    "complex128 complex64 complex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2".split()
)
_PATH = 4096  # characters of a path, on Linux


def _refuse(target: object) -> NoReturn:
    _forged(f"sets attributes of {target!r}")


def _forged(what: str) -> NoReturn:
    raise CheckpointUnsafeError(
        f"the checkpoint's metadata {what}, which metadata never does: it was forged; nothing was "
        "changed"
    )


class _Unchanging(type):
    """A class as a pickle sees it: pickle asks for `__setstate__` before it sets attributes."""

    def __setstate__(cls, _: object) -> None:
        _refuse(cls)


class _MemoryFormat:
    """Stands for a member of DCP's enum, which is one for the whole process."""

    __slots__ = ("_member",)

    def __init__(self, number: int) -> None:
        self._member = MemoryFormatCode(number)

    def __eq__(self, other: object) -> bool:
        return self._member is other

    __hash__ = None  # type: ignore[assignment]

    def __setstate__(self, _: object) -> None:
        _refuse(self._member)


def _maker_of(name: str, make: Callable[..., Any]) -> type:
    """Return a class that makes something else: what a pickle sees of a class or function."""
    # Note [A pickle can set attributes]
    # It is not enough to allow few names in `find_class`. Pickle's instruction BUILD sets
    # attributes of whatever lies on its stack, so a forged file could change a class, a function or
    # a member of an enum for the whole process. The unpickler therefore gives out stand-ins, and
    # whatever pickle may reach refuses `__setstate__`, which pickle asks for before it sets any.
    return _Unchanging(name, (), {"__new__": lambda _, *given: make(*given)})


def _path_text(*parts: str) -> str:  # of a checkpoint that plain DCP wrote; not used
    if not all(isinstance(part, str) for part in parts) or sum(map(len, parts)) > _PATH:
        # Joined again and again, a few bytes would become gigabytes.
        _forged(f"names a path that is no text of at most {_PATH} characters")
    return "/".join(parts)


def _member(owner: object, name: object) -> _MemoryFormat:
    # Note [Members of an enum]
    # Pickle writes a member as a call of its class with the member's value. The first releases of
    # Python 3.11 write `getattr(class, name)`, such as 3.11.2, which Debian 12 has. So `getattr`
    # stands for this alone: it gives members of this enum, and no attribute of anything else.
    if owner is not _KNOWN[_MEMORY_FORMAT] or name not in MemoryFormatCode.__members__:
        _forged(f"asks for the attribute {name!r} of {owner!r}")
    return _MemoryFormat(MemoryFormatCode[str(name)].value)


_MEMORY_FORMAT = (MemoryFormatCode.__module__, "_MEM_FORMAT_ENCODING")
# What DCP's metadata is made of.
_KNOWN: dict[tuple[str, str], Any] = {
    # Whose making runs no code of the file's, and which nobody can set attributes of.
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    **{
        (k.__module__, k.__name__): _maker_of(k.__name__, partial(object.__new__, k))
        for k in _RECORDS
    },
    **{path: _maker_of(path[1], _path_text) for path in _PATHS},
    _MEMORY_FORMAT: _maker_of("_MEM_FORMAT_ENCODING", _MemoryFormat),
    ("builtins", "getattr"): _maker_of("getattr", _member),
    ("__builtin__", "getattr"): _maker_of("getattr", _member),  # as protocol 2 writes it
    ("torch.serialization", "_get_layout"): _maker_of("_get_layout", get_layout),
    **{("torch", name): getattr(torch, name) for name in _DTYPES if hasattr(torch, name)},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Knows metadata's classes and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that metadata needs; CheckpointUnsafeError names any other."""
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise CheckpointUnsafeError(
            f"the checkpoint's metadata asks for {module}.{name}, which metadata never needs: "
            "it was forged or comes from another version of torch; nothing of it was executed"
        )


def read_metadata(location: Location, text: bytes | None = None) -> Metadata:
    """Read DCP's `.metadata`, a pickle, or the text of one, without executing any of it.

    CheckpointUnsafeError says that it names anything but metadata's own classes,
    CheckpointDamagedError that it is no metadata.
    """
    file = f"{location}/{METADATA}"
    try:
        text = location.read(METADATA) if text is None else text
        _check_claims(text)
        metadata = _MetadataUnpickler(io.BytesIO(text)).load()
        _check_files(metadata)
    except CheckpointUnsafeError:
        raise
    except Exception as error:  # an altered pickle may raise nearly anything
        raise CheckpointDamagedError(f"{file} can't be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointDamagedError(f"{file} holds a {type(metadata).__name__}, not metadata")
    return metadata


# Bytes of each instruction's argument, or less than 0 for one that says where it ends.
_ARGUMENTS = {ord(op.code): 0 if op.arg is None else op.arg.n for op in pickletools.opcodes}
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_PUT, _STOP, _FRAME = ord("p"), ord("."), 0x95
_PLACES = {ord("r"): 4}  # bytes of an entry's number; one byte asks for little
_SKIPS = [
    1 + argument if argument >= 0 and code not in (_STOP, _FRAME, *_PLACES) else 0
    for code, argument in ((code, _ARGUMENTS.get(code, -1)) for code in range(256))
]
"""Bytes of the instructions that claim nothing, and 0 for all others."""
_SHORT = {code for code, length in _ARGUMENTS.items() if length == pickletools.TAKEN_FROM_ARGUMENT1}
_TWO_LINES = (ord("c"), ord("i"))


def _check_claims(text: bytes) -> None:
    """Raise ValueError for a pickle that claims more memory than its length can account for."""
    # Note [A pickle claims memory before it is read]
    # Python's unpickler makes room for what an instruction announces: for a string its length, for
    # an entry of its table of objects all entries before it. Eleven bytes can so ask for gigabytes.
    # A pickle that was written has at most one entry for each instruction, and so for each byte
    # before it, and holds its strings.
    at = 0
    while True:
        operation = text[at]
        if skip := _SKIPS[operation]:
            at += skip
            continue
        if operation in _SHORT:  # at most 255 bytes
            at += 2 + text[at + 1]
            continue
        at = count = at + 1
        argument = _ARGUMENTS[operation]
        if argument > 0:
            width = 8 if operation == _FRAME else _PLACES.get(operation, 0)
            limit = len(text) if operation == _FRAME else count
            if width and int.from_bytes(text[at : at + width], "little") > limit:
                raise ValueError(f"the instruction before byte {at} asks for too much memory")
            at += argument
        elif argument < 0:
            begin, width = at, _LENGTHS.get(argument, 0)
            at += width + int.from_bytes(text[at : at + width], "little")
            for _ in range(0 if width else 1 + (operation in _TWO_LINES)):
                at = text.index(b"\n", at) + 1
            asked = int(text[begin:at]) if operation == _PUT else 0
            if at > len(text) or asked > count:
                raise ValueError(f"the instruction before byte {begin} asks for too much memory")
        elif operation == _STOP:
            return


def _check_files(metadata: Any) -> None:
    """Refuse chunks that lie outside the checkpoint; below it, plain DCP may have directories."""
    infos = (getattr(metadata, "storage_data", None) or {}).values()
    names = {info.relative_path for info in infos}
    paths = map(PurePath, sorted(names))
    if outside := [str(path) for path in paths if path.is_absolute() or ".." in path.parts]:
        raise ValueError(f"it lists files outside the checkpoint: {outside}")


@contextmanager
def opened(
    location: Location, name: str, *, mapped: bool = True
) -> Iterator[Callable[[int, int], memoryview]]:
    """Open a file and give a function (offset, length) -> bytes, without copies where possible.

    With `mapped` a local file is mapped into memory. A bad sector then kills the process (SIGBUS);
    without it, reading raises OSError.
    """
    with location.open(name) as file:
        if mapped and isinstance(location, LocalLocation) and os.fstat(file.fileno()).st_size:
            # Not closed by hand: tensors made of it may still be alive.
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            yield lambda offset, length: whole[offset : offset + length]
            return

        def read(offset: int, length: int) -> memoryview:
            file.seek(offset)
            return memoryview(bytearray(file.read(length)))

        yield read


class Reader(StorageReader):
    """Reads what a plan asks for, after checking every chunk that the plan touches.

    The check runs while DCP plans, before it writes into any tensor; a failure on one rank reaches
    all ranks by DCP's own exchange of plans. A manifest of None is that of plain DCP's checkpoints,
    which have no sums to check. `read` is called with the bytes of each chunk read.
    """

    def __init__(
        self,
        location: Location,
        metadata: Metadata,
        manifest: Manifest | None,
        read: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._location, self._metadata = location, metadata
        self._manifest, self._read = manifest, read
        self._sums = ChunkSums({}) if manifest is None else ChunkSums.read(manifest, location)
        # A local file is read twice, the second time from memory; others come over a network.
        near = manifest is None or isinstance(location, LocalLocation)
        self._fetched = None if near else Fetched()
        self.bytes_read = 0

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a Reader is made with its location."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Keep everything: a Reader serves one load."""

    def read_metadata(self) -> Metadata:
        """Return the metadata read before."""
        # Its signature must not have **kwargs, or DCP takes an error for an older file layout.
        if getattr(self._metadata, "storage_meta", None) is None:
            self._metadata.storage_meta = StorageMeta()
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, *_: object, **__: object) -> None:
        """Do nothing: all is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check what this rank is about to read."""
        if any(item.type == LoadItemType.BYTE_IO for item in plan.items):
            raise CheckpointUnsafeError(
                f"{self._location} holds pickled objects, tensors are wanted"
            )
        if self._manifest is not None:
            for name, items in self._by_file(plan.items):
                self._check(self._manifest, name, items)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def _info(self, item: ReadItem) -> StorageInfo:
        info: StorageInfo = self._metadata.storage_data[item.storage_index]
        if info.transform_descriptors:
            raise CheckpointUnsafeError(
                f"{item.storage_index.fqn} was written through {info.transform_descriptors}, which "
                "this layer does not undo: read the checkpoint with plain DCP"
            )
        return info

    def _by_file(self, items: list[ReadItem]) -> list[tuple[str, list[ReadItem]]]:
        """Group items by file, in the order in which they lie there."""
        ordered = sorted(
            items, key=lambda item: (self._info(item).relative_path, self._info(item).offset)
        )
        by_file = groupby(ordered, key=lambda item: self._info(item).relative_path)
        return [(name, list(of_file)) for name, of_file in by_file]

    def _check(self, manifest: Manifest, name: str, items: list[ReadItem]) -> None:
        if name not in manifest.files:
            raise CheckpointDamagedError(f"{self._location}/{name} is used but not in the manifest")
        chunks = {self._info(item).offset: item for item in items}
        if any(self._sums.of(name, offset) is None for offset in chunks):
            manifest.check_file(self._location, name)
            return
        # Read, not mapped: a bad sector is then an error, which every rank hears of.
        with self._location.open(name) as file:
            for offset, item in chunks.items():
                self._check_chunk(name, file, offset, item)

    def _check_chunk(self, name: str, file: BinaryIO, offset: int, item: ReadItem) -> None:
        length = self._info(item).length
        try:
            if self._fetched is None:
                crc = crc_of(file, offset, length)
            else:
                crc = self._fetched.keep(name, file, offset, length)
        except OSError as error:
            where = f"{self._location}/{name}: '{item.storage_index.fqn}'"
            raise unreadable(where, error) from error
        self._compare(item, crc)

    def _compare(self, item: ReadItem, crc: int) -> None:
        """Compare the CRC-32 of a chunk with the one that was written."""
        info = self._info(item)
        name, offset, length = info.relative_path, info.offset, info.length
        expected = self._sums.of(name, offset)
        if expected is None or expected.crc32 != crc or expected.bytes != length:
            index, at = item.storage_index, list(item.storage_index.offset or ())
            raise CheckpointDamagedError(
                f"{self._location}/{name} is damaged: '{index.fqn}' from {at} "
                f"(bytes {offset} to {offset + length}) has CRC-32 {crc:08x}, written was "
                f"{expected.crc32 if expected else 0:08x}"
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each chunk once, and copy from it all that is wanted of it."""
        for name, items in self._by_file(plan.items):
            kept = self._fetched  # what was kept of a file when it was checked
            near = kept is not None and all(kept.holds(name, self._info(i).offset) for i in items)
            source = nullcontext(partial(kept.read, name)) if kept and near else None
            with source or opened(self._location, name) as read:
                for _, of_chunk in groupby(items, key=lambda item: self._info(item).offset):
                    self._read_chunk(read, list(of_chunk), planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_chunk(
        self, read: Callable[[int, int], memoryview], items: list[ReadItem], planner: LoadPlanner
    ) -> None:
        info, kept = self._info(items[0]), self._fetched
        chunk, place = read(info.offset, info.length), (info.relative_path, info.offset)
        if kept is not None and not kept.holds(*place) and self._sums.of(*place) is not None:
            # It came over a network a second time, after its check.
            self._compare(items[0], zlib.crc32(chunk))
        stored = self._tensor(chunk, items[0])
        for item in items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrowed(stored, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        self.bytes_read += info.length
        self._read(info.length)

    def _tensor(self, chunk: memoryview, item: ReadItem) -> torch.Tensor:
        index = item.storage_index
        if self._manifest is None:  # another writer's: strides are its own affair
            return safely_loaded(io.BytesIO(chunk))
        described = self._metadata.state_dict_metadata[index.fqn]
        if not isinstance(described, TensorStorageMetadata):
            raise CheckpointDamagedError(f"'{index.fqn}' is no tensor in the metadata")
        boxes, hint = described.chunks, index.index
        if hint is None or boxes[hint].offsets != index.offset:
            hint = [box.offsets for box in boxes].index(cast(torch.Size, index.offset))
        dtype, sizes = described.properties.dtype, boxes[hint].sizes
        stored = tensor_in(chunk, dtype, sizes)
        if stored.dtype != dtype or stored.shape != sizes:
            raise CheckpointDamagedError(
                f"'{index.fqn}' from {list(index.offset or ())} in {self._location} is "
                f"{stored.dtype} {list(stored.shape)}, its metadata says {dtype} {list(sizes)}"
            )
        return stored


class Fetched:
    """Keeps chunks in a nameless file in Python's temporary directory (`TMPDIR`).

    It grows to what this rank reads. Where there is no room, nothing is kept: `holds` is then
    False, and chunks are read again from where they came.
    """

    def __init__(self) -> None:
        self._starts: dict[tuple[str, int], int] = {}
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
        self._starts[name, offset] = start
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
        return self._file is not None and (name, offset) in self._starts

    def read(self, name: str, offset: int, length: int) -> memoryview:
        """Return a chunk that `holds`; it shares the file's pages."""
        if self._file is None:
            raise KeyError(name)
        if self._map is None:
            self._map = memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY))
        start = self._starts[name, offset]
        return self._map[start : start + length]
