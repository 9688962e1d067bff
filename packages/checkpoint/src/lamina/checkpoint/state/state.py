"""The entries of a state: compared between ranks, and taken apart into tensors and JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lamina.checkpoint.errors import CheckpointError
from lamina.checkpoint.ranks import Ranks
from lamina.checkpoint.state.cut_tensors import CutTensors, as_part
from lamina.checkpoint.state.json_values import Json, encode
from lamina.checkpoint.state.optimizer_names import (
    OptimizerNames,
    is_optimizer,
    parameters_of,
    unwrapped,
)
from lamina.checkpoint.state.per_rank import PerRank

Path = tuple[str, ...]


def is_stateful(value: Any) -> bool:
    """Whether a value gives its state itself; all others are plain values."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


@dataclass
class Taken:
    """One entry of a state, taken apart.

    `tree` is its state_dict, or the plain value itself: an optimizer's with parameter names, a
    module's with the names of the whole model. `json` is the tree without its tensors. By name,
    `tensors` are those that the tree holds, `shown` the whole model's tensors that they are parts
    of, which DCP sees, and `paths` their keys. `optimizer` has names and numbers. `own_names` are
    those of a module whose names were changed, by the names of the whole model. `trained` are names
    of parameters and of what an optimizer keeps of them, which are equal wherever they are whole;
    but step counts, for experts without a token are not stepped.
    """

    tree: Any
    json: Json
    tensors: dict[str, torch.Tensor]
    shown: dict[str, torch.Tensor]
    paths: dict[str, Path]
    optimizer: OptimizerNames | None = None
    own_names: Mapping[str, str] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()


def take_entry(entry: str, value: Any, state: Mapping[str, Any], cut: CutTensors) -> Taken:
    """Ask one object for its state and take it apart.

    TypeError names what is neither a tensor nor a plain value, CheckpointError two tensors that
    would be stored under one name.
    """
    optimizer = OptimizerNames(value, state, cut.rename) if is_optimizer(value) else None
    own_names: dict[str, str] = {}
    if optimizer is not None:
        tree: Any = optimizer.named()
    elif isinstance(value, torch.nn.Module):
        tree, own_names = _renamed(dict(value.state_dict()), cut)
    else:
        tree = value.state_dict() if is_stateful(value) else value
    by_path: dict[Path, torch.Tensor] = {}
    json = encode(tree, (entry,), by_path)
    paths: dict[str, Path] = {}
    tensors = {claim(path, paths): tensor for path, tensor in by_path.items()}
    owners = _owners(entry, value, paths, optimizer, cut)
    shown = {name: tensor.detach() for name, tensor in tensors.items()}
    for name, parameter in owners.items():
        shown[name] = as_part(shown[name], cut.region_of(name, parameter), parameter)
    trained = frozenset(n for n in owners if optimizer is None or tensors[n].ndim > 0)
    return Taken(tree, json, tensors, shown, paths, optimizer, own_names, trained)


def claim(path: Path, paths: dict[str, Path]) -> str:
    """Note the name of a path; CheckpointError if another path has that name."""
    name = ".".join(path)
    if paths.setdefault(name, path) != path:
        raise CheckpointError(
            f"two tensors are called '{name}': {paths[name]} and {path}; rename one entry"
        )
    return name


def _renamed(tree: dict[str, Any], cut: CutTensors) -> tuple[dict[str, Any], dict[str, str]]:
    own_names: dict[str, str] = {}
    for name in tree:
        if own_names.setdefault(cut.rename(name), name) != name:
            raise CheckpointError(
                f"rename gives '{name}' and '{own_names[cut.rename(name)]}' one name: "
                f"'{cut.rename(name)}'"
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
    cut: CutTensors,
) -> dict[str, torch.Tensor]:
    """Return, of the names of parameters and of optimizer state, the parameter."""
    if optimizer is not None:
        keys = {name: path[2] for name, path in paths.items() if path[1] == "state"}
        known = optimizer.parameters
        return {name: known[key] for name, key in keys.items() if key in known}
    if isinstance(value, torch.nn.Module):
        named = {f"{entry}.{cut.rename(n)}": p for n, p in parameters_of(value)}
        return {name: parameter for name, parameter in named.items() if name in paths}
    return {}


_OBJECT = "an object with state_dict"
_PLAIN = "a plain value"


def check_entries(state: Mapping[str, Any], ranks: Ranks) -> None:
    """Compare names and kinds of entries between ranks (collective).

    Of plain values, and of objects that are neither modules nor optimizers, the first rank's are
    stored. So an object such as a loader may be there on the first rank alone, with a plain value
    (None) in its place on others. CheckpointError, the same on every rank, says what differs.
    TypeError says that the state is no dict of names.
    """
    own = ranks.together(lambda: _kinds(state))
    if ranks.agree(json.dumps(own).encode()):
        return
    of_ranks = [dict(text.rsplit("\n", 1) for text in of) for of in ranks.lists(own)]
    for entry in sorted({entry for of in of_ranks for entry in of}):
        kinds = [of.get(entry, "missing") for of in of_ranks]
        same = {kinds[0], _PLAIN} if kinds[0] == _OBJECT else {kinds[0]}  # only rank 0's is stored
        other = next((rank for rank, kind in enumerate(kinds) if kind not in same), None)
        if other is not None:
            remedy = "give every rank the same entries, and wrap in PerRank what differs"
            if (kinds[0], kinds[other]) == (_PLAIN, _OBJECT):
                remedy = "rank 0's state is what is stored: give rank 0 the object"
            raise CheckpointError(
                f"entry '{entry}' of the state is {kinds[0]} on rank 0 and {kinds[other]} on rank "
                f"{other}: {remedy}"
            )


def _kinds(state: Mapping[str, Any]) -> list[str]:
    """The names of the entries, each with its kind; TypeError for what has no names."""
    example = '{"model": model, "optimizer": optimizer}'
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is of type {type(state).__name__}: give a dict, {example}")
    for entry in state:
        if not isinstance(entry, str):
            raise TypeError(f"the state has an entry {entry!r}: names are strings, as in {example}")
    return [f"{entry}\n{_kind(unwrapped(value))}" for entry, value in sorted(state.items())]


def _kind(value: Any) -> str:
    if isinstance(value, PerRank):
        return "a PerRank"
    if isinstance(value, torch.nn.Module):
        return "a module"
    if is_optimizer(value):
        return "an optimizer"
    return _OBJECT if is_stateful(value) else _PLAIN
