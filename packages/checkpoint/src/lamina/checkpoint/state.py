"""From a dict of objects to tensors and JSON: what is saved, and what a restore fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from lamina.checkpoint.errors import CheckpointError
from lamina.checkpoint.names import OptimizerNames, is_optimizer
from lamina.checkpoint.parts import Parts, as_part
from lamina.checkpoint.per_rank import PerRank
from lamina.checkpoint.trees import Trees
from lamina.checkpoint.values import Json, encode, join
from lamina.mesh import ParallelMesh

Path = tuple[str, ...]
Mesh = ParallelMesh | DeviceMesh | None


def is_stateful(value: Any) -> bool:
    """Whether a value gives its state itself; all others are plain values."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


@dataclass
class Taken:
    """One entry of a state, taken apart.

    Attributes:
        tree: its state_dict, or the plain value itself; an optimizer's with parameter names.
        json: the tree without its tensors.
        tensors: name -> tensor, as the tree holds it.
        parts: name -> tensor, as the whole model's tensor that it is a part of: what DCP sees.
        paths: name -> its keys.
        optimizer: names and numbers, of an optimizer.

    """

    tree: Any
    json: Json
    tensors: dict[str, torch.Tensor]
    parts: dict[str, torch.Tensor]
    paths: dict[str, Path]
    optimizer: OptimizerNames | None = None


def take_entry(entry: str, value: Any, state: Mapping[str, Any], parts: Parts) -> Taken:
    """Ask one object for its state and take it apart.

    Raises:
        TypeError: it holds something that is neither a tensor nor a plain value.
        CheckpointError: two tensors would be stored under one name.

    """
    optimizer = OptimizerNames(value, state) if is_optimizer(value) else None
    if optimizer is not None:
        tree: Any = optimizer.named()
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
    shown = _shown(entry, value, tensors, optimizer, parts)
    return Taken(tree, json, tensors, shown, paths, optimizer)


def _shown(
    entry: str,
    value: Any,
    tensors: Mapping[str, torch.Tensor],
    optimizer: OptimizerNames | None,
    parts: Parts,
) -> dict[str, torch.Tensor]:
    """Show parameters, and optimizer state of their shape, as the parts that they are."""
    shown = {name: tensor.detach() for name, tensor in tensors.items()}
    owners: dict[str, torch.Tensor] = {}
    if optimizer is not None:
        for name in tensors:
            owner = optimizer.parameters.get(owner_of(entry, name))
            if owner is not None:
                owners[name] = owner
    elif isinstance(value, torch.nn.Module):
        owners = {f"{entry}.{n}": p for n, p in value.named_parameters(remove_duplicate=False)}
    for name, held in owners.items():
        if name in shown:
            shown[name] = as_part(shown[name], parts.region(name, held), held)
    return shown


def owner_of(entry: str, name: str) -> str:
    """Return the parameter's name in the name of a tensor of optimizer state."""
    return name.removeprefix(f"{entry}.state.").rpartition(".")[0]


def take(state: Mapping[str, Any], mesh: Mesh = None) -> tuple[dict[str, Any], Trees]:
    """Split a state into what DCP saves and what JSON saves.

    Args:
        state: name -> object or plain value.
        mesh: see `Parts`.

    Returns:
        A nested dict that holds only tensors, for DCP, and the rest.

    Raises:
        TypeError: an entry holds something that is neither a tensor nor a plain value.
        CheckpointError: two tensors would be stored under one name.

    """
    nested: dict[str, Any] = {}
    shared: dict[str, Json] = {}
    own: dict[str, Json] = {}
    joined = set()
    seen: dict[str, Path] = {}
    parts = Parts(state, mesh)
    for entry, value in state.items():
        if isinstance(value, PerRank):
            shared[entry], own[entry] = None, value.encoded(entry)
            continue
        taken = take_entry(entry, value, state, parts)
        shared[entry] = taken.json
        if taken.optimizer is not None or isinstance(value, torch.nn.Module):
            joined.add(entry)
        for name, tensor in taken.parts.items():
            if seen.setdefault(name, taken.paths[name]) != taken.paths[name]:
                raise CheckpointError(
                    f"two tensors are called '{name}': {seen[name]} and {taken.paths[name]}; "
                    "rename one entry"
                )
            _insert(nested, taken.paths[name], tensor)
    return nested, Trees(shared, frozenset(joined), own)


def _insert(nested: dict[str, Any], path: Path, tensor: torch.Tensor) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
        if not isinstance(nested, dict):
            raise CheckpointError(f"'{join(path)}' is below a tensor of the same name")
    if path[-1] in nested:
        raise CheckpointError(f"two tensors are called '{join(path)}'")
    nested[path[-1]] = tensor
