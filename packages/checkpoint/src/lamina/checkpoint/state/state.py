"""From a dict of objects to tensors and JSON: what is saved, and what a restore fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lamina.checkpoint.errors import CheckpointError
from lamina.checkpoint.state.cut_tensors import Hints, Parts, as_part
from lamina.checkpoint.state.json_values import Json, encode, join
from lamina.checkpoint.state.merge_ranks import Trees
from lamina.checkpoint.state.optimizer_names import (
    OptimizerNames,
    is_optimizer,
    parameters_of,
    unwrapped,
)
from lamina.checkpoint.state.per_rank import PerRank
from lamina.checkpoint.state.replicas import Digests, Kind, digests, first_box

__all__ = ["Offered", "Path", "Taken", "holds", "is_stateful", "take", "take_entry"]


Path = tuple[str, ...]


def is_stateful(value: Any) -> bool:
    """Whether a value gives its state itself; all others are plain values."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


@dataclass
class Taken:
    """One entry of a state, taken apart.

    Attributes:
        tree: its state_dict, or the plain value itself; an optimizer's with parameter names, a
            module's with the names of the whole model.
        json: the tree without its tensors.
        tensors: name -> tensor, as the tree holds it.
        parts: name -> tensor, as the whole model's tensor that it is a part of: what DCP sees.
        paths: name -> its keys.
        optimizer: names and numbers, of an optimizer.
        own_names: of a module whose names were changed, by the names of the whole model.
        trained: names of parameters and of what an optimizer keeps of them, which are equal
            wherever they are whole; but step counts, for experts without a token are not stepped.
    """

    tree: Any
    json: Json
    tensors: dict[str, torch.Tensor]
    parts: dict[str, torch.Tensor]
    paths: dict[str, Path]
    optimizer: OptimizerNames | None = None
    own_names: Mapping[str, str] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()


def take_entry(entry: str, value: Any, state: Mapping[str, Any], parts: Parts) -> Taken:
    """Ask one object for its state and take it apart.

    Raises:
        TypeError: it holds something that is neither a tensor nor a plain value.
        CheckpointError: two tensors would be stored under one name.
    """
    optimizer = OptimizerNames(value, state, parts.rename) if is_optimizer(value) else None
    own_names: dict[str, str] = {}
    if optimizer is not None:
        tree: Any = optimizer.named()
    elif isinstance(value, torch.nn.Module):
        tree, own_names = _renamed(dict(value.state_dict()), parts)
    else:
        tree = value.state_dict() if is_stateful(value) else value
    found: dict[Path, torch.Tensor] = {}
    json = encode(tree, (entry,), found)
    paths: dict[str, Path] = {}
    for path in found:
        if paths.setdefault(join(path), path) != path:
            raise CheckpointError(
                f"two tensors are called '{join(path)}': {paths[join(path)]} and {path}; rename "
                "one entry"
            )
    tensors = {join(path): tensor for path, tensor in found.items()}
    owners = _owners(entry, value, paths, optimizer, parts)
    shown = {name: tensor.detach() for name, tensor in tensors.items()}
    for name, held in owners.items():
        shown[name] = as_part(shown[name], parts.region(name, held), held)
    trained = frozenset(n for n in owners if optimizer is None or tensors[n].ndim > 0)
    return Taken(tree, json, tensors, shown, paths, optimizer, own_names, trained)


def _renamed(tree: dict[str, Any], parts: Parts) -> tuple[dict[str, Any], dict[str, str]]:
    own_names: dict[str, str] = {}
    for name in tree:
        if own_names.setdefault(parts.rename(name), name) != name:
            raise CheckpointError(
                f"rename gives '{name}' and '{own_names[parts.rename(name)]}' one name: "
                f"'{parts.rename(name)}'"
            )
    if all(name == own for name, own in own_names.items()):
        return tree, {}
    return {name: tree[own] for name, own in own_names.items()}, own_names


def holds(tree: Any, mark: object) -> bool:
    """Whether a tree of plain values has `mark` at any depth."""
    if isinstance(tree, Mapping):
        return any(holds(value, mark) for value in tree.values())
    if isinstance(tree, (list, tuple, set, frozenset)):
        return any(holds(value, mark) for value in tree)
    return tree is mark


def _owners(
    entry: str,
    value: Any,
    paths: Mapping[str, Path],
    optimizer: OptimizerNames | None,
    parts: Parts,
) -> dict[str, torch.Tensor]:
    """Return, of the names of parameters and of optimizer state, the parameter."""
    if optimizer is not None:
        keys = {name: path[2] for name, path in paths.items() if path[1] == "state"}
        known = optimizer.parameters
        return {name: known[key] for name, key in keys.items() if key in known}
    if isinstance(value, torch.nn.Module):
        named = {f"{entry}.{parts.rename(n)}": p for n, p in parameters_of(value)}
        return {name: parameter for name, parameter in named.items() if name in paths}
    return {}


@dataclass(frozen=True)
class Offered:
    """What a rank offers of a state.

    Attributes:
        tensors: nested, for DCP.
        trees: the other values.
        digests: of the weights, buffers and optimizer state that this rank offers as whole, and of
            its first box of each that is cut.
    """

    tensors: dict[str, Any]
    trees: Trees
    digests: Digests


def take(
    state: Mapping[str, Any], hints: Hints, *, first: bool = True, check: bool = True
) -> Offered:
    """Split a state into what DCP saves and what JSON saves.

    Args:
        state: name -> object or plain value.
        hints: what the objects don't say.
        first: this is the first rank, whose plain values count. Others offer of their tensors only
            the sharded ones: of a whole one DCP would take any rank's.
        check: make digests.

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
    parts = Parts(objects, hints)
    for entry, value in objects.items():
        if isinstance(value, PerRank):
            shared[entry], own[entry] = None, value.encoded(entry, parts.place())
            continue
        taken = take_entry(entry, value, objects, parts)
        taken.parts = {name: _resolved(tensor) for name, tensor in taken.parts.items()}
        shared[entry] = taken.json
        known = taken.optimizer is not None or isinstance(value, torch.nn.Module)
        if known:
            joined.add(entry)
        if check and is_stateful(value):
            for name, tensor, kind in _compared(taken, known):
                compared[name], kinds[name] = tensor, kind
        for name, tensor in taken.parts.items():
            if not (known or first or _is_cut(tensor)):
                continue
            if seen.setdefault(name, taken.paths[name]) != taken.paths[name]:
                raise CheckpointError(
                    f"two tensors are called '{name}': {seen[name]} and {taken.paths[name]}; "
                    "rename one entry"
                )
            _insert(nested, taken.paths[name], tensor)
    trees = Trees(shared, frozenset(joined), own)
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

    Args:
        taken: of an object.
        known: it is a module or an optimizer; of others whole tensors are the first rank's.
    """
    for name, tensor in taken.parts.items():
        trained: Kind = "trained" if name in taken.trained else "usual"
        if not _is_cut(tensor):
            yield name, tensor, trained if known else "first"
        elif trained == "trained" and (box := first_box(name, tensor)):
            yield *box, trained


def _insert(nested: dict[str, Any], path: Path, tensor: torch.Tensor) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
        if not isinstance(nested, dict):
            raise CheckpointError(f"'{join(path)}' is below a tensor of the same name")
    if path[-1] in nested:
        raise CheckpointError(f"two tensors are called '{join(path)}'")
    nested[path[-1]] = tensor
