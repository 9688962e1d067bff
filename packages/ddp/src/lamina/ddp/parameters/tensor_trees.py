"""Tensors inside whatever a module takes and gives: containers, dataclasses, users' objects."""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node

from lamina.ddp.compat import tree_flatten, tree_leaves, tree_unflatten

_PLAIN = (str, bytes, int, float, type)  # what neither is a tensor nor holds one
_NUMBERS_AND_WORDS = frozenset((type(None), bool, int, float, str))  # most fields of settings
_NOTHING = nullcontext()
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


class _Lent(NamedTuple):
    """What a module was given for a tensor, and both tensors' places in the graph then."""

    own: torch.Tensor
    instead: torch.Tensor
    own_node: Node | None
    node: Node | None
    version: int | None


class Loan:
    """Other tensors than the caller's, for the time of one call of a module.

    Note [Containers of the caller]
        A module may append to a list or write into a dict that it was given, and its caller reads
        that afterwards. So a hook that hands other tensors to the module must not hand it another
        list: it puts them into the caller's, and `end` puts back what was there. What the module
        has written meanwhile stays, wherever it is by then. Only tuples and frozen dataclasses,
        which nobody writes to, are made anew. (torch's FSDP2 makes all of them anew, so there the
        caller sees nothing of what a block writes.)

    Note [Tensors of the caller]
        A module may also write into a tensor that it was given, as an in-place ReLU does, and its
        caller may go on with that tensor. What was lent for it is a cast copy, or an alias with a
        history of its own. So `bring_back` copies it into the caller's, whose history then goes on
        through the module's. (Under FSDP2 the write itself raises.)

    `is_flat` says that what the module is given holds tensors in no container.
    """

    __slots__ = ("_before", "_containers", "_lent", "_places", "is_flat")

    def __init__(self, *, is_flat: bool = False) -> None:
        self.is_flat = is_flat
        self._containers: dict[int, Any] = {}
        self._places: list[tuple[Any, Any, Any]] = []
        self._lent: list[_Lent] = []
        self._before: list[torch.Tensor] = []

    def lend(self, own: torch.Tensor, instead: torch.Tensor) -> torch.Tensor:
        """The module is given a cast copy or an alias of the caller's tensor, which comes back."""
        self._lent.append(_Lent(own, instead, own.grad_fn, instead.grad_fn, _version(instead)))
        return instead

    def put(self, container: Any, values: dict[Any, Any]) -> None:
        """Write `values` into a container of the caller, under their keys."""
        self._containers[id(container)] = container
        before = dict(_items(container) or ()) if values else {}
        self._places += [(container, before[key], value) for key, value in values.items()]
        _write(container, values)

    def begin(self) -> None:
        """The module is about to run."""
        self._before = list(self._tensors())

    def written(self) -> Iterator[torch.Tensor]:
        """Tensors that the containers hold since: outputs of the module like those it returns."""
        before = set(map(id, self._before))
        return (tensor for tensor in self._tensors() if id(tensor) not in before)

    def bring_back(self, name: str) -> list[torch.Tensor]:
        """Write into the caller's tensors what the module `name` has written into those it got.

        The latter come back: gradients reach the module through them. The caller's may be views,
        whose place in the graph a write changes. RuntimeError: the module has written into the
        caller's by another way, and what it was given does not know.
        """
        changed = []
        for own, instead, own_node, node, version in self._lent:
            is_alias = own.dtype == instead.dtype
            # Nodes of views are made anew after any write.
            if is_alias and own.grad_fn is not own_node and not own._is_view():
                raise RuntimeError(
                    f"{name} has changed a tensor of shape {tuple(own.shape)} in place through "
                    "another reference than its own argument, so the gradients of that argument "
                    "would be wrong: change the argument, or return the result"
                )
            # Writes under no_grad have no history, and an alias has their values already.
            if instead.grad_fn is node if is_alias else _version(instead) == version:
                continue
            # It also shares the count of writes, by which autograd knows what has changed since it
            # was saved. One more would spoil what the module has saved of its result.
            with torch.autograd._unsafe_preserve_version_counter(own) if is_alias else _NOTHING:
                own.copy_(instead)
            changed.append(instead)
        return changed

    def end(self) -> None:
        """Put back what was there, except where the module has put something else."""
        for container, before, value in reversed(self._places):
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


def _version(value: Any) -> int | None:
    """How often a tensor was written to in place; None for what has no such count."""
    counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if counted else None
