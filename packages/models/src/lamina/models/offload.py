"""Saved activations that wait for backward in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class _OnHost:
    """A tensor's copy in pinned host memory, on its way or there."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self.device = tensor.device
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.copied = stream.record_event()
        # The copy still reads it after its last owner on this stream lets go.
        tensor.record_stream(stream)

    def back(self) -> Tensor:
        """Copy to the device again."""
        torch.cuda.current_stream(self.device).wait_event(self.copied)
        return self.host.to(self.device, non_blocking=True)


@contextmanager
def offloading(module: nn.Module, min_numel: int) -> Iterator[None]:
    """Inside, what autograd saves moves to host memory; on a CPU it is there already.

    Args:
        module: its parameters stay where they are.
        min_numel: smaller tensors stay too.

    """
    parameters = {p.untyped_storage()._cdata for p in module.parameters()}
    streams: dict[torch.device, torch.cuda.Stream] = {}
    moved: dict[tuple[object, ...], _OnHost] = {}

    def pack(tensor: Tensor) -> Tensor | _OnHost:
        storage = tensor.untyped_storage()._cdata
        if not tensor.is_cuda or tensor.numel() < min_numel or storage in parameters:
            return tensor
        if tensor.device not in streams:
            streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in moved:
            moved[key] = _OnHost(tensor, streams[tensor.device])
        return moved[key]

    def unpack(packed: Tensor | _OnHost) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.back()

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        moved.clear()
