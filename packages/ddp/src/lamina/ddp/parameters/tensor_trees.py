"""Tensors inside whatever a module gives: containers, dataclasses, users' objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["tensors_in"]

_DEPTH = 4  # objects inside objects: deep enough for outputs, too shallow for a whole model


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in containers, dataclasses and attributes of other objects, once each."""
    seen: set[int] = set()
    yield from _walk(tree, seen, _DEPTH)


def _walk(tree: Any, seen: set[int], depth: int) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(tree):
        if leaf is None or isinstance(leaf, str | bytes | int | float | type | nn.Module):
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
