"""What a checkpoint holds, whether it is undamaged, and how two differ: without any model.

Everything here runs in one process and holds one tensor at a time.
"""

import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lamina.buffers.engine import narrowed
from lamina.checkpoint.errors import CheckpointDamagedError, CheckpointError
from lamina.checkpoint.load.loading import open_checkpoint
from lamina.checkpoint.load.reader import opened, read_metadata
from lamina.checkpoint.storage.locations import Location, location_of
from lamina.checkpoint.storage.manifest import CHUNKS, METADATA, VALUES, ChunkSums, Manifest
from lamina.checkpoint.storage.streams import tensor_in


class Opened:
    """A complete checkpoint (`.../step-00000100`), open for reading; tensors are by name.

    CheckpointDamagedError and CheckpointUnsafeError say what is wrong with its small files.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self.location = location_of(location)
        source = open_checkpoint(self.location)
        self.metadata, self.values = source.metadata, source.trees
        self.manifest = cast(Manifest, source.manifest)
        self.tensors = tensors_of(self.metadata)

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor whole; CheckpointDamagedError if one of its chunks is altered."""
        described = self.tensors[name]
        whole = torch.empty(described.size, dtype=described.properties.dtype)
        sums = ChunkSums.read(self.manifest, self.location)
        for chunk in chunks_of(self.metadata, name):
            if problem := check_chunk(self.location, sums, chunk):
                raise CheckpointDamagedError(problem)
            with opened(self.location, chunk.file) as read:
                piece = tensor_in(read(chunk.offset, chunk.length), whole.dtype, chunk.sizes)
            narrowed(whole, chunk.at, chunk.sizes).copy_(piece)
        return whole


@dataclass(frozen=True)
class Chunk:
    """One box of one tensor, and where it lies."""

    name: str
    at: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    file: str
    offset: int
    length: int


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the tensors in DCP's metadata."""
    return {
        name: described
        for name, described in metadata.state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata)
    }


def chunks_of(metadata: Metadata, name: str | None = None) -> Iterator[Chunk]:
    """Yield the chunks of a tensor, or of all, in the order of their files."""
    storage_items = sorted(
        (item for item in metadata.storage_data.items() if name in (None, item[0].fqn)),
        key=lambda item: (item[1].relative_path, item[1].offset),
    )
    tensors = tensors_of(metadata)
    boxes = {
        fqn: {box.offsets: box.sizes for box in described.chunks}
        for fqn, described in tensors.items()
    }
    for index, info in storage_items:
        if index.fqn not in boxes:
            continue
        sizes = boxes[index.fqn].get(index.offset)
        if sizes is None:
            raise CheckpointDamagedError(f"'{index.fqn}' has no box at {index.offset}")
        dtype, place = tensors[index.fqn].properties.dtype, (info.relative_path, info.offset)
        yield Chunk(index.fqn, tuple(index.offset), tuple(sizes), dtype, *place, info.length)


def check_chunk(location: Location, sums: ChunkSums, chunk: Chunk) -> str | None:
    """Read a chunk; return what is wrong with it."""
    where = f"{location}/{chunk.file}: '{chunk.name}' from {list(chunk.at)} (written by rank "
    where += f"{chunk.file.lstrip('_').partition('_')[0]})"
    expected = sums.of(chunk.file, chunk.offset)
    try:
        with opened(location, chunk.file, mapped=False) as read:
            data = read(chunk.offset, chunk.length)
            if len(data) != chunk.length:
                return f"{where} is cut off after {len(data)} of {chunk.length} bytes"
            if expected is not None and zlib.crc32(data) != expected.crc32:
                return f"{where} is damaged: its CRC-32 is not the one written"
            stored = tensor_in(data, chunk.dtype, chunk.sizes)
            if stored.dtype != chunk.dtype or tuple(stored.shape) != chunk.sizes:
                return (
                    f"{where} is {stored.dtype} {list(stored.shape)}, the metadata says "
                    f"{chunk.dtype} {list(chunk.sizes)}"
                )
    except FileNotFoundError:
        return f"{where}: the file is missing"
    except Exception as error:  # a damaged zip file may raise nearly anything
        return f"{where} can't be read: {error}"
    return None


def verify_checkpoint(location: str | os.PathLike[str]) -> list[str]:
    """Read every byte of a checkpoint and compare it with its checksums.

    Returns:
        What is wrong, each with file, tensor and rank; empty for an undamaged checkpoint.

    Examples:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = CheckpointManager(folder).save(1, {"model": torch.nn.Linear(4, 1)})
        ...     verify_checkpoint(report.path)
        []
    """
    at = location_of(location)
    try:
        manifest = Manifest.read(at)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    bad_files = set()
    for name in manifest.files:
        problem = _check_file(at, manifest, name)
        if problem is not None:
            bad_files.add(name)
            problems.append(problem)
    if bad_files & {METADATA, VALUES, CHUNKS}:
        return problems
    try:
        metadata, sums = read_metadata(at), ChunkSums.read(manifest, at)
        chunk_problems = [check_chunk(at, sums, chunk) for chunk in chunks_of(metadata)]
    except CheckpointError as error:
        return [*problems, str(error)]
    return problems + [problem for problem in chunk_problems if problem is not None]


def _check_file(location: Location, manifest: Manifest, name: str) -> str | None:
    try:
        replace(manifest, files={name: manifest.files[name]}).check_sizes(location)
        manifest.check_file(location, name)
    except CheckpointDamagedError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Difference:
    """One name that two checkpoints don't agree on, and how."""

    name: str
    how: str


def compare_checkpoints(
    first: str | os.PathLike[str], second: str | os.PathLike[str]
) -> list[Difference]:
    """Compare two checkpoints by names, shapes, dtypes, bits of tensors, and plain values.

    How many ranks wrote them and how tensors were cut does not matter.

    Examples:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = CheckpointManager(folder).save(1, {"model": torch.nn.Linear(4, 1)})
        ...     compare_checkpoints(report.path, report.path)
        []
    """
    a, b = Opened(first), Opened(second)
    differences = [
        Difference(name, "only in the second" if name in b.tensors else "only in the first")
        for name in sorted(a.tensors.keys() ^ b.tensors.keys())
    ]
    for name in sorted(a.tensors.keys() & b.tensors.keys()):
        how = _compare(a, b, name)
        if how is not None:
            differences.append(Difference(name, how))
    flat_a, flat_b = flat_values(a.values), flat_values(b.values)
    for name in sorted(flat_a.keys() | flat_b.keys()):
        value_a, value_b = flat_a.get(name, "(absent)"), flat_b.get(name, "(absent)")
        if value_a != value_b:
            differences.append(Difference(name, f"{_short(value_a)} / {_short(value_b)}"))
    return differences


def _compare(a: Opened, b: Opened, name: str) -> str | None:
    described_a, described_b = a.tensors[name], b.tensors[name]
    if described_a.size != described_b.size:
        return f"shape {list(described_a.size)} / {list(described_b.size)}"
    if described_a.properties.dtype != described_b.properties.dtype:
        return f"dtype {described_a.properties.dtype} / {described_b.properties.dtype}"
    x, y = a.tensor(name), b.tensor(name)
    if not x.numel() or torch.equal(_bits(x), _bits(y)):
        return None
    if not x.is_floating_point():
        return f"{int((x != y).sum())} of {x.numel()} elements differ"
    x, y = x.double(), y.double()
    gap = (x - y).abs()
    return (
        f"{int((x != y).sum())} of {x.numel()} elements differ, by at most {float(gap.max()):.3g} "
        f"(largest value {float(x.abs().max()):.3g})"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def flat_values(tree: Any, name: str = "") -> dict[str, Any]:
    """Return the plain values of `values.json` by dotted names; tensors' places are left out."""
    if isinstance(tree, Mapping):
        if set(tree) == {"$tensor"}:
            return {}
        items: Any = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    else:
        return {name: tree}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat.update(flat_values(value, f"{name}.{key}" if name else str(key)))
    return flat


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
