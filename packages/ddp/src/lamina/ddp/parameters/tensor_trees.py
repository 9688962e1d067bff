"""Tensors inside whatever a module takes and gives: containers, dataclasses, users' objects."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lamina.ddp.compat import tree_leaves, tree_map

__all__ = ["map_tensors", "tensors_in"]

_PLAIN = (str, bytes, int, float, type)  # what neither is a tensor nor holds one
_DEPTH = 4  # objects inside objects: deep enough for outputs, too shallow for a whole model


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in containers, dataclasses and attributes of other objects, once each."""
    return iter((tree,)) if isinstance(tree, torch.Tensor) else _walk(tree, set(), _DEPTH)


def _walk(tree: Any, seen: set[int], depth: int) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(tree):
        if leaf is None or isinstance(leaf, (*_PLAIN, nn.Module)):
            continue
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__"):
            yield from _walk(list(vars(leaf).values()), seen, depth - 1)
        elif depth and dataclasses.is_dataclass(leaf):  # with slots
            values = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
            yield from _walk(values, seen, depth - 1)


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same tree with every tensor in containers and dataclasses changed.

    Dataclasses are copied, never written to: they are the caller's. Other objects are passed on
    as they are (a cache is shared on purpose).
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if tree is None or isinstance(tree, _PLAIN):  # most fields of dataclasses: torch's walk is slow
        return tree

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
            return _map_dataclass(value, change)
        return value

    return tree_map(leaf, tree)


def _map_dataclass(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        before = getattr(value, field.name, None)
        after = map_tensors(before, change)
        if after is before:
            continue
        if any(a is not b for a, b in zip(tree_leaves(before), tree_leaves(after), strict=True)):
            changed[field.name] = after
    if not changed:
        return value
    # Not dataclasses.replace, which runs __init__ again and takes its arguments only.
    copied = copy.copy(value)
    for name, after in changed.items():
        object.__setattr__(copied, name, after)
    return copied
