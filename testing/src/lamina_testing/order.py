"""Records in which order the engine's CUDA path queues its work, on a CPU.

`recorded_order()` makes this process one rank of a simulated world (the "fake" backend, which
Lamina serves as it serves NCCL) and puts stand-ins for `torch.cuda`'s streams and events in place.
The engine's own code for CUDA then runs on CPU tensors: it takes a side stream per group, records
events and waits for them. Each of these goes into a `History`, and so does

- each operator, by a dispatch mode: its schema says which tensors it reads and writes, views none;
- each collective of the backend: on a stream of its group, after the stream it was called on, as
  NCCL has it; the stream that calls `Work.wait` waits for its end;
- each release of memory, by `UntypedStorage.resize_` or when the last tensor goes: it counts as a
  write on the stream on which the memory was allocated. The caching allocator gives the bytes to
  the next tensor of that stream and looks at no other. Tensors of messages to and from one other
  rank are freed later: `ProcessGroupNCCL` keeps them until the message has ended. It keeps those of
  collectives, too, but the engine may not count on that, because it frees storages themselves.

Backward nodes run on the streams that autograd would choose (`lamina_testing.autograd_streams`).

What it does not see: work inside one operator, and another order in which the host queues work.

To delete a wait, name its `Site`: `recorded_order(without=site)`. A wait that stands in the
packages' source and did something is in `Recording.waits`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lamina.collectives.call import collective
from lamina_testing.autograd_streams import AutogradStreams
from lamina_testing.happens_before import HOST, Access, Event, History

__all__ = ["Recording", "Site", "recorded_order"]

COMPUTE = "compute"
CUDA = torch.device("cuda", 0)
PACKAGES = "/src/lamina/"
SCHEDULES = "/site-packages/torch/distributed/pipelining/"

# Methods of `ProcessGroup`, and which of the first two arguments they write and read.
GATHERS = ("_allgather_base", "all_gather_single", "allgather", "allgather_into_tensor_coalesced")
SCATTERS = ("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced")
EXCHANGES = ("alltoall", "alltoall_base", "all_to_all_single")
MESSAGES = ("recv", "send")
IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", *MESSAGES)


class Site(NamedTuple):
    """A line of the packages' source, or of torch's schedules of pipelines."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        """Return `ddp/group/weights.py:118 Weights.wait`."""
        return f"{self.file}:{self.line} {self.function}"


def caller() -> Site | None:
    """Return the line that called the function which asks, if a `Site` can name it."""
    frame = sys._getframe(2)
    name = frame.f_code.co_filename
    for root, before in (PACKAGES, ""), (SCHEDULES, "torch: "):
        if root in name:
            file = before + name.partition(root)[2]
            return Site(file, frame.f_code.co_qualname, frame.f_lineno)
    return None


def nearest() -> str:
    """Return the innermost line of the packages on the stack, or ""."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if PACKAGES in name:
            return f"{name.partition(PACKAGES)[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@dataclass
class Memory:
    """A storage with bytes: its number, the stream it was allocated on, who else may use it."""

    number: int
    reference: StorageWeakRef
    nbytes: int
    stream: str
    lent_to: set[str] = field(default_factory=set)


def gone(memory: Memory) -> bool:
    """Whether no tensor refers to the storage any more."""
    return bool(memory.reference.expired())  # type: ignore[no-untyped-call]


@dataclass
class Recording:
    """What `recorded_order` yields.

    Attributes:
        history: the nodes and the races.
        waits: how often each wait of the packages was for something that was still pending.
        without: the wait that is left out.
    """

    without: Site | None = None
    history: History = field(default_factory=History)
    waits: Counter[Site] = field(default_factory=Counter)
    _current: list[str] = field(default_factory=lambda: [COMPUTE])
    _autograd: AutogradStreams = field(init=False)
    _memories: dict[int, Memory] = field(default_factory=dict)
    _host: set[int] = field(default_factory=set)
    _pinned: set[int] = field(default_factory=set)
    _made: int = 0

    def __post_init__(self) -> None:
        """Let autograd know of streams."""
        self._autograd = AutogradStreams(self, COMPUTE)

    @property
    def races(self) -> list[str]:
        """Return the races in words."""
        return [str(race) for race in self.history.races]

    @property
    def current(self) -> str:
        """Return the name of the current stream."""
        self._autograd.follow()
        return self._current[-1]

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Make a stream the current one."""
        self._autograd.follow()
        self.push(stream)
        try:
            yield
        finally:
            self.pop()

    def push(self, stream: str) -> None:
        """Make a stream the current one until `pop`."""
        self._current.append(stream)
        self._autograd.switched(stream)

    def pop(self) -> None:
        """Go back to the stream before."""
        self._current.pop()
        self._autograd.switched(self._current[-1])

    def lend(self, tensor: Tensor, stream: str) -> None:
        """Tell the allocator that a stream uses a tensor of another one."""
        if (storage := storage_of(tensor)) is not None and storage.nbytes():
            memory = self.memory_of(storage)
            memory.lent_to |= {stream} if stream != memory.stream else set()

    def keeps(self, site: Site | None) -> bool:
        """Note a wait; whether it is to happen."""
        if site is not None:
            self.waits[site] += 1
        return site is None or site != self.without

    def on_host(self, *tensors: Tensor, pinned: bool = False) -> None:
        """Operators on these tensors alone run on the host, which waits for no stream."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._host |= keys
        self._pinned |= keys if pinned else set()

    # -- memory -----------------------------------------------------------------------------------

    def run(self, stream: str, label: str, accesses: Iterable[Access]) -> None:
        """Queue work, after what was freed before it."""
        self.find_freed()
        self.history.run(stream, label, accesses, nearest())

    def access(self, tensor: Tensor, writes: bool) -> Access | None:
        """Return the bytes that a tensor covers; None if it has no memory."""
        storage = storage_of(tensor)
        if storage is None or not tensor.numel() or not storage.nbytes():
            return None
        memory = self.memory_of(storage)
        if storage._cdata in self._pinned:  # a copy tells the allocator of pinned memory so itself
            memory.lent_to.add(self.current)
        size = tensor.element_size()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = int(tensor.storage_offset()) * size
        return Access(memory.number, start, start + int(span) * size, writes)

    def memory_of(self, storage: torch.UntypedStorage) -> Memory:
        """Return the record of a storage; what is new was allocated on the current stream."""
        memory = self._memories.get(storage._cdata)
        if memory is None:
            self._made += 1
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            stream = HOST if storage._cdata in self._host else self.current
            memory = Memory(self._made, reference, storage.nbytes(), stream)
            self._memories[storage._cdata] = memory
        return memory

    def find_freed(self) -> None:
        """Free what no tensor refers to any more."""
        freed = [key for key, memory in self._memories.items() if gone(memory)]
        for key in freed:
            self._host.discard(key)
            self._pinned.discard(key)
            self.free(key)

    def free(self, key: int) -> None:
        """Give memory back to the allocator."""
        memory = self._memories.pop(key)
        stream = memory.stream
        if memory.lent_to:  # the allocator waits for streams it was told of, and nobody else does
            stream = f"allocator for {stream}"
            for other in (memory.stream, *memory.lent_to):
                self.history.wait(stream, self.history.record(other))
        whole = Access(memory.number, 0, sys.maxsize, writes=True)
        self.history.run(stream, "free", [whole], nearest())
        self.history.forget(memory.number)

    def give_back(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free the bytes of a storage that is about to have another number of them."""
        self.find_freed()
        if storage.nbytes() and storage.nbytes() != nbytes:
            self.memory_of(storage)
            self.free(storage._cdata)

    # -- events -----------------------------------------------------------------------------------

    def mark(self, stream: str) -> Event:
        """Record an event."""
        self.find_freed()
        return self.history.record(stream)

    def wait(self, stream: str, event: Event | None) -> None:
        """Make a stream wait; None was never recorded."""
        self.find_freed()
        if event is not None:
            self.history.wait(stream, event)


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a recording what each operator reads and writes."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, then queue it."""
        if any(takes_operators_apart(kind) for kind in types):
            return NotImplemented  # the subclass goes first; operators it runs come back here
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return func(*args, **kwargs)
        recording, found = self._recording, []
        given: set[int] = set()
        large: set[int] = set()
        for argument, value in named_arguments(func._schema, args, kwargs):
            alias = argument.alias_info
            for tensor in tensors_in(value):
                if (storage := storage_of(tensor)) is not None:
                    given.add(storage._cdata)
                    large |= {storage._cdata} if tensor.dim() else set()
                if (alias is None or alias.is_write) and not only_shapes(func._schema.name):
                    found.append(recording.access(tensor, writes=alias is not None))
        pinned = kwargs.get("pin_memory")
        result = func(*args, **{**kwargs, "pin_memory": False} if pinned else kwargs)
        elsewhere = kwargs.get("device") is not None  # the new tensor need not lie with the others
        on_host = bool(given) and not elsewhere and (large or given) <= recording._host
        if on_host and not given <= recording._host:
            # A number of the device: `.to("cpu")`, which is nothing here, waits for it there.
            recording.wait(HOST, recording.mark(recording.current))
        if pinned or on_host:
            recording.on_host(*filter(has_memory, tensors_in(result)), pinned=bool(pinned))
        found += [
            recording.access(tensor, writes=True)
            for tensor in tensors_in(result)
            if (storage := storage_of(tensor)) is not None and storage._cdata not in given
        ]
        accesses = [access for access in found if access is not None]
        if accesses:
            stream = HOST if on_host else recording.current
            recording.run(stream, func._schema.name, accesses)
        if func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"):
            recording.wait(HOST, recording.mark(recording.current))  # the host has the number
        return result


def named_arguments(
    schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield the schema's arguments with what was given for each."""
    for argument, value in zip(schema.arguments, args, strict=False):
        yield argument, value
    for argument in schema.arguments:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def only_shapes(name: str) -> bool:
    """Whether an operator looks at its inputs' shapes and dtypes, not at their numbers."""
    return name.endswith("_like") or name.startswith("aten::new_")


def has_memory(tensor: Tensor) -> bool:
    """Whether there is a storage behind a tensor."""
    return storage_of(tensor) is not None


def takes_operators_apart(kind: type) -> bool:
    """Whether a tensor class handles operators itself."""
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from tensors_in(element)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor that has memory."""
    if tensor.layout != torch.strided or tensor.is_meta or takes_operators_apart(type(tensor)):
        return None
    return tensor.untyped_storage()


# -- stand-ins ------------------------------------------------------------------------------------


def stand_ins(recording: Recording) -> dict[str, Any]:
    """Return stand-ins for the names of `torch.cuda` that the packages use."""
    made: Counter[str] = Counter()

    class FakeEvent:
        """An event; before its first `record` nobody waits for it."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.point: Event | None = None

        def record(self, stream: FakeStream | None = None) -> None:
            self.point = recording.mark(stream.name if stream else recording.current)

        def wait(self, stream: FakeStream | None = None) -> None:
            if recording.keeps(caller()):
                recording.wait(stream.name if stream else recording.current, self.point)

        def synchronize(self) -> None:
            if recording.keeps(caller()):
                recording.wait(HOST, self.point)

        def query(self) -> bool:
            return True

    class FakeStream:
        """A stream."""

        def __init__(self, *_: Any, name: str = "", **__: Any) -> None:
            made["side"] += not name
            self.name = name or f"side {made['side']}"
            self.device = CUDA

        def __eq__(self, other: object) -> bool:
            return isinstance(other, FakeStream) and other.name == self.name

        def __hash__(self) -> int:
            return hash(self.name)

        def wait_stream(self, other: FakeStream) -> None:
            if recording.keeps(caller()):
                recording.wait(self.name, recording.mark(other.name))

        def wait_event(self, event: FakeEvent) -> None:
            if recording.keeps(caller()):
                recording.wait(self.name, event.point)

        def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
            event = event or FakeEvent()
            event.record(self)
            return event

        def synchronize(self) -> None:
            if recording.keeps(caller()):
                recording.wait(HOST, recording.mark(self.name))

    def lend(tensor: Tensor, stream: FakeStream) -> None:
        if recording.keeps(caller()) and (storage := storage_of(tensor)) is not None:
            recording.memory_of(storage).lent_to.add(stream.name)

    return {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "stream": lambda stream: recording.on(stream.name),
        "device": lambda _: contextlib.nullcontext(),
        "current_stream": lambda device=None: FakeStream(name=recording.current),
        "is_current_stream_capturing": lambda: False,
        "record_stream": lend,
    }


class Pending(dist.Work):
    """A collective of the backend; the stream that waits comes after it."""

    def __init__(self, recording: Recording, end: Event) -> None:
        super().__init__()
        self._recording, self._end = recording, end

    def wait(self, timeout: object = None) -> bool:
        """Make the current stream wait."""
        if self._recording.keeps(caller()):
            self._recording.wait(self._recording.current, self._end)
        return True

    def is_completed(self) -> bool:
        """Say yes: the data are there."""
        return True


def queued(recording: Recording, name: str) -> Callable[..., Pending]:
    """Return a method of `ProcessGroup` that queues a collective on the group's stream."""

    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Pending:
        outputs, inputs = list(tensors_in(args[0])), list(tensors_in(args[1:2]))
        if name in IN_PLACE:
            inputs = outputs
        stream = f"nccl {group.group_desc} {group.group_name}"
        recording.wait(stream, recording.mark(recording.current))
        found = [recording.access(tensor, writes=False) for tensor in inputs]
        if name != "send":
            found += [recording.access(tensor, writes=True) for tensor in outputs]
        recording.run(stream, name, [access for access in found if access is not None])
        for tensor in outputs if name in MESSAGES else ():
            recording.memory_of(tensor.untyped_storage()).lent_to.add(stream)
        with torch.no_grad(), _disable_current_modes():
            fill(outputs, inputs)
        return Pending(recording, recording.mark(stream))

    return call


def fill(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Give the outputs numbers: the inputs', repeated or cut."""
    if outputs is inputs or not inputs:
        return
    source = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in inputs])
    for output in outputs:
        target = output.view(-1).view(torch.uint8)
        if target.numel() and source.numel():
            target.copy_(source.repeat(-(-target.numel() // source.numel()))[: target.numel()])


@contextlib.contextmanager
def recorded_order(
    ranks: int = 4, without: Site | None = None, rank: int = 0
) -> Iterator[Recording]:
    """Record until the end of the block; this process is one of `ranks`.

    Args:
        ranks: of the simulated world; no process group may be there before.
        without: a wait that is left out wherever it stands. A handle that is not waited for then
            also does not wait when it is dropped.
        rank: this process.
    """
    recording = Recording(without)
    cuda = stand_ins(recording)
    lend = cuda.pop("record_stream")
    resize, launch = torch.UntypedStorage.resize_, collective.launch
    wait = collective.Handle.wait

    def resized(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        recording.give_back(storage, nbytes)
        result: torch.UntypedStorage = resize(storage, nbytes)
        if nbytes:
            recording.memory_of(storage)
        return result

    def launched(handle: Any, group: Any, device: Any, begin: Any, *, async_op: bool) -> Any:
        return launch(handle, group, CUDA, begin, async_op=async_op)

    def waited(handle: collective.Handle) -> None:
        if handle._pending and handle._event is not None and not recording.keeps(caller()):
            handle._event = None
            return
        wait(handle)

    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lend))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        stack.enter_context(mock.patch.object(collective.Handle, "wait", waited))
        seams = {"launch": launched, "current_stream": lambda _: cuda["current_stream"]()}
        for name, stand_in in seams.items():
            original = getattr(collective, name)
            for module in list(sys.modules.values()):
                if getattr(module, name, None) is original:
                    stack.enter_context(mock.patch.object(module, name, stand_in))
        for name in (*GATHERS, *SCATTERS, *EXCHANGES, *IN_PLACE):
            if hasattr(dist.ProcessGroup, name):  # versions of torch differ in which there are
                method = queued(recording, name)
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, method))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(recording._autograd.steering(lambda: recording.current))
        with Mode(recording):
            yield recording
