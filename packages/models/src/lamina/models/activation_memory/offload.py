"""Saved activations that wait for backward in host memory, and come back one block ahead of it.

When backward comes to a block, the tensors of the block before are sent for: they travel while this
one's gradients are computed. So two blocks' tensors are on the device at most, and only those of
the last block are waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Offloader", "OnHost"]


class Offloader:
    """What the blocks of a model share: whose tensors are back, and whose come next.

    Args:
        devices: types of devices whose tensors move. What is on a CPU is in host memory already; a
            test may name it all the same.
    """

    def __init__(self, devices: Sequence[str] = ("cuda",)) -> None:
        self.devices = tuple(devices)
        self._streams: dict[torch.device, _Streams] = {}
        self._last: Callable[[], _Saved | None] = lambda: None
        self._now: _Saved | None = None
        self._ahead: _Saved | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled model starts with nothing saved (streams cannot be copied)."""
        return Offloader, (self.devices,)

    @contextmanager
    def hooks(self, block: nn.Module, index: int, min_numel: int) -> Iterator[None]:
        """Inside, what autograd saves moves to host memory.

        Args:
            block: its parameters stay where they are.
            index: its place among the blocks; backward comes to them from the last to the first.
            min_numel: smaller tensors stay too.
        """
        parameters = {p.untyped_storage()._cdata for p in block.parameters()}
        before = self._last()
        if before is None or before.index != index - 1:  # another forward, or another stage
            before = None
        saved = _Saved(index, before)
        self._last = weakref.ref(saved)
        moved: dict[tuple[object, ...], OnHost] = {}
        # A storage that is gone leaves its name to another one, unless somebody refers to it.
        storages: list[StorageWeakRef] = []

        def pack(tensor: Tensor) -> Tensor | OnHost:
            storage, shape = tensor.untyped_storage(), (tensor.shape, tensor.stride())
            stays = tensor.numel() < min_numel or storage._cdata in parameters
            if stays or tensor.device.type not in self.devices:
                return tensor
            place = (storage._cdata, tensor.storage_offset(), tensor._version)
            key = (*place, *shape, tensor.dtype)
            if key not in moved:
                storages.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
                moved[key] = saved.add(tensor, self._streams_of(tensor.device))
            moved[key].uses += 1
            return moved[key]

        def unpack(packed: Tensor | OnHost) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            self._come_to(packed.owner)
            return packed.take()

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            moved.clear()
            storages.clear()

    def _come_to(self, saved: _Saved) -> None:
        """Backward asks for a block's tensors: send for all of them, then for the next block's."""
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
    """Copies to the host and from it, each in an order of its own."""

    def __init__(self, device: torch.device) -> None:
        self.away = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Saved:
    """What one forward of a block saved; the graph alone keeps it alive."""

    def __init__(self, index: int, before: _Saved | None) -> None:
        self.index = index
        self.before: Callable[[], _Saved | None] = lambda: None
        if before is not None:
            self.before = weakref.ref(before)
        self._tensors: list[weakref.ref[OnHost]] = []

    def add(self, tensor: Tensor, streams: _Streams | None) -> OnHost:
        """Begin a tensor's copy to the host."""
        held = OnHost(self, tensor, streams)
        self._tensors.append(weakref.ref(held))
        return held

    def send_for(self) -> None:
        """Begin the copies to the device: what was saved last is wanted first."""
        for reference in reversed(self._tensors):
            held = reference()
            if held is not None:
                held.send_for()

    def let_go(self) -> None:
        """Give the device's memory back: backward has gone elsewhere."""
        for reference in self._tensors:
            held = reference()
            if held is not None:
                held.let_go()


class OnHost:
    """A tensor in (pinned) host memory, and its copy on the device while backward needs it.

    Attributes:
        owner: the forward of a block that saved it.
        uses: how often autograd saved it.
    """

    def __init__(self, owner: _Saved, tensor: Tensor, streams: _Streams | None) -> None:
        self.owner = owner
        self.device = tensor.device
        self.uses = 0
        self._used = 0
        self._streams = streams
        self._copy: Tensor | None = None
        self._copied: Any = None  # events of the two copies, on a GPU
        self._arrived: Any = None
        if streams is None:
            self._host = torch.empty_like(tensor, device="cpu").copy_(tensor)
            return
        streams.away.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(streams.away):
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = streams.away.record_event()
        # The copy still reads it after its last owner on this stream lets go.
        tensor.record_stream(streams.away)

    @property
    def is_back(self) -> bool:
        """Whether it is on the device, or on its way there."""
        return self._copy is not None

    def send_for(self) -> None:
        """Begin the copy to the device, if none is there."""
        if self._copy is not None:
            return
        # Memory of the computing stream, which the copy waits for: it is given out again in that
        # stream's order, so a host that runs ahead holds no more of it.
        self._copy = torch.empty_like(self._host, device=self.device)
        if self._streams is None:
            self._copy.copy_(self._host)
            return
        back = self._streams.back
        back.wait_event(self._copied)
        back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(back):
            self._copy.copy_(self._host, non_blocking=True)
            self._arrived = back.record_event()

    def take(self) -> Tensor:
        """The copy on the device, once there; forgotten here with its last use."""
        self.send_for()
        self._wait()
        copy = self._copy
        self._used += 1
        if self._used == self.uses:
            self._copy, self._used = None, 0
        return copy  # type: ignore[return-value]

    def let_go(self) -> None:
        """Forget the copy on the device."""
        if self._copy is not None:
            self._wait()
            self._copy, self._used = None, 0

    def _wait(self) -> None:
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
