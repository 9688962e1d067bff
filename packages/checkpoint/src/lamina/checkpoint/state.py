"""From a dict of objects to tensors and JSON, and back.

`take` asks every object for its state_dict and splits it. `Plan` compares what a checkpoint holds
with what the objects at hand expect, says by name what does not fit before anything is read, and
hands the tensors back after DCP has filled them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lamina.checkpoint.errors import CheckpointError, CheckpointMismatchError, shortened
from lamina.checkpoint.names import (
    is_optimizer,
    parameter_names,
    parameters_by_name,
    with_keys,
    with_names,
)
from lamina.checkpoint.values import Json, decode, encode, join

Path = tuple[str, ...]


def is_stateful(value: Any) -> bool:
    """Whether a value gives its state itself; all others are plain values."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _tree_of(value: Any, state: Mapping[str, Any]) -> Any:
    if not is_stateful(value):
        return value
    tree = value.state_dict()
    if is_optimizer(value):
        tree = with_names(value, tree, parameter_names(value, state))
    return tree


def take(state: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Split a state into what DCP saves and what JSON saves.

    Returns:
        A nested dict that holds only tensors, for DCP, and the text of `values.json`.

    Raises:
        TypeError: an entry holds something that is neither a tensor nor a plain value.
        CheckpointError: two tensors would be stored under one name.

    """
    nested: dict[str, Any] = {}
    trees: dict[str, Json] = {}
    seen: dict[str, Path] = {}
    for entry, value in state.items():
        tensors: dict[Path, torch.Tensor] = {}
        trees[entry] = encode(_tree_of(value, state), (entry,), tensors)
        for path, tensor in tensors.items():
            if seen.setdefault(join(path), path) != path:
                raise CheckpointError(
                    f"two tensors are called '{join(path)}': {seen[join(path)]} and {path}; "
                    "rename one entry"
                )
            _insert(nested, path, tensor)
    return nested, json.dumps(trees, allow_nan=False).encode()


def _insert(nested: dict[str, Any], path: Path, tensor: torch.Tensor) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
        if not isinstance(nested, dict):
            raise CheckpointError(f"'{join(path)}' is below a tensor of the same name")
    if path[-1] in nested:
        raise CheckpointError(f"two tensors are called '{join(path)}'")
    nested[path[-1]] = tensor.detach()


class Plan:
    """One restore: which stored tensor goes into which tensor at hand.

    Args:
        state: what to load into.
        trees: the parsed `values.json`.
        metadata: DCP's.
        allow_cast: let a tensor be loaded into one of another dtype.

    Raises:
        CheckpointMismatchError: entries, names, shapes or dtypes that don't fit, by name.

    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        trees: Mapping[str, Json],
        metadata: Metadata,
        *,
        allow_cast: bool,
    ) -> None:
        self._state, self._trees = state, trees
        self._stored = metadata.state_dict_metadata
        self._allow_cast = allow_cast
        if absent := sorted(set(state) - set(trees)):
            raise CheckpointMismatchError(
                f"the checkpoint has no entry {shortened(absent)}; "
                f"it has {shortened(sorted(trees))}"
            )
        #: name -> tensor that DCP fills
        self.tensors: dict[str, torch.Tensor] = {}
        for entry, value in state.items():
            self._plan_entry(entry, value)

    def _plan_entry(self, entry: str, value: Any) -> None:
        here: dict[Path, torch.Tensor] = {}
        if is_stateful(value):
            encode(_tree_of(value, self._state), (entry,), here)
        targets = {join(path): tensor for path, tensor in here.items()}
        stored: list[str] = []
        decode(self._trees[entry], stored.append)
        if isinstance(value, torch.nn.Module):
            _check_names(entry, set(targets), set(stored))
        like = parameters_by_name(value, self._state) if is_optimizer(value) else {}
        for name in stored:
            metadata = self._stored.get(name)
            if not isinstance(metadata, TensorStorageMetadata):
                raise CheckpointMismatchError(
                    f"tensor '{name}' is not in the checkpoint's metadata"
                )
            target = targets.get(name)
            if target is None:
                owner = like.get(name.removeprefix(f"{entry}.state.").rpartition(".")[0])
                target = _empty(metadata, owner)
            self._check_tensor(name, target, metadata)
            self.tensors[name] = target.detach()

    def _check_tensor(
        self, name: str, target: torch.Tensor, metadata: TensorStorageMetadata
    ) -> None:
        if target.shape != metadata.size:
            raise CheckpointMismatchError(
                f"'{name}' has shape {list(metadata.size)} in the checkpoint and "
                f"{list(target.shape)} here"
            )
        if target.dtype != metadata.properties.dtype and not self._allow_cast:
            raise CheckpointMismatchError(
                f"'{name}' is {metadata.properties.dtype} in the checkpoint and {target.dtype} "
                "here: pass allow_cast=True to convert it"
            )

    def apply(self) -> None:
        """Give every object its loaded state, and put loaded plain values into the dict."""
        for entry, value in self._state.items():
            tree = decode(self._trees[entry], self.tensors.__getitem__)
            if not is_stateful(value):
                self._state[entry] = tree
                continue
            if is_optimizer(value):
                tree = with_keys(entry, value, tree, parameter_names(value, self._state))
            value.load_state_dict(tree)


def _empty(metadata: TensorStorageMetadata, owner: torch.Tensor | None) -> torch.Tensor:
    """Make the tensor for state that does not exist yet.

    An optimizer that has not stepped has no state. What has its parameter's shape is cut as the
    parameter is (empty_like keeps a sharded tensor's placement); the rest is whole and on the CPU.
    """
    dtype = metadata.properties.dtype
    if owner is not None and owner.ndim > 0 and owner.shape == metadata.size:
        return torch.empty_like(owner.detach(), dtype=dtype)
    return torch.empty(metadata.size, dtype=dtype)


def _check_names(entry: str, here: set[str], stored: set[str]) -> None:
    missing, unexpected = sorted(here - stored), sorted(stored - here)
    if missing or unexpected:
        raise CheckpointMismatchError(
            f"'{entry}' does not fit the checkpoint: not in the checkpoint: "
            f"{shortened(missing) or 'none'}; only in the checkpoint: "
            f"{shortened(unexpected) or 'none'}"
        )
