"""What a process group says about itself: its size, this rank's place, its backend, its timeout."""

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout


def no_group(given: object) -> TypeError:
    """What to raise for what is given in the place of a process group."""
    return TypeError(
        f"{given!r} is no process group: pass axis.group or axis.sibling(purpose) of a MeshAxis, "
        "mesh.group(name) of a ParallelMesh, or None for a group of one"
    )


def size_of(group: ProcessGroup | None) -> int:
    """Number of ranks; None is a group of one. TypeError: it is no process group."""
    if group is None:
        return 1
    try:
        return group.size()
    except AttributeError:
        raise no_group(group) from None


def where(group: ProcessGroup | None) -> str:
    """Name this rank and its group for an error message."""
    if group is None:
        return "(group of one)"
    return f"(rank {group.rank()} of {group.size()} in group '{group.group_desc}')"


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Name of the backend for tensors on `device` ("gloo", "nccl", "fake"); ValueError if none."""
    try:
        name = str(group._get_backend(torch.device(device.type)).name()).lower()
    except RuntimeError as error:
        raise ValueError(
            f"process group '{group.group_desc}' has no backend for {device.type} tensors; start "
            f"the world with init_distributed() (cpu:gloo,cuda:nccl on GPUs), or pass tensors on "
            f"a device that the group serves"
        ) from error
    return "nccl" if name == "nccl2" else name  # what torch 2.15 calls its NCCL


def served_by_gloo(group: ProcessGroup | None, device: torch.device) -> bool:
    """Whether gloo moves the tensors on `device`, so that the host has to wait for messages."""
    return group is not None and device.type != "meta" and backend_name(group, device) == "gloo"


def cuts_as_gloo(group: ProcessGroup | None, device: torch.device) -> bool:
    """Whether pieces travel as over gloo: uneven, and straight from the buffer that holds them.

    Any other backend wants equal pieces, and memory for what comes. Meta tensors do as tensors with
    values do on the devices of the group, so that a plan has the memory of a run.
    """
    if group is None or device.type != "meta":
        return served_by_gloo(group, device)
    return all(
        backend_name(group, each) == "gloo" for each in group._device_types if each.type != "meta"
    )


def timeout_of(group: ProcessGroup, device: torch.device | None = None) -> float:
    """Seconds after which a backend (by default the CPU's) gives up; else torch's default."""
    backend: Any = group._get_backend(device or torch.device("cpu"))
    timeout = getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)
    return float(timeout.total_seconds())
