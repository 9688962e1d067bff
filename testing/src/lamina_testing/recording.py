"""What was queued on which stream: the books of `lamina_testing.order`.

A `Recording` numbers the memory that operators touch, notes when it is given back, and passes all
work and waits on to a `History`, which finds the races. `graph` keeps what was queued, in order.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from lamina_testing.autograd_streams import AutogradStreams
from lamina_testing.happens_before import HOST, Access, Event, History
from lamina_testing.walk import path_in_lamina

COMPUTE = "compute"
COLLECTIVES = "nccl "  # so begin the names of the streams on which collectives run
SCHEDULES = "/site-packages/torch/distributed/pipelining/"
# Files whose frames lie between a wait and the line that asked for it.
BETWEEN = (
    "/lamina_testing/order.py",
    "/lamina_testing/simulated_cuda.py",
    "/lamina_testing/cuda_trace.py",
    "/lamina_testing/recording.py",
    "/torch/cuda/streams.py",
    "/torch/_utils.py",
)


class Site(NamedTuple):
    """A line of the packages' source, or of torch's schedules of pipelines."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        """Return `ddp/group/weights.py:118 Weights.wait`."""
        return f"{self.file}:{self.line} {self.function}"


class Entry(NamedTuple):
    """Something that was queued.

    Attributes:
        stream: on which; "host" for what the host did or waited for.
        kind: "kernel", "collective", "wait", "alloc" or "free".
        words: which kernel or collective, what was waited for, or how many bytes.
        memory: numbers of the memory that it touches.
    """

    stream: str
    kind: str
    words: str
    memory: tuple[int, ...] = ()


def caller() -> Site | None:
    """Return the line that asked for what is being recorded, if a `Site` can name it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(BETWEEN):
        frame = frame.f_back
    name = frame.f_code.co_filename
    file = path_in_lamina(name)
    if not file and SCHEDULES in name:
        file = f"torch: {name.rpartition(SCHEDULES)[2]}"
    return Site(file, frame.f_code.co_qualname, frame.f_lineno) if file else None


def nearest() -> str:
    """Return the innermost line of the packages on the stack, or ""."""
    frame = sys._getframe(1)
    while frame is not None:
        if file := path_in_lamina(frame.f_code.co_filename):
            return f"{file}:{frame.f_lineno}"
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


def takes_operators_apart(kind: type) -> bool:
    """Whether a tensor class handles operators itself."""
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor that has memory."""
    if tensor.layout != torch.strided or tensor.is_meta or takes_operators_apart(type(tensor)):
        return None
    return tensor.untyped_storage()


@dataclass
class Recording:
    """What `recorded_order` yields.

    Args:
        without: the wait that is left out.
        device: where the model is to be. On the CPU, streams are simulated.

    Attributes:
        history: the nodes and the races.
        graph: what was queued, in order.
        users: number of a piece of memory -> the streams that have touched it.
        waits: how often each wait of the packages was for something that was still pending.
        facts_on_host: whether facts that hosts agree on travel between hosts, by gloo beside NCCL.
        surprises: where autograd chose another stream than its rules say, on a GPU.
    """

    without: Site | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    history: History = field(default_factory=History)
    graph: list[Entry] = field(default_factory=list)
    users: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    waits: Counter[Site] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)
    _current: list[str] = field(default_factory=lambda: [COMPUTE])
    _names: dict[int, str] = field(default_factory=lambda: {0: COMPUTE})
    _autograd: AutogradStreams = field(init=False)
    _memories: dict[int, Memory] = field(default_factory=dict)
    _given_back: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    _host: set[int] = field(default_factory=set)
    _pinned: set[int] = field(default_factory=set)
    _made: int = 0
    facts_on_host: bool = True
    _on_host: bool = False
    _collectives: int = 0
    _unseen: int = 0
    _asked_by: tuple[Site | None, ...] = ()
    _behalf: Site | None = None

    def __post_init__(self) -> None:
        """Let autograd know of streams."""
        self._autograd = AutogradStreams(self.autograd(), COMPUTE)

    def autograd(self) -> Recording | AutogradOfTheDevice:
        """Return what autograd's rules are to act on."""
        return AutogradOfTheDevice(self) if self.on_gpu else self

    @property
    def on_gpu(self) -> bool:
        """Whether streams are CUDA's own."""
        return self.device.type == "cuda"

    @property
    def races(self) -> list[str]:
        """Return the races in words."""
        return [str(race) for race in self.history.races]

    # -- streams ----------------------------------------------------------------------------------

    @property
    def current(self) -> str:
        """Return the name of the current stream."""
        if self.on_gpu:
            return self.name_of(int(torch.cuda.current_stream(self.device).cuda_stream))
        self._autograd.follow()
        return self._current[-1]

    def name_of(self, number: int) -> str:
        """Return the name of a stream that CUDA has numbered; a new one is a side stream."""
        if number not in self._names:
            sides = sum(name.startswith("side ") for name in self._names.values())
            self._names[number] = f"side {sides + 1}"
        return self._names[number]

    def number_of(self, name: str, number: int | None = None) -> int:
        """Return the number of a stream, which is `number` or any if it is new."""
        for known, other in self._names.items():
            if other == name:
                return known
        number = -len(self._names) if number is None else number
        self._names[number] = name
        return number

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Make a stream the current one, on a CPU."""
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

    def chosen(self, stream: str) -> None:
        """Autograd's rules have chosen the stream of a node, and `push` follows."""

    def lend(self, tensor: Tensor, stream: str) -> None:
        """Tell the allocator that a stream uses a tensor of another one."""
        if (storage := storage_of(tensor)) is not None and storage.nbytes():
            memory = self.memory_of(storage)
            memory.lent_to |= {stream} if stream != memory.stream else set()

    # -- who waits --------------------------------------------------------------------------------

    def keeps(self, site: Site | None) -> bool:
        """Note a wait; whether it is to happen."""
        if site is not None:
            self.waits[site] += 1
        return site is None or site != self.without

    def happens(self) -> bool:
        """Note the wait that the innermost caller asks for, unless it was noted; as `keeps`."""
        return bool(self._asked_by) or self.keeps(caller())

    @contextlib.contextmanager
    def asked_by(self, site: Site | None) -> Iterator[None]:
        """Whatever waits within the block does so for this line, which was noted already."""
        before, self._asked_by = self._asked_by, (site,)
        try:
            yield
        finally:
            self._asked_by = before

    @contextlib.contextmanager
    def on_behalf_of(self, site: Site | None) -> Iterator[None]:
        """Lines that wait within the block do so for this one, which the graph names too."""
        before, self._behalf = self._behalf, site
        try:
            yield
        finally:
            self._behalf = before

    # -- memory -----------------------------------------------------------------------------------

    def on_host(self, *tensors: Tensor, pinned: bool = False) -> None:
        """Operators on these tensors alone run on the host, which waits for no stream."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._host |= keys
        self._pinned |= keys if pinned else set()

    @contextlib.contextmanager
    def all_on_host(self) -> Iterator[None]:
        """Whatever is made within the block lies on the host, on a CPU."""
        before, self._on_host = self._on_host, self.facts_on_host and not self.on_gpu
        try:
            yield
        finally:
            self._on_host = before

    def is_host(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage lies in the memory of the host."""
        if self.on_gpu:
            return storage.device.type == "cpu"
        return storage._cdata in self._host

    def is_pinned(self, storage: torch.UntypedStorage) -> bool:
        """Whether it does, and the device copies from it by itself."""
        if self.on_gpu:
            return self.is_host(storage) and bool(storage.is_pinned())
        return storage._cdata in self._pinned

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Operators and waits within the block are not recorded, such as a copy of data."""
        self._unseen += 1
        try:
            with _disable_current_modes():
                yield
        finally:
            self._unseen -= 1

    def run(self, stream: str, label: str, accesses: Iterable[Access]) -> None:
        """Queue work, after what was freed before it."""
        self.find_freed()
        self._hand_out(stream)
        found = list(accesses)
        self.history.run(stream, label, found, nearest())
        for access in found:
            self.users[access.memory].add(stream)
        kind, words = "kernel", label
        if stream.startswith(COLLECTIVES):
            kind, self._collectives = "collective", self._collectives + 1
            read, wrote = (
                sum(a.stop - a.start for a in found if a.writes is writes)
                for writes in (False, True)
            )
            words = f"{label} of {read} bytes into {wrote}"
        self.graph.append(Entry(stream, kind, words, tuple(a.memory for a in found)))

    def access(self, tensor: Tensor, writes: bool) -> Access | None:
        """Return the bytes that a tensor covers; None if it has no memory."""
        storage = storage_of(tensor)
        if storage is None or not tensor.numel() or not storage.nbytes():
            return None
        memory = self.memory_of(storage)
        if self.is_pinned(storage):  # a copy tells the allocator of pinned memory so itself
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
            stream = HOST if self.is_host(storage) else self.current
            self._hand_out(stream)
            memory = Memory(self._made, reference, storage.nbytes(), stream)
            self._memories[storage._cdata] = memory
            self.users[memory.number].add(stream)
            words = f"{memory.nbytes} bytes"
            self.graph.append(Entry(stream, "alloc", words, (memory.number,)))
        return memory

    def find_freed(self) -> None:
        """Free what no tensor refers to any more."""
        freed = [key for key, memory in self._memories.items() if gone(memory)]
        for key in freed:
            self._host.discard(key)
            self._pinned.discard(key)
            self.free(key)

    def free(self, key: int, how: str = "") -> None:
        """Give memory back to the allocator, which may hand it out again on the same stream."""
        memory = self._memories.pop(key)
        stream = memory.stream
        if memory.lent_to:  # the allocator waits for streams it was told of, and nobody else does
            stream = f"allocator for {stream}"
            for other in (memory.stream, *memory.lent_to):
                self.history.wait(stream, self.history.record(other))
        self._given_back.setdefault(stream, []).append((memory.number, nearest()))
        # Another stream than the current one may wait before it is given anything.
        if memory.lent_to or stream == (self.current if self.on_gpu else self._current[-1]):
            self._hand_out(stream)
        self.graph.append(Entry(stream, "free", f"{memory.nbytes} bytes{how}", (memory.number,)))

    def _hand_out(self, stream: str) -> None:
        """What is queued next on a stream may write to the memory that was given back there."""
        for number, site in self._given_back.pop(stream, ()):
            whole = Access(number, 0, sys.maxsize, writes=True)
            self.history.run(stream, "free", [whole], site)
            self.history.forget(number)

    def give_back(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free the bytes of a storage that is about to have another number of them."""
        self.find_freed()
        if storage.nbytes() and storage.nbytes() != nbytes:
            self.memory_of(storage)
            self.free(storage._cdata, ", given back")

    # -- events -----------------------------------------------------------------------------------

    def mark(self, stream: str) -> Event:
        """Record an event."""
        self.find_freed()
        place = f"{stream} as of collective {self._collectives}"
        return self.history.record(stream, place)

    def wait(self, stream: str, event: Event | None, site: Site | None = None) -> None:
        """Make a stream wait; None was never recorded."""
        self.find_freed()
        if event is not None and self.history.wait(stream, event):
            sites = [str(one) for one in (site, self._behalf) if one]
            words = event.place + (f" ({' for '.join(sites)})" if sites else "")
            self.graph.append(Entry(stream, "wait", words))


class AutogradOfTheDevice:
    """What autograd's rules act on where a device runs autograd: they tell what no trace has.

    The device switches streams and waits by itself. That autograd tells the allocator of streams
    is in no trace, so the rules say it. What they say of streams is compared with the device.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.lend: Callable[[Tensor, str], None] = recording.lend

    def chosen(self, stream: str) -> None:
        """Compare the stream of a node that begins."""
        if (current := self._recording.current) != stream:
            self._recording.surprises.append(f"autograd is on {current}; its rules say {stream}")

    def push(self, stream: str) -> None:
        """The device has done so."""

    def pop(self) -> None:
        """The device has done so."""

    def mark(self, stream: str) -> Event:
        """Return an event that orders nothing."""
        return Event({})

    def wait(self, stream: str, event: Event | None) -> None:
        """The device has done so."""
