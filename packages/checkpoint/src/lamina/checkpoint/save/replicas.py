"""Checks that tensors which several ranks offer under one name are the same.

DCP stores one of the tensors that several ranks offer as the whole, or as the same box, of one
name. Where they are not equal (experts in modules of equal names on every ep rank, parameters that
are marked as cut along an unknown axis), all but one would be lost without a word. So each rank
sums the beginning of what it offers as whole, and of its first box of what is cut, and the
coordinator compares before anything is written.
"""

import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from lamina.checkpoint.errors import CheckpointError, shortened
from lamina.checkpoint.storage.streams import memory_of

__all__ = ["Digests", "Kind", "compare", "digests", "first_box"]

_BYTES = 4096
"""Of each tensor or box: enough to tell two that were trained apart, little beside copying them."""

Kind = Literal["trained", "usual", "first"]
"""What a difference between ranks means. "trained": weights or optimizer state would be lost.
"usual": buffers hold running statistics. "first": of objects that are neither modules nor
optimizers the first rank's tensors are stored, and other ranks' would be lost."""

Digests = dict[str, tuple[int, Kind]]
"""Name -> checksum of shape, dtype and first bytes, and what a difference means."""


def digests(whole: Mapping[str, torch.Tensor], kinds: Mapping[str, Kind]) -> Digests:
    """Sum the beginnings of what this rank offers as all there is under a name, or in a box.

    Beginnings are copied once per device. `kinds` say what a difference means.
    """
    found: Digests = {}
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in whole.items():
        if _has_bytes(tensor):
            by_device.setdefault(tensor.device, {})[name] = _beginning(tensor.detach())
    for heads in by_device.values():
        joined = torch.cat(list(heads.values())).cpu()
        view, start = memory_of(joined), 0
        for name, head in heads.items():
            tensor, stop = whole[name], start + head.numel()
            kind = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            found[name] = zlib.crc32(view[start:stop], kind), kinds[name]
            start = stop
    return found


def _has_bytes(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and tensor.layout is torch.strided and not tensor.is_meta


def first_box(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
    """Return a name for the first box that this rank holds of a tensor that is cut, and the box.

    Copies under data parallelism have the same boxes; ranks with other boxes are not compared.
    """
    chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    if not chunks or not chunks[0].sizes.numel():
        return None
    offsets, sizes = chunks[0].offsets, chunks[0].sizes
    box = tensor.__get_tensor_shard__(MetadataIndex(name, offsets))  # type: ignore[attr-defined]
    return f"{name} from {list(offsets)} of size {list(sizes)}", box


def _beginning(tensor: torch.Tensor) -> torch.Tensor:
    while not tensor.is_contiguous() and tensor.nbytes > _BYTES:
        tensor = tensor[0]  # a copy of all of it would be in the way
    flat = tensor.contiguous().view(-1)
    return flat[: -(-_BYTES // flat.element_size())].view(torch.uint8)


def compare(of_ranks: Sequence[Digests]) -> None:
    """Refuse weights, optimizer state and objects' tensors that differ; warn of buffers.

    Raises:
        CheckpointError: naming tensors, two ranks and the remedies.
    """
    first: dict[str, tuple[int, int]] = {}
    found: dict[Kind, dict[str, tuple[int, int]]] = {"trained": {}, "usual": {}, "first": {}}
    for rank, mine in enumerate(of_ranks):
        for name, (sum_, kind) in mine.items():
            other, expected = first.setdefault(name, (rank, sum_))
            if sum_ != expected or (kind == "first" and other != 0):
                found[kind].setdefault(name, (other, rank))
    lost, usual = found["trained"], found["usual"]
    if found["first"]:
        name, (_, other) = next(iter(found["first"].items()))
        raise CheckpointError(
            f"'{name}' on rank {other} is another tensor than on rank 0, or rank 0 has none: of "
            "objects that are neither modules nor optimizers the first rank's whole tensors are "
            f"stored, and others would be lost ({len(found['first'])} names: "
            f"{shortened(list(found['first']))}). PerRank(object) stores each rank's; a tensor "
            "that is cut over ranks can say so (DTensor, lamina.buffers.engine.TensorPart); "
            "CheckpointManager(check_replicas=False) stores the first rank's"
        )
    if lost:
        name, (one, other) = next(iter(lost.items()))
        raise CheckpointError(
            f"'{name}' on rank {other} is another tensor than on rank {one}, and both offer it as "
            f"the whole: all but one would be lost (so {len(lost)} names: {shortened(list(lost))})."
            " Experts in modules of their own need names of their own on every ep rank "
            "(experts.<number in the whole model>), which CheckpointManager(rename=...) can give "
            "them; parameters that tp or ep has cut need "
            "CheckpointManager(mesh=...); an optimizer's state gets names from its model in the "
            "same state. If these are copies that have drifted apart, "
            "CheckpointManager(check_replicas=False) stores one of them"
        )
    if usual:
        name, (one, other) = next(iter(usual.items()))
        warnings.warn(
            f"buffers differ between ranks, and one rank's are stored: {shortened(list(usual))} "
            f"('{name}' on ranks {one} and {other})",
            stacklevel=2,
        )
