"""What a rank offers to write of a state: tensors for DCP, values for JSON, digests to compare.

DCP stores one of the tensors that several ranks offer as the whole, or as the same box, of one
name. Where they are not equal (experts in modules of equal names on every ep rank, parameters that
are marked as cut along an unknown axis), all but one would be lost without a word. So each rank
sums the beginning of what it offers as whole, and of its first box of what is cut, and the
coordinator compares before anything is written.
"""

import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from lamina.checkpoint.errors import CheckpointError, shortened
from lamina.checkpoint.state.cut_tensors import CutTensors, Hints, is_cut
from lamina.checkpoint.state.json_values import Json, RankValues
from lamina.checkpoint.state.optimizer_names import unwrapped
from lamina.checkpoint.state.per_rank import PerRank
from lamina.checkpoint.state.state import Path, Taken, claim, is_stateful, take_entry
from lamina.checkpoint.storage.streams import memory_of

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
    sums: Digests = {}
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
            sums[name] = zlib.crc32(view[start:stop], kind), kinds[name]
            start = stop
    return sums


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


def compare(of_ranks: Sequence[Digests], written: Mapping[str, int]) -> None:
    """Refuse weights, optimizer state and objects' tensors that differ; warn of buffers.

    `written` says which rank writes a whole tensor: DCP gives each to a rank that has little to
    write. CheckpointError names tensors, two ranks and the remedies.
    """
    first: dict[str, tuple[int, int]] = {}
    differing: dict[Kind, dict[str, tuple[int, int]]] = {"trained": {}, "usual": {}, "first": {}}
    for rank, mine in enumerate(of_ranks):
        for name, (sum_, kind) in mine.items():
            other, expected = first.setdefault(name, (rank, sum_))
            if sum_ != expected or (kind == "first" and other != 0):
                differing[kind].setdefault(name, (other, rank))
    lost, usual = differing["trained"], differing["usual"]
    if differing["first"]:
        name, (_, other) = next(iter(differing["first"].items()))
        raise CheckpointError(
            f"'{name}' on rank {other} is another tensor than on rank 0, or rank 0 has none: of "
            "objects that are neither modules nor optimizers the first rank's whole tensors are "
            f"stored, and others would be lost ({len(differing['first'])} names: "
            f"{shortened(list(differing['first']))}). PerRank(object) stores each rank's; a tensor "
            "that is cut over ranks can say so (DTensor, lamina.buffers.engine.TensorPart); "
            "CheckpointManager(check_replicas=False) stores the first rank's"
        )
    if lost:
        name, (earlier, other) = next(iter(lost.items()))
        raise CheckpointError(
            f"'{name}' on rank {other} is another tensor than on rank {earlier}, and both offer it "
            f"as the whole: all but one would be lost (so {len(lost)} names: "
            f"{shortened(list(lost))}). Experts in modules of their own need names of "
            "their own on every ep rank (experts.<number in the whole model>), which "
            "CheckpointManager(rename=...) can give them; parameters that tp or ep has cut need "
            "CheckpointManager(mesh=...); an optimizer's state gets names from its model in the "
            "same state. If these are copies that have drifted apart, "
            "CheckpointManager(check_replicas=False) stores one of them"
        )
    if usual:
        name, (earlier, other) = next(iter(usual.items()))
        stored = [f"{buffer} of rank {written[buffer]}" for buffer in usual if buffer in written]
        warnings.warn(
            f"buffers differ between ranks ('{name}' on ranks {earlier} and {other}), and one "
            f'rank\'s are stored: {shortened(stored)}. broadcast_buffers="forward" of the wrapper '
            "keeps the first rank's on all; torch.nn.SyncBatchNorm computes them over all ranks",
            stacklevel=2,
        )


@dataclass(frozen=True)
class Offered:
    """What a rank offers of a state: tensors, nested for DCP, and the other values.

    Digests are of the weights, buffers and optimizer state that this rank offers as whole, and of
    its first box of each that is cut.
    """

    tensors: dict[str, Any]
    trees: RankValues
    digests: Digests


def take(
    state: Mapping[str, Any], hints: Hints, *, first: bool = True, check: bool = True
) -> Offered:
    """Split a state into what DCP saves and what JSON saves; with `check` make digests.

    The first rank's plain values count. Others offer of their tensors only the sharded ones: of a
    whole one DCP would take any rank's. Errors are those of `take_entry`, and TypeError for a
    tensor that has no values.
    """
    nested: dict[str, Any] = {}
    shared: dict[str, Json] = {}
    own: dict[str, Json] = {}
    joined = set()
    claimed: dict[str, Path] = {}
    compared: dict[str, torch.Tensor] = {}
    kinds: dict[str, Kind] = {}
    objects = {entry: unwrapped(value) for entry, value in state.items()}
    cut = CutTensors(objects, hints)
    for entry, value in objects.items():
        if isinstance(value, PerRank):
            shared[entry], own[entry] = None, value.encoded(entry, cut.coordinates())
            continue
        taken = take_entry(entry, value, objects, cut)
        for name, tensor in taken.shown.items():
            if tensor.is_meta:
                raise TypeError(
                    f"'{name}' is on the meta device, where it has no values to save: give the "
                    "module memory first (module.to_empty(device=...)), and its weights after that"
                )
        taken.shown = {name: _resolved(tensor) for name, tensor in taken.shown.items()}
        shared[entry] = taken.json
        known = taken.optimizer is not None or isinstance(value, torch.nn.Module)
        if known:
            joined.add(entry)
        if check and is_stateful(value):
            for name, tensor, kind in _compared(taken, known):
                compared[name], kinds[name] = tensor, kind
        for name, tensor in taken.shown.items():
            if not (known or first or is_cut(tensor)):
                continue
            claim(taken.paths[name], claimed)
            _insert(nested, taken.paths[name], tensor)
    trees = RankValues(shared, frozenset(joined), own)
    return Offered(nested, trees, digests(compared, kinds))


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has its values: a view may conjugate or negate what is there."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return tensor.resolve_conj().resolve_neg()
    return tensor


def _compared(taken: Taken, known: bool) -> Iterator[tuple[str, torch.Tensor, Kind]]:
    """Yield what other ranks may hold too: name, tensor, and what a difference means.

    Of modules and optimizers (`known`) all; of other objects whole tensors are the first rank's.
    """
    for name, tensor in taken.shown.items():
        trained: Kind = "trained" if name in taken.trained else "usual"
        if not is_cut(tensor):
            yield name, tensor, trained if known else "first"
        elif trained == "trained" and (box := first_box(name, tensor)):
            yield *box, trained


def _insert(nested: dict[str, Any], path: Path, tensor: torch.Tensor) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
        if not isinstance(nested, dict):
            raise CheckpointError(f"'{'.'.join(path)}' is below a tensor of the same name")
    if path[-1] in nested:
        raise CheckpointError(f"two tensors are called '{'.'.join(path)}'")
    nested[path[-1]] = tensor
