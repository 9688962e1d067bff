"""What one step asks of a rank: the life of every storage, every operator and every collective.

`StepRecorder` watches a step as the profiler would, and needs no device: on meta tensors a step of
a large model takes seconds. It knows a storage from the operator that made it to the moment at
which nothing refers to it any more, also where only autograd's graph does.

Note [What a storage is]
A storage belongs to the category of the Lamina file (or of torch's FSDP2) that made it. What no
such file has made belongs to the model: an activation if it outlives the forward that made it, and
a temporary otherwise. States that are there before the step are named by `states`.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lamina.collectives import Ledger
from lamina.models.compat import (
    FakeTensor,
    TorchDispatchMode,
    current_graph_task_id,
    tree_leaves,
)

CATEGORIES = (
    "weights",
    "gradients",
    "optimizer state",
    "activations",
    "gathered units",
    "temporaries",
)
_MAKERS: dict[str, str | None] = {
    "lamina/models/plan/": None,
    "lamina/models/": "temporaries",
    "lamina/collectives/autograd_regions": "temporaries",
    "lamina/ddp/gradients/": "gradients",
    "lamina/ddp/group/": "gradients",
    "lamina/ddp/backward/": "gradients",
    "lamina/ddp/optimizer/": "optimizer state",
    "torch/optim/": "optimizer state",
    "lamina/buffers/pool/": None,
    "lamina/fsdp/weights/": "gathered units",
    "fsdp/_fully_shard/_fsdp_collectives": "gathered units",
    "fsdp/_fully_shard/_fsdp_param.py": "gathered units",
}
"""Where in the sources a storage is made, and what it is; None is no answer, and the caller is
asked. The first that fits counts."""
_DEPTH = 30  # frames that are looked at


@dataclass
class Life:
    """A storage: its bytes from the event `born` until the event before `died`.

    `sizes` are all its sizes: pairs of an event and of the bytes from then on. `crosses` says
    whether a forward made it and a backward let it go, which is what an activation is.
    """

    born: int
    category: str
    crosses: bool
    sizes: list[tuple[int, int]]
    died: int | None = None


@dataclass(frozen=True)
class Operation:
    """An operator: its name, products (two operations for each multiplication) and bytes moved.

    `at` is its place among all events, `shape` the number, rows, columns and inner length of
    products, `width` the bytes of a product's elements.
    """

    name: str
    at: int
    backward: bool
    flops: float
    nbytes: int
    shape: tuple[int, ...] = ()
    width: int = 2


@dataclass(frozen=True)
class Message:
    """A collective of this rank: between which events it was issued and waited for.

    `waited` is None where the step never waits for the result.
    """

    axis: str
    communicator: str
    op: str
    purpose: str
    nbytes: int
    between: int
    ranks: int
    issued: int
    waited: int | None


@dataclass
class StepRecord:
    """What a step was: events are numbered from 0, `end` is the number after the last one."""

    lives: list[Life] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    end: int = 0

    def timeline(self) -> list[tuple[int, dict[str, int]]]:
        """Bytes by category after each event that changes them."""
        changes: dict[int, Counter[str]] = {}
        for life in self.lives:
            before = 0
            for at, nbytes in life.sizes:
                changes.setdefault(at, Counter())[life.category] += nbytes - before
                before = nbytes
            if life.died is not None:
                changes.setdefault(life.died, Counter())[life.category] -= before
        now: Counter[str] = Counter()
        points = []
        for at in sorted(changes):
            for category, change in changes[at].items():
                now[category] += change
            points.append((at, dict(now)))
        return points

    def peak(self) -> dict[str, int]:
        """Bytes by category at the moment at which they are most in all."""
        points = [now for _, now in self.timeline()]
        most = max(points, key=lambda now: sum(now.values()), default={})
        return {category: most.get(category, 0) for category in CATEGORIES}

    def at_rest(self) -> dict[str, int]:
        """Bytes by category when the step has ended."""
        points = self.timeline()
        last = points[-1][1] if points else {}
        return {category: last.get(category, 0) for category in CATEGORIES}

    def wire_bytes(self) -> Counter[str]:
        """Bytes that this rank sends, by axis."""
        sent: Counter[str] = Counter()
        for message in self.messages:
            sent[message.axis] += message.nbytes
        return sent


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs inside it.

    Args:
        device: the type of the devices whose memory counts.
        states: tensors that are there before the step, by category.
        rounded: storages are rounded up to a multiple of so many bytes, as an allocator does.

    Examples:
        >>> from lamina.models.plan import StepRecorder
        >>> with StepRecorder("cpu") as recorder:
        ...     product = torch.ones(4, 4) @ torch.ones(4, 4)
        >>> recorder.record.operations[-1].flops
        128.0
    """

    def __init__(
        self,
        device: str = "meta",
        states: Callable[[], Mapping[str, list[Tensor]]] = dict,
        rounded: int = 1,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = StepRecord()
        self._device, self._states, self._rounded = device, states, rounded
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Life]] = {}
        self._ledger = Ledger()
        self._event_times: list[float] = []

    # -- the step's phases --------------------------------------------------------------------

    def __enter__(self) -> StepRecorder:
        gc.collect()
        for each in gc.get_objects():
            if issubclass(type(each), Tensor):
                for tensor in (each, each.grad if each.is_leaf else None):
                    self._know(tensor, "temporaries")
        self._name_states()
        self._ledger.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._ledger.__exit__(*exception)
        self._poll()
        self._name_states()
        for life in self.record.lives:
            if life.category == "optimizer state" and life.died is not None:
                life.category = "temporaries"
            elif life.category == "temporaries" and life.crosses and life.died is not None:
                life.category = "activations"
        self.record.end = self._now
        self.record.messages = list(self._messages())
        self._alive.clear()

    def mark(self, name: str) -> None:
        """Begin a phase, such as `optimizer`."""
        self._poll()
        self.record.marks.append((self._now, name))

    def _name_states(self) -> None:
        for category, tensors in self._states().items():
            for tensor in tensors:
                self._know(tensor, category)
                entry = self._alive.get(_key(tensor))
                if entry is not None:
                    entry[1].category = category

    # -- storages -----------------------------------------------------------------------------

    @property
    def _now(self) -> int:
        return len(self._event_times)

    def _size(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._rounded) * self._rounded

    def _know(self, tensor: Tensor | None, category: str | None = None) -> None:
        """Enter a tensor's storage, if it is new and on the device."""
        if tensor is None or tensor.device.type != self._device or tensor.layout != torch.strided:
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a wrapper around other tensors
            return
        key = storage._cdata
        if key in self._alive and self._alive[key][0]() is not None:
            return
        made = category or _maker()
        life = Life(self._now, made, category is None and not _in_backward(), [])
        life.sizes.append((self._now, self._size(storage)))

        def ended(_: object, key: int = key, life: Life = life) -> None:
            # An operator has its inputs until it has made its results, so what goes after it is
            # there at its event still.
            life.died = self._now + 1
            life.crosses = life.crosses and _in_backward()
            if key in self._alive and self._alive[key][1] is life:
                del self._alive[key]

        self._alive[key] = weakref.ref(storage, ended), life
        self.record.lives.append(life)

    def _poll(self) -> None:
        """Note storages that were resized since the last look."""
        for reference, life in list(self._alive.values()):
            storage = reference()
            if storage is not None and (size := self._size(storage)) != life.sizes[-1][1]:
                life.sizes.append((self._now, size))

    # -- operators ----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and note what it makes, multiplies and moves."""
        if any(_takes_operators_apart(kind) for kind in types):
            return NotImplemented  # the subclass goes first; its operators come back here
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        self._event_times.append(time.perf_counter())
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        results = _tensors(result)
        if not func.is_view and name not in _FREE:
            inputs = _tensors((args, kwargs))
            if any(each.device.type == self._device for each in (*results, *inputs)):
                known = len(self.record.lives)
                for tensor in results:
                    self._know(tensor)
                if len(self.record.lives) > known:  # memory is most where some is taken
                    self._poll()
                cost = _cost(func._schema, args, kwargs, results, inputs)
                self.record.operations.append(Operation(name, self._now - 1, _in_backward(), *cost))
        else:
            for tensor in results:
                self._know(tensor)
        return result

    # -- messages -----------------------------------------------------------------------------

    def _messages(self) -> Iterator[Message]:
        """Collectives, with times on the host moved to the events before them."""
        for each in self._ledger.records:
            if not each.asynchronous:
                waited: int | None = bisect_left(self._event_times, each.issued)
            else:
                at = each.waited
                waited = None if at is None else bisect_left(self._event_times, at)
            yield Message(
                each.axis, each.communicator, each.op, each.purpose, each.bytes, each.between,
                each.group_size, bisect_left(self._event_times, each.issued), waited,
            )  # fmt: skip


_FREE = frozenset(
    """
    detach empty empty_like empty_strided new_empty set_ resize_ lift_fresh alias
    _local_scalar_dense _unsafe_view _reshape_alias
    """.split()
)
"""Operators that move nothing; views move nothing either."""


def _in_backward() -> bool:
    return bool(current_graph_task_id() != -1)


def _key(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -1


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@cache
def _takes_operators_apart(kind: type) -> bool:
    # Fake tensors do too, but have no memory: what they run is of no interest here.
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


def _maker() -> str:
    """The category of what is made now, by the innermost file that `_MAKERS` names."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            break
        category = _category_of(frame.f_code.co_filename)
        if category is not None:
            return category
        frame = frame.f_back  # type: ignore[assignment]
    return "temporaries"


@cache
def _category_of(path: str) -> str | None:
    """The category of what a file makes; None where its callers say more."""
    normal = path.replace("\\", "/")
    return next((name for part, name in _MAKERS.items() if part in normal), None)


# ------------------------------------------------------------------------------ what operators cost


def _cost(
    schema: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: list[Tensor],
    inputs: list[Tensor],
) -> tuple[float, int, tuple[int, ...], int]:
    """Operations of a product, bytes read and written, the product's shape and element width."""
    name = schema.name.removeprefix("aten::")
    nbytes = _bytes_moved(name, schema, args, kwargs, results, inputs)
    product = _PRODUCTS.get(name)
    if product is None:
        return 0.0, nbytes, (), 2
    flops, shape = product(args, kwargs)
    # A product of bf16 may be added to fp32, and takes the time of bf16.
    factors = [each for each in inputs if each.ndim >= 2 and each.is_floating_point()]
    width = min((each.element_size() for each in factors), default=2)
    return flops, nbytes, shape, width


_PICKS = frozenset({"index_select", "gather", "index", "embedding"})
"""Operators that read of their source what they return, however large it is."""
_ADDS = frozenset({"index_add_", "index_put_", "index_copy_", "scatter_", "scatter_add_"})
"""Operators that change of their target as much as their last tensor has."""
_OVERWRITES = frozenset(
    "copy_ zero_ fill_ normal_ uniform_ random_ bernoulli_ _foreach_copy_ _foreach_zero_".split()
)
"""Operators in place that do not read what they change."""


def _bytes_moved(
    name: str,
    schema: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: list[Tensor],
    inputs: list[Tensor],
) -> int:
    """Bytes that a kernel reads and writes."""
    if name in _PICKS:
        return 2 * _nbytes(results) + _nbytes(inputs[1:])
    if name in _ADDS:
        return 3 * _nbytes(inputs[-1:]) + _nbytes(inputs[1:-1])
    changed, unread = [], []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        changed += _tensors(value)
        if argument.kwarg_only or name in _OVERWRITES:  # an `out`
            unread += _tensors(value)
    left_out = {id(tensor) for tensor in unread}
    read = [tensor for tensor in inputs if id(tensor) not in left_out]
    return _nbytes(read) + _nbytes([*results, *changed])


def _nbytes(tensors: list[Tensor]) -> int:
    """Bytes of different tensors. An expanded one has no more than its storage."""
    sizes = {
        id(tensor): min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
        for tensor in tensors
    }
    return sum(sizes.values())


def _matrix(left: int) -> Callable[[Any, Any], tuple[float, tuple[int, ...]]]:
    """The product of two matrices (or two stacks of them) that are arguments `left` and next."""

    def count(args: Any, kwargs: Any) -> tuple[float, tuple[int, ...]]:
        first, second = args[left], args[left + 1]
        batch = first.shape[0] if first.ndim == 3 else 1
        rows, inner, columns = first.shape[-2], first.shape[-1], second.shape[-1]
        return 2.0 * batch * rows * inner * columns, (batch, rows, columns, inner)

    return count


def _groups(args: Any, kwargs: Any) -> tuple[float, tuple[int, ...]]:
    """Products of experts: each row of the left meets one matrix, or rows are the inner sum."""
    first, second = args[0], args[1]
    rows, inner, columns = first.shape[-2], first.shape[-1], second.shape[-1]
    groups = second.shape[0] if second.ndim == 3 else 1
    batch = first.shape[0] if first.ndim == 3 else 1
    return 2.0 * batch * rows * inner * columns, (max(groups, 1), rows, columns, inner)


def _attention(times: float, heads_first: bool = True) -> Callable[[Any, Any], Any]:
    """Flash attention: `times` products of scores' size, of which a causal kernel skips half."""

    def count(args: Any, kwargs: Any) -> tuple[float, tuple[int, ...]]:
        query, key, value = args[:3] if times == 2.0 else args[1:4]
        batch, heads, rows, width = query.shape
        columns, wide = key.shape[-2], value.shape[-1]
        flags = [each for each in (*args, *kwargs.values()) if isinstance(each, bool)]
        share = 0.5 if any(flags) and rows == columns else 1.0
        pairs = batch * heads * rows * columns * share
        return times * pairs * (width + wide), (batch * heads, rows, columns, width)

    return count


def _efficient_attention(times: float, causal: int) -> Callable[[Any, Any], Any]:
    """The kernel that takes fp32; `causal` is the argument that says so."""

    def count(args: Any, kwargs: Any) -> tuple[float, tuple[int, ...]]:
        flags = args[causal:] or (kwargs.get("is_causal", False),)
        tensors = args[:3] if times == 2.0 else args[:4]
        counted: tuple[float, tuple[int, ...]] = _attention(times)((*tensors, bool(flags[0])), {})
        return counted

    return count


def _varlen_attention(times: float) -> Callable[[Any, Any], Any]:
    """Sequences one behind the other, `[tokens, heads, width]`: each token sees half of its own, or
    its window.
    """

    def count(args: Any, kwargs: Any) -> tuple[float, tuple[int, ...]]:
        query, _, value = args[:3] if times == 2.0 else args[1:4]
        longest = args[6] if times == 2.0 else args[9]
        sizes = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
        before = sizes[0][0] if sizes else -1
        partners = longest / 2 if before < 0 else min(before + 1, longest / 2)
        (tokens, heads, width), wide = query.shape, value.shape[-1]
        return times * tokens * heads * partners * (width + wide), (
            heads,
            tokens,
            int(partners),
            width,
        )

    return count


_PRODUCTS: dict[str, Callable[[Any, Any], tuple[float, tuple[int, ...]]]] = {
    "mm": _matrix(0),
    "bmm": _matrix(0),
    "addmm": _matrix(1),
    "addmm_": _matrix(1),
    "baddbmm": _matrix(1),
    "baddbmm_": _matrix(1),
    "_scaled_mm": _matrix(0),
    "_grouped_mm": _groups,
    "_scaled_dot_product_flash_attention": _attention(2.0),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(2.0),
    "_scaled_dot_product_flash_attention_backward": _attention(5.0),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(5.0),
    "_scaled_dot_product_efficient_attention": _efficient_attention(2.0, 6),
    "_scaled_dot_product_efficient_attention_backward": _efficient_attention(5.0, 11),
    "torch_attn::_varlen_attn": _varlen_attention(2.0),
    "torch_attn::_varlen_attn_backward": _varlen_attention(5.0),
}
"""Operators that multiply. The backward of flash attention computes the scores again: 5 products
beside the forward's 2 (Dao, 2023)."""
