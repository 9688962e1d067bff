"""Saved activations that are kept in host memory until backward needs them.

When backward comes to a block, copies of the block before start, which run while this block's
gradients are computed. So the tensors of at most two blocks are on the device. The last few of
forward have not gone when backward begins, and are used as they are.

Note [Memory of what has left]
    The copy of a tensor to the host reads it when the device comes to that, which is later than the
    host. With `record_stream` its memory would be free then, and a host that runs ahead would take
    new memory for all blocks: more was reserved than without offloading (29.3 and 25.3 GiB for
    eight blocks of Llama 3 8B on the virtual GPU). So the tensor is kept, and the computing stream
    waits for its copy before it is let go. To wait for the newest one would stop the device, so the
    last `_LEAVING` tensors are on their way.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lamina.buffers.engine import SavedTensor
from lamina.models.base.computing_device import computes_on, has_values, planned_copy

_LEAVING = 8
"""Tensors whose copies to the host may be under way: about half of what a block saves."""


class Offloader:
    """Moves the saved tensors of a model's blocks; one object serves all of the blocks.

    Only tests name the CPU, whose tensors are in host memory already, among the types of `devices`.
    """

    def __init__(self, devices: Sequence[str] = ("cuda",)) -> None:
        self.devices = tuple(devices)
        self._streams: dict[torch.device, _Streams] = {}
        self._last: Callable[[], _Saved | None] = lambda: None
        self._now: _Saved | None = None
        self._ahead: _Saved | None = None
        self._leaving: deque[weakref.ref[OnHost]] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled model starts with nothing saved (streams cannot be copied)."""
        return Offloader, (self.devices,)

    @contextmanager
    def hooks(self, block: nn.Module, index: int, min_numel: int) -> Iterator[None]:
        """Inside, tensors that autograd saves are moved to host memory, except for small ones.

        Parameters of the block are not moved. Backward visits blocks from the last `index` to the
        first.
        """
        parameters = {p.untyped_storage()._cdata for p in block.parameters()}
        before = self._last()
        if before is None or before.index != index - 1:  # from another forward or stage
            before = None
        saved = _Saved(index, before)
        self._last = weakref.ref(saved)
        moved: dict[tuple[object, ...], OnHost] = {}
        # Note [Addresses of storages]
        # A tensor that autograd saves twice is moved once: tensors are looked up by the address of
        # their storage. If a storage is freed, the next one may get its address, and would be taken
        # for it. A weak reference to the storage keeps the address from being used again.
        storages: list[StorageWeakRef] = []

        def pack(tensor: Tensor) -> SavedTensor | OnHost:
            kept = SavedTensor.of(tensor)
            tensor = kept.tensor
            storage, shape = tensor.untyped_storage(), (tensor.shape, tensor.stride())
            stays = tensor.numel() < min_numel or storage._cdata in parameters
            if stays or computes_on(tensor) not in self.devices:
                return kept
            address = (storage._cdata, tensor.storage_offset(), tensor._version)
            key = (*address, *shape, tensor.dtype)
            if key not in moved:
                storages.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
                moved[key] = saved.add(tensor, self._streams_of(tensor.device))
                self._leaving.append(weakref.ref(moved[key]))
                if len(self._leaving) > _LEAVING and (gone := self._leaving.popleft()()):
                    gone.leave()
            moved[key].uses += 1
            return moved[key]

        def unpack(packed: SavedTensor | OnHost) -> Tensor:
            if isinstance(packed, SavedTensor):
                return packed.unpacked()
            self._come_to(packed.owner)
            return packed.take()

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            moved.clear()
            storages.clear()

    def _come_to(self, saved: _Saved) -> None:
        """Backward needs a block's tensors: start their copies, and those of the block before."""
        if saved is self._now:
            return
        for other in (self._now, self._ahead):
            if other is not None and other is not saved:
                other.let_go()
        self._now, self._ahead = saved, saved.before()
        saved.send_for()
        if self._ahead is not None:
            self._ahead.send_for()

    def _streams_of(self, device: torch.device) -> _Streams | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = _Streams(device)
        return self._streams[device]


class _Streams:
    """One stream of copies to the host, and one of copies from it."""

    def __init__(self, device: torch.device) -> None:
        self.away = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Saved:
    """The tensors that one forward of a block saved. Only the autograd graph keeps it alive."""

    def __init__(self, index: int, before: _Saved | None) -> None:
        self.index = index
        self.before: Callable[[], _Saved | None] = lambda: None
        if before is not None:
            self.before = weakref.ref(before)
        self._tensors: list[weakref.ref[OnHost]] = []

    def add(self, tensor: Tensor, streams: _Streams | None) -> OnHost:
        """Start the copy of a tensor to the host."""
        on_host = OnHost(self, tensor, streams)
        self._tensors.append(weakref.ref(on_host))
        return on_host

    def _alive(self) -> list[OnHost]:
        return [on_host for reference in self._tensors if (on_host := reference()) is not None]

    def send_for(self) -> None:
        """Start the copies to the device, beginning with the tensor that was saved last."""
        for on_host in reversed(self._alive()):
            on_host.send_for()

    def let_go(self) -> None:
        """Free the copies on the device, as backward is at another block."""
        for on_host in self._alive():
            on_host.let_go()


class OnHost:
    """A tensor in (pinned) host memory, and its copy on the device while backward needs it.

    `owner` is the forward of a block that saved the tensor, and `uses` how many times it did.
    """

    def __init__(self, owner: _Saved, tensor: Tensor, streams: _Streams | None) -> None:
        self.owner = owner
        self.device = tensor.device
        self.uses = 0
        self._used = 0
        self._streams = streams
        self._copy: Tensor | None = None
        self._copied: Any = None  # events of the two copies, on a GPU and in a plan
        self._arrived: Any = None
        self._computing: Any = None  # the stream that the copy on the device was allocated on
        # The tensor itself, which the copy to the host reads.
        self._leaving: Tensor | None = tensor.detach()
        self._version = tensor._version
        if not has_values(tensor):  # a plan counts the memory of the device alone
            self._host = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
            self._copied = planned_copy("copy_to_host", tensor.nbytes)
            return
        if streams is None:
            self._host = torch.empty_like(tensor, device="cpu").copy_(tensor)
            return
        self._computing = torch.cuda.current_stream(self.device)
        streams.away.wait_stream(self._computing)
        with torch.cuda.stream(streams.away):
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            # A view with gaps (a third of a fused projection) is made dense on the device: torch
            # would copy it through host memory that is not pinned, and the host would wait.
            dense = tensor if tensor.stride() == self._host.stride() else tensor.clone()
            self._host.copy_(dense, non_blocking=True)
            self._copied = streams.away.record_event()

    def leave(self) -> None:
        """Let go of the tensor, which is on the host. See Note [Memory of what has left]."""
        if self._leaving is not None:
            if self._copied is not None:
                self._copied.wait(self._computing)
            self._leaving = None

    def send_for(self) -> None:
        """Start the copy to the device, unless there is one."""
        if self._copy is not None:
            return
        if self._leaving is not None and self._leaving._version == self._version:
            self._copy = self._leaving  # nothing has written into it since
            return
        self.leave()
        # Allocated on the computing stream, for which the copy waits. The allocator reuses such
        # memory in the order of that stream, so a host that runs ahead does not allocate more.
        self._copy = torch.empty_like(self._host, device=self.device)
        if self._streams is None:
            self._copy.copy_(self._host)
            self._arrived = planned_copy("copy_from_host", self._copy.nbytes)
            return
        back, forward = self._streams.back, self._computing
        self._computing = torch.cuda.current_stream(self.device)
        # Forward's stream, which may be another one, has come after the copy to the host.
        for stream in dict.fromkeys((forward, self._computing)):
            back.wait_stream(stream)
        with torch.cuda.stream(back):
            self._copy.copy_(self._host, non_blocking=True)
            self._arrived = back.record_event()

    def take(self) -> Tensor:
        """Return the copy on the device, and drop the reference to it with its last use."""
        self.send_for()
        if self._arrived is not None:
            now = None if self._streams is None else torch.cuda.current_stream(self.device)
            self._arrived.wait(now)
        copy = self._copy
        self._used += 1
        if self._used == self.uses:
            self.leave()
            self._copy, self._used = None, 0
        return copy  # type: ignore[return-value]

    def let_go(self) -> None:
        """Drop what is on the device."""
        self.leave()
        if self._copy is not None:
            if self._arrived is not None:
                self._arrived.wait(self._computing)
            self._copy, self._used = None, 0

    def __del__(self) -> None:
        """Let go: a graph may end without this tensor, whose copy may still be under way.

        The allocator gives freed memory to the stream that it was allocated on at once.
        """
        self.let_go()
