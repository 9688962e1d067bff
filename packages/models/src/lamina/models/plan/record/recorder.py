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

import sys
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor

import lamina.collectives
from lamina.collectives import Ledger
from lamina.models.base.computing_device import copies_planned_by
from lamina.models.compat import (
    FakeTensor,
    TorchDispatchMode,
    active_fake_mode,
    current_graph_task_id,
    resizes_told_to,
)
from lamina.models.plan.record.operator_costs import cost_of, nbytes_of, tensors_in
from lamina.models.plan.record.remembered import Remembered
from lamina.models.plan.record.step_record import Life, Message, Operation, StepRecord
from lamina.models.plan.record.storages import Counted, takes_operators_apart
from lamina.models.plan.record.torch_streams import (
    SEND,
    Event,
    Posted,
    Streams,
    is_collective,
    sent_by,
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
    "fsdp/_fully_shard/_fsdp_collectives.py:allocate": None,
    "fsdp/_fully_shard/_fsdp_collectives.py:foreach_reduce": "gradients",
    "fsdp/_fully_shard/_fsdp_collectives": "gathered units",
    "fsdp/_fully_shard/_fsdp_param.py": "gathered units",
}
"""Where in the sources (`file:function`) a storage is made, and what it is; None is no answer, and
the caller is asked. The first that fits counts."""
_COLLECTIVES = f"{Path(lamina.collectives.__file__).parent}/".replace("\\", "/")
_DEPTH = 30  # frames that are looked at


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs inside it.

    Args:
        device: the type of the devices whose memory counts.
        states: tensors that are there before the step, by category.
        rounded: storages are rounded up to a multiple of so many bytes, as an allocator does.
        streams: those that torch's collectives are posted on, if the program has streams.

    Entered inside torch's `FakeTensorMode`, it counts fake tensors instead, whatever their device.

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
        streams: Streams | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = StepRecord()
        self._counted, self._states, self._rounded = Counted(device), states, rounded
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Life]] = {}
        self._remembered = Remembered()
        self._changed: dict[int, tuple[weakref.ref[torch.UntypedStorage], Life]] = {}
        self._ledger = Ledger()
        self._earlier_events = 0  # of finished records
        self._event_times: list[float] = []
        self._streams = Streams() if streams is None else streams
        self._posted: list[Posted] = []
        self._contexts = ExitStack()
        self._notes = True
        self._backwards, self._backward = 0, 0

    # -- the step's phases --------------------------------------------------------------------

    def __enter__(self) -> StepRecorder:
        self._counted = Counted(self._counted.device, active_fake_mode())
        self._streams.number_by(lambda: self._earlier_events + self._now)
        self._begin()
        self._contexts.enter_context(copies_planned_by(self._note_copy))
        self._contexts.enter_context(resizes_told_to(self._resized))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._contexts.close()
        self._finish()
        self._alive.clear()

    def next_record(self, states: Callable[[], Mapping[str, list[Tensor]]]) -> StepRecord:
        """Finish the record, and begin another one of what follows.

        Returns:
            The finished one. Of storages that are still there, the lives of the new record have
            the finished one's as `earlier`.
        """
        self._finish()
        finished, self._states = self.record, states
        self._earlier_events += self._now
        self._begin()
        return finished

    def _begin(self) -> None:
        self.record, self._event_times, self._posted = StepRecord(), [], []
        self._backwards, self._backward = 0, 0
        before, self._alive = self._alive, {}
        for reference, life in before.values():
            # Not `if storage`: one that was resized to nothing is false, and gets its memory back.
            if (storage := reference()) is not None:
                self._enter(storage, Life(0, "temporaries", False, [], None, life.stream, life))
        self._name_states()
        self._ledger = Ledger()
        self._ledger.__enter__()

    def _finish(self) -> None:
        self._ledger.__exit__()
        self._poll()
        self._name_states()
        for life in self.record.lives:
            if life.category == "optimizer state" and life.died is not None:
                life.category = "temporaries"
            elif life.category == "temporaries" and life.crosses and life.died is not None:
                life.category = "activations"
            elif life.category == "temporaries" and not life.born and len(life.sizes) > 1:
                life.category = "gathered units"  # FSDP2's, which gets its memory by a resize
        self.record.end = self._now
        self.record.messages = list(self._messages())

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
        storage = self._counted.storage(tensor)
        if storage is not None and not self._knows(storage):
            made, crosses = category or _maker(), category is None and not _in_backward()
            stream = self._streams.current.number
            self._enter(storage, Life(self._now, made, crosses, [], None, stream))

    def _know_earlier(self, tensor: Tensor) -> None:
        """Enter a storage that was there before the step, and that nobody has named."""
        storage = self._counted.storage(tensor)
        if storage is not None and not self._knows(storage):
            self._enter(storage, Life(0, "temporaries", False, []))

    def _knows(self, storage: torch.UntypedStorage) -> bool:
        entry = self._alive.get(storage._cdata)
        return entry is not None and entry[0]() is not None

    def _enter(self, storage: torch.UntypedStorage, life: Life) -> None:
        key = storage._cdata
        life.sizes.append((life.born, self._size(storage)))

        def ended(_: object, key: int = key, life: Life = life) -> None:
            # An operator has its inputs until it has made its results, so what goes after it is
            # there at its event still.
            life.died = self._now + 1
            life.crosses = life.crosses and _in_backward()
            if key in self._alive and self._alive[key][1] is life:
                del self._alive[key]

        self._alive[key] = weakref.ref(storage, ended), life
        self.record.lives.append(life)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Remember a storage that may have another size now, until `_poll`."""
        if self._knows(storage):
            self._changed[storage._cdata] = self._alive[storage._cdata]

    def _poll(self) -> None:
        """Note storages that were resized since the last look."""
        for reference, life in self._changed.values():
            storage = reference()
            if storage is not None and (size := self._size(storage)) != life.sizes[-1][1]:
                life.sizes.append((self._now, size))
        self._changed.clear()

    # -- operators ----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and note what it makes, multiplies and moves."""
        if any(map(takes_operators_apart, types)):
            return NotImplemented  # the subclass goes first; its operators come back here
        kwargs = kwargs or {}
        self._follow_backwards()
        fake = any(issubclass(kind, FakeTensor) for kind in types)
        asks = func._schema.name in _QUESTIONS
        if not self._notes or (fake and self._counted.fake is None) or asks:
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        for tensor in inputs:
            self._know_earlier(tensor)
        self._event_times.append(time.perf_counter())
        result = self._remembered.call(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        if is_collective(name):
            self._note_collective(name, func._schema, args, result)
            return result
        results = tensors_in(result)
        known = len(self.record.lives)
        for tensor in results:
            self._know(tensor)
            if name in _RESIZE and (storage := self._counted.storage(tensor)) is not None:
                self._resized(storage)
        # Memory is most where some is taken. `set_` gives a storage that is too small its bytes.
        if len(self.record.lives) > known or name == "set_":
            self._poll()
        counted = any(map(self._counted.has, (*results, *inputs)))
        if counted and not func.is_view and name not in _FREE:
            cost = cost_of(func._schema, args, kwargs, results, inputs)
            self.record.operations.append(Operation(name, self._now - 1, self._backward, *cost))
        return result

    def _follow_backwards(self) -> None:
        """Count backwards. One that begins inside another is a part of it.

        Of two that follow each other in a pipeline the first one's messages come between them.
        """
        if not _in_backward():
            self._backward = 0
        elif not self._backward:
            self._backwards += 1
            self._backward = self._backwards

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Inside, operators are parts of a kernel that `note_kernel` tells of."""
        self._notes = False
        try:
            yield
        finally:
            self._notes = True

    def note_kernel(self, name: str, results: list[Tensor], inputs: list[Tensor]) -> None:
        """Note a kernel of a compiled graph: what it makes, and what it reads."""
        self._event_times.append(time.perf_counter())
        self.record.fused = True
        for tensor in results:
            self._know(tensor)
        self._poll()
        nbytes = nbytes_of([*results, *inputs])
        self.record.operations.append(Operation(name, self._now - 1, self._backward, 0.0, nbytes))

    # -- messages -----------------------------------------------------------------------------

    def _note_collective(self, name: str, schema: Any, args: tuple[Any, ...], result: Any) -> None:
        """A collective of torch's; those that Lamina makes of it come from the ledger."""
        if any(map(_is_in_collectives, _callers())):
            return
        if (sent := sent_by(name, schema, args)) is not None and sent[2].size() > 1:
            stream = self._streams.current
            self._posted.append((self._streams.send if sent[0] == SEND else stream.post)(*sent))
        for tensor in tensors_in(result):
            self._know(tensor)

    def _note_copy(self, direction: str, nbytes: int) -> Event:
        """A copy between host and device, and an event of its end."""
        posted, end = self._streams.copy(direction, nbytes)
        self._posted.append(posted)
        return end

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
        first, earlier = len(self._ledger.records), self._earlier_events
        places = {posted: first + number for number, posted in enumerate(self._posted)}
        for posted in self._posted:
            waited = None if posted.waited is None else posted.waited - earlier
            yield Message(
                posted.axis, posted.communicator, posted.op, "", posted.nbytes, posted.between,
                posted.ranks, posted.issued - earlier, waited, max(0, posted.after - earlier),
                tuple(places[before] for before in posted.behind if before in places),
            )  # fmt: skip


_QUESTIONS = frozenset({"prim::device", "aten::_local_scalar_dense"})
"""Operators that only tell something of a tensor. They are no events: optimizers ask for each
parameter, so models of two depths would have no moments in common."""
_RESIZE = frozenset({"set_", "resize_", "resize_as_", "resize_storage_bytes_"})
"""Operators that may give a storage another size."""
_FREE = frozenset(
    """
    detach empty empty_like empty_strided new_empty set_ resize_ lift_fresh alias
    _unsafe_view _reshape_alias
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


def _callers() -> Iterator[str]:
    """`file:function` of the frames that ask, from the innermost one."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return
        yield _site(frame.f_code)
        frame = frame.f_back  # type: ignore[assignment]


@cache
def _site(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_name}".replace("\\", "/")


@cache
def _is_in_collectives(site: str) -> bool:
    return site.startswith(_COLLECTIVES)


def _maker() -> str:
    """The category of what is made now, by the innermost function that `_MAKERS` names."""
    known = (category for site in _callers() if (category := _category_of(site)) is not None)
    return next(known, "temporaries")


@cache
def _category_of(site: str) -> str | None:
    """The category of what a function makes; None where its callers say more."""
    return next((name for part, name in _MAKERS.items() if part in site), None)
