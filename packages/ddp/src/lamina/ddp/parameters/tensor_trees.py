"""Tensors inside whatever a module takes and gives: containers, dataclasses, users' objects."""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lamina.ddp.compat import tree_flatten, tree_leaves, tree_unflatten

_PLAIN = (str, bytes, int, float, type)  # what neither is a tensor nor holds one
_NUMBERS_AND_WORDS = frozenset((type(None), bool, int, float, str))  # most fields of settings
_DEPTH = 4  # objects inside objects: deep enough for outputs, too shallow for a whole model


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in containers, dataclasses and attributes of other objects, once each."""
    return iter((tree,)) if isinstance(tree, torch.Tensor) else _walk(tree, set(), _DEPTH)


def _walk(tree: Any, visited: set[int], depth: int) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(tree):
        if leaf is None or isinstance(leaf, (*_PLAIN, nn.Module)):
            continue
        if id(leaf) in visited:
            continue
        visited.add(id(leaf))
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__"):
            yield from _walk(list(vars(leaf).values()), visited, depth - 1)
        elif depth and dataclasses.is_dataclass(leaf):  # with slots
            values = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
            yield from _walk(values, visited, depth - 1)


class Loan:
    """Other tensors in a caller's own containers, for the time of one call of a module.

    Note [Containers of the caller]
        A module may append to a list or write into a dict that it was given, and its caller reads
        that afterwards. So a hook that hands other tensors to the module must not hand it another
        list: it puts them into the caller's, and `end` puts back what was there. What the module
        has written meanwhile stays, wherever it is by then. Only tuples and frozen dataclasses,
        which nobody writes to, are made anew. (torch's FSDP2 makes all of them anew, so there the
        caller sees nothing of what a block writes.)
    """

    __slots__ = ("_before", "_containers", "_put")

    def __init__(self) -> None:
        self._containers: dict[int, Any] = {}
        self._put: list[tuple[Any, Any, Any]] = []
        self._before: list[torch.Tensor] = []

    def put(self, container: Any, values: dict[Any, Any]) -> None:
        """Write `values` into a container of the caller, under their keys."""
        self._containers[id(container)] = container
        before = dict(_items(container) or ()) if values else {}
        self._put += [(container, before[key], value) for key, value in values.items()]
        _write(container, values)

    def begin(self) -> None:
        """The module is about to run."""
        self._before = list(self._tensors())

    def written(self) -> Iterator[torch.Tensor]:
        """Tensors that the containers hold since: outputs of the module like those it returns."""
        before = set(map(id, self._before))
        return (tensor for tensor in self._tensors() if id(tensor) not in before)

    def end(self) -> None:
        """Put back what was there, except where the module has put something else."""
        for container, before, value in reversed(self._put):
            places = [key for key, there in _items(container) or () if there is value]
            _write(container, dict.fromkeys(places, before))

    def _tensors(self) -> Iterator[torch.Tensor]:
        return tensors_in(list(self._containers.values())) if self._containers else iter(())


def map_tensors(
    tree: Any, change: Callable[[torch.Tensor], torch.Tensor], loan: Loan | None = None
) -> Any:
    """The same tree with every tensor in containers and dataclasses changed.

    What holds no tensor that changes comes back itself. Other containers are copied, or lent other
    tensors until `loan` ends, see Note [Containers of the caller]. Other objects are passed on as
    they are (a cache is shared on purpose).
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if tree is None or isinstance(tree, _PLAIN):
        return tree
    leaves: list[Any] = []
    spec = None
    if (items := _items(tree)) is None:  # torch may know how to take such an object apart
        leaves, spec = tree_flatten(tree)
        if len(leaves) == 1 and leaves[0] is tree:
            return tree
        items = enumerate(leaves)
    # This runs for each unit, whose blocks may hand a whole configuration on.
    others = (item for item in items if type(item[1]) not in _NUMBERS_AND_WORDS)
    pairs = ((key, before, map_tensors(before, change, loan)) for key, before in others)
    changed = {key: after for key, before, after in pairs if after is not before}
    if loan is not None and _is_written_to(tree):
        loan.put(tree, changed)
        return tree
    if not changed:
        return tree
    if spec is not None:
        return tree_unflatten([changed.get(at, leaf) for at, leaf in enumerate(leaves)], spec)
    if isinstance(tree, tuple):
        values = [changed.get(at, value) for at, value in enumerate(tree)]
        return tree._make(values) if hasattr(tree, "_make") else tuple(values)
    copied = copy.copy(tree)  # not dataclasses.replace, which runs __init__ again
    _write(copied, changed)
    return copied


def _items(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Keys and values of a container, or fields of a dataclass; None for another object."""
    if isinstance(tree, dict):
        return list(tree.items())
    named = isinstance(tree, tuple) and hasattr(tree, "_make")
    if isinstance(tree, list | deque) or type(tree) is tuple or named:
        return enumerate(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type | nn.Module):
        return [(field.name, getattr(tree, field.name, None)) for field in dataclasses.fields(tree)]
    return None


def _is_written_to(tree: Any) -> bool:
    """Whether a module may write to a container."""
    frozen = getattr(tree, "__dataclass_params__", None)
    return isinstance(tree, list | dict | deque) or (frozen is not None and not frozen.frozen)


def _write(container: Any, values: dict[Any, Any]) -> None:
    for key, value in values.items():
        if isinstance(container, list | dict | deque):
            container[key] = value
        else:
            object.__setattr__(container, key, value)
