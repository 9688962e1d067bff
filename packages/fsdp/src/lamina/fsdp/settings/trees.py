"""Changing the tensors inside whatever a module takes and gives: containers and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["map_tensors"]


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same tree with every tensor in containers and dataclasses changed.

    Dataclasses are copied, never written to: they are the caller's. Other objects are passed on
    as they are (a cache is shared on purpose).
    """

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
        if any(a is not b for a, b in zip(tree_leaves(before), tree_leaves(after), strict=True)):
            changed[field.name] = after
    if not changed:
        return value
    # Not dataclasses.replace, which runs __init__ again and takes its arguments only.
    copied = copy.copy(value)
    for name, after in changed.items():
        object.__setattr__(copied, name, after)
    return copied
