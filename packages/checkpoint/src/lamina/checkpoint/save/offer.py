"""What a rank offers to write of a state: tensors for DCP, values for JSON, digests to compare."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lamina.checkpoint.errors import CheckpointError
from lamina.checkpoint.save.replicas import Digests, Kind, digests, first_box
from lamina.checkpoint.state.cut_tensors import CutTensors, Hints
from lamina.checkpoint.state.json_values import Json
from lamina.checkpoint.state.merge_ranks import RankValues
from lamina.checkpoint.state.optimizer_names import unwrapped
from lamina.checkpoint.state.per_rank import PerRank
from lamina.checkpoint.state.state import Path, Taken, claim, is_stateful, take_entry

__all__ = ["Offered", "take"]


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
    whole one DCP would take any rank's.

    Raises:
        TypeError: an entry holds something that is neither a tensor nor a plain value.
        CheckpointError: two tensors would be stored under one name.
    """
    nested: dict[str, Any] = {}
    shared: dict[str, Json] = {}
    own: dict[str, Json] = {}
    joined = set()
    seen: dict[str, Path] = {}
    compared: dict[str, torch.Tensor] = {}
    kinds: dict[str, Kind] = {}
    objects = {entry: unwrapped(value) for entry, value in state.items()}
    cut = CutTensors(objects, hints)
    for entry, value in objects.items():
        if isinstance(value, PerRank):
            shared[entry], own[entry] = None, value.encoded(entry, cut.coordinates())
            continue
        taken = take_entry(entry, value, objects, cut)
        taken.shown = {name: _resolved(tensor) for name, tensor in taken.shown.items()}
        shared[entry] = taken.json
        known = taken.optimizer is not None or isinstance(value, torch.nn.Module)
        if known:
            joined.add(entry)
        if check and is_stateful(value):
            for name, tensor, kind in _compared(taken, known):
                compared[name], kinds[name] = tensor, kind
        for name, tensor in taken.shown.items():
            if not (known or first or _is_cut(tensor)):
                continue
            claim(taken.paths[name], seen)
            _insert(nested, taken.paths[name], tensor)
    trees = RankValues(shared, frozenset(joined), own)
    return Offered(nested, trees, digests(compared, kinds))


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has its values: a view may conjugate or negate what is there."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return tensor.resolve_conj().resolve_neg()
    return tensor


def _is_cut(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__create_chunk_list__")


def _compared(taken: Taken, known: bool) -> Iterator[tuple[str, torch.Tensor, Kind]]:
    """Yield what other ranks may hold too: name, tensor, and what a difference means.

    Of modules and optimizers (`known`) all; of other objects whole tensors are the first rank's.
    """
    for name, tensor in taken.shown.items():
        trained: Kind = "trained" if name in taken.trained else "usual"
        if not _is_cut(tensor):
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
