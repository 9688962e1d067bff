"""Records in which order the engine's CUDA path queues its work, on a CPU or on a GPU.

`recorded_order()` makes this process one rank of a simulated world (the "fake" backend, which
Lamina serves as it serves NCCL). On a CPU it puts stand-ins for `torch.cuda`'s streams and events
in place (`lamina_testing.simulated_cuda`), and the engine's own code for CUDA runs on CPU tensors:
it takes a side stream per group, records events and waits for them. On a GPU the streams and events
are CUDA's. Either way torch's own trace of CUDA (`torch.cuda._gpu_trace`, as its sanitizer uses it)
tells of events, waits and synchronisations. Each of these goes into a `History`, and so does

- each operator, by a dispatch mode: its schema says which tensors it reads and writes, views none;
- each collective of the backend: on a stream of its group, after the stream it was called on, as
  NCCL has it; the stream that calls `Work.wait` waits for its end;
- each release of memory, by `UntypedStorage.resize_` or when the last tensor goes: it counts as a
  write on the stream on which the memory was allocated, and if that is not the current one, as a
  write by what is queued there next. The caching allocator gives the bytes to the next tensor of
  that stream and looks at no other. Tensors of
  messages to and from one other rank are freed later: `ProcessGroupNCCL` keeps them until the
  message has ended. It keeps those of collectives, too, but the engine may not count on that,
  because it frees storages themselves.

On a CPU backward nodes run on the streams that autograd would choose, by its rules
(`lamina_testing.autograd_streams`). On a GPU autograd chooses them, and the rules only say which
memory it tells the allocator of, because no trace has that.

`Recording.graph` is what was queued, in order; `lamina_testing.order_graphs` compares two of them.

What it does not see: work inside one operator, and another order in which the host queues work.

To delete a wait, name its `Site`: `recorded_order(without=site)`. A wait that stands in the
packages' source and did something is in `Recording.waits`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lamina.collectives.call import collective
from lamina.ddp.backward.agreement import ProducedFlags
from lamina.ddp.norm import clip
from lamina_testing.cuda_trace import CudaTrace, triton_launches
from lamina_testing.happens_before import HOST, Access
from lamina_testing.recording import (
    COLLECTIVES,
    Recording,
    Site,
    caller,
    storage_of,
    takes_operators_apart,
)
from lamina_testing.simulated_cuda import CUDA, stand_ins

__all__ = ["CUDA", "Recording", "Site", "recorded_order"]

# Methods of `ProcessGroup`, and which of the first two arguments they write and read.
GATHERS = ("_allgather_base", "all_gather_single", "allgather", "allgather_into_tensor_coalesced")
SCATTERS = ("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced")
EXCHANGES = ("alltoall", "alltoall_base", "all_to_all_single")
MESSAGES = ("recv", "send")
IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", *MESSAGES)
# Versions of torch call other methods for one collective: 2.11 `_allgather_base`, 2.13
# `all_gather_single`. A recording has one name for all of them.
CALLED = {
    **dict.fromkeys(GATHERS, "all_gather"),
    **dict.fromkeys(SCATTERS, "reduce_scatter"),
    **dict.fromkeys(EXCHANGES, "all_to_all"),
}
# Operators that bring a number of the device to the host.
READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
# Files that read no number of a GPU: torch's optimizers count steps on the host, a GPU has
# another sum, which leaves its statistics there, and ids are looked at on a CPU alone.
OF_THE_HOST = (
    "/torch/optim/",
    "/src/lamina/collectives/reduction/summation.py",
    "/src/lamina/models/layers/loss.py",
)
MACHINERY = ("/lamina_testing/", "/torch/_compile.py", "/torch/_dynamo/")


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a recording what each operator reads and writes."""

    def __init__(self, recording: Recording, trace: CudaTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._trace = recording, trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, then queue it."""
        if any(takes_operators_apart(kind) for kind in types):
            return NotImplemented  # the subclass goes first; operators it runs come back here
        kwargs, name = kwargs or {}, func._schema.name
        if func.namespace == "c10d" or name == "aten::record_stream":
            return func(*args, **kwargs)
        recording = self._recording
        found: list[Access | None] = []
        by_host: list[Access | None] = []
        given: dict[int, torch.UntypedStorage] = {}
        large: dict[int, torch.UntypedStorage] = {}
        for argument, value in named_arguments(func._schema, args, kwargs):
            alias = argument.alias_info
            for tensor in tensors_in(value):
                if (storage := storage_of(tensor)) is not None:
                    given[storage._cdata] = storage
                    large |= {storage._cdata: storage} if tensor.dim() else {}
                if (alias is None or alias.is_write) and not only_shapes(name):
                    # The device touches no host memory that is not pinned: the host reads the
                    # number of a tensor without dimensions, and copies the others, by itself.
                    access = recording.access(tensor, writes=alias is not None)
                    (by_host if self._is_pageable(storage) else found).append(access)
        pinned = kwargs.get("pin_memory") and not recording.on_gpu
        with self._trace.operator():
            result = func(*args, **{**kwargs, "pin_memory": False} if pinned else kwargs)
        results = [tensor for tensor in tensors_in(result) if storage_of(tensor) is not None]
        made = [one for one in results if one.untyped_storage()._cdata not in given]
        elsewhere = kwargs.get("device") is not None  # the new tensor need not lie with the others
        on_host = recording._on_host or self._runs_on_host(given, large, made, elsewhere)
        if not recording.on_gpu and (pinned or on_host):
            recording.on_host(*results, pinned=bool(pinned))
        for tensor in made:
            # The seed that an attention kernel of CUDA returns is a number of the host's.
            pageable = self._is_pageable(storage_of(tensor))
            (by_host if pageable else found).append(recording.access(tensor, writes=True))
        found += by_host if on_host else []
        accesses = [access for access in found if access is not None]
        if accesses:
            recording.run(HOST if on_host else recording.current, name, accesses)
        self._trace.operator_has_run(recording.current)
        if name in READS and not (on_host or recording.on_gpu) and reads_a_gpu():
            recording.wait(HOST, recording.mark(recording.current))
        return result

    def _is_pageable(self, storage: torch.UntypedStorage | None) -> bool:
        """Whether a storage lies in memory of the host that a GPU does not touch."""
        recording = self._recording
        if not recording.on_gpu or storage is None or not recording.is_host(storage):
            return False
        return not recording.is_pinned(storage)

    def _runs_on_host(
        self,
        given: dict[int, torch.UntypedStorage],
        large: dict[int, torch.UntypedStorage],
        made: list[Tensor],
        elsewhere: bool,
    ) -> bool:
        """Whether an operator runs on the host. On a CPU, where all does, the books say it."""
        recording = self._recording
        on_host = all(map(recording.is_host, (large or given).values()))
        if recording.on_gpu:
            return on_host and all(tensor.device.type == "cpu" for tensor in made)
        on_host = on_host and bool(given) and not elsewhere
        if on_host and not all(map(recording.is_host, given.values())):
            # A number of the device: `.to("cpu")`, which is nothing here, waits for it there.
            recording.wait(HOST, recording.mark(recording.current))
        return on_host


def reads_a_gpu() -> bool:
    """Whether the line that brings a number to the host does so on a GPU too."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(n in frame.f_code.co_filename for n in MACHINERY):
        frame = frame.f_back
    return not any(name in frame.f_code.co_filename for name in OF_THE_HOST)


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


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from tensors_in(element)


class Pending(dist.Work):
    """A collective of the backend; the stream that waits comes after it."""

    def __init__(self, recording: Recording, end: Any) -> None:
        super().__init__()
        self._recording, self._end = recording, end

    def wait(self, timeout: object = None) -> bool:
        """Make the current stream wait."""
        if self._recording.keeps(site := caller()):
            with self._recording.asked_by(site):
                torch.cuda.current_stream().wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        """Say yes: the data are there."""
        return True


class Done(dist.Work):
    """A collective between hosts, which has ended."""

    def wait(self, timeout: object = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Say yes."""
        return True


class Backend:
    """Queues collectives as NCCL does: each group has a stream, which waits for the current one.

    Args:
        recording: to tell.
        stream: makes a stream of a name.
    """

    def __init__(self, recording: Recording, stream: Callable[[str], Any]) -> None:
        self._recording, self._make = recording, stream
        self._streams: dict[str, Any] = {}

    def method(self, name: str) -> Callable[..., dist.Work]:
        """Return a method of `ProcessGroup`."""
        called = CALLED.get(name, name)

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
            outputs, inputs = list(tensors_in(args[0])), list(tensors_in(args[1:2]))
            if name in IN_PLACE:
                inputs = outputs
            return self._queue(called, f"{group.group_desc} {group.group_name}", outputs, inputs)

        return call

    def _queue(
        self, name: str, group: str, outputs: list[Tensor], inputs: list[Tensor]
    ) -> dist.Work:
        recording, where = self._recording, COLLECTIVES + group
        storages = [tensor.untyped_storage() for tensor in (*outputs, *inputs)]
        if storages and all(map(recording.is_host, storages)):
            self._on_host(name, outputs, inputs)
            return Done()
        if where not in self._streams:
            self._streams[where] = self._make(where)
            recording.number_of(where, self._streams[where].cuda_stream)
        stream = self._streams[where]
        with recording.asked_by(None):
            stream.wait_stream(torch.cuda.current_stream())
        found = [recording.access(tensor, writes=False) for tensor in inputs]
        if name != "send":
            found += [recording.access(tensor, writes=True) for tensor in outputs]
        recording.run(where, name, [access for access in found if access is not None])
        for tensor in outputs if name in MESSAGES else ():
            recording.memory_of(tensor.untyped_storage()).lent_to.add(where)
        with torch.no_grad(), _disable_current_modes(), torch.cuda.stream(stream):
            fill(outputs, inputs)
        return Pending(recording, stream.record_event())

    def _on_host(self, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Run a collective of tensors on the host, as gloo does beside NCCL: the host waits."""
        accesses = [self._recording.access(tensor, writes=True) for tensor in (*outputs, *inputs)]
        self._recording.run(HOST, name, [one for one in accesses if one is not None])
        with torch.no_grad(), _disable_current_modes():
            fill(outputs, inputs)


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
    ranks: int = 4, without: Site | None = None, rank: int = 0, device: str = "cpu"
) -> Iterator[Recording]:
    """Record until the end of the block; this process is one of `ranks`.

    Args:
        ranks: of the simulated world; no process group may be there before.
        without: a wait that is left out wherever it stands, on a CPU. A handle that is not waited
            for then also does not wait when it is dropped.
        rank: this process.
        device: "cpu" for streams that only record, "cuda" for those of the current GPU. What the
            block trains is to lie on `Recording.device`.
    """
    on_gpu = device == "cuda"
    where = torch.device(device, torch.cuda.current_device()) if on_gpu else torch.device(device)
    recording = Recording(without, where)
    trace = CudaTrace(recording)
    cuda = {} if on_gpu else stand_ins(recording)
    make = own_stream if on_gpu else cuda["Stream"].named
    backend = Backend(recording, make)
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for owner, name, value in seams(recording):
            stack.enter_context(mock.patch.object(owner, name, value))
        for name in (*GATHERS, *SCATTERS, *EXCHANGES, *IN_PLACE):
            if hasattr(dist.ProcessGroup, name):  # versions of torch differ in which there are
                method = backend.method(name)
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, method))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(recording._autograd.steering(lambda: recording.current))
        stack.enter_context(trace.listening())
        stack.enter_context(triton_launches(recording))
        with Mode(recording, trace):
            yield recording


def own_stream(name: str) -> torch.cuda.Stream:
    """Return a stream of the GPU that is no other's: CUDA hands out the 32 usual ones in turns."""
    return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


def seams(recording: Recording) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced beside streams and collectives: its owner, its name, and by what."""
    resize, lend, wait = (
        torch.UntypedStorage.resize_,
        torch.Tensor.record_stream,
        collective.Handle.wait,
    )

    def resized(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        recording.give_back(storage, nbytes)
        result: torch.UntypedStorage = resize(storage, nbytes)
        if nbytes:
            recording.memory_of(storage)
        return result

    def lent(tensor: Tensor, stream: Any) -> None:
        if recording.happens():
            recording.lend(tensor, recording.name_of(stream.cuda_stream))
            if recording.on_gpu:
                lend(tensor, stream)

    def waited(handle: collective.Handle) -> None:
        site = caller()
        if handle._pending and handle._end is not None and not recording.keeps(site):
            handle._end.forget()
            return
        with recording.on_behalf_of(site):
            wait(handle)

    yield torch.UntypedStorage, "resize_", resized
    yield torch.Tensor, "record_stream", lent
    yield collective.Handle, "wait", waited
    yield from switches(recording) if recording.on_gpu else launches(recording)


def switches(recording: Recording) -> Iterator[tuple[Any, str, Any]]:
    """On a GPU: autograd's rules hear of another current stream."""
    switch = torch.cuda.set_stream

    def switched(stream: torch.cuda.Stream) -> None:
        switch(stream)
        if threading.current_thread() is threading.main_thread():
            recording._autograd.switched(recording.current)

    yield torch.cuda, "set_stream", switched


def launches(recording: Recording) -> Iterator[tuple[Any, str, Any]]:
    """On a CPU: the engine takes its tensors for those of a GPU, and facts for those of a host."""
    launch, agree = collective.launch, ProducedFlags.agree

    def agreed(flags: ProducedFlags, *args: Any, **kwargs: Any) -> Any:
        with recording.all_on_host():
            return agree(flags, *args, **kwargs)

    def launched(handle: Any, group: Any, device: Any, begin: Any, **how: Any) -> Any:
        return launch(handle, group, CUDA, begin, **how)

    def current_stream(device: object) -> Any:
        return torch.cuda.current_stream()

    yield ProducedFlags, "agree", agreed
    yield clip, "_reads_for_nothing", lambda device: False
    for name, stand_in in {"launch": launched, "current_stream": current_stream}.items():
        original = getattr(collective, name)
        for module in list(sys.modules.values()):
            if getattr(module, name, None) is original:
                yield module, name, stand_in
