"""What a collective takes from torch that torch does not promise: its private names.

Beside them stand the names that torch 2.11 to 2.15 spell differently.

No other module of this layer uses one (tests/test_compat.py), so what a new torch breaks is here.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _get_obj_in_tls as get_in_thread
from torch._C import _is_key_in_tls as is_in_thread
from torch._C import _stash_obj_in_tls as stash_in_thread
from torch._compile import _disable_dynamo as one_graph_break
from torch.distributed import ProcessGroup, Work

__all__ = [
    "DeviceEnd",
    "all_gather_single",
    "get_in_thread",
    "group_named",
    "has_ended",
    "hold_stream",
    "is_in_thread",
    "one_graph_break",
    "profiling",
    "reduce_scatter_single",
    "remove_from_thread",
    "set_in_thread",
    "shared_block",
]

remove_from_thread: Callable[[str], None] | None = getattr(torch._C, "_remove_obj_from_tls", None)
"""Removes what `set_in_thread` left. None before torch 2.13, which needs no removal."""


def set_in_thread(key: str, value: object) -> None:
    """Leave an object in torch's table of this thread, which autograd carries to its workers."""
    # Note [torch's table of a thread]
    # In torch 2.11 the table takes no reference of its own to what it is given, and gives one back
    # when the entry goes. The object would be freed while it is in the table, and the next look
    # would read freed memory.
    before = sys.getrefcount(value)
    stash_in_thread(key, value)
    if sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class DeviceEnd(Protocol):
    """What a device comes to: an event, or the end of a collective of the backend."""

    @property
    def device(self) -> torch.device:
        """Which device."""

    def query(self) -> bool:
        """Whether it has come to it."""
        ...

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Have a stream come after it."""


def has_ended(event: DeviceEnd) -> bool:
    """Whether the device has come to an event, for a thread beside those that use the device."""
    # Note [Events are asked in relaxed mode]
    # While a thread captures a CUDA graph in the default mode, another thread that asks an event
    # spoils the capture, unless it has taken the relaxed mode. torch does so in C++ alone
    # (`CUDAStreamCaptureModeGuard`). The device has to be the event's: a new thread has GPU 0, and
    # CUDA might make a context for it there. ROCm has neither that driver nor that name.
    if torch.version.hip:
        return event.query()
    driver, mode = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        with torch.cuda.device(event.device):
            return event.query()
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


hold_stream: Callable[[int], None] = torch.cuda._sleep
"""Keep the current stream busy for as many cycles of the GPU's clock, some two in a nanosecond."""

profiling: Callable[[], bool] = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")
"""Whether one of torch's profilers records now, on whichever thread. A call costs no Python."""


group_named: Callable[[Any], ProcessGroup] = torch._C._distributed_c10d._resolve_process_group
"""The group that torch knows by this `group_name`."""


def _first(*names: str) -> Any:
    """Return the first of `names` that this torch.distributed has."""
    for name in names:
        if hasattr(dist, name):
            return getattr(dist, name)
    raise RuntimeError(f"torch {torch.__version__} has none of torch.distributed.{names}")


def shared_block(
    nbytes: int, device: torch.device, group: ProcessGroup
) -> tuple[torch.Tensor, Any]:
    """A flat uint8 tensor that all ranks of `group` map, and torch's handle to those of all ranks.

    Collective over the group. The errors are torch's own, where build, driver or topology lack it.
    """
    import torch.distributed._symmetric_memory as symmetric  # defines operators, which takes time

    block = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    return block, symmetric.rendezvous(block, group.group_name)


# Torch's own, under the names that this version does not warn about. Pass the group by its name.
all_gather_single: Callable[..., Work | None] = _first(
    "all_gather_single", "all_gather_into_tensor"
)
reduce_scatter_single: Callable[..., Work | None] = _first(
    "reduce_scatter_single", "reduce_scatter_tensor"
)
